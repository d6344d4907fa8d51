/*
 * kvstore.engine._search: looking keys up in the RAM index (index.py), many of them in one call, and lining up the
 * reads of what was found (division.py).
 *
 * The index is memory that Python owns, as columns; what a lookup costs there is a dozen numpy calls, or fifty bytecodes
 * a key. The columns come with each call, as buffers, and are held for its time. Every slot is checked against the
 * columns' length before it is touched: a wrong directory is an exception and not a wild read.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <string.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "keys and columns are read as little-endian words; without this module Python does the same"
#endif

/* index.py, location.py, namespaces.py; the tests compare both searches */
#define KV_INTERFACE 2 /* of this module to its Python half; raise it, and kvstore/types/compiled.py, with each change of either */
#define PAGE_SLOTS 256
#define BUCKET_SLOTS 8
#define BUCKET_SHIFT 28 /* 64 - DIRECTORY_DEPTH_MAX - 10 */
#define DIGEST_BYTES 32
#define DEPTH_BITS 11
#define PAGES_MASK 0x7fff
#define SEGMENT_SHIFT 44
#define PLACE_SHIFT 26
#define PAGE_BITS 18
#define PAGE_BYTES 4096

struct columns {
    const uint64_t *key0, *key1, *locations;
    const uint32_t *directory;
    uint64_t slots, directory_size;
    uint64_t secret0, secret1;
    unsigned shift;
};

/* Slot of a key, -1 where it is absent, -2 where the directory points beyond the columns. */
static int64_t find(const struct columns *columns, uint64_t key0, uint64_t key1)
{
    uint64_t mixed = key0 * columns->secret0 + key1 * columns->secret1;
    uint64_t entry = columns->shift < 64 ? mixed >> columns->shift : 0;
    if (entry >= columns->directory_size)
        return -2;
    uint64_t first = (uint64_t)columns->directory[entry] * PAGE_SLOTS;
    if (first + PAGE_SLOTS > columns->slots)
        return -2;
    uint64_t bits = mixed >> BUCKET_SHIFT, low = bits & 31;
    uint64_t buckets[2] = {low, low ^ ((bits >> 5 & 31) | 1)};
    for (int i = 0; i < 2; i++) {
        uint64_t slot = first + buckets[i] * BUCKET_SLOTS;
        for (uint64_t end = slot + BUCKET_SLOTS; slot < end; slot++)
            if (columns->key0[slot] == key0 && columns->key1[slot] == key1 && columns->locations[slot] != 0)
                return (int64_t)slot;
    }
    return -1;
}

static int take_columns(struct columns *columns, const Py_buffer *key0, const Py_buffer *key1,
                        const Py_buffer *locations, const Py_buffer *directory)
{
    columns->key0 = key0->buf;
    columns->key1 = key1->buf;
    columns->locations = locations->buf;
    columns->directory = directory->buf;
    columns->slots = (uint64_t)key0->len / 8;
    columns->directory_size = (uint64_t)directory->len / 4;
    if (key1->len != key0->len || locations->len != key0->len) {
        PyErr_SetString(PyExc_ValueError, "the columns of the index differ in length");
        return -1;
    }
    return 0;
}

static void *raise_beyond(void)
{
    PyErr_SetString(PyExc_ValueError, "the directory of the index points beyond its columns");
    return NULL;
}

PyDoc_STRVAR(find_many_doc,
"find_many(keys, slots, key0, key1, locations, directory, shift, secret0, secret1)\n\n"
"Write the slot of each of n keys, two u64 each, into n int64; -1 where it is absent.");

