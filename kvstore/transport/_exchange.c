/*
 * kvstore.transport._exchange: the two ends of a read of one record, each a call or two; see kvstore/transport/exchange.py, which
 * holds the same in Python and says what is returned.
 *
 *   ReadExchange    the client's: send(handle, id, epoch, key, place), receive(handle, id, view), and both in one when the
 *                   record comes to a place: ask(handle, id, epoch, key, place, wait_ns);
 *   AnswerExchange  the node's: receive(), learn(count, place_bytes), answer(head, payload, id, epoch), and for a place
 *                   place(head, payload, into, id, epoch).
 *
 * What keeps this sound:
 *   - nothing is decoded: a frame is compared with the one that is expected, byte for byte but for the fields that may
 *     differ, and its checksum is computed over the very bytes that were received, before any of them is used;
 *   - heads are received into memory that is the call's own, so threads may share a ReadExchange;
 *   - the caller's memory is held through the buffer protocol while the kernel writes to it without the GIL;
 *   - descriptors stay the caller's: a connection is closed by nobody but who has taken it.
 */
#define _GNU_SOURCE /* ppoll(2) */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <poll.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>

#include "../types/_crc32c.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the wire's words are little endian"
#endif

#define KV_INTERFACE 4 /* of this module to its Python half; raise it, and kvstore/types/compiled.py, with each change of either */
#define KV_ID_AT 4          /* of the request id, docs/protocol.md "Header" */
#define KV_SIZES_AT 8
#define KV_PAYLOAD_AT 12
#define KV_EPOCH_AT 16
#define KV_FLAGS_AT 24
#define KV_CRC_AT 28
#define KV_HEADER 32
#define KV_BEFORE_ID 20     /* of a slice, before its content id */
#define KV_ID 16
#define KV_SLICE 48
#define KV_KEY 32
#define KV_HEAD_MAX 4096    /* header, slice and CRC table of one record */
#define KV_FIRST 8192       /* of a payload, sent first: the peer wakes up while the rest is copied */
#define KV_SPLIT_MIN 32768  /* payload for which that pays */
#define KV_ASLEEP_MAX 32    /* answers that are slept for after some that were looked for in vain */
#define KV_FORMS 4          /* kinds of request that a node compares with */
#define KV_DESCRIPTORS 16   /* that may come with one receive; more are closed by the kernel, and it says so */

static const unsigned char KV_PLACED[4] = {'K', 'V', 1, 33}; /* how a PLACED frame begins */

/* Of a head: all of the header before its CRC, then the body. */
static uint32_t head_crc(const unsigned char *head, size_t length)
{
    return ~kv_crc_more(kv_crc_more(~0u, head, KV_CRC_AT), head + KV_HEADER, length - KV_HEADER);
}

static uint32_t u32_at(const unsigned char *data)
{
    uint32_t word;
    memcpy(&word, data, 4);
    return word;
}

static PyObject *os_error(void)
{
    return PyErr_SetFromErrno(PyExc_OSError);
}

/* --- the client's end ------------------------------------------------------------------------------------------- */
typedef struct {
    PyObject_HEAD
    PyObject *frame, *head; /* bytes; NULL before __init__ */
    Py_ssize_t frame_bytes, key_at, place_bytes, head_bytes, record_bytes;
    long long look_ns; /* for so long `ask` looks for the answer before it sleeps */
    unsigned asleep;   /* so many answers it sleeps for, since one took longer than that; with the GIL */
    unsigned in_vain;  /* so many for the next one: twice as many each time in a row; with the GIL */
} Read;

