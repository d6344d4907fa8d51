/*
 * kvstore.engine._records: the check of many records of one shape that were read together (packing.py), in one call.
 *
 * What is compared and summed is what verify.py compares and sums; whatever is not right, or not of that one shape, is
 * only said to be so, and judged in Python. Four blocks of one length are summed side by side (_crc32c.h). Headers
 * always are; payload is not where its reader sums it (docs/decisions/who-checks.md).
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <string.h>

#include "../types/_crc32c.h"

/* format.py, verify.py, location.py, slices.py; the tests compare both checks */
#define KV_INTERFACE 3 /* of this module to its Python half; raise it, and kvstore/types/compiled.py, with each change of either */
#define MAGIC_AT 0
#define CRC_AT 4
#define SHAPE_AT 8 /* and where the bytes begin that the CRC of a header covers */
#define SHAPE_BYTES 16
#define GENERATION_AT 24
#define SEGMENT_AT 32
#define PAGE_AT 36
#define CRC_COUNT_AT 44
#define CONTENT_ID_AT 48
#define KEY_AT 64
#define KEY_BYTES 32
#define SPACE_AT 160
#define SPACE_BYTES 40
#define TABLE_AT 256
#define PAGE_BYTES 4096
#define DEPTH_BITS 11
#define PAGES_MASK 0x7fff
#define PLACE_SHIFT 26
#define PAGE_BITS 18

struct __attribute__((packed)) slice {
    uint32_t item;
    uint64_t offset;
    uint32_t length;
    uint8_t status, flags;
    uint16_t crc_count;
    uint8_t content_id[16];
    uint64_t record_bytes;
    uint32_t block_bytes;
};

static uint32_t word_at(const uint8_t *at)
{
    uint32_t word;
    memcpy(&word, at, sizeof word);
    return word;
}

static uint64_t long_at(const uint8_t *at)
{
    uint64_t word;
    memcpy(&word, at, sizeof word);
    return word;
}

/* Stretches of one length that wait for company, with the CRCs that they should have. */
struct lanes {
    const uint8_t *starts[KV_CRC_STREAMS];
    uint32_t wanted[KV_CRC_STREAMS];
    unsigned count;
    size_t length;
};

/* Whether all that wait have their CRCs; none waits then. */
static int flush(struct lanes *lanes)
{
    uint32_t crcs[KV_CRC_STREAMS];
    int same = 1;
    if (lanes->count == 0)
        return 1;
    for (unsigned i = lanes->count; i < KV_CRC_STREAMS; i++)
        lanes->starts[i] = lanes->starts[0];
    kv_crc_far(lanes->starts, lanes->length, crcs);
    for (unsigned i = 0; i < lanes->count; i++)
        same &= crcs[i] == lanes->wanted[i];
    lanes->count = 0;
    return same;
}

static int add(struct lanes *lanes, const uint8_t *start, size_t length, uint32_t wanted)
{
    if (lanes->count && lanes->length != length && !flush(lanes))
        return 0;
    lanes->length = length;
    lanes->starts[lanes->count] = start;
    lanes->wanted[lanes->count++] = wanted;
    return lanes->count < KV_CRC_STREAMS || flush(lanes);
}

struct wanted {
    uint64_t length, header_bytes, block_bytes, record_bytes;
    unsigned words, flags, magic;
    int sums; /* of payload, too */
    const uint8_t *keys, *space;
    uint64_t keys_count;
    PyObject *generations;
};

/* Whether a record's header is what is wanted, but for its CRC. -1 with an exception. */
static int is_wanted(const struct wanted *wanted, const uint8_t *first, const uint8_t *record, uint64_t location,
                     uint64_t index, PyObject *segment_object)
{
    if ((location >> DEPTH_BITS & PAGES_MASK) * PAGE_BYTES != wanted->length || index >= wanted->keys_count
        || word_at(record + MAGIC_AT) != wanted->magic || memcmp(record + SHAPE_AT, first + SHAPE_AT, SHAPE_BYTES)
        || word_at(record + CRC_COUNT_AT) != wanted->words
        || ((uint64_t)word_at(record + SEGMENT_AT) << PAGE_BITS | word_at(record + PAGE_AT)) != location >> PLACE_SHIFT
        || memcmp(record + KEY_AT, wanted->keys + index * KEY_BYTES, KEY_BYTES)
        || memcmp(record + SPACE_AT, wanted->space, SPACE_BYTES))
        return 0;
    PyObject *generation = PyDict_GetItemWithError(wanted->generations, segment_object);
    if (generation == NULL)
        return PyErr_Occurred() ? -1 : 0;
    uint64_t number = PyLong_AsUnsignedLongLong(generation);
    if (number == (uint64_t)-1 && PyErr_Occurred())
        return -1;
    return long_at(record + GENERATION_AT) == number;
}