static PyObject *find_many(PyObject *self, PyObject *args)
{
    Py_buffer keys, slots, key0, key1, locations, directory;
    struct columns columns;
    unsigned long long secret0, secret1;
    PyObject *result = NULL;
    (void)self;

    if (!PyArg_ParseTuple(args, "y*w*y*y*y*y*IKK:find_many", &keys, &slots, &key0, &key1, &locations, &directory,
                          &columns.shift, &secret0, &secret1))
        return NULL;
    columns.secret0 = secret0;
    columns.secret1 = secret1;
    if (take_columns(&columns, &key0, &key1, &locations, &directory) < 0)
        goto end;
    if (keys.len % 16 || slots.len / 8 != keys.len / 16 || slots.len % 8) {
        PyErr_SetString(PyExc_ValueError, "as many slots as keys are needed");
        goto end;
    }
    const uint64_t *words = keys.buf;
    int64_t *out = slots.buf;
    for (Py_ssize_t i = 0; i < keys.len / 16; i++)
        if ((out[i] = find(&columns, words[2 * i], words[2 * i + 1])) == -2) {
            raise_beyond();
            goto end;
        }
    result = Py_NewRef(Py_None);
end:
    PyBuffer_Release(&keys);
    PyBuffer_Release(&slots);
    PyBuffer_Release(&key0);
    PyBuffer_Release(&key1);
    PyBuffer_Release(&locations);
    PyBuffer_Release(&directory);
    return result;
}

/* An access of a slot at `tick`, told to the scores of its segment as SegmentScores.touch does. */
static int touch(uint32_t *access, int64_t slot, uint64_t location, uint32_t tick, int64_t *sums, uint64_t segments)
{
    uint32_t before = access[slot];
    uint64_t segment = location >> SEGMENT_SHIFT;
    if (before == tick)
        return 0;
    if (segment >= segments) {
        PyErr_SetString(PyExc_ValueError, "a location names a segment that has no score");
        return -1;
    }
    access[slot] = tick;
    sums[segment] += (int64_t)(location >> DEPTH_BITS & PAGES_MASK) * ((int64_t)tick - (int64_t)before);
    return 0;
}

PyDoc_STRVAR(locate_doc,
"locate(keys, indices, salt, key0, key1, locations, directory, shift, secret0, secret1, access, access_sums, tick)\n"
"-> list of int\n\n"
"Locations of record keys, 0 where absent: of those of n * 32 bytes of keys that the list `indices` names, in its\n"
"order. With a tick (not 0) this is an access of each.");

static PyObject *locate(PyObject *self, PyObject *args)
{
    Py_buffer keys, salt, key0, key1, locations, directory, access, sums;
    PyObject *indices, *found = NULL;
    struct columns columns;
    unsigned long long secret0, secret1;
    unsigned tick;
    (void)self;

    if (!PyArg_ParseTuple(args, "y*O!y*y*y*y*y*IKKw*w*I:locate", &keys, &PyList_Type, &indices, &salt, &key0, &key1,
                          &locations, &directory, &columns.shift, &secret0, &secret1, &access, &sums, &tick))
        return NULL;
    columns.secret0 = secret0;
    columns.secret1 = secret1;
    if (take_columns(&columns, &key0, &key1, &locations, &directory) < 0)
        goto end;
    if (salt.len != 16 || (uint64_t)access.len / 4 != columns.slots) {
        PyErr_SetString(PyExc_ValueError, "a salt has 16 bytes, and a slot an access tick");
        goto end;
    }
    uint64_t salts[2];
    memcpy(salts, salt.buf, sizeof salts);
    Py_ssize_t count = PyList_GET_SIZE(indices), keys_count = keys.len / DIGEST_BYTES;
    if ((found = PyList_New(count)) == NULL)
        goto end;
    for (Py_ssize_t i = 0; i < count; i++) {
        Py_ssize_t index = PyLong_AsSsize_t(PyList_GET_ITEM(indices, i));
        if (index < 0 || index >= keys_count) {
            if (!PyErr_Occurred())
                PyErr_Format(PyExc_IndexError, "key %zd of %zd", index, keys_count);
            Py_CLEAR(found);
            goto end;
        }
        uint64_t halves[2];
        memcpy(halves, (const char *)keys.buf + index * DIGEST_BYTES, sizeof halves);
        int64_t slot = find(&columns, halves[0] ^ salts[0], halves[1] ^ salts[1]);
        uint64_t location = slot < 0 ? 0 : columns.locations[slot];
        if (slot == -2)
            raise_beyond();
        PyObject *number = NULL;
        if (slot != -2 && (slot < 0 || !tick
                           || touch(access.buf, slot, location, tick, sums.buf, (uint64_t)sums.len / 8) == 0))
            number = PyLong_FromUnsignedLongLong(location);
        if (number == NULL) {
            Py_CLEAR(found);
            goto end;
        }
        PyList_SET_ITEM(found, i, number);
    }
end:
    PyBuffer_Release(&keys);
    PyBuffer_Release(&salt);
    PyBuffer_Release(&key0);
    PyBuffer_Release(&key1);
    PyBuffer_Release(&locations);
    PyBuffer_Release(&directory);
    PyBuffer_Release(&access);
    PyBuffer_Release(&sums);
    return found;
}