static int read_init(Read *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"frame", "head", "key_at", "place_bytes", "record_bytes", "look_ns", NULL};
    PyObject *frame, *head;
    Py_ssize_t key_at, place_bytes, record_bytes;
    long long look_ns;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "$SSnnnL", names, &frame, &head, &key_at, &place_bytes,
                                     &record_bytes, &look_ns))
        return -1;
    if (PyBytes_GET_SIZE(frame) > KV_HEAD_MAX || key_at < KV_HEADER || place_bytes < 0 || place_bytes > KV_HEAD_MAX ||
        key_at > PyBytes_GET_SIZE(frame) - place_bytes - KV_KEY || PyBytes_GET_SIZE(head) > KV_HEAD_MAX ||
        PyBytes_GET_SIZE(head) <= KV_HEADER + KV_SLICE || record_bytes < 0 || (!record_bytes && !place_bytes)) {
        PyErr_SetString(PyExc_ValueError, "no frames of one record");
        return -1;
    }
    Py_INCREF(frame);
    Py_INCREF(head);
    Py_XSETREF(self->frame, frame);
    Py_XSETREF(self->head, head);
    self->frame_bytes = PyBytes_GET_SIZE(frame);
    self->key_at = key_at;
    self->place_bytes = place_bytes;
    self->head_bytes = PyBytes_GET_SIZE(head);
    self->record_bytes = record_bytes;
    self->look_ns = look_ns;
    return 0;
}

static void read_dealloc(Read *self)
{
    Py_XDECREF(self->frame);
    Py_XDECREF(self->head);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static int counts_args(Py_ssize_t count, Py_ssize_t wanted)
{
    if (count == wanted)
        return 1;
    PyErr_Format(PyExc_TypeError, "%zd arguments instead of %zd", count, wanted);
    return 0;
}

/* The frame of a request, from the arguments after the handle; false with an exception set. */
static int framed(const Read *self, PyObject *const *args, unsigned char *frame)
{
    unsigned long id = PyLong_AsUnsignedLong(args[1]);
    unsigned long long epoch = PyLong_AsUnsignedLongLong(args[2]);
    if (PyErr_Occurred())
        return 0;
    if (!self->frame || !PyBytes_Check(args[3]) || PyBytes_GET_SIZE(args[3]) != KV_KEY) {
        PyErr_SetString(PyExc_ValueError, "a key has 32 bytes");
        return 0;
    }
    if (!PyBytes_Check(args[4]) || PyBytes_GET_SIZE(args[4]) != self->place_bytes) {
        PyErr_SetString(PyExc_ValueError, "a place of another length than the request has room for");
        return 0;
    }
    uint32_t id_word = (uint32_t)id, crc;
    memcpy(frame, PyBytes_AS_STRING(self->frame), self->frame_bytes);
    memcpy(frame + KV_ID_AT, &id_word, 4);
    memcpy(frame + KV_EPOCH_AT, &epoch, 8);
    memcpy(frame + self->key_at, PyBytes_AS_STRING(args[3]), KV_KEY);
    memcpy(frame + self->frame_bytes - self->place_bytes, PyBytes_AS_STRING(args[4]), self->place_bytes);
    crc = head_crc(frame, self->frame_bytes);
    memcpy(frame + KV_CRC_AT, &crc, 4);
    return 1;
}

static PyObject *read_send(Read *self, PyObject *const *args, Py_ssize_t count)
{
    if (!counts_args(count, 5))
        return NULL;
    long handle = PyLong_AsLong(args[0]);
    unsigned char frame[KV_HEAD_MAX];
    if (PyErr_Occurred() || !framed(self, args, frame))
        return NULL;
    ssize_t sent;
    do {
        Py_BEGIN_ALLOW_THREADS
        sent = send((int)handle, frame, self->frame_bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
        Py_END_ALLOW_THREADS
    } while (sent < 0 && errno == EINTR && !PyErr_CheckSignals());
    if (sent < 0)
        return PyErr_Occurred() ? NULL : os_error();
    return PyBool_FromLong(sent == self->frame_bytes);
}

/* What has come, as far as it came: for who knows every frame. */
static PyObject *as_received(const unsigned char *head, size_t head_bytes, const Py_buffer *view, size_t count)
{
    PyObject *all = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)count);
    if (all) {
        char *to = PyBytes_AS_STRING(all);
        memcpy(to, head, count < head_bytes ? count : head_bytes);
        if (count > head_bytes)
            memcpy(to + head_bytes, view->buf, count - head_bytes);
    }
    return all;
}

