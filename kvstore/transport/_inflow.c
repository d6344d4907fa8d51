/*
 * kvstore.transport._inflow: the answer to a read of whole records of one length, received and checked in one call
 * without the GIL; kvstore_client/inflow.py holds the same in Python and says what is expected.
 *
 *   Inflow    receive(rearm_at_ns) -> DONE, ARM or STOP; rest(), done(), content_ids(), epoch.
 *
 * What keeps this sound:
 *   - nothing is decoded: header and slices are compared with those that are expected, byte for byte but for the fields
 *     that may differ, and their checksum is computed before any of them is used;
 *   - a record counts as done only when each of its blocks has its checksum, computed over the bytes in the caller's
 *     memory while the cache has them, and its whole frame has come so;
 *   - at whatever else comes it stops, and gives every byte of that frame away for others to judge;
 *   - the caller's memory is held through the buffer protocol for the object's life;
 *   - the descriptor stays the caller's: a connection is closed by nobody but who has taken it.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>

#include "../types/_crc32c.h"

#define KV_INTERFACE 2 /* of this module to its Python half; raise it, and kvstore/types/compiled.py, with each change of either */
#define KV_START 4 /* of a header, docs/protocol.md "Header": what all DATA frames begin with */
#define KV_ID_AT 4
#define KV_BODY_AT 8
#define KV_PAYLOAD_AT 12
#define KV_EPOCH_AT 16
#define KV_FLAGS_AT 24
#define KV_CRC_AT 28
#define KV_HEADER 32
#define KV_SLICE 48 /* item, what stands before the content id, that, what stands behind it */
#define KV_BEFORE_AT 4
#define KV_BEFORE 16
#define KV_CONTENT_AT 20
#define KV_CONTENT 16
#define KV_AFTER_AT 36
#define KV_AFTER 12
#define KV_AHEAD 4096 /* received at a time where it is not known how long a body is */
#define KV_VECTORS 64 /* of one receive; a piece of shorter records takes some more */

enum { KV_DONE, KV_ARM, KV_STOP, KV_SIGNAL };
enum { FREE, ARRIVING, DONE };

typedef struct {
    PyObject_HEAD
    int handle, is_made, is_busy, is_open; /* is_open: a frame was begun, its body has been judged */
    uint32_t request_id, final_flag, slices_max, count, count_done;
    size_t record_bytes, block_bytes, words, slice_bytes, payload_max, piece_bytes;
    unsigned char start[KV_START], before[KV_BEFORE], after[KV_AFTER];
    Py_buffer *views;
    unsigned char *states, *content; /* of each item */
    unsigned char head[KV_HEADER], ahead[KV_AHEAD];
    size_t head_came, body_came, ahead_at, ahead_end;
    unsigned char *body;
    size_t body_room, body_bytes, payload_bytes, payload_came, checked;
    uint32_t frame_count, is_final, block_crc;
    unsigned long long epoch;
} Inflow;

static uint32_t word_at(const unsigned char *at)
{
    uint32_t word;
    memcpy(&word, at, sizeof word);
    return word;
}

/* ---- one frame ------------------------------------------------------------------------------------------------ */

/* Whether the header is one of a frame that is expected; what it says is known then. */
static int begins(Inflow *self)
{
    const unsigned char *head = self->head;
    uint32_t flags = word_at(head + KV_FLAGS_AT);
    uint32_t count = flags & ~self->final_flag;
    self->body_bytes = word_at(head + KV_BODY_AT);
    self->payload_bytes = word_at(head + KV_PAYLOAD_AT);
    self->frame_count = count;
    self->is_final = count != flags;
    return !memcmp(head, self->start, KV_START) && word_at(head + KV_ID_AT) == self->request_id && count > 0
           && count <= self->slices_max && self->body_bytes == count * self->slice_bytes
           && self->payload_bytes == count * self->record_bytes && self->payload_bytes <= self->payload_max;
}

