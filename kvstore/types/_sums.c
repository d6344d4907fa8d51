/*
 * kvstore.types._sums: the CRC table of bytes that no cache of this core has, or whether they match one, in one call.
 *
 * Four blocks of one length are summed side by side where that keeps memory busy (_crc32c.h).
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <string.h>

#include "_crc32c.h"

#define KV_INTERFACE 3 /* of this module to its Python half; raise it, and kvstore/types/compiled.py, with each change of either */
#define WITHOUT_GIL_MIN 65536  /* bytes for which others may run */

/* Sums the next blocks, KV_CRC_STREAMS of them or what is left of whole ones; the last one may be short. How many. */
static size_t sum_blocks(const uint8_t *data, size_t length, size_t block_bytes, size_t at, uint32_t *crcs)
{
    const uint8_t *starts[KV_CRC_STREAMS];
    size_t whole = length / block_bytes;
    size_t count = at < whole ? whole - at : 1;
    size_t size = at < whole ? block_bytes : length - at * block_bytes;
    if (count > KV_CRC_STREAMS)
        count = KV_CRC_STREAMS;
    for (size_t lane = 0; lane < KV_CRC_STREAMS; lane++)
        starts[lane] = data + (at + (lane < count ? lane : 0)) * block_bytes;
    kv_crc_far(starts, size, crcs);
    return count;
}

/* Whether each block has the CRC that the table says. */
static int all_match(const uint8_t *data, size_t length, size_t block_bytes, const uint8_t *table)
{
    uint32_t crcs[KV_CRC_STREAMS];
    for (size_t at = 0, count; at * block_bytes < length; at += count) {
        count = sum_blocks(data, length, block_bytes, at, crcs);
        if (memcmp(crcs, table + 4 * at, 4 * count))
            return 0;
    }
    return 1;
}

static void sum_all(const uint8_t *data, size_t length, size_t block_bytes, uint8_t *table)
{
    uint32_t crcs[KV_CRC_STREAMS];
    for (size_t at = 0, count; at * block_bytes < length; at += count) {
        count = sum_blocks(data, length, block_bytes, at, crcs);
        memcpy(table + 4 * at, crcs, 4 * count);
    }
}

static PyObject *table_of(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer data;
    Py_ssize_t block_bytes;
    PyObject *result = NULL;
    if (!PyArg_ParseTuple(args, "y*n:table", &data, &block_bytes))
        return NULL;
    if (block_bytes < 1) {
        PyErr_SetString(PyExc_ValueError, "a block has at least one byte");
        goto done;
    }
    size_t length = (size_t)data.len, size = (size_t)block_bytes;
    result = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(4 * (length / size + !!(length % size))));
    if (!result)
        goto done;
    uint8_t *table = (uint8_t *)PyBytes_AS_STRING(result);
    if (length < WITHOUT_GIL_MIN) {
        sum_all(data.buf, length, size, table);
    } else {
        Py_BEGIN_ALLOW_THREADS
        sum_all(data.buf, length, size, table);
        Py_END_ALLOW_THREADS
    }
done:
    PyBuffer_Release(&data);
    return result;
}

static PyObject *match(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer data, table;
    Py_ssize_t block_bytes;
    PyObject *result = NULL;
    if (!PyArg_ParseTuple(args, "y*ny*:match", &data, &block_bytes, &table))
        return NULL;
    if (block_bytes < 1) {
        PyErr_SetString(PyExc_ValueError, "a block has at least one byte");
        goto done;
    }
    size_t length = (size_t)data.len, size = (size_t)block_bytes;
    int same = (size_t)table.len == 4 * (length / size + !!(length % size));
    if (same && length < WITHOUT_GIL_MIN) {
        same = all_match(data.buf, length, size, table.buf);
    } else if (same) {
        Py_BEGIN_ALLOW_THREADS
        same = all_match(data.buf, length, size, table.buf);
        Py_END_ALLOW_THREADS
    }
    result = PyBool_FromLong(same);
done:
    PyBuffer_Release(&data);
    PyBuffer_Release(&table);
    return result;
}

static PyMethodDef functions[] = {
    {"match", match, METH_VARARGS,
     "match(data, block_bytes, table) -> bool\n\nWhether `table` is exactly the CRC table of `data`: one u32 LE for each block."},
    {"table", table_of, METH_VARARGS,
     "table(data, block_bytes) -> bytes\n\nThe CRC table of `data`: one u32 LE for each block; the last one may be short."},
    KV_CRC_METHODS,
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, .m_name = "_sums", .m_doc = "Checks of far memory; see kvstore.types.checksum.", .m_size = -1,
    .m_methods = functions,
};

PyMODINIT_FUNC PyInit__sums(void)
{
    kv_crc_prepare();
    PyObject *made = PyModule_Create(&module);
    if (!made || PyModule_AddIntConstant(made, "INTERFACE", KV_INTERFACE) < 0) {
        Py_XDECREF(made);
        return NULL;
    }
    return made;
}