/* What an answer is of which `count` bytes have come, those behind the head into `view`; see exchange.ReadExchange. */
static PyObject *judged(const Read *self, uint32_t id, const unsigned char *head, const Py_buffer *view, size_t count)
{
    const unsigned char *expected = (unsigned char *)PyBytes_AS_STRING(self->head);
    const size_t after = KV_HEADER + KV_BEFORE_ID + KV_ID, table = KV_HEADER + KV_SLICE;
    size_t head_bytes = (size_t)self->head_bytes;
    if (count < head_bytes || memcmp(head, expected, KV_ID_AT) || memcmp(head + KV_ID_AT, &id, 4) ||
        memcmp(head + KV_SIZES_AT, expected + KV_SIZES_AT, KV_EPOCH_AT - KV_SIZES_AT) ||
        memcmp(head + KV_FLAGS_AT, expected + KV_FLAGS_AT, KV_CRC_AT - KV_FLAGS_AT) ||
        memcmp(head + KV_HEADER, expected + KV_HEADER, KV_BEFORE_ID) ||
        memcmp(head + after, expected + after, table - after))
        return as_received(head, head_bytes, view, count);
    if (head_crc(head, head_bytes) != u32_at(head + KV_CRC_AT))
        Py_RETURN_NONE;
    unsigned long long epoch;
    memcpy(&epoch, head + KV_EPOCH_AT, 8);
    return Py_BuildValue("nKy#y#", (Py_ssize_t)(count - head_bytes), epoch, (char *)head + KV_HEADER + KV_BEFORE_ID,
                         (Py_ssize_t)KV_ID, (char *)head + table, (Py_ssize_t)(head_bytes - table));
}

static long long clock_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (long long)now.tv_sec * 1000000000 + now.tv_nsec;
}

/*
 * The answer's bytes, as recv(2) says; EAGAIN when none has come until `end_ns`, EINTR at a signal.
 *
 * It looks for them until `look_end_ns`, since to sleep and to be woken takes as long as most answers do, and costs the
 * node the waking. Then it sleeps in poll(2): whoever sleeps in recv(2) of a Unix socket is also woken, for nothing and at
 * the peer's cost, when the peer takes what was sent (unix_write_space in the kernel's net/unix/af_unix.c).
 */
static ssize_t answered(int handle, unsigned char *head, size_t head_bytes, long long look_end_ns, long long end_ns)
{
    for (;;) {
        ssize_t count = recv(handle, head, head_bytes, MSG_DONTWAIT);
        if (count >= 0 || (errno != EAGAIN && errno != EWOULDBLOCK))
            return count;
        long long now_ns = clock_ns();
        if (now_ns < look_end_ns)
            continue;
        if (now_ns >= end_ns)
            return count;
        struct pollfd one = {.fd = handle, .events = POLLIN};
        struct timespec left = {.tv_sec = (end_ns - now_ns) / 1000000000, .tv_nsec = (end_ns - now_ns) % 1000000000};
        if (ppoll(&one, 1, &left, NULL) < 0)
            return -1;
    }
}

/* Learns from an answer that took so long, or a wait in vain, whether to look for the next ones. With the GIL. */
static void note_took(Read *self, long long look_ns, long long took_ns)
{
    if (!look_ns) {
        self->asleep -= !!self->asleep;
    } else if (took_ns <= look_ns) {
        self->in_vain = 0;
    } else {
        self->in_vain = !self->in_vain ? 1 : self->in_vain < KV_ASLEEP_MAX ? 2 * self->in_vain : KV_ASLEEP_MAX;
        self->asleep = self->in_vain;
    }
}