/* Whether everything is right; the frame's body is written then. -1 with an exception. */
static int check_all(const struct wanted *wanted, const uint8_t *view, PyObject *wants, uint8_t *body)
{
    Py_ssize_t count = PyList_GET_SIZE(wants);
    struct slice *slices = (struct slice *)body;
    uint8_t *tables = body + (size_t)count * sizeof *slices;
    struct lanes lanes = {0};

    for (Py_ssize_t i = 0; i < count; i++) {
        const uint8_t *record = view + (uint64_t)i * wanted->length;
        PyObject *want = PyList_GET_ITEM(wants, i);
        if (!PyTuple_Check(want) || PyTuple_GET_SIZE(want) != 2) {
            PyErr_SetString(PyExc_TypeError, "a want is a location and an index");
            return -1;
        }
        uint64_t location = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(want, 0));
        uint64_t index = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(want, 1));
        if (PyErr_Occurred())
            return -1;
        PyObject *segment = PyLong_FromUnsignedLongLong(location >> (PLACE_SHIFT + PAGE_BITS));
        if (segment == NULL)
            return -1;
        int right = is_wanted(wanted, view, record, location, index, segment);
        Py_DECREF(segment);
        if (right <= 0)
            return right;
        if (!add(&lanes, record + SHAPE_AT, wanted->header_bytes - SHAPE_AT, word_at(record + CRC_AT)))
            return 0;
        slices[i] = (struct slice){
            .item = (uint32_t)index, .length = (uint32_t)wanted->record_bytes, .flags = (uint8_t)wanted->flags,
            .crc_count = (uint16_t)wanted->words, .record_bytes = wanted->record_bytes,
            .block_bytes = (uint32_t)wanted->block_bytes};
        memcpy(slices[i].content_id, record + CONTENT_ID_AT, sizeof slices[i].content_id);
        memcpy(tables + (size_t)i * 4 * wanted->words, record + TABLE_AT, 4 * (size_t)wanted->words);
    }
    if (!flush(&lanes))
        return 0;
    for (Py_ssize_t i = 0; i < count && wanted->sums; i++) {
        const uint8_t *payload = view + (uint64_t)i * wanted->length + wanted->header_bytes;
        for (unsigned word = 0; word < wanted->words; word++) {
            uint64_t at = word * wanted->block_bytes, left = wanted->record_bytes - at;
            uint64_t length = left < wanted->block_bytes ? left : wanted->block_bytes;
            if (!add(&lanes, payload + at, length, word_at(tables + ((size_t)i * wanted->words + word) * 4)))
                return 0;
        }
    }
    return flush(&lanes);
}

PyDoc_STRVAR(check_doc,
"check(view, wants, keys, space, generations, magic, length, header_bytes, block_bytes, record_bytes, words, flags,\n"
"sums) -> bytes or None\n\n"
"The body of a DATA frame with all of these records, if each is right; None if any is not, or is of another shape.\n"
"`view` holds a record of `length` bytes for each of `wants`, which are (location, index of the key); `space` is the\n"
"namespace digest and generation, `generations` those of the segments by number; the rest is what the first header\n"
"says, and was found plausible. Without `sums` only headers are summed: the reader does the payload.");

static PyObject *check(PyObject *self, PyObject *args)
{
    Py_buffer view, keys, space;
    PyObject *wants, *body = NULL;
    struct wanted wanted;
    unsigned long long length, header_bytes, block_bytes, record_bytes;
    (void)self;

    if (!PyArg_ParseTuple(args, "y*O!y*y*O!IKKKKIIp:check", &view, &PyList_Type, &wants, &keys, &space, &PyDict_Type,
                          &wanted.generations, &wanted.magic, &length, &header_bytes, &block_bytes, &record_bytes,
                          &wanted.words, &wanted.flags, &wanted.sums))
        return NULL;
    Py_ssize_t count = PyList_GET_SIZE(wants);
    wanted.length = length;
    wanted.header_bytes = header_bytes;
    wanted.block_bytes = block_bytes;
    wanted.record_bytes = record_bytes;
    wanted.keys = keys.buf;
    wanted.keys_count = (uint64_t)keys.len / KEY_BYTES;
    wanted.space = space.buf;
    if (space.len != SPACE_BYTES || length < PAGE_BYTES || length > (1u << 30) || header_bytes < PAGE_BYTES
        || header_bytes > length || record_bytes > length - header_bytes || wanted.words > UINT16_MAX
        || TABLE_AT + 4 * (uint64_t)wanted.words > header_bytes || block_bytes == 0 || block_bytes > UINT32_MAX
        || (record_bytes + block_bytes - 1) / block_bytes != wanted.words
        || (uint64_t)view.len != (uint64_t)count * length) {
        PyErr_SetString(PyExc_ValueError, "these lengths are not of whole records, one behind the other");
        goto end;
    }
    body = PyBytes_FromStringAndSize(NULL, count * (Py_ssize_t)(sizeof(struct slice) + 4 * wanted.words));
    if (body == NULL)
        goto end;
    int right = check_all(&wanted, view.buf, wants, (uint8_t *)PyBytes_AS_STRING(body));
    if (right <= 0)
        Py_CLEAR(body);
    if (right == 0)
        body = Py_NewRef(Py_None);
end:
    PyBuffer_Release(&view);
    PyBuffer_Release(&keys);
    PyBuffer_Release(&space);
    return body;
}

static PyMethodDef methods[] = {
    {"check", check, METH_VARARGS, check_doc},
    KV_CRC_METHODS,
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "kvstore.engine._records",
    .m_doc = PyDoc_STR("The check of many records in one call; see the head of _records.c."),
    .m_size = 0,
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__records(void)
{
    kv_crc_prepare();
    PyObject *made = PyModule_Create(&module);
    if (made != NULL && PyModule_AddIntConstant(made, "INTERFACE", KV_INTERFACE) < 0)
        Py_CLEAR(made);
    return made;
}