PyDoc_STRVAR(line_up_doc,
"line_up(locations, indices, pages_max) -> list of (location, index), sorted, or None\n\n"
"None where a location is 0, or that of a record of more than so many pages.");

static PyObject *line_up(PyObject *self, PyObject *args)
{
    PyObject *locations, *indices, *wants;
    unsigned long long pages_max;
    (void)self;

    if (!PyArg_ParseTuple(args, "O!O!K:line_up", &PyList_Type, &locations, &PyList_Type, &indices, &pages_max))
        return NULL;
    Py_ssize_t count = PyList_GET_SIZE(locations);
    if (count != PyList_GET_SIZE(indices)) {
        PyErr_SetString(PyExc_ValueError, "as many locations as indices");
        return NULL;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        uint64_t location = PyLong_AsUnsignedLongLong(PyList_GET_ITEM(locations, i));
        if (location == (uint64_t)-1 && PyErr_Occurred())
            return NULL;
        if (location == 0 || (location >> DEPTH_BITS & PAGES_MASK) > pages_max)
            Py_RETURN_NONE;
    }
    if ((wants = PyList_New(count)) == NULL)
        return NULL;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *want = PyTuple_Pack(2, PyList_GET_ITEM(locations, i), PyList_GET_ITEM(indices, i));
        if (want == NULL) {
            Py_DECREF(wants);
            return NULL;
        }
        PyList_SET_ITEM(wants, i, want);
    }
    if (PyList_Sort(wants) < 0)
        Py_CLEAR(wants);
    return wants;
}

/* Appends what it takes over; -1 with an exception. */
static int append(PyObject *list, PyObject *item)
{
    int code = item == NULL ? -1 : PyList_Append(list, item);
    Py_XDECREF(item);
    return code;
}

/* The bounds of a division, in pages and records, and where segments lie. */
struct bounds {
    Py_ssize_t count_max;
    uint64_t most, record_pages_max, run_pages_max, first_byte, segment_bytes;
};

struct cut {
    Py_ssize_t end;
    uint64_t pages;
    PyObject *starts, *locations, *offsets, *lengths, *segments;
};

/* One run begins: where, and how long the one before it was. */
static int begin_run(struct cut *cut, const struct bounds *bounds, Py_ssize_t number, uint64_t place, uint64_t run_from)
{
    uint64_t segment = place >> PAGE_BITS, page = place & ((1u << PAGE_BITS) - 1);
    uint64_t offset = bounds->first_byte + segment * bounds->segment_bytes + page * PAGE_BYTES;
    if (number && append(cut->lengths, PyLong_FromUnsignedLongLong((cut->pages - run_from) * PAGE_BYTES)) < 0)
        return -1;
    if (append(cut->starts, Py_BuildValue("nKK", number, (unsigned long long)cut->pages * PAGE_BYTES,
                                          (unsigned long long)place)) < 0
        || append(cut->offsets, PyLong_FromUnsignedLongLong(offset)) < 0)
        return -1;
    return append(cut->segments, PyLong_FromUnsignedLongLong(segment));
}

