/*
 * kvstore.transport._put_lane: granted payload, received and checked without the GIL; put_lane.py holds the same in
 * Python and says what is expected.
 *
 *   Lane    expect(landings), receive(socket, bytes_max) -> (MORE, OTHER or CLOSED, what has come whole), take_apart().
 *
 * What keeps this sound:
 *   - nothing is decoded: header and slices are compared with those that are expected, byte for byte but for epoch and
 *     checksums, and the header's checksum is computed before a record of the frame counts;
 *   - a record is called good only when each of its blocks has its checksum, computed over the bytes in the node's memory
 *     while the cache has them;
 *   - at whatever else comes it stops, and gives every byte of that frame away for others to judge;
 *   - memory is held through the buffer protocol until its record has been told of, or was given back;
 *   - the socket stays the caller's, and is non-blocking for each receive.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include "../types/_crc32c.h"

#define KV_INTERFACE 1 /* of this module to its Python half; raise it, and kvstore/types/compiled.py, with each change of either */
#define KV_START 4 /* of a header, docs/protocol.md "Header": what all DATA frames begin with */
#define KV_ID_AT 4
#define KV_BODY_AT 8
#define KV_PAYLOAD_AT 12
#define KV_FLAGS_AT 24
#define KV_CRC_AT 28
#define KV_HEADER 32
#define KV_SLICE 48 /* item, and what stands behind it */
#define KV_BEHIND_AT 4
#define KV_BEHIND 44
#define KV_VECTORS 64 /* of one receive */

enum { KV_MORE, KV_OTHER, KV_CLOSED };

typedef struct {
    PyObject *landing; /* a tuple of item and memory */
    Py_buffer view;
    uint32_t item;
    unsigned char ends_group, is_good;
} Place;

typedef struct {
    PyObject_HEAD
    int is_made, is_busy;
    uint32_t request_id, crc;
    size_t record_bytes, block_bytes, table_bytes, per_frame, piece_bytes;
    unsigned char start[KV_START], behind[KV_BEHIND];
    Place *places; /* [0, done) have come whole and are not told of, [done, done + frame_count) are in the present frame */
    unsigned char *tables; /* of each place, once its frame has come */
    size_t room, count, done, frame_count;
    unsigned char *head;
    size_t head_bytes, whole_bytes, came, summed; /* of the present frame; the last of its payload */
    unsigned long long received_bytes, expected_bytes;
} Lane;

static uint32_t word_at(const unsigned char *at)
{
    uint32_t word;
    memcpy(&word, at, sizeof word);
    return word;
}

/* ---- one frame ------------------------------------------------------------------------------------------------ */

/* What the client sends next: records of one grant, as many as share a frame. */
static void next_frame(Lane *self)
{
    size_t count = 0;
    while (self->done + count < self->count && count < self->per_frame) {
        Place *place = &self->places[self->done + count++];
        place->is_good = 1;
        if (place->ends_group)
            break;
    }
    self->frame_count = count;
    self->head_bytes = KV_HEADER + count * (KV_SLICE + self->table_bytes);
    self->whole_bytes = count ? self->head_bytes + count * self->record_bytes : 0;
    self->came = self->summed = 0;
    self->crc = ~0u;
}

/* Whether the header is that of the frame that is expected. */
static int begins(const Lane *self)
{
    const unsigned char *head = self->head;
    return !memcmp(head, self->start, KV_START) && word_at(head + KV_ID_AT) == self->request_id
           && word_at(head + KV_BODY_AT) == self->head_bytes - KV_HEADER
           && word_at(head + KV_PAYLOAD_AT) == self->whole_bytes - self->head_bytes
           && word_at(head + KV_FLAGS_AT) == self->frame_count;
}