/* Whether the body is what is expected behind that header: items that are wanted and have not come. */
static int opens(Inflow *self)
{
    uint32_t crc = kv_crc_more(kv_crc_more(~0u, self->head, KV_CRC_AT), self->body, self->body_bytes);
    uint32_t count = self->frame_count;
    if (~crc != word_at(self->head + KV_CRC_AT) || count > self->count - self->count_done
        || (self->is_final && self->count_done + count != self->count))
        return 0;
    for (uint32_t i = 0; i < count; i++) {
        const unsigned char *slice = self->body + i * KV_SLICE;
        uint32_t item = word_at(slice);
        if (item >= self->count || self->states[item] != FREE || memcmp(slice + KV_BEFORE_AT, self->before, KV_BEFORE)
            || memcmp(slice + KV_AFTER_AT, self->after, KV_AFTER))
            return 0; /* those marked before it are given back by whoever stops here */
        self->states[item] = ARRIVING;
        memcpy(self->content + (size_t)item * KV_CONTENT, slice + KV_CONTENT_AT, KV_CONTENT);
    }
    self->payload_came = self->checked = 0;
    self->block_crc = ~0u;
    self->is_open = 1;
    return 1;
}

/* Memory of the frame's payload from byte `at` on, up to the end of its record. */
static unsigned char *place_of(const Inflow *self, size_t at, size_t *length)
{
    size_t number = at / self->record_bytes, offset = at % self->record_bytes;
    uint32_t item = word_at(self->body + number * KV_SLICE);
    *length = self->record_bytes - offset;
    return (unsigned char *)self->views[item].buf + offset;
}

/* Sums what has come; whether all blocks that are whole have their checksums. */
static int check(Inflow *self)
{
    const unsigned char *table = self->body + (size_t)self->frame_count * KV_SLICE;
    while (self->checked < self->payload_came) {
        size_t room, number = self->checked / self->record_bytes, offset = self->checked % self->record_bytes;
        const unsigned char *data = place_of(self, self->checked, &room);
        size_t block_left = self->block_bytes - offset % self->block_bytes;
        size_t until_end = room < block_left ? room : block_left, length = self->payload_came - self->checked;
        if (length > until_end)
            length = until_end;
        self->block_crc = kv_crc_more(self->block_crc, data, length);
        self->checked += length;
        if (length == until_end) {
            size_t word = number * self->words + offset / self->block_bytes;
            if (~self->block_crc != word_at(table + 4 * word))
                return 0;
            self->block_crc = ~0u;
        }
    }
    return 1;
}

static void close_frame(Inflow *self)
{
    for (uint32_t i = 0; i < self->frame_count; i++)
        self->states[word_at(self->body + i * KV_SLICE)] = DONE;
    self->count_done += self->frame_count;
    memcpy(&self->epoch, self->head + KV_EPOCH_AT, 8);
    self->is_open = 0;
    self->head_came = self->body_came = 0;
}

/* ---- receiving ------------------------------------------------------------------------------------------------ */

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Receives once. The bytes that came, or what to end with as -1 - code. */
static ssize_t receive_once(Inflow *self, struct iovec *parts, size_t parts_count, int flags, int64_t rearm_at_ns)
{
    if (now_ns() >= rearm_at_ns)
        return -1 - KV_ARM;
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = parts_count};
    ssize_t came = recvmsg(self->handle, &message, flags);
    if (came < 0 && errno == EINTR)
        return -1 - KV_SIGNAL;
    return came > 0 ? came : -1 - KV_STOP; /* too late, broken, or its end: who goes on will see for themselves */
}

/* Moves what was received ahead, as far as it is there. */
static size_t take_ahead(Inflow *self, unsigned char *to, size_t wanted)
{
    size_t there = self->ahead_end - self->ahead_at;
    if (there > wanted)
        there = wanted;
    memcpy(to, self->ahead + self->ahead_at, there);
    self->ahead_at += there;
    return there;
}