/* To send and to receive without a step in Python between them; nothing is expected behind the head. */
static PyObject *read_ask(Read *self, PyObject *const *args, Py_ssize_t argument_count)
{
    if (!counts_args(argument_count, 6))
        return NULL;
    int handle = (int)PyLong_AsLong(args[0]);
    long long wait_ns = PyLong_AsLongLong(args[5]), start_ns = clock_ns(), look_ns = self->asleep ? 0 : self->look_ns;
    unsigned char frame[KV_HEAD_MAX], head[KV_HEAD_MAX];
    if (PyErr_Occurred() || !framed(self, args, frame))
        return NULL;
    if (self->record_bytes) {
        PyErr_SetString(PyExc_ValueError, "the record would come behind the answer: send, then receive");
        return NULL;
    }
    ssize_t sent, count = -1;
    do {
        Py_BEGIN_ALLOW_THREADS
        sent = send(handle, frame, self->frame_bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
        Py_END_ALLOW_THREADS
    } while (sent < 0 && errno == EINTR && !PyErr_CheckSignals());
    if (PyErr_Occurred())
        return NULL;
    if (sent < 0 && errno != EAGAIN && errno != EWOULDBLOCK)
        return os_error();
    if (sent < self->frame_bytes)
        Py_RETURN_FALSE;
    do {
        Py_BEGIN_ALLOW_THREADS
        count = answered(handle, head, (size_t)self->head_bytes, start_ns + look_ns, start_ns + wait_ns);
        Py_END_ALLOW_THREADS
    } while (count < 0 && errno == EINTR && !PyErr_CheckSignals());
    note_took(self, look_ns, clock_ns() - start_ns);
    if (count < 0)
        return PyErr_Occurred() ? NULL : os_error();
    return judged(self, u32_at(frame + KV_ID_AT), head, NULL, (size_t)count);
}

static PyObject *read_receive(Read *self, PyObject *const *args, Py_ssize_t argument_count)
{
    if (!counts_args(argument_count, 3))
        return NULL;
    long handle = PyLong_AsLong(args[0]);
    unsigned long id = PyLong_AsUnsignedLong(args[1]);
    if (PyErr_Occurred())
        return NULL;
    if (!self->frame) {
        PyErr_SetString(PyExc_ValueError, "it was not made");
        return NULL;
    }
    Py_buffer view;
    if (PyObject_GetBuffer(args[2], &view, PyBUF_WRITABLE) < 0)
        return NULL;
    PyObject *result = NULL;
    size_t head_bytes = (size_t)self->head_bytes;
    if (view.len != self->record_bytes) {
        PyErr_SetString(PyExc_ValueError, "memory of another length than the record");
        goto done;
    }
    unsigned char head[KV_HEAD_MAX];
    struct iovec parts[2] = {{head, head_bytes}, {view.buf, (size_t)view.len}};
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};
    ssize_t count;
    do {
        Py_BEGIN_ALLOW_THREADS
        count = recvmsg((int)handle, &message, 0);
        if (count >= (ssize_t)head_bytes && count < (ssize_t)head_bytes + view.len) {
            /* the rest is here most often, too; waiting for it is for who minds the deadline */
            size_t come = (size_t)count - head_bytes;
            ssize_t more = recv((int)handle, (char *)view.buf + come, (size_t)view.len - come, MSG_DONTWAIT);
            if (more > 0)
                count += more;
        }
        Py_END_ALLOW_THREADS
    } while (count < 0 && errno == EINTR && !PyErr_CheckSignals());
    if (count < 0) {
        if (!PyErr_Occurred())
            os_error();
        goto done;
    }
    result = judged(self, (uint32_t)id, head, &view, (size_t)count);
done:
    PyBuffer_Release(&view);
    return result;
}

static PyMethodDef read_methods[] = {
    {"send", (PyCFunction)(void (*)(void))read_send, METH_FASTCALL, "See exchange.ReadExchange."},
    {"receive", (PyCFunction)(void (*)(void))read_receive, METH_FASTCALL, "See exchange.ReadExchange."},
    {"ask", (PyCFunction)(void (*)(void))read_ask, METH_FASTCALL, "See exchange.ReadExchange."},
    {NULL},
};

static PyTypeObject read_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "kvstore.transport._exchange.ReadExchange",
    .tp_basicsize = sizeof(Read),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)read_init,
    .tp_dealloc = (destructor)read_dealloc,
    .tp_methods = read_methods,
};

/* --- the node's end --------------------------------------------------------------------------------------------- */
struct form {
    Py_ssize_t frame_bytes; /* 0: none */
    Py_ssize_t place_bytes; /* of these, at the end */
    unsigned char frame[256];
};

typedef struct {
    PyObject_HEAD
    int handle, form_next, has_view;
    Py_ssize_t key_at;
    Py_buffer view;
    PyObject *on_descriptors; /* NULL: none can come */
    struct form forms[KV_FORMS];
} Answer;