/* Whether the body behind it is, too. */
static int opens(const Lane *self)
{
    const unsigned char *head = self->head;
    uint32_t crc = kv_crc_more(kv_crc_more(~0u, head, KV_CRC_AT), head + KV_HEADER, self->head_bytes - KV_HEADER);
    if (~crc != word_at(head + KV_CRC_AT))
        return 0;
    for (size_t i = 0; i < self->frame_count; i++) {
        const unsigned char *slice = head + KV_HEADER + i * KV_SLICE;
        if (word_at(slice) != self->places[self->done + i].item || memcmp(slice + KV_BEHIND_AT, self->behind, KV_BEHIND))
            return 0;
    }
    return 1;
}

/* Sums the payload that has come; a record with a block of another checksum is not good. */
static void sum(Lane *self)
{
    const unsigned char *table = self->head + KV_HEADER + self->frame_count * KV_SLICE;
    size_t end = self->came - self->head_bytes;
    while (self->summed < end) {
        size_t number = self->summed / self->record_bytes, offset = self->summed % self->record_bytes;
        Place *place = &self->places[self->done + number];
        size_t until_end = self->block_bytes - offset % self->block_bytes, length = end - self->summed;
        if (until_end > self->record_bytes - offset)
            until_end = self->record_bytes - offset;
        if (length > until_end)
            length = until_end;
        self->crc = kv_crc_more(self->crc, (const unsigned char *)place->view.buf + offset, length);
        self->summed += length;
        if (length == until_end) {
            if (~self->crc != word_at(table + number * self->table_bytes + offset / self->block_bytes * 4))
                place->is_good = 0;
            self->crc = ~0u;
        }
    }
}

static void close_frame(Lane *self)
{
    memcpy(self->tables + self->done * self->table_bytes, self->head + KV_HEADER + self->frame_count * KV_SLICE,
           self->frame_count * self->table_bytes);
    self->done += self->frame_count;
    next_frame(self);
}

/* ---- receiving ------------------------------------------------------------------------------------------------ */

/* Where the next bytes belong: the rest of the head, and of the payload up to the end of a piece. How many vectors. */
static size_t line_up(const Lane *self, struct iovec *parts, size_t *wanted)
{
    size_t count = 0, at = 0;
    *wanted = 0;
    if (self->came < self->head_bytes)
        parts[count++] = (struct iovec){self->head + self->came, *wanted = self->head_bytes - self->came};
    else
        at = self->came - self->head_bytes;
    size_t payload_bytes = self->whole_bytes - self->head_bytes;
    size_t end = (at / self->piece_bytes + 1) * self->piece_bytes;
    if (end > payload_bytes)
        end = payload_bytes;
    while (at < end && count < KV_VECTORS) {
        size_t number = at / self->record_bytes, offset = at % self->record_bytes, length = self->record_bytes - offset;
        if (length > end - at)
            length = end - at;
        parts[count++] = (struct iovec){(unsigned char *)self->places[self->done + number].view.buf + offset, length};
        *wanted += length;
        at += length;
    }
    return count;
}

/* Receives what is there, at most about `bytes_max`; `error` is set where the socket has one. */
static int receive_frames(Lane *self, int handle, size_t bytes_max, int *error)
{
    size_t received = 0;
    while (received < bytes_max && self->frame_count) {
        struct iovec parts[KV_VECTORS];
        size_t wanted, before = self->came;
        struct msghdr message = {.msg_iov = parts, .msg_iovlen = line_up(self, parts, &wanted)};
        ssize_t came = recvmsg(handle, &message, MSG_DONTWAIT);
        if (came < 0) {
            if (errno == EINTR)
                continue;
            if (errno != EAGAIN && errno != EWOULDBLOCK)
                *error = errno;
            return KV_MORE;
        }
        if (came == 0)
            return KV_CLOSED;
        received += (size_t)came;
        self->came += (size_t)came;
        self->received_bytes += (size_t)came;
        self->expected_bytes -= (size_t)came;
        if (before < KV_HEADER && self->came >= KV_HEADER && !begins(self))
            return KV_OTHER;
        if (before < self->head_bytes && self->came >= self->head_bytes && !opens(self))
            return KV_OTHER;
        if (self->came > self->head_bytes)
            sum(self);
        if (self->came == self->whole_bytes)
            close_frame(self);
        if ((size_t)came < wanted)
            return KV_MORE;
    }
    return KV_MORE;
}

