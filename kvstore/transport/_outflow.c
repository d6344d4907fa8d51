/*
 * kvstore.transport._outflow: what is queued for many sockets goes out while the loop waits, without the GIL, and
 * without a turn of the loop for each part that a socket takes; outflow.py says who uses it.
 *
 *   Outflow(epoll)   lend(socket, buffers, leave_bytes), sent_bytes(socket), take_back(socket), wait(timeout_ns).
 *
 * What keeps this sound:
 *   - whatever is ready but a lent socket that only takes more is told at once, as epoll tells it; so is a lent socket
 *     on which sending failed: who writes to it next hears why;
 *   - each socket that takes more gets one sendmsg, then the next one its own;
 *   - `wait` takes no longer than it was told, however fast peers read;
 *   - buffers are held through the buffer protocol until they are taken back;
 *   - descriptors stay the caller's: a socket is taken back before it is closed.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <limits.h>
#include <stdint.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>

#define KV_INTERFACE 1 /* of this module to its Python half; raise it, and kvstore/types/compiled.py, with each change of either */
#define KV_VECTORS 1024 /* IOV_MAX: more than one sendmsg takes */
#define KV_EVENTS 256

typedef struct {
    int is_lent;
    Py_buffer *held;
    Py_ssize_t count;
    struct iovec *vectors, *next; /* next: the first that has not gone out whole */
    size_t vectors_left, left, leave;
    unsigned long long sent;
} Flow;

typedef struct {
    PyObject_HEAD
    int epoll, is_waiting, room; /* room: descriptors that the table has places for */
    Flow *flows;
} Outflow;

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static void give_back(Flow *flow)
{
    for (Py_ssize_t i = 0; i < flow->count; i++)
        PyBuffer_Release(&flow->held[i]);
    PyMem_Free(flow->held);
    PyMem_Free(flow->vectors);
    memset(flow, 0, sizeof *flow);
}

static Flow *flow_of(Outflow *self, int socket)
{
    return socket >= 0 && socket < self->room && self->flows[socket].is_lent ? &self->flows[socket] : NULL;
}

static int is_free(Outflow *self)
{
    if (!self->is_waiting)
        return 1;
    PyErr_SetString(PyExc_RuntimeError, "another thread waits: one thread lends, waits and takes back");
    return 0;
}