static int answer_init(Answer *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"handle", "view", "key_at", "on_descriptors", NULL};
    PyObject *view, *on_descriptors;
    int handle;
    Py_ssize_t key_at;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "$iOnO", names, &handle, &view, &key_at,
                                     &on_descriptors))
        return -1;
    if (self->has_view || key_at < KV_HEADER || key_at > (Py_ssize_t)sizeof self->forms[0].frame - KV_KEY) {
        PyErr_SetString(PyExc_ValueError, "no place for the key of a GET");
        return -1;
    }
    if (PyObject_GetBuffer(view, &self->view, PyBUF_WRITABLE) < 0)
        return -1;
    self->has_view = 1;
    self->on_descriptors = on_descriptors == Py_None ? NULL : Py_NewRef(on_descriptors);
    self->handle = handle;
    self->key_at = key_at;
    return 0;
}

static int answer_traverse(Answer *self, visitproc visit, void *arg)
{
    Py_VISIT(self->on_descriptors);
    return 0;
}

static int answer_clear(Answer *self)
{
    Py_CLEAR(self->on_descriptors);
    return 0;
}

static void answer_dealloc(Answer *self)
{
    PyObject_GC_UnTrack(self);
    answer_clear(self);
    if (self->has_view)
        PyBuffer_Release(&self->view);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

/* Gives away the descriptors that came, whose owner closes them; false with an exception set. */
static int hand_over(Answer *self, struct msghdr *message)
{
    PyObject *found = PyList_New(0);
    for (struct cmsghdr *one = CMSG_FIRSTHDR(message); found && one; one = CMSG_NXTHDR(message, one)) {
        if (one->cmsg_level != SOL_SOCKET || one->cmsg_type != SCM_RIGHTS)
            continue;
        size_t count = (one->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t at = 0; found && at < count; at++) {
            int descriptor;
            memcpy(&descriptor, CMSG_DATA(one) + at * sizeof(int), sizeof(int));
            PyObject *number = PyLong_FromLong(descriptor);
            if (!number || PyList_Append(found, number) < 0)
                Py_CLEAR(found);
            Py_XDECREF(number);
        }
    }
    if (!found)
        return 0; /* no memory for a list of small numbers: the worker is ending */
    PyObject *none = PyObject_CallFunction(self->on_descriptors, "Oi", found, !!(message->msg_flags & MSG_CTRUNC));
    Py_DECREF(found);
    Py_XDECREF(none);
    return none != NULL;
}

static int is_made(Answer *self)
{
    if (!self->has_view)
        PyErr_SetString(PyExc_ValueError, "it was not made");
    return self->has_view;
}

static PyObject *answer_receive(Answer *self, PyObject *Py_UNUSED(none))
{
    if (!is_made(self))
        return NULL;
    unsigned char *frame = self->view.buf;
    ssize_t count;
    union {
        struct cmsghdr align;
        char room[CMSG_SPACE(KV_DESCRIPTORS * sizeof(int))];
    } control;
    struct iovec part = {frame, (size_t)self->view.len};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    do {
        /* it does not wait: to let go of the GIL would cost more than the copy of a request */
        if (self->on_descriptors) {
            message.msg_control = control.room;
            message.msg_controllen = sizeof control.room;
            count = recvmsg(self->handle, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
        } else {
            count = recv(self->handle, frame, (size_t)self->view.len, MSG_DONTWAIT);
        }
    } while (count < 0 && errno == EINTR && !PyErr_CheckSignals());
    if (count < 0)
        return PyErr_Occurred() ? NULL : os_error();
    if (self->on_descriptors && (message.msg_controllen || message.msg_flags & MSG_CTRUNC) &&
        !hand_over(self, &message))
        return NULL;
    Py_ssize_t key_at = self->key_at, behind = key_at + KV_KEY;
    for (const struct form *form = self->forms; form < self->forms + KV_FORMS; form++)
        if (count == form->frame_bytes && count && !memcmp(frame, form->frame, KV_ID_AT) &&
            !memcmp(frame + KV_SIZES_AT, form->frame + KV_SIZES_AT, KV_CRC_AT - KV_SIZES_AT) &&
            !memcmp(frame + KV_HEADER, form->frame + KV_HEADER, (size_t)(key_at - KV_HEADER)) &&
            !memcmp(frame + behind, form->frame + behind, (size_t)(count - form->place_bytes - behind)) &&
            head_crc(frame, (size_t)count) == u32_at(frame + KV_CRC_AT))
            return Py_BuildValue("nky#y#", (Py_ssize_t)count, (unsigned long)u32_at(frame + KV_ID_AT),
                                 (char *)frame + key_at, (Py_ssize_t)KV_KEY,
                                 (char *)frame + count - form->place_bytes, form->place_bytes);
    return PyLong_FromSsize_t(count);
}

static PyObject *answer_learn(Answer *self, PyObject *const *args, Py_ssize_t argument_count)
{
    if (!counts_args(argument_count, 2))
        return NULL;
    Py_ssize_t count = PyLong_AsSsize_t(args[0]), place_bytes = PyLong_AsSsize_t(args[1]);
    if (PyErr_Occurred() || !is_made(self))
        return NULL;
    if (count < self->key_at + KV_KEY || count > self->view.len || count > (Py_ssize_t)sizeof self->forms[0].frame ||
        place_bytes < 0 || place_bytes > count - self->key_at - KV_KEY) {
        PyErr_SetString(PyExc_ValueError, "no GET of one record has this length");
        return NULL;
    }
    struct form *form = &self->forms[self->form_next];
    for (int at = 0; at < KV_FORMS; at++)
        if (self->forms[at].frame_bytes == count)
            form = &self->forms[at];
    if (form == &self->forms[self->form_next])
        self->form_next = (self->form_next + 1) % KV_FORMS;
    form->frame_bytes = count;
    form->place_bytes = place_bytes;
    memcpy(form->frame, self->view.buf, (size_t)count);
    Py_RETURN_NONE;
}

/* A copy of the head in `args[0]` with the request's id and the epoch; how long, or 0 with an exception set. */
static size_t headed(PyObject *given, PyObject *id_given, PyObject *epoch_given, unsigned char *head)
{
    unsigned long id = PyLong_AsUnsignedLong(id_given);
    unsigned long long epoch = PyLong_AsUnsignedLongLong(epoch_given);
    if (PyErr_Occurred())
        return 0;
    if (!PyBytes_Check(given) || PyBytes_GET_SIZE(given) < KV_HEADER || PyBytes_GET_SIZE(given) > KV_HEADER + KV_HEAD_MAX) {
        PyErr_SetString(PyExc_ValueError, "no head of an answer");
        return 0;
    }
    uint32_t id_word = (uint32_t)id;
    memcpy(head, PyBytes_AS_STRING(given), (size_t)PyBytes_GET_SIZE(given));
    memcpy(head + KV_ID_AT, &id_word, 4);
    memcpy(head + KV_EPOCH_AT, &epoch, 8);
    return (size_t)PyBytes_GET_SIZE(given);
}

static void sum_head(unsigned char *head, size_t head_bytes)
{
    uint32_t crc = head_crc(head, head_bytes);
    memcpy(head + KV_CRC_AT, &crc, 4);
}

static PyObject *answer_answer(Answer *self, PyObject *const *args, Py_ssize_t count)
{
    if (!counts_args(count, 4) || !is_made(self))
        return NULL;
    unsigned char head[KV_HEADER + KV_HEAD_MAX];
    size_t head_bytes = headed(args[0], args[2], args[3], head);
    Py_buffer payload;
    if (!head_bytes || PyObject_GetBuffer(args[1], &payload, PyBUF_SIMPLE) < 0)
        return NULL;
    sum_head(head, head_bytes);
    int splits = payload.len >= KV_SPLIT_MIN && !self->on_descriptors; /* a Unix socket gains nothing */
    size_t first = splits ? KV_FIRST : (size_t)payload.len, rest = (size_t)payload.len - first;
    struct iovec parts[2] = {{head, head_bytes}, {payload.buf, first}};
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};
    ssize_t sent;
    int handle = self->handle;
    do {
        Py_BEGIN_ALLOW_THREADS
        sent = sendmsg(handle, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (rest && sent == (ssize_t)(head_bytes + first)) {
            ssize_t more = send(handle, (char *)payload.buf + first, rest, MSG_NOSIGNAL | MSG_DONTWAIT);
            if (more > 0)
                sent += more;
        }
        Py_END_ALLOW_THREADS
    } while (sent < 0 && errno == EINTR && !PyErr_CheckSignals());
    PyBuffer_Release(&payload);
    if (sent < 0)
        return PyErr_Occurred() ? NULL : os_error();
    return PyLong_FromSsize_t(sent);
}

static PyObject *answer_place(Answer *self, PyObject *const *args, Py_ssize_t count)
{
    if (!counts_args(count, 5) || !is_made(self))
        return NULL;
    unsigned char head[KV_HEADER + KV_HEAD_MAX];
    size_t head_bytes = headed(args[0], args[3], args[4], head);
    Py_buffer payload, into;
    if (!head_bytes || PyObject_GetBuffer(args[1], &payload, PyBUF_SIMPLE) < 0)
        return NULL;
    if (PyObject_GetBuffer(args[2], &into, PyBUF_WRITABLE) < 0) {
        PyBuffer_Release(&payload);
        return NULL;
    }
    PyObject *result = NULL;
    if (into.len != payload.len) {
        PyErr_SetString(PyExc_ValueError, "a place of another length than the record");
        goto done;
    }
    memcpy(head, KV_PLACED, sizeof KV_PLACED);
    memset(head + KV_PAYLOAD_AT, 0, 4);
    sum_head(head, head_bytes);
    ssize_t sent;
    int handle = self->handle;
    Py_BEGIN_ALLOW_THREADS
    memcpy(into.buf, payload.buf, (size_t)payload.len);
    sent = send(handle, head, head_bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
    Py_END_ALLOW_THREADS
    while (sent < 0 && errno == EINTR && !PyErr_CheckSignals())
        sent = send(handle, head, head_bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent >= 0)
        result = PyLong_FromSsize_t(sent);
    else if (!PyErr_Occurred())
        os_error();
done:
    PyBuffer_Release(&into);
    PyBuffer_Release(&payload);
    return result;
}

static PyMethodDef answer_methods[] = {
    {"receive", (PyCFunction)answer_receive, METH_NOARGS, "See exchange.AnswerExchange."},
    {"learn", (PyCFunction)(void (*)(void))answer_learn, METH_FASTCALL, "See exchange.AnswerExchange."},
    {"answer", (PyCFunction)(void (*)(void))answer_answer, METH_FASTCALL, "See exchange.AnswerExchange."},
    {"place", (PyCFunction)(void (*)(void))answer_place, METH_FASTCALL, "See exchange.AnswerExchange."},
    {NULL},
};

static PyTypeObject answer_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "kvstore.transport._exchange.AnswerExchange",
    .tp_basicsize = sizeof(Answer),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_traverse = (traverseproc)answer_traverse,
    .tp_clear = (inquiry)answer_clear,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)answer_init,
    .tp_dealloc = (destructor)answer_dealloc,
    .tp_methods = answer_methods,
};

static PyMethodDef functions[] = {
    KV_CRC_METHODS,
    {NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_exchange",
    .m_doc = "The two ends of a read of one record; see kvstore.transport.exchange.",
    .m_size = -1,
    .m_methods = functions,
};

PyMODINIT_FUNC PyInit__exchange(void)
{
    kv_crc_prepare();
    PyObject *made = PyModule_Create(&module);
    if (!made || PyModule_AddType(made, &read_type) < 0 || PyModule_AddType(made, &answer_type) < 0 ||
        PyModule_AddIntConstant(made, "HEAD_BYTES_MAX", KV_HEAD_MAX) < 0 ||
        PyModule_AddIntConstant(made, "INTERFACE", KV_INTERFACE) < 0 ||
        PyModule_AddIntConstant(made, "DESCRIPTORS_MAX", KV_DESCRIPTORS) < 0 ||
        PyModule_AddIntConstant(made, "PLACED_START", (long)u32_at(KV_PLACED)) < 0) {
        Py_XDECREF(made);
        return NULL;
    }
    return made;
}