/* Fills a header or body. 0, or what to end with as -1 - code. */
static ssize_t fill(Inflow *self, unsigned char *to, size_t *came, size_t wanted, int64_t rearm_at_ns)
{
    while (*came < wanted) {
        if (self->ahead_at == self->ahead_end) {
            /* a header and the longest body that can still come, but for what it is grouped with */
            size_t most = KV_HEADER + (size_t)(self->count - self->count_done) * self->slice_bytes;
            size_t missing = wanted - *came;
            if (most < missing)
                most = missing;
            struct iovec part = {self->ahead, most < KV_AHEAD ? most : KV_AHEAD};
            ssize_t count = receive_once(self, &part, 1, 0, rearm_at_ns);
            if (count < 0)
                return count;
            self->ahead_at = 0;
            self->ahead_end = (size_t)count;
        }
        *came += take_ahead(self, to + *came, wanted - *came);
    }
    return 0;
}

/* Receives and checks payload, a piece at a time. 0, or what to end with as -1 - code. */
static ssize_t take_payload(Inflow *self, int64_t rearm_at_ns)
{
    while (self->payload_came < self->payload_bytes) {
        size_t end = (self->payload_came / self->piece_bytes + 1) * self->piece_bytes, at = self->payload_came;
        if (end > self->payload_bytes)
            end = self->payload_bytes;
        struct iovec parts[KV_VECTORS];
        size_t count = 0;
        while (at < end && count < KV_VECTORS) {
            size_t length;
            unsigned char *place = place_of(self, at, &length);
            if (length > end - at)
                length = end - at;
            if (self->ahead_at < self->ahead_end) {
                size_t taken = take_ahead(self, place, length);
                self->payload_came = at += taken;
                continue;
            }
            parts[count++] = (struct iovec){place, length};
            at += length;
        }
        if (count) {
            ssize_t came = receive_once(self, parts, count, MSG_WAITALL, rearm_at_ns);
            if (came < 0)
                return came;
            self->payload_came += (size_t)came;
        }
        if (!check(self))
            return -1 - KV_STOP;
    }
    return 0;
}

static int receive_frames(Inflow *self, int64_t rearm_at_ns)
{
    for (;;) {
        ssize_t code;
        if (!self->is_open) {
            code = fill(self, self->head, &self->head_came, KV_HEADER, rearm_at_ns);
            if (code < 0)
                return (int)(-1 - code);
            if (!begins(self) || self->body_bytes > self->body_room)
                return KV_STOP;
            code = fill(self, self->body, &self->body_came, self->body_bytes, rearm_at_ns);
            if (code < 0)
                return (int)(-1 - code);
            if (!opens(self))
                return KV_STOP;
        }
        code = take_payload(self, rearm_at_ns);
        if (code < 0)
            return (int)(-1 - code);
        close_frame(self);
        if (self->is_final)
            return KV_DONE;
    }
}

/* ---- the type ------------------------------------------------------------------------------------------------- */

static int take_views(Inflow *self, PyObject *views)
{
    Py_ssize_t count = PySequence_Fast_GET_SIZE(views);
    self->views = PyMem_Calloc((size_t)count, sizeof *self->views);
    self->states = PyMem_Calloc((size_t)count, 1);
    self->content = PyMem_Calloc((size_t)count, KV_CONTENT);
    uint32_t grouped = (uint32_t)count < self->slices_max ? (uint32_t)count : self->slices_max;
    self->body_room = grouped * self->slice_bytes;
    self->body = PyMem_Malloc(self->body_room);
    if (!self->views || !self->states || !self->content || !self->body) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        if (PyObject_GetBuffer(PySequence_Fast_GET_ITEM(views, i), &self->views[i], PyBUF_WRITABLE) < 0)
            return -1;
        self->count++;
        if ((size_t)self->views[i].len != self->record_bytes) {
            PyErr_SetString(PyExc_ValueError, "memory of another length than its record");
            return -1;
        }
    }
    return 0;
}

