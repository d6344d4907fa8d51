/*
 * kvstore.types._sums: whether bytes that no cache of this core has match a CRC table, in one call.
 *
 * The CRC32C is the processor's instruction, over four blocks of one length side by side: it takes three cycles for eight
 * bytes and can begin one each cycle. Four streams, and reading ahead across the ends of pages, keep memory busy.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <string.h>

#if !defined(__x86_64__)
#error "needs the crc32 instruction of x86-64; without this module Python does the same"
#endif
#include <nmmintrin.h>

#define KV_INTERFACE 1 /* of this module to its Python half; raise it, and kvstore/types/compiled.py, with each change of either */
#define LANES 4
#define LINE 64
#define AHEAD 2048             /* bytes; .068 to .070 s/GB where 0 takes .075, 4096 .072, 8192 .079 */
#define WITHOUT_GIL_MIN 65536  /* bytes for which others may run */

static uint64_t word_at(const uint8_t *at)
{
    uint64_t word;
    memcpy(&word, at, sizeof word);
    return word;
}

/* CRC32C of LANES stretches of `length` bytes each. */
__attribute__((target("sse4.2"))) static void crc_lanes(const uint8_t *const *starts, size_t length, uint32_t *crcs)
{
    const uint8_t *a = starts[0], *b = starts[1], *c = starts[2], *d = starts[3];
    uint64_t crc_a = 0xffffffff, crc_b = crc_a, crc_c = crc_a, crc_d = crc_a;
    size_t at = 0;
    for (; at + LINE <= length; at += LINE) {
        __builtin_prefetch(a + at + AHEAD); /* a hint: it may lie behind the end */
        __builtin_prefetch(b + at + AHEAD);
        __builtin_prefetch(c + at + AHEAD);
        __builtin_prefetch(d + at + AHEAD);
        for (size_t in = at; in < at + LINE; in += 8) {
            crc_a = _mm_crc32_u64(crc_a, word_at(a + in));
            crc_b = _mm_crc32_u64(crc_b, word_at(b + in));
            crc_c = _mm_crc32_u64(crc_c, word_at(c + in));
            crc_d = _mm_crc32_u64(crc_d, word_at(d + in));
        }
    }
    for (; at < length; at++) {
        crc_a = _mm_crc32_u8((uint32_t)crc_a, a[at]);
        crc_b = _mm_crc32_u8((uint32_t)crc_b, b[at]);
        crc_c = _mm_crc32_u8((uint32_t)crc_c, c[at]);
        crc_d = _mm_crc32_u8((uint32_t)crc_d, d[at]);
    }
    crcs[0] = ~(uint32_t)crc_a;
    crcs[1] = ~(uint32_t)crc_b;
    crcs[2] = ~(uint32_t)crc_c;
    crcs[3] = ~(uint32_t)crc_d;
}

/* Whether each block has the CRC that the table says. The last one may be short. */
static int all_match(const uint8_t *data, size_t length, size_t block_bytes, const uint8_t *table)
{
    size_t whole = length / block_bytes, at = 0;
    while (at < whole || at * block_bytes < length) {
        const uint8_t *starts[LANES];
        uint32_t crcs[LANES];
        size_t count = at < whole ? whole - at : 1;
        size_t size = at < whole ? block_bytes : length - at * block_bytes;
        if (count > LANES)
            count = LANES;
        for (size_t lane = 0; lane < LANES; lane++)
            starts[lane] = data + (at + (lane < count ? lane : 0)) * block_bytes;
        crc_lanes(starts, size, crcs);
        if (memcmp(crcs, table + 4 * at, 4 * count))
            return 0;
        at += count;
    }
    return 1;
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
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, .m_name = "_sums", .m_doc = "Checks of far memory; see kvstore.types.checksum.", .m_size = -1,
    .m_methods = functions,
};

PyMODINIT_FUNC PyInit__sums(void)
{
    if (!__builtin_cpu_supports("sse4.2")) {
        PyErr_SetString(PyExc_ImportError, "this processor has no crc32 instruction");
        return NULL;
    }
    PyObject *made = PyModule_Create(&module);
    if (!made || PyModule_AddIntConstant(made, "INTERFACE", KV_INTERFACE) < 0) {
        Py_XDECREF(made);
        return NULL;
    }
    return made;
}