/* ---- the type ------------------------------------------------------------------------------------------------- */

static void let_go(Place *place)
{
    PyBuffer_Release(&place->view);
    Py_CLEAR(place->landing);
}

/* Room for so many more places. */
static int make_room(Lane *self, size_t more)
{
    if (self->room - self->count >= more)
        return 0;
    size_t room = self->count + more;
    Place *places = PyMem_Realloc(self->places, room * sizeof *places);
    if (places)
        self->places = places;
    unsigned char *tables = places ? PyMem_Realloc(self->tables, room * self->table_bytes) : NULL;
    if (!tables) {
        PyErr_NoMemory();
        return -1;
    }
    self->tables = tables;
    self->room = room;
    return 0;
}

static int take_landing(Lane *self, PyObject *landing, int is_last)
{
    if (!PyTuple_Check(landing) || PyTuple_GET_SIZE(landing) != 2) {
        PyErr_SetString(PyExc_TypeError, "a landing is an item and memory");
        return -1;
    }
    unsigned long item = PyLong_AsUnsignedLong(PyTuple_GET_ITEM(landing, 0));
    if (item == (unsigned long)-1 && PyErr_Occurred())
        return -1;
    Place place = {.item = (uint32_t)item, .ends_group = (unsigned char)is_last, .is_good = 1};
    if (PyObject_GetBuffer(PyTuple_GET_ITEM(landing, 1), &place.view, PyBUF_WRITABLE) < 0)
        return -1;
    if ((size_t)place.view.len != self->record_bytes || item > UINT32_MAX) {
        PyBuffer_Release(&place.view);
        PyErr_SetString(PyExc_ValueError, "memory of another length than its record");
        return -1;
    }
    place.landing = Py_NewRef(landing);
    self->places[self->count++] = place;
    return 0;
}

static int is_usable(Lane *self)
{
    if (!self->is_made || self->is_busy)
        PyErr_SetString(PyExc_ValueError, self->is_busy ? "it is receiving" : "it was not made");
    return self->is_made && !self->is_busy;
}

static PyObject *Lane_expect(Lane *self, PyObject *argument)
{
    if (!is_usable(self))
        return NULL;
    PyObject *landings = PySequence_Fast(argument, "landings are a sequence");
    if (!landings)
        return NULL;
    size_t before = self->count;
    Py_ssize_t count = PySequence_Fast_GET_SIZE(landings);
    int code = make_room(self, (size_t)count);
    for (Py_ssize_t i = 0; i < count && code == 0; i++)
        code = take_landing(self, PySequence_Fast_GET_ITEM(landings, i), i + 1 == count);
    Py_DECREF(landings);
    if (code < 0) {
        while (self->count > before)
            let_go(&self->places[--self->count]);
        return NULL;
    }
    size_t frames = ((size_t)count + self->per_frame - 1) / self->per_frame;
    self->expected_bytes += frames * KV_HEADER + (size_t)count * (KV_SLICE + self->table_bytes + self->record_bytes);
    if (!self->frame_count)
        next_frame(self);
    Py_RETURN_NONE;
}

/* Some records, one behind the other, that are all good or all not: (items, tables, whether they are). */
static PyObject *told(const Lane *self, size_t from, size_t to)
{
    PyObject *items = PyList_New((Py_ssize_t)(to - from));
    for (size_t i = from; items && i < to; i++) {
        PyObject *item = PyTuple_GET_ITEM(self->places[i].landing, 0);
        PyList_SET_ITEM(items, (Py_ssize_t)(i - from), Py_NewRef(item));
    }
    return items ? Py_BuildValue("Ny#O", items, (const char *)self->tables + from * self->table_bytes,
                                 (Py_ssize_t)((to - from) * self->table_bytes),
                                 self->places[from].is_good ? Py_True : Py_False)
                 : NULL;
}