static int Inflow_init(Inflow *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"handle", "views", "request_id", "start", "before", "after", "final_flag", "block_bytes",
                            "record_bytes", "slices_max", "payload_max", "piece_bytes", NULL};
    PyObject *views;
    const char *start, *before, *after;
    Py_ssize_t start_bytes, before_bytes, after_bytes, block_bytes, record_bytes, payload_max, piece_bytes;
    unsigned request_id, final_flag, slices_max;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "$iOIy#y#y#InnInn", names, &self->handle, &views, &request_id,
                                     &start, &start_bytes, &before, &before_bytes, &after, &after_bytes, &final_flag,
                                     &block_bytes, &record_bytes, &slices_max, &payload_max, &piece_bytes))
        return -1;
    if (self->views || start_bytes != KV_START || before_bytes != KV_BEFORE || after_bytes != KV_AFTER
        || record_bytes < 1 || block_bytes < 1 || slices_max < 1 || payload_max < 1 || piece_bytes < 1
        || record_bytes > UINT32_MAX || block_bytes > UINT32_MAX || payload_max > UINT32_MAX) {
        PyErr_SetString(PyExc_ValueError, "no frames of whole records");
        return -1;
    }
    memcpy(self->start, start, KV_START);
    memcpy(self->before, before, KV_BEFORE);
    memcpy(self->after, after, KV_AFTER);
    self->request_id = request_id;
    self->final_flag = final_flag;
    self->slices_max = slices_max;
    self->record_bytes = (size_t)record_bytes;
    self->block_bytes = (size_t)block_bytes;
    self->words = ((size_t)record_bytes + (size_t)block_bytes - 1) / (size_t)block_bytes;
    self->slice_bytes = KV_SLICE + 4 * self->words;
    self->payload_max = (size_t)payload_max;
    self->piece_bytes = (size_t)piece_bytes;
    views = PySequence_Fast(views, "views are a sequence");
    if (!views)
        return -1;
    int code = 0;
    if (PySequence_Fast_GET_SIZE(views) < 1 || PySequence_Fast_GET_SIZE(views) > UINT32_MAX) {
        PyErr_SetString(PyExc_ValueError, "a read of no records");
        code = -1;
    } else {
        code = take_views(self, views);
    }
    Py_DECREF(views);
    self->is_made = code == 0;
    return code;
}

static void Inflow_dealloc(Inflow *self)
{
    for (uint32_t i = 0; i < self->count; i++)
        PyBuffer_Release(&self->views[i]);
    PyMem_Free(self->views);
    PyMem_Free(self->states);
    PyMem_Free(self->content);
    PyMem_Free(self->body);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static int is_usable(Inflow *self)
{
    if (!self->is_made || self->is_busy)
        PyErr_SetString(PyExc_ValueError, self->is_busy ? "it is receiving" : "it was not made");
    return self->is_made && !self->is_busy;
}

static PyObject *Inflow_receive(Inflow *self, PyObject *argument)
{
    long long rearm_at_ns = PyLong_AsLongLong(argument);
    if ((rearm_at_ns == -1 && PyErr_Occurred()) || !is_usable(self))
        return NULL;
    int code;
    do {
        self->is_busy = 1;
        Py_BEGIN_ALLOW_THREADS
        code = receive_frames(self, rearm_at_ns);
        Py_END_ALLOW_THREADS
        self->is_busy = 0;
    } while (code == KV_SIGNAL && !PyErr_CheckSignals());
    return code == KV_SIGNAL ? NULL : PyLong_FromLong(code);
}

static PyObject *Inflow_rest(Inflow *self, PyObject *Py_UNUSED(none))
{
    if (!is_usable(self))
        return NULL;
    size_t payload = self->is_open ? self->payload_came : 0, ahead = self->ahead_end - self->ahead_at;
    PyObject *all = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(self->head_came + self->body_came + payload + ahead));
    if (!all)
        return NULL;
    char *to = PyBytes_AS_STRING(all);
    memcpy(to, self->head, self->head_came);
    to += self->head_came;
    memcpy(to, self->body, self->body_came);
    to += self->body_came;
    for (size_t at = 0, length; at < payload; at += length, to += length) {
        const unsigned char *place = place_of(self, at, &length);
        if (length > payload - at)
            length = payload - at;
        memcpy(to, place, length);
    }
    memcpy(to, self->ahead + self->ahead_at, ahead);
    return all;
}