static int cut_off(struct cut *cut, const struct bounds *bounds, PyObject *wants, Py_ssize_t at)
{
    uint64_t most = bounds->most, run_from = 0, next_place = UINT64_MAX;
    Py_ssize_t last = PyList_GET_SIZE(wants);
    if (last - at > bounds->count_max)
        last = at + bounds->count_max;
    for (cut->end = at; cut->end < last; cut->end++) {
        PyObject *want = PyList_GET_ITEM(wants, cut->end);
        if (!PyTuple_Check(want) || PyTuple_GET_SIZE(want) != 2) {
            PyErr_SetString(PyExc_TypeError, "a want is a location and an index");
            return -1;
        }
        uint64_t location = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(want, 0));
        if (location == (uint64_t)-1 && PyErr_Occurred())
            return -1;
        uint64_t more = location >> DEPTH_BITS & PAGES_MASK, place = location >> PLACE_SHIFT;
        if (more > bounds->record_pages_max || (cut->pages + more > most && cut->pages))
            break;
        if (place != next_place || cut->pages + more - run_from > bounds->run_pages_max) {
            if (begin_run(cut, bounds, cut->end - at, place, run_from) < 0)
                return -1;
            run_from = cut->pages;
        }
        next_place = place + more;
        cut->pages += more;
        most++;
        if (PyList_Append(cut->locations, PyTuple_GET_ITEM(want, 0)) < 0)
            return -1;
    }
    if (cut->end == at)
        return 0;
    return append(cut->lengths, PyLong_FromUnsignedLongLong((cut->pages - run_from) * PAGE_BYTES));
}

PyDoc_STRVAR(divide_doc,
"divide(wants, at, most, count_max, record_pages_max, run_pages_max, first_byte, segment_bytes)\n"
"-> (end, starts, pages, locations, offsets, lengths, segments) or None\n\n"
"The next parcel of a request, from want number `at` on, see division.py; None where that record is too long.");

static PyObject *divide(PyObject *self, PyObject *args)
{
    PyObject *wants, *result = NULL;
    Py_ssize_t at;
    struct bounds bounds;
    unsigned long long most, record_pages_max, run_pages_max, first_byte, segment_bytes;
    (void)self;

    if (!PyArg_ParseTuple(args, "O!nKnKKKK:divide", &PyList_Type, &wants, &at, &most, &bounds.count_max,
                          &record_pages_max, &run_pages_max, &first_byte, &segment_bytes))
        return NULL;
    if (at < 0) {
        PyErr_SetString(PyExc_ValueError, "a want before the first");
        return NULL;
    }
    bounds.most = most;
    bounds.record_pages_max = record_pages_max;
    bounds.run_pages_max = run_pages_max;
    bounds.first_byte = first_byte;
    bounds.segment_bytes = segment_bytes;
    struct cut cut = {0, 0, PyList_New(0), PyList_New(0), PyList_New(0), PyList_New(0), PyList_New(0)};
    if (cut.starts && cut.locations && cut.offsets && cut.lengths && cut.segments
        && cut_off(&cut, &bounds, wants, at) == 0) {
        if (cut.end == at)
            result = Py_NewRef(Py_None);
        else
            result = Py_BuildValue("nOKOOOO", cut.end, cut.starts, (unsigned long long)cut.pages, cut.locations,
                                   cut.offsets, cut.lengths, cut.segments);
    }
    Py_XDECREF(cut.starts);
    Py_XDECREF(cut.locations);
    Py_XDECREF(cut.offsets);
    Py_XDECREF(cut.lengths);
    Py_XDECREF(cut.segments);
    return result;
}

static PyMethodDef methods[] = {
    {"line_up", line_up, METH_VARARGS, line_up_doc},
    {"divide", divide, METH_VARARGS, divide_doc},
    {"find_many", find_many, METH_VARARGS, find_many_doc},
    {"locate", locate, METH_VARARGS, locate_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "kvstore.engine._search",
    .m_doc = PyDoc_STR("Looking keys up in the RAM index; see the head of _search.c."),
    .m_size = 0,
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__search(void)
{
    PyObject *made = PyModule_Create(&module);
    if (made != NULL && PyModule_AddIntConstant(made, "INTERFACE", KV_INTERFACE) < 0)
        Py_CLEAR(made);
    return made;
}