/* What has come whole since the last call; its memory is let go of. */
static PyObject *tell(Lane *self)
{
    PyObject *came = PyList_New(0);
    for (size_t from = 0, to; came && from < self->done; from = to) {
        for (to = from + 1; to < self->done && self->places[to].is_good == self->places[from].is_good; to++)
            ;
        PyObject *some = told(self, from, to);
        if (!some || PyList_Append(came, some) < 0)
            Py_CLEAR(came);
        Py_XDECREF(some);
    }
    if (!came)
        return NULL;
    for (size_t i = 0; i < self->done; i++)
        let_go(&self->places[i]);
    memmove(self->places, self->places + self->done, (self->count - self->done) * sizeof *self->places);
    self->count -= self->done;
    self->done = 0;
    return came;
}

static PyObject *Lane_receive(Lane *self, PyObject *args)
{
    PyObject *connected;
    Py_ssize_t bytes_max;
    if (!PyArg_ParseTuple(args, "On:receive", &connected, &bytes_max) || !is_usable(self))
        return NULL;
    int handle = PyObject_AsFileDescriptor(connected), error = 0, code;
    if (handle < 0)
        return NULL;
    self->is_busy = 1;
    Py_BEGIN_ALLOW_THREADS
    code = receive_frames(self, handle, bytes_max > 0 ? (size_t)bytes_max : 0, &error);
    Py_END_ALLOW_THREADS
    self->is_busy = 0;
    if (self->done) { /* what the socket has to say beside that it says again */
        PyObject *came = tell(self);
        return came ? Py_BuildValue("iN", code == KV_CLOSED ? KV_MORE : code, came) : NULL;
    }
    if (error) {
        errno = error;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    return Py_BuildValue("i[]", code);
}

static PyObject *Lane_take_apart(Lane *self, PyObject *Py_UNUSED(ignored))
{
    if (!is_usable(self))
        return NULL;
    PyObject *begun = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)self->came);
    PyObject *landings = PyList_New((Py_ssize_t)(self->count - self->done));
    if (!begun || !landings) {
        Py_XDECREF(begun);
        Py_XDECREF(landings);
        return NULL;
    }
    char *to = PyBytes_AS_STRING(begun);
    size_t part = self->came < self->head_bytes ? self->came : self->head_bytes;
    memcpy(to, self->head, part);
    to += part;
    size_t left = self->came - part;
    for (size_t i = self->done; left; i++) {
        part = left < self->record_bytes ? left : self->record_bytes;
        memcpy(to, self->places[i].view.buf, part);
        to += part;
        left -= part;
    }
    for (size_t i = self->done; i < self->count; i++)
        PyList_SET_ITEM(landings, (Py_ssize_t)(i - self->done), Py_NewRef(self->places[i].landing));
    for (size_t i = 0; i < self->count; i++)
        let_go(&self->places[i]);
    self->count = self->done = 0;
    next_frame(self);
    return Py_BuildValue("NN", begun, landings);
}

static PyObject *Lane_is_over(Lane *self, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(self->frame_count == 0);
}