static PyObject *content_id_of(const Inflow *self, uint32_t item)
{
    return PyBytes_FromStringAndSize((const char *)self->content + (size_t)item * KV_CONTENT, KV_CONTENT);
}

static PyObject *Inflow_done(Inflow *self, PyObject *Py_UNUSED(none))
{
    if (!is_usable(self))
        return NULL;
    PyObject *done = PyDict_New();
    for (uint32_t i = 0; done && i < self->count; i++) {
        if (self->states[i] != DONE)
            continue;
        PyObject *item = PyLong_FromUnsignedLong(i), *content_id = content_id_of(self, i);
        if (!item || !content_id || PyDict_SetItem(done, item, content_id) < 0)
            Py_CLEAR(done);
        Py_XDECREF(item);
        Py_XDECREF(content_id);
    }
    return done;
}

static PyObject *Inflow_content_ids(Inflow *self, PyObject *Py_UNUSED(none))
{
    if (!is_usable(self))
        return NULL;
    if (self->count_done != self->count) {
        PyErr_SetString(PyExc_ValueError, "not all have come");
        return NULL;
    }
    PyObject *all = PyList_New(self->count);
    for (uint32_t i = 0; all && i < self->count; i++) {
        PyObject *content_id = content_id_of(self, i);
        if (content_id)
            PyList_SET_ITEM(all, i, content_id);
        else
            Py_CLEAR(all);
    }
    return all;
}

static PyMethodDef Inflow_methods[] = {
    {"receive", (PyCFunction)Inflow_receive, METH_O,
     PyDoc_STR("receive(rearm_at_ns) -> DONE, ARM or STOP\n\nReceives until all items are done. ARM: the time has come to"
               " set the socket's timeout anew; call again.\nSTOP: see rest.")},
    {"rest", (PyCFunction)Inflow_rest, METH_NOARGS,
     PyDoc_STR("rest() -> bytes\n\nAll bytes of the frame that it stopped at, and behind it, as far as they came.")},
    {"done", (PyCFunction)Inflow_done, METH_NOARGS, PyDoc_STR("done() -> content id of each item that is done.")},
    {"content_ids", (PyCFunction)Inflow_content_ids, METH_NOARGS,
     PyDoc_STR("content_ids() -> those of all items, which are all done.")},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef Inflow_members[] = {
    {"epoch", T_ULONGLONG, offsetof(Inflow, epoch), READONLY, PyDoc_STR("the node's view, in the last frame")},
    {NULL, 0, 0, 0, NULL},
};

static PyTypeObject InflowType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "kvstore.transport._inflow.Inflow",
    .tp_basicsize = sizeof(Inflow),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)Inflow_init,
    .tp_dealloc = (destructor)Inflow_dealloc,
    .tp_methods = Inflow_methods,
    .tp_members = Inflow_members,
};

static PyMethodDef functions[] = {
    KV_CRC_METHODS,
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "kvstore.transport._inflow",
    .m_doc = PyDoc_STR("The answer to a read, received and checked in one call; see the head of _inflow.c."),
    .m_size = -1,
    .m_methods = functions,
};

PyMODINIT_FUNC PyInit__inflow(void)
{
    kv_crc_prepare();
    if (PyType_Ready(&InflowType) < 0)
        return NULL;
    PyObject *made = PyModule_Create(&module);
    if (!made)
        return NULL;
    if (PyModule_AddObjectRef(made, "Inflow", (PyObject *)&InflowType) < 0
        || PyModule_AddIntConstant(made, "INTERFACE", KV_INTERFACE) < 0
        || PyModule_AddIntConstant(made, "DONE", KV_DONE) < 0 || PyModule_AddIntConstant(made, "ARM", KV_ARM) < 0
        || PyModule_AddIntConstant(made, "STOP", KV_STOP) < 0) {
        Py_DECREF(made);
        return NULL;
    }
    return made;
}