/* Sends what the socket takes now; whether the caller is wanted: little is left, or sending failed. Without the GIL. */
static int step(Flow *flow, int socket)
{
    struct msghdr message = {.msg_iov = flow->next, .msg_iovlen = flow->vectors_left};
    ssize_t sent;
    do
        sent = sendmsg(socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    while (sent < 0 && errno == EINTR);
    if (sent < 0)
        return errno != EAGAIN && errno != EWOULDBLOCK && errno != ENOBUFS;
    flow->sent += (size_t)sent;
    flow->left -= (size_t)sent;
    while (flow->vectors_left && (size_t)sent >= flow->next->iov_len) {
        sent -= (ssize_t)flow->next->iov_len;
        flow->next++;
        flow->vectors_left--;
    }
    if (sent) {
        flow->next->iov_base = (char *)flow->next->iov_base + sent;
        flow->next->iov_len -= (size_t)sent;
    }
    return flow->left <= flow->leave;
}

static PyObject *lend(Outflow *self, PyObject *args)
{
    int socket;
    PyObject *buffers;
    Py_ssize_t leave;
    if (!PyArg_ParseTuple(args, "iO!n", &socket, &PyList_Type, &buffers, &leave) || !is_free(self))
        return NULL;
    if (socket < 0 || leave < 0 || PyList_GET_SIZE(buffers) > KV_VECTORS) {
        PyErr_SetString(PyExc_ValueError, "a socket, at most 1024 buffers and what is to be left of them");
        return NULL;
    }
    if (flow_of(self, socket)) {
        PyErr_Format(PyExc_RuntimeError, "socket %d is lent already", socket);
        return NULL;
    }
    if (socket >= self->room) {
        int room = socket + 64;
        Flow *flows = PyMem_Realloc(self->flows, (size_t)room * sizeof *flows);
        if (!flows)
            return PyErr_NoMemory();
        memset(flows + self->room, 0, (size_t)(room - self->room) * sizeof *flows);
        self->flows = flows;
        self->room = room;
    }
    Flow flow = {.is_lent = 1, .leave = (size_t)leave};
    Py_ssize_t count = PyList_GET_SIZE(buffers);
    flow.held = PyMem_Malloc((size_t)(count + 1) * sizeof *flow.held);
    flow.vectors = flow.next = PyMem_Malloc((size_t)(count + 1) * sizeof *flow.vectors);
    if (!flow.held || !flow.vectors) {
        give_back(&flow);
        return PyErr_NoMemory();
    }
    for (; flow.count < count; flow.count++) {
        Py_buffer *view = &flow.held[flow.count];
        if (PyObject_GetBuffer(PyList_GET_ITEM(buffers, flow.count), view, PyBUF_SIMPLE)) {
            give_back(&flow);
            return NULL;
        }
        flow.vectors[flow.count] = (struct iovec){.iov_base = view->buf, .iov_len = (size_t)view->len};
        flow.left += (size_t)view->len;
    }
    flow.vectors_left = (size_t)count;
    self->flows[socket] = flow;
    Py_RETURN_NONE;
}

static PyObject *take_back(Outflow *self, PyObject *arg)
{
    int socket = (int)PyLong_AsLong(arg);
    if (PyErr_Occurred() || !is_free(self))
        return NULL;
    Flow *flow = flow_of(self, socket);
    unsigned long long sent = flow ? flow->sent : 0;
    if (flow)
        give_back(flow);
    return PyLong_FromUnsignedLongLong(sent);
}

static PyObject *sent_bytes(Outflow *self, PyObject *arg)
{
    int socket = (int)PyLong_AsLong(arg);
    if (PyErr_Occurred())
        return NULL;
    Flow *flow = flow_of(self, socket);
    return PyLong_FromUnsignedLongLong(flow ? flow->sent : 0);
}

/* Until `end_ns` (INT64_MAX: for ever) as epoll_wait counts, rounded up: waking before a timer is due would spin. */
static int milliseconds_to(int64_t end_ns)
{
    if (end_ns == INT64_MAX)
        return -1;
    int64_t left_ns = end_ns - now_ns();
    if (left_ns <= 0)
        return 0;
    int64_t left_ms = (left_ns + 999999) / 1000000;
    return left_ms > INT_MAX ? INT_MAX : (int)left_ms;
}

/* One wait, and what it makes of lent sockets; how many events are left to tell, or -1. Without the GIL. */
static int turn(Outflow *self, struct epoll_event *events, int wait_ms)
{
    int told = 0, count = epoll_wait(self->epoll, events, KV_EVENTS, wait_ms);
    for (int i = 0; i < count; i++) {
        Flow *flow = flow_of(self, events[i].data.fd);
        if (flow && events[i].events == EPOLLOUT && !step(flow, events[i].data.fd))
            continue;
        events[told++] = events[i];
    }
    return count < 0 ? -1 : told;
}

static PyObject *wait_(Outflow *self, PyObject *arg)
{
    long long timeout_ns = PyLong_AsLongLong(arg);
    if (PyErr_Occurred() || !is_free(self))
        return NULL;
    int64_t end_ns = timeout_ns < 0 ? INT64_MAX : now_ns() + timeout_ns;
    struct epoll_event events[KV_EVENTS];
    int told, wait_ms, error = 0;
    do {
        self->is_waiting = 1;
        Py_BEGIN_ALLOW_THREADS
        do {
            wait_ms = milliseconds_to(end_ns);
            told = turn(self, events, wait_ms);
        } while (!told && wait_ms);
        error = errno;
        Py_END_ALLOW_THREADS
        self->is_waiting = 0;
        if (told < 0 && (error != EINTR || PyErr_CheckSignals())) {
            if (error != EINTR) {
                errno = error;
                PyErr_SetFromErrno(PyExc_OSError);
            }
            return NULL;
        }
    } while (told < 0);
    PyObject *list = PyList_New(told);
    for (int i = 0; list && i < told; i++) {
        PyObject *one = Py_BuildValue("iI", events[i].data.fd, events[i].events);
        if (one)
            PyList_SET_ITEM(list, i, one);
        else
            Py_CLEAR(list);
    }
    return list;
}

static PyObject *new_(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    int epoll;
    if (kwargs && PyDict_GET_SIZE(kwargs)) {
        PyErr_SetString(PyExc_TypeError, "Outflow(epoll)");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "i", &epoll))
        return NULL;
    Outflow *self = (Outflow *)type->tp_alloc(type, 0);
    if (self)
        self->epoll = epoll;
    return (PyObject *)self;
}

static void dealloc(Outflow *self)
{
    for (int i = 0; i < self->room; i++)
        if (self->flows[i].is_lent)
            give_back(&self->flows[i]);
    PyMem_Free(self->flows);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMethodDef methods[] = {
    {"lend", (PyCFunction)lend, METH_VARARGS, NULL},
    {"take_back", (PyCFunction)take_back, METH_O, NULL},
    {"sent_bytes", (PyCFunction)sent_bytes, METH_O, NULL},
    {"wait", (PyCFunction)wait_, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "kvstore.transport._outflow.Outflow",
    .tp_basicsize = sizeof(Outflow),
    .tp_dealloc = (destructor)dealloc,
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_methods = methods,
    .tp_new = new_,
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, .m_name = "kvstore.transport._outflow", .m_size = -1};

PyMODINIT_FUNC PyInit__outflow(void)
{
    if (PyType_Ready(&type))
        return NULL;
    PyObject *made = PyModule_Create(&module);
    if (!made || PyModule_AddIntConstant(made, "INTERFACE", KV_INTERFACE) ||
        PyModule_AddIntConstant(made, "VECTORS_MAX", KV_VECTORS) ||
        PyModule_AddObjectRef(made, "Outflow", (PyObject *)&type))
        Py_CLEAR(made);
    return made;
}