static int Lane_init(Lane *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"request_id", "start", "behind", "block_bytes", "record_bytes", "per_frame", "piece_bytes",
                            NULL};
    const char *start, *behind;
    Py_ssize_t start_bytes, behind_bytes, block_bytes, record_bytes, per_frame, piece_bytes;
    unsigned request_id;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "$Iy#y#nnnn", names, &request_id, &start, &start_bytes, &behind,
                                     &behind_bytes, &block_bytes, &record_bytes, &per_frame, &piece_bytes))
        return -1;
    if (self->is_made || start_bytes != KV_START || behind_bytes != KV_BEHIND || block_bytes < 1 || record_bytes < 1
        || per_frame < 1 || piece_bytes < 1 || record_bytes > UINT32_MAX || block_bytes > UINT32_MAX
        || per_frame > UINT16_MAX) {
        PyErr_SetString(PyExc_ValueError, "no frames of whole records");
        return -1;
    }
    memcpy(self->start, start, KV_START);
    memcpy(self->behind, behind, KV_BEHIND);
    self->request_id = request_id;
    self->block_bytes = (size_t)block_bytes;
    self->record_bytes = (size_t)record_bytes;
    self->table_bytes = 4 * (((size_t)record_bytes + (size_t)block_bytes - 1) / (size_t)block_bytes);
    self->per_frame = (size_t)per_frame;
    self->piece_bytes = (size_t)piece_bytes;
    self->head = PyMem_Malloc(KV_HEADER + self->per_frame * (KV_SLICE + self->table_bytes));
    if (!self->head) {
        PyErr_NoMemory();
        return -1;
    }
    next_frame(self);
    self->is_made = 1;
    return 0;
}

static void Lane_dealloc(Lane *self)
{
    for (size_t i = 0; i < self->count; i++)
        let_go(&self->places[i]);
    PyMem_Free(self->places);
    PyMem_Free(self->tables);
    PyMem_Free(self->head);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMethodDef Lane_methods[] = {
    {"expect", (PyCFunction)Lane_expect, METH_O, PyDoc_STR("expect(landings)\n\nOne GRANT names these.")},
    {"receive", (PyCFunction)Lane_receive, METH_VARARGS,
     PyDoc_STR("receive(socket, bytes_max) -> (MORE, OTHER or CLOSED, [(items, tables, are_good), ...])\n\n"
               "Receives what is there. OTHER: see take_apart.")},
    {"take_apart", (PyCFunction)Lane_take_apart, METH_NOARGS,
     PyDoc_STR("take_apart() -> (bytes, landings)\n\nWhat has come of the frame in progress, and where all that has not"
               " come whole belongs.\nThe lane is spent.")},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef Lane_members[] = {
    {"received_bytes", T_ULONGLONG, offsetof(Lane, received_bytes), READONLY, PyDoc_STR("so far")},
    {"expected_bytes", T_ULONGLONG, offsetof(Lane, expected_bytes), READONLY, PyDoc_STR("of frames, that have not come")},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef Lane_getset[] = {
    {"is_over", (getter)Lane_is_over, NULL, PyDoc_STR("all that was granted has come"), NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyTypeObject LaneType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "kvstore.transport._put_lane.Lane",
    .tp_basicsize = sizeof(Lane),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)Lane_init,
    .tp_dealloc = (destructor)Lane_dealloc,
    .tp_methods = Lane_methods,
    .tp_members = Lane_members,
    .tp_getset = Lane_getset,
};

static PyMethodDef functions[] = {
    KV_CRC_METHODS,
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "kvstore.transport._put_lane",
    .m_doc = PyDoc_STR("Granted payload, received and checked in one call; see the head of _put_lane.c."),
    .m_size = -1,
    .m_methods = functions,
};

PyMODINIT_FUNC PyInit__put_lane(void)
{
    kv_crc_prepare();
    if (PyType_Ready(&LaneType) < 0)
        return NULL;
    PyObject *made = PyModule_Create(&module);
    if (!made)
        return NULL;
    if (PyModule_AddObjectRef(made, "Lane", (PyObject *)&LaneType) < 0
        || PyModule_AddIntConstant(made, "INTERFACE", KV_INTERFACE) < 0
        || PyModule_AddIntConstant(made, "MORE", KV_MORE) < 0 || PyModule_AddIntConstant(made, "OTHER", KV_OTHER) < 0
        || PyModule_AddIntConstant(made, "CLOSED", KV_CLOSED) < 0) {
        Py_DECREF(made);
        return NULL;
    }
    return made;
}
