/*
 * kvstore.device._uring: a small io_uring binding for one drive.
 *
 * Raw system calls and <linux/io_uring.h> only; no liburing. One Ring drives one file from one thread:
 *
 *   submit(ops, start, odd)  takes operations (kvstore.device.base.IoOp, kvstore.device.scattered.ScatteredRead) until
 *                            the depth is reached and starts them with one system call;
 *   reap()                   collects what has completed, never waits;
 *   wait()                   waits for one completion without the GIL (only close needs it);
 *   fileno()                 an eventfd that is readable while completions wait.
 *
 * What keeps this sound:
 *   - every buffer of an operation in flight is held through the buffer protocol, so that its memory can be neither
 *     released nor resized while the kernel uses it; the operation itself is referenced too;
 *   - at most `depth` operations are in flight and both rings have at least `depth` entries, so neither overflows;
 *   - close and deallocation wait for what is in flight before any memory goes;
 *   - io_uring_enter for large batches runs without the GIL; meanwhile every other call on the ring is refused.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <errno.h>
#include <linux/io_uring.h>
#include <poll.h>
#include <stdint.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

/* Newer than the headers of Debian 12 (Linux 6.15, include/uapi/linux/io_uring.h). */
#define KV_OP_READV_FIXED 60
#define KV_OP_WRITEV_FIXED 61

#define KV_INTERFACE 3                       /* as in kvstore/types/compiled.py; raise both with each change */
#define KV_VECTORS_MAX 1024                  /* IOV_MAX, readv(2) */
#define KV_PIECE_BYTES_MAX (1ull << 30)      /* largest registered buffer, io_uring_register(2) */
#define KV_PIECES_MAX 16384                  /* most registered buffers, io_uring_register(2) */
#define KV_UNLOCK_BYTES (256u << 10)         /* a batch this large is submitted without the GIL */
#define KV_DEPTH_MAX 4096

/* Which operation codes may be used; see Ring.variants. */
#define KV_VARIANT_PLAIN 1                   /* READ / WRITE for one buffer, else READV / WRITEV */
#define KV_VARIANT_FIXED 2                   /* READ_FIXED / WRITE_FIXED for one registered buffer */
#define KV_VARIANT_VECTOR_FIXED 4            /* READV_FIXED / WRITEV_FIXED for several */

/* A scattered read: one operation whose extents have a slot each and fill one buffer, one behind the other. */
struct group {
    PyObject *op;          /* owned; NULL while the group is free */
    Py_buffer memory;
    unsigned left;         /* extents that have not completed */
    PyObject *odd;         /* list of (extent, result) of those that did not come whole; NULL without any */
    int unsure;            /* a result could not be noted, for want of memory: no extent counts as having come */
};

struct slot {
    PyObject *op;          /* owned; NULL while the slot is free */
    struct group *group;   /* that the slot is an extent of, or NULL */
    unsigned extent;       /* which one */
    Py_ssize_t length;     /* bytes that complete the operation */
    int view_count;        /* buffers held */
    int view_room;         /* entries in views and vectors */
    Py_buffer *views;
    struct iovec *vectors; /* read by the kernel, so they live as long as the operation */
};

typedef struct {
    PyObject_HEAD
    int ring_fd, event_fd, file_fd;
    pid_t owner;           /* rings are shared memory: a forked child must not touch them */
    int file_registered, closed, busy;
    unsigned setup_flags, depth, in_flight, unsubmitted, variants;
    unsigned long long size_bytes, align_mask;
    /* submission ring */
    void *ring_memory;
    size_t ring_bytes, sqes_bytes;
    unsigned *sq_head, *sq_tail, *sq_flags, sq_mask;
    struct io_uring_sqe *sqes;
    /* completion ring */
    unsigned *cq_head, *cq_tail, cq_mask;
    struct io_uring_cqe *cqes;
    /* operations in flight */
    struct slot *slots;
    unsigned *free_slots, free_count;
    struct group *groups;  /* as many as slots: each has an extent at least */
    unsigned *free_groups, free_group_count;
    /* registered memory, cut into pieces of piece_bytes */
    Py_buffer memory;
    int memory_held;
    uintptr_t memory_start, memory_end;
    uint64_t piece_bytes;
    /* what an operation is compared with */
    PyObject *kind_read, *kind_write, *kind_sync, *part_type, *scattered_type;
} Ring;

static PyObject *name_kind, *name_offset, *name_buffers, *name_done_bytes, *name_error, *name_offsets, *name_lengths;
static PyObject *name_faults;

static int ring_enter(Ring *ring, unsigned submit, unsigned complete, unsigned flags)
{
    int result = (int)syscall(__NR_io_uring_enter, ring->ring_fd, submit, complete, flags, NULL, 0);
    return result < 0 ? -errno : result;
}

static int ring_register(Ring *ring, unsigned opcode, const void *argument, unsigned count)
{
    int result = (int)syscall(__NR_io_uring_register, ring->ring_fd, opcode, argument, count);
    return result < 0 ? -errno : result;
}

static PyObject *raise_errno(int code, const char *what)
{
    PyObject *arguments = Py_BuildValue("(is)", code, what);
    if (arguments != NULL) {
        PyErr_SetObject(PyExc_OSError, arguments);
        Py_DECREF(arguments);
    }
    return NULL;
}

static int check_usable(Ring *ring)
{
    if (ring->closed || ring->ring_fd < 0) {
        PyErr_SetString(PyExc_ValueError, "the ring is closed");
        return -1;
    }
    if (ring->owner != getpid()) {
        PyErr_SetString(PyExc_RuntimeError, "the ring belongs to the parent process; open a device after the fork");
        return -1;
    }
    if (ring->busy) {
        PyErr_SetString(PyExc_RuntimeError, "the ring is in use by another thread; one thread drives a ring");
        return -1;
    }
    return 0;
}

/* ---- making and unmaking -------------------------------------------------------------------------------------- */

static void release_slot(Ring *ring, struct slot *slot)
{
    PyObject *op = slot->op;
    int count = slot->view_count;
    slot->op = NULL;
    slot->group = NULL;
    slot->view_count = 0;
    for (int i = 0; i < count; i++)
        PyBuffer_Release(&slot->views[i]);
    ring->free_slots[ring->free_count++] = (unsigned)(slot - ring->slots);
    Py_XDECREF(op);
}

static void release_group(Ring *ring, struct group *group)
{
    PyObject *op = group->op, *odd = group->odd;
    group->op = group->odd = NULL;
    group->unsure = 0;
    PyBuffer_Release(&group->memory);
    ring->free_groups[ring->free_group_count++] = (unsigned)(group - ring->groups);
    Py_XDECREF(odd);
    Py_XDECREF(op);
}

static void unmap(Ring *ring)
{
    if (ring->sqes != NULL)
        munmap(ring->sqes, ring->sqes_bytes);
    if (ring->ring_memory != NULL)
        munmap(ring->ring_memory, ring->ring_bytes);
    ring->sqes = NULL;
    ring->ring_memory = NULL;
    if (ring->ring_fd >= 0)
        close(ring->ring_fd);
    if (ring->event_fd >= 0)
        close(ring->event_fd);
    ring->ring_fd = ring->event_fd = -1;
}

static int map_rings(Ring *ring, struct io_uring_params *params)
{
    size_t sq_bytes = params->sq_off.array + params->sq_entries * sizeof(unsigned);
    size_t cq_bytes = params->cq_off.cqes + params->cq_entries * sizeof(struct io_uring_cqe);
    char *memory;

    ring->ring_bytes = sq_bytes > cq_bytes ? sq_bytes : cq_bytes;
    memory = mmap(NULL, ring->ring_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring->ring_fd,
                  IORING_OFF_SQ_RING);
    if (memory == MAP_FAILED)
        return -errno;
    ring->ring_memory = memory;
    ring->sqes_bytes = params->sq_entries * sizeof(struct io_uring_sqe);
    ring->sqes = mmap(NULL, ring->sqes_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring->ring_fd,
                      IORING_OFF_SQES);
    if (ring->sqes == MAP_FAILED) {
        ring->sqes = NULL;
        return -errno;
    }
    ring->sq_head = (unsigned *)(memory + params->sq_off.head);
    ring->sq_tail = (unsigned *)(memory + params->sq_off.tail);
    ring->sq_flags = (unsigned *)(memory + params->sq_off.flags);
    ring->sq_mask = *(unsigned *)(memory + params->sq_off.ring_mask);
    ring->cq_head = (unsigned *)(memory + params->cq_off.head);
    ring->cq_tail = (unsigned *)(memory + params->cq_off.tail);
    ring->cq_mask = *(unsigned *)(memory + params->cq_off.ring_mask);
    ring->cqes = (struct io_uring_cqe *)(memory + params->cq_off.cqes);
    unsigned *array = (unsigned *)(memory + params->sq_off.array);
    for (unsigned i = 0; i < params->sq_entries; i++)
        array[i] = i; /* entry i of the ring is always sqe i */
    return 0;
}

static int set_up(Ring *ring)
{
    struct io_uring_params params = {0};
    int code;

    params.flags = ring->setup_flags | IORING_SETUP_CLAMP;
    ring->ring_fd = (int)syscall(__NR_io_uring_setup, ring->depth, &params);
    if (ring->ring_fd < 0) {
        raise_errno(errno, "io_uring_setup");
        return -1;
    }
    if (!(params.features & IORING_FEAT_SINGLE_MMAP) || !(params.features & IORING_FEAT_NODROP)) {
        raise_errno(ENOSYS, "io_uring_setup: the kernel is older than Linux 5.5");
        return -1;
    }
    code = map_rings(ring, &params);
    if (code < 0) {
        raise_errno(-code, "mmap of the rings");
        return -1;
    }
    if (ring->depth > params.sq_entries)
        ring->depth = params.sq_entries;
    ring->event_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (ring->event_fd < 0) {
        raise_errno(errno, "eventfd");
        return -1;
    }
    code = ring_register(ring, IORING_REGISTER_EVENTFD, &ring->event_fd, 1);
    if (code < 0) {
        raise_errno(-code, "IORING_REGISTER_EVENTFD");
        return -1;
    }
    return 0;
}

static int Ring_init(Ring *ring, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"fd", "depth", "size_bytes", "alignment_bytes", "read", "write", "sync",
                            "part_type", "scattered_type", "setup_flags", NULL};
    unsigned long long alignment = 0;
    PyObject *kind_read = NULL, *kind_write = NULL, *kind_sync = NULL, *part_type = NULL, *scattered_type = NULL;

    if (ring->slots != NULL) {
        PyErr_SetString(PyExc_RuntimeError, "a ring is made once");
        return -1;
    }
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "iI|$KKOOOOOI:Ring", names, &ring->file_fd, &ring->depth,
                                     &ring->size_bytes, &alignment, &kind_read, &kind_write, &kind_sync,
                                     &part_type, &scattered_type, &ring->setup_flags))
        return -1;
    if (!kind_read || !kind_write || !kind_sync || !part_type || !scattered_type) {
        PyErr_SetString(PyExc_TypeError, "read, write, sync, part_type and scattered_type must be given by name");
        return -1;
    }
    if (ring->depth == 0 || ring->depth > KV_DEPTH_MAX) {
        PyErr_Format(PyExc_ValueError, "depth is %u, at least 1 and at most %d", ring->depth, KV_DEPTH_MAX);
        return -1;
    }
    if (alignment == 0 || (alignment & (alignment - 1)) != 0) {
        PyErr_SetString(PyExc_ValueError, "alignment_bytes must be a power of two");
        return -1;
    }
    ring->align_mask = alignment - 1;
    ring->kind_read = Py_NewRef(kind_read);
    ring->kind_write = Py_NewRef(kind_write);
    ring->kind_sync = Py_NewRef(kind_sync);
    ring->part_type = Py_NewRef(part_type);
    ring->scattered_type = Py_NewRef(scattered_type);
    ring->slots = PyMem_Calloc(ring->depth, sizeof(struct slot));
    ring->free_slots = PyMem_Calloc(ring->depth, sizeof(unsigned));
    ring->groups = PyMem_Calloc(ring->depth, sizeof(struct group));
    ring->free_groups = PyMem_Calloc(ring->depth, sizeof(unsigned));
    if (ring->slots == NULL || ring->free_slots == NULL || ring->groups == NULL || ring->free_groups == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    if (set_up(ring) < 0) {
        unmap(ring);
        return -1;
    }
    for (unsigned i = 0; i < ring->depth; i++) {
        ring->free_slots[ring->free_count++] = ring->depth - 1 - i;
        ring->free_groups[ring->free_group_count++] = ring->depth - 1 - i;
    }
    ring->owner = getpid();
    ring->closed = 0;
    return 0;
}

static PyObject *Ring_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    (void)args, (void)kwargs;
    Ring *ring = (Ring *)type->tp_alloc(type, 0);
    if (ring != NULL) {
        ring->ring_fd = ring->event_fd = ring->file_fd = -1;
        ring->closed = 1;
    }
    return (PyObject *)ring;
}

/* ---- submitting ----------------------------------------------------------------------------------------------- */

static int reserve_views(struct slot *slot, Py_ssize_t count)
{
    if (count <= slot->view_room)
        return 0;
    Py_buffer *views = PyMem_Realloc(slot->views, (size_t)count * sizeof(Py_buffer));
    if (views != NULL)
        slot->views = views;
    struct iovec *vectors = PyMem_Realloc(slot->vectors, (size_t)count * sizeof(struct iovec));
    if (vectors != NULL)
        slot->vectors = vectors;
    if (views == NULL || vectors == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    slot->view_room = (int)count;
    return 0;
}

/* Index of the registered piece that holds all of a range, or -1. */
static int piece_of(const Ring *ring, const struct iovec *vector)
{
    uintptr_t start = (uintptr_t)vector->iov_base, end = start + vector->iov_len;
    if (start < ring->memory_start || end > ring->memory_end || end < start)
        return -1;
    uint64_t first = (start - ring->memory_start) / ring->piece_bytes;
    uint64_t last = (end - 1 - ring->memory_start) / ring->piece_bytes;
    return first == last ? (int)first : -1;
}

/* Hold the buffers of an operation and describe them as vectors; neighbours in memory become one. Returns the count
 * of vectors, or -1 with an exception. */
static int gather(struct slot *slot, PyObject *buffers, int writable, uintptr_t *bits, Py_ssize_t *whole)
{
    Py_ssize_t count = PySequence_Fast_GET_SIZE(buffers);
    Py_ssize_t taken = count > KV_VECTORS_MAX ? KV_VECTORS_MAX : count;
    int vectors = 0;

    *whole = 0;
    if (reserve_views(slot, taken) < 0)
        return -1;
    for (Py_ssize_t i = 0; i < taken; i++) {
        Py_buffer *view = &slot->views[i];
        if (i >= PySequence_Fast_GET_SIZE(buffers)) {
            PyErr_SetString(PyExc_RuntimeError, "the list of buffers changed while it was read");
            return -1;
        }
        PyObject *buffer = PySequence_Fast_GET_ITEM(buffers, i);
        if (PyObject_GetBuffer(buffer, view, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) < 0)
            return -1;
        slot->view_count = (int)i + 1;
        if (view->len == 0)
            continue;
        *bits |= (uintptr_t)view->buf | (uintptr_t)view->len;
        *whole += view->len;
        struct iovec *last = vectors > 0 ? &slot->vectors[vectors - 1] : NULL;
        if (last != NULL && (char *)last->iov_base + last->iov_len == (char *)view->buf)
            last->iov_len += (size_t)view->len;
        else
            slot->vectors[vectors++] = (struct iovec){view->buf, (size_t)view->len};
    }
    return vectors;
}

static void fill_transfer(Ring *ring, struct io_uring_sqe *sqe, struct slot *slot, int vectors, int writing)
{
    struct iovec *first = slot->vectors;
    int piece = ring->memory_held && (ring->variants & (KV_VARIANT_FIXED | KV_VARIANT_VECTOR_FIXED))
                    ? piece_of(ring, first) : -1;

    if (vectors == 1 && first->iov_len <= UINT32_MAX) {
        if (piece >= 0 && (ring->variants & KV_VARIANT_FIXED)) {
            sqe->opcode = writing ? IORING_OP_WRITE_FIXED : IORING_OP_READ_FIXED;
            sqe->buf_index = (uint16_t)piece;
        } else if (ring->variants & KV_VARIANT_PLAIN) {
            sqe->opcode = writing ? IORING_OP_WRITE : IORING_OP_READ;
        } else {
            piece = -2;
        }
        if (piece != -2) {
            sqe->addr = (uint64_t)(uintptr_t)first->iov_base;
            sqe->len = (uint32_t)first->iov_len;
            return;
        }
    }
    sqe->addr = (uint64_t)(uintptr_t)first;
    sqe->len = (uint32_t)vectors;
    if (piece >= 0 && (ring->variants & KV_VARIANT_VECTOR_FIXED)) {
        for (int i = 1; i < vectors && piece >= 0; i++)
            if (piece_of(ring, &first[i]) != piece)
                piece = -1;
        if (piece >= 0) {
            sqe->opcode = writing ? KV_OP_WRITEV_FIXED : KV_OP_READV_FIXED;
            sqe->buf_index = (uint16_t)piece;
            return;
        }
    }
    sqe->opcode = writing ? IORING_OP_WRITEV : IORING_OP_READV;
}

enum outcome { FAILED = -1, PREPARED = 0, ODD = 1, NO_ROOM = 2 };

/* The next submission entry, for what `slot` holds. It is free: unsubmitted <= in_flight < depth <= entries. */
static struct io_uring_sqe *next_entry(Ring *ring, const struct slot *slot)
{
    struct io_uring_sqe *sqe = &ring->sqes[*ring->sq_tail & ring->sq_mask];
    memset(sqe, 0, sizeof *sqe);
    sqe->fd = ring->file_registered ? 0 : ring->file_fd;
    sqe->flags = ring->file_registered ? IOSQE_FIXED_FILE : 0;
    sqe->user_data = (uint64_t)(slot - ring->slots);
    return sqe;
}

/* It has been filled in. */
static void entry_filled(Ring *ring)
{
    __atomic_store_n(ring->sq_tail, *ring->sq_tail + 1, __ATOMIC_RELEASE);
    ring->unsubmitted++;
    ring->in_flight++;
}

static int set_unfinished(PyObject *op)
{
    PyObject *zero = PyLong_FromLong(0);
    int failed = zero == NULL || PyObject_SetAttr(op, name_done_bytes, zero) < 0
                 || PyObject_SetAttr(op, name_error, Py_None) < 0;
    Py_XDECREF(zero);
    return failed ? -1 : 0;
}

/* Number `at` of a list of ints; -1 where it is not one of 0 to 2^63-1 (no exception). */
static long long number_at(PyObject *list, Py_ssize_t at)
{
    int overflow = 0;
    PyObject *item = at < PyList_GET_SIZE(list) ? PyList_GET_ITEM(list, at) : NULL;
    if (item == NULL || !PyLong_CheckExact(item))
        return -1;
    long long number = PyLong_AsLongLongAndOverflow(item, &overflow);
    return overflow || number < 0 ? -1 : number;
}

/* Put every extent of a scattered read into an entry of its own; all of them or none. */
static enum outcome prepare_scattered(Ring *ring, PyObject *op, size_t *batch_bytes)
{
    enum outcome outcome = FAILED;
    PyObject *offsets = PyObject_GetAttr(op, name_offsets), *lengths = PyObject_GetAttr(op, name_lengths);
    PyObject *buffers = PyObject_GetAttr(op, name_buffers);
    struct group *group = NULL;

    if (offsets == NULL || lengths == NULL || buffers == NULL)
        goto end;
    if (!PyList_CheckExact(offsets) || !PyList_CheckExact(lengths) || !PyList_CheckExact(buffers)
        || PyList_GET_SIZE(buffers) != 1 || PyList_GET_SIZE(offsets) != PyList_GET_SIZE(lengths)) {
        PyErr_SetString(PyExc_TypeError, "a scattered read needs lists of as many offsets as lengths, and one buffer");
        goto end;
    }
    Py_ssize_t count = PyList_GET_SIZE(offsets);
    if (count == 0 || count > (Py_ssize_t)ring->depth) {
        outcome = ODD;
        goto end;
    }
    if (count > (Py_ssize_t)ring->free_count) {
        outcome = NO_ROOM;
        goto end;
    }
    group = &ring->groups[ring->free_groups[--ring->free_group_count]];
    if (PyObject_GetBuffer(PyList_GET_ITEM(buffers, 0), &group->memory, PyBUF_WRITABLE) < 0) {
        ring->free_group_count++;
        group = NULL;
        goto end;
    }
    group->op = Py_NewRef(op);
    if (set_unfinished(op) < 0 || PyObject_SetAttr(op, name_faults, Py_None) < 0) /* the last that may run Python code: the lists are as they are from here on */
        goto end;
    uintptr_t bits = (uintptr_t)group->memory.buf;
    unsigned long long total = 0, pages = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        long long offset = number_at(offsets, i), length = number_at(lengths, i);
        if (offset < 0 || length <= 0 || length > group->memory.len) {
            outcome = ODD;
            goto end;
        }
        pages |= (unsigned long long)offset | (unsigned long long)length;
        total += (unsigned long long)length;
    }
    if ((bits & ring->align_mask) || (pages & (4096 - 1)) || total != (unsigned long long)group->memory.len) {
        outcome = ODD;
        goto end;
    }
    for (Py_ssize_t i = 0; i < count; i++) /* so that nothing can fail once the first extent is in an entry */
        if (reserve_views(&ring->slots[ring->free_slots[ring->free_count - 1 - (unsigned)i]], 1) < 0)
            goto end;
    char *at = group->memory.buf;
    for (Py_ssize_t i = 0; i < count; i++) {
        long long offset = number_at(offsets, i), length = number_at(lengths, i);
        struct slot *slot = &ring->slots[ring->free_slots[--ring->free_count]];
        slot->op = Py_NewRef(op);
        slot->group = group;
        slot->extent = (unsigned)i;
        slot->length = (Py_ssize_t)length;
        slot->view_count = 0;
        slot->vectors[0] = (struct iovec){at, (size_t)length};
        struct io_uring_sqe *sqe = next_entry(ring, slot);
        sqe->off = (uint64_t)offset;
        fill_transfer(ring, sqe, slot, 1, 0);
        entry_filled(ring);
        at += length;
    }
    *batch_bytes += (size_t)total;
    group->left = (unsigned)count;
    group = NULL;
    outcome = PREPARED;

end:
    if (group != NULL)
        release_group(ring, group);
    Py_XDECREF(offsets);
    Py_XDECREF(lengths);
    Py_XDECREF(buffers);
    return outcome;
}

/* Put one operation into the next submission entry. ODD: not for the kernel as it is (see submit). */
static enum outcome prepare(Ring *ring, PyObject *op, size_t *batch_bytes)
{
    enum outcome outcome = FAILED;
    PyObject *kind = NULL, *offset_object = NULL, *buffers_object = NULL, *buffers = NULL;

    if ((PyObject *)Py_TYPE(op) == ring->scattered_type)
        return prepare_scattered(ring, op, batch_bytes);
    struct slot *slot = &ring->slots[ring->free_slots[--ring->free_count]];
    struct io_uring_sqe *sqe;
    unsigned long long offset = 0;
    int vectors = 0, writing = 0, syncing;

    slot->op = Py_NewRef(op);
    slot->length = 0;
    slot->view_count = 0;
    if ((kind = PyObject_GetAttr(op, name_kind)) == NULL)
        goto give_up;
    syncing = kind == ring->kind_sync;
    writing = kind == ring->kind_write;
    if (!syncing && !writing && kind != ring->kind_read) {
        PyErr_Format(PyExc_TypeError, "kind of an operation is %R, not one of IoKind", kind);
        goto give_up;
    }
    if (!syncing) {
        uintptr_t bits = 0;
        if ((offset_object = PyObject_GetAttr(op, name_offset)) == NULL)
            goto give_up;
        if (!PyLong_Check(offset_object)) {
            PyErr_Format(PyExc_TypeError, "offset of an operation is %R, not an int", offset_object);
            goto give_up;
        }
        int overflow = 0;
        long long signed_offset = PyLong_AsLongLongAndOverflow(offset_object, &overflow);
        if ((buffers_object = PyObject_GetAttr(op, name_buffers)) == NULL)
            goto give_up;
        if ((buffers = PySequence_Fast(buffers_object, "buffers of an operation must be a sequence")) == NULL)
            goto give_up;
        vectors = gather(slot, buffers, !writing, &bits, &slot->length);
        if (vectors < 0)
            goto give_up;
        offset = (unsigned long long)signed_offset;
        if (overflow || signed_offset < 0 || vectors == 0 || (bits & ring->align_mask)
            || ((offset | (unsigned long long)slot->length) & (4096 - 1))
            || (writing && ((unsigned long long)slot->length > ring->size_bytes
                            || offset > ring->size_bytes - (unsigned long long)slot->length))) {
            outcome = ODD;
            goto give_up;
        }
        if (PySequence_Fast_GET_SIZE(buffers) > KV_VECTORS_MAX)
            slot->length = -1; /* more to come: the completion is never the whole */
    }
    if (set_unfinished(op) < 0)
        goto give_up;

    sqe = next_entry(ring, slot);
    if (syncing) {
        sqe->opcode = IORING_OP_FSYNC;
        sqe->fsync_flags = IORING_FSYNC_DATASYNC;
    } else {
        sqe->off = offset;
        fill_transfer(ring, sqe, slot, vectors, writing);
        *batch_bytes += (size_t)(slot->length > 0 ? slot->length : 0);
    }
    entry_filled(ring);
    outcome = PREPARED;
    slot = NULL;

give_up:
    Py_XDECREF(kind);
    Py_XDECREF(offset_object);
    Py_XDECREF(buffers_object);
    Py_XDECREF(buffers);
    if (slot != NULL)
        release_slot(ring, slot);
    return outcome;
}

/* Hand prepared entries to the kernel. What it cannot take now (EAGAIN, EBUSY, ENOMEM) stays in the ring, and the
 * eventfd is raised so that the driver comes back. Returns 0, or -errno for what will not pass by itself. */
static int flush(Ring *ring, size_t batch_bytes)
{
    while (ring->unsubmitted > 0) {
        int result;
        if (batch_bytes >= KV_UNLOCK_BYTES) {
            ring->busy = 1;
            Py_BEGIN_ALLOW_THREADS
            result = ring_enter(ring, ring->unsubmitted, 0, 0);
            Py_END_ALLOW_THREADS
            ring->busy = 0;
        } else {
            result = ring_enter(ring, ring->unsubmitted, 0, 0);
        }
        if (result > 0) {
            ring->unsubmitted -= (unsigned)result;
        } else if (result == 0 || result == -EAGAIN || result == -EBUSY || result == -ENOMEM) {
            uint64_t one = 1;
            ssize_t written = write(ring->event_fd, &one, sizeof one);
            (void)written; /* fails only when the counter is full, so when it is readable anyway */
            return 0;
        } else if (result != -EINTR) {
            return result;
        }
    }
    return 0;
}

PyDoc_STRVAR(submit_doc,
"submit(ops, start, odd) -> int\n\n"
"Start operations of the sequence `ops` from index `start` on, until the depth is reached; returns how many were\n"
"taken. Those that the kernel cannot carry out as they are (unaligned offset, length or memory, a write beyond the\n"
"drive, no bytes at all, more extents than the depth) count as taken, are appended to the list `odd` and are not\n"
"started. A scattered read is started whole: where there is no room for all of its extents, it is not taken.\n"
"Raises TypeError for what is not an operation; those before it have been started.");

static PyObject *Ring_submit(Ring *ring, PyObject *const *args, Py_ssize_t arg_count)
{
    if (arg_count != 3 || !PyList_Check(args[2])) {
        PyErr_SetString(PyExc_TypeError, "submit takes a sequence of operations, an index and a list");
        return NULL;
    }
    Py_ssize_t start = PyLong_AsSsize_t(args[1]);
    if (start == -1 && PyErr_Occurred())
        return NULL;
    if (start < 0) {
        PyErr_SetString(PyExc_ValueError, "start is negative");
        return NULL;
    }
    if (check_usable(ring) < 0)
        return NULL;
    PyObject *ops = PySequence_Fast(args[0], "ops must be a sequence of operations");
    if (ops == NULL)
        return NULL;

    size_t batch_bytes = 0;
    Py_ssize_t at = start;
    enum outcome outcome = PREPARED;
    ring->busy = 1; /* attribute access may run Python code, which must not come back here */
    for (; at < PySequence_Fast_GET_SIZE(ops) && ring->free_count > 0; at++) {
        PyObject *op = Py_NewRef(PySequence_Fast_GET_ITEM(ops, at));
        outcome = prepare(ring, op, &batch_bytes);
        if (outcome == ODD && PyList_Append(args[2], op) < 0)
            outcome = FAILED;
        Py_DECREF(op);
        if (outcome == FAILED || outcome == NO_ROOM)
            break;
    }
    ring->busy = 0;
    Py_DECREF(ops);

    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    int code = flush(ring, batch_bytes);
    PyErr_Restore(type, value, trace);
    if (outcome == FAILED)
        return NULL;
    if (code < 0)
        return raise_errno(-code, "io_uring_enter");
    return PyLong_FromSsize_t(at - start);
}

/* ---- reaping -------------------------------------------------------------------------------------------------- */

static int finish_group(Ring *ring, struct group *group, PyObject *done, PyObject *scattered)
{
    int failed;

    if (group->unsure) {
        PyObject *pair = PyTuple_Pack(2, group->op, Py_None);
        failed = pair == NULL || PyList_Append(scattered, pair) < 0;
        Py_XDECREF(pair);
    } else if (group->odd == NULL) {
        PyObject *bytes = PyLong_FromSsize_t(group->memory.len);
        failed = bytes == NULL || PyObject_SetAttr(group->op, name_done_bytes, bytes) < 0
                 || PyList_Append(done, group->op) < 0;
        Py_XDECREF(bytes);
    } else {
        PyObject *pair = PyTuple_Pack(2, group->op, group->odd);
        failed = pair == NULL || PyList_Append(scattered, pair) < 0;
        Py_XDECREF(pair);
    }
    release_group(ring, group);
    return failed ? -1 : 0;
}

static int complete_extent(Ring *ring, struct slot *slot, int result, PyObject *done, PyObject *scattered)
{
    int failed = 0;
    struct group *group = slot->group;

    if (result != slot->length) {
        PyObject *pair = Py_BuildValue("(Ii)", slot->extent, result);
        if (group->odd == NULL)
            group->odd = PyList_New(0);
        failed = pair == NULL || group->odd == NULL || PyList_Append(group->odd, pair) < 0;
        group->unsure |= failed;
        Py_XDECREF(pair);
    }
    release_slot(ring, slot);
    if (--group->left == 0)
        failed |= finish_group(ring, group, done, scattered) < 0;
    return failed ? -1 : 0;
}

static int complete(Ring *ring, struct slot *slot, int result, PyObject *done, PyObject *odd)
{
    int failed;
    PyObject *op = slot->op;

    if (result == slot->length && (PyObject *)Py_TYPE(op) != ring->part_type) {
        PyObject *bytes = PyLong_FromLong(result);
        failed = bytes == NULL || PyObject_SetAttr(op, name_done_bytes, bytes) < 0 || PyList_Append(done, op) < 0;
        Py_XDECREF(bytes);
    } else {
        PyObject *pair = Py_BuildValue("(Oi)", op, result);
        failed = pair == NULL || PyList_Append(odd, pair) < 0;
        Py_XDECREF(pair);
    }
    release_slot(ring, slot);
    return failed ? -1 : 0;
}

static int collect(Ring *ring, PyObject *done, PyObject *odd, PyObject *scattered)
{
    int failed = 0;
    unsigned head = *ring->cq_head;

    ring->busy = 1;
    while (head != __atomic_load_n(ring->cq_tail, __ATOMIC_ACQUIRE)) {
        struct io_uring_cqe *cqe = &ring->cqes[head & ring->cq_mask];
        uint64_t index = cqe->user_data;
        int result = cqe->res;
        head++;
        __atomic_store_n(ring->cq_head, head, __ATOMIC_RELEASE);
        if (index < ring->depth && ring->slots[index].op != NULL) {
            ring->in_flight--;
            if (ring->slots[index].group != NULL)
                failed |= complete_extent(ring, &ring->slots[index], result, done, scattered) < 0;
            else
                failed |= complete(ring, &ring->slots[index], result, done, odd) < 0;
        }
    }
    ring->busy = 0;
    return failed ? -1 : 0;
}

PyDoc_STRVAR(reap_doc,
"reap() -> (list of operations, list of (operation, result), list of (operation, list of (extent, result) or None))\n\n"
"What has completed, without waiting; clears the eventfd. The first list holds operations that moved all their\n"
"bytes, with done_bytes set; the second all others and every operation of `part_type`, with the bytes moved or\n"
"-errno; the third scattered reads, all of whose extents have completed, with those that moved less than all their\n"
"bytes, or None where memory was too short to note which. Buffers are no longer held.");

static PyObject *Ring_reap(Ring *ring, PyObject *unused)
{
    (void)unused;
    if (check_usable(ring) < 0)
        return NULL;
    uint64_t count;
    ssize_t got = read(ring->event_fd, &count, sizeof count);
    (void)got; /* EAGAIN when nobody has raised it */
    if (ring->unsubmitted > 0) {
        int code = flush(ring, KV_UNLOCK_BYTES);
        if (code < 0)
            return raise_errno(-code, "io_uring_enter");
    }
#ifdef IORING_SQ_TASKRUN
    unsigned pending = IORING_SQ_TASKRUN | IORING_SQ_CQ_OVERFLOW;
#else
    unsigned pending = IORING_SQ_CQ_OVERFLOW;
#endif
    if (__atomic_load_n(ring->sq_flags, __ATOMIC_RELAXED) & pending) {
        int code = ring_enter(ring, 0, 0, IORING_ENTER_GETEVENTS);
        if (code < 0 && code != -EINTR && code != -EAGAIN && code != -EBUSY)
            return raise_errno(-code, "io_uring_enter");
    }
    PyObject *done = PyList_New(0), *odd = PyList_New(0), *scattered = PyList_New(0), *all = NULL;
    if (done != NULL && odd != NULL && scattered != NULL && collect(ring, done, odd, scattered) == 0)
        all = PyTuple_Pack(3, done, odd, scattered);
    Py_XDECREF(done);
    Py_XDECREF(odd);
    Py_XDECREF(scattered);
    return all;
}

/* Wait, without the GIL, until something can be reaped. Returns 0 or -errno. */
static int wait_one(Ring *ring)
{
    int result = 0;
    ring->busy = 1;
    Py_BEGIN_ALLOW_THREADS
    while (*ring->cq_head == __atomic_load_n(ring->cq_tail, __ATOMIC_ACQUIRE)) {
        result = ring_enter(ring, ring->unsubmitted, 1, IORING_ENTER_GETEVENTS);
        if (result > 0)
            ring->unsubmitted -= (unsigned)result;
        else if (result == -EAGAIN || result == -EBUSY || result == -ENOMEM)
            usleep(1000);
        else if (result < 0 && result != -EINTR)
            break;
    }
    Py_END_ALLOW_THREADS
    ring->busy = 0;
    return result < 0 && result != -EINTR && result != -EAGAIN && result != -EBUSY && result != -ENOMEM ? result : 0;
}

PyDoc_STRVAR(wait_doc,
"wait()\n\nBlock, without the GIL, until a completion can be reaped; returns at once when nothing is in flight.");

static PyObject *Ring_wait(Ring *ring, PyObject *unused)
{
    (void)unused;
    if (check_usable(ring) < 0)
        return NULL;
    if (ring->in_flight > 0) {
        int code = wait_one(ring);
        if (code < 0)
            return raise_errno(-code, "io_uring_enter");
    }
    Py_RETURN_NONE;
}

/* ---- registering ---------------------------------------------------------------------------------------------- */

PyDoc_STRVAR(register_memory_doc,
"register_memory(memory, piece_bytes)\n\n"
"Pin writable memory for good, in pieces of at most `piece_bytes`; operations whose buffers lie in one piece then use\n"
"it (see variants). The memory is held until the ring is closed. Raises OSError with the kernel's reason.");

static PyObject *Ring_register_memory(Ring *ring, PyObject *args)
{
    PyObject *memory;
    unsigned long long piece_bytes;

    if (!PyArg_ParseTuple(args, "OK:register_memory", &memory, &piece_bytes) || check_usable(ring) < 0)
        return NULL;
    if (ring->memory_held) {
        PyErr_SetString(PyExc_ValueError, "memory is registered once");
        return NULL;
    }
    if (piece_bytes < 4096 || piece_bytes > KV_PIECE_BYTES_MAX) {
        PyErr_SetString(PyExc_ValueError, "piece_bytes must be from 4096 to 1 GiB");
        return NULL;
    }
    if (PyObject_GetBuffer(memory, &ring->memory, PyBUF_WRITABLE) < 0)
        return NULL;
    uint64_t total = (uint64_t)ring->memory.len;
    uint64_t count = (total + piece_bytes - 1) / piece_bytes;
    if (count == 0 || count > KV_PIECES_MAX) {
        PyBuffer_Release(&ring->memory);
        PyErr_SetString(PyExc_ValueError, "memory to register is empty or has too many pieces");
        return NULL;
    }
    struct iovec *pieces = PyMem_Calloc(count, sizeof *pieces);
    if (pieces == NULL) {
        PyBuffer_Release(&ring->memory);
        return PyErr_NoMemory();
    }
    for (uint64_t i = 0; i < count; i++) {
        uint64_t start = i * piece_bytes, left = total - start;
        pieces[i].iov_base = (char *)ring->memory.buf + start;
        pieces[i].iov_len = left < piece_bytes ? left : piece_bytes;
    }
    int code;
    ring->busy = 1;
    Py_BEGIN_ALLOW_THREADS /* pinning gigabytes takes a while */
    code = ring_register(ring, IORING_REGISTER_BUFFERS, pieces, (unsigned)count);
    Py_END_ALLOW_THREADS
    ring->busy = 0;
    PyMem_Free(pieces);
    if (code < 0) {
        PyBuffer_Release(&ring->memory);
        return raise_errno(-code, "IORING_REGISTER_BUFFERS");
    }
    ring->memory_held = 1;
    ring->memory_start = (uintptr_t)ring->memory.buf;
    ring->memory_end = ring->memory_start + (uintptr_t)total;
    ring->piece_bytes = piece_bytes;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(register_file_doc,
"register_file()\n\nLet the kernel keep the file at hand, so that no operation looks it up. Raises OSError.");

static PyObject *Ring_register_file(Ring *ring, PyObject *unused)
{
    (void)unused;
    if (check_usable(ring) < 0)
        return NULL;
    if (!ring->file_registered) {
        int code = ring_register(ring, IORING_REGISTER_FILES, &ring->file_fd, 1);
        if (code < 0)
            return raise_errno(-code, "IORING_REGISTER_FILES");
        ring->file_registered = 1;
    }
    Py_RETURN_NONE;
}

PyDoc_STRVAR(supports_doc,
"supports(opcode) -> bool\n\nWhether the kernel knows an operation code (IORING_REGISTER_PROBE). Raises OSError.");

static PyObject *Ring_supports(Ring *ring, PyObject *argument)
{
    long opcode = PyLong_AsLong(argument);
    if (opcode == -1 && PyErr_Occurred())
        return NULL;
    if (check_usable(ring) < 0)
        return NULL;
    struct io_uring_probe *probe = PyMem_Calloc(1, sizeof *probe + 256 * sizeof(struct io_uring_probe_op));
    if (probe == NULL)
        return PyErr_NoMemory();
    int code = ring_register(ring, IORING_REGISTER_PROBE, probe, 256);
    int known = code >= 0 && opcode >= 0 && opcode <= probe->last_op && opcode < 256
                && (probe->ops[opcode].flags & IO_URING_OP_SUPPORTED);
    PyMem_Free(probe);
    if (code < 0)
        return raise_errno(-code, "IORING_REGISTER_PROBE");
    return PyBool_FromLong(known);
}

/* ---- closing -------------------------------------------------------------------------------------------------- */

/* Everything in flight completes, then everything is released. Returns -1 with an exception set when the kernel
 * refuses to wait; then nothing was released. */
static int shut(Ring *ring)
{
    while (ring->in_flight > 0) {
        int code = wait_one(ring);
        if (code < 0) {
            raise_errno(-code, "io_uring_enter");
            return -1;
        }
        PyObject *done = PyList_New(0), *odd = PyList_New(0), *scattered = PyList_New(0);
        int failed = done == NULL || odd == NULL || scattered == NULL || collect(ring, done, odd, scattered) < 0;
        Py_XDECREF(done);
        Py_XDECREF(odd);
        Py_XDECREF(scattered);
        if (failed)
            return -1;
    }
    ring->closed = 1;
    if (ring->file_registered) /* else a kernel worker would drop the file some time later */
        ring_register(ring, IORING_UNREGISTER_FILES, NULL, 0);
    ring->file_registered = 0;
    if (ring->memory_held) {
        ring_register(ring, IORING_UNREGISTER_BUFFERS, NULL, 0);
        ring->memory_held = 0;
        PyBuffer_Release(&ring->memory);
    }
    unmap(ring);
    return 0;
}

PyDoc_STRVAR(close_doc, "close()\n\nWait for what is in flight, drop its results, release everything. Idempotent.");

static PyObject *Ring_close(Ring *ring, PyObject *unused)
{
    (void)unused;
    if (ring->closed)
        Py_RETURN_NONE;
    if (check_usable(ring) < 0 || shut(ring) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static void Ring_dealloc(Ring *ring)
{
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    if (!ring->closed && ring->owner != getpid())
        unmap(ring); /* after a fork: this process's share only */
    else if (!ring->closed && shut(ring) < 0)
        PyErr_WriteUnraisable(NULL); /* what is still in flight keeps its memory for ever rather than lose it */
    PyErr_Restore(type, value, trace);
    if (ring->in_flight == 0 && ring->slots != NULL) {
        for (unsigned i = 0; i < ring->depth; i++) {
            PyMem_Free(ring->slots[i].views);
            PyMem_Free(ring->slots[i].vectors);
        }
        PyMem_Free(ring->slots);
        PyMem_Free(ring->groups);
    }
    PyMem_Free(ring->free_slots);
    PyMem_Free(ring->free_groups);
    Py_XDECREF(ring->kind_read);
    Py_XDECREF(ring->kind_write);
    Py_XDECREF(ring->kind_sync);
    Py_XDECREF(ring->part_type);
    Py_XDECREF(ring->scattered_type);
    Py_TYPE(ring)->tp_free((PyObject *)ring);
}

/* ---- the type and the module ---------------------------------------------------------------------------------- */

static PyObject *Ring_fileno(Ring *ring, PyObject *unused)
{
    (void)unused;
    return check_usable(ring) < 0 ? NULL : PyLong_FromLong(ring->event_fd);
}

static PyMethodDef Ring_methods[] = {
    {"submit", (PyCFunction)(void (*)(void))Ring_submit, METH_FASTCALL, submit_doc},
    {"reap", (PyCFunction)Ring_reap, METH_NOARGS, reap_doc},
    {"wait", (PyCFunction)Ring_wait, METH_NOARGS, wait_doc},
    {"fileno", (PyCFunction)Ring_fileno, METH_NOARGS, PyDoc_STR("fileno() -> int\n\nThe eventfd.")},
    {"register_memory", (PyCFunction)Ring_register_memory, METH_VARARGS, register_memory_doc},
    {"register_file", (PyCFunction)Ring_register_file, METH_NOARGS, register_file_doc},
    {"supports", (PyCFunction)Ring_supports, METH_O, supports_doc},
    {"close", (PyCFunction)Ring_close, METH_NOARGS, close_doc},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef Ring_members[] = {
    {"in_flight", T_UINT, offsetof(Ring, in_flight), READONLY, PyDoc_STR("operations that have not been reaped")},
    {"depth", T_UINT, offsetof(Ring, depth), READONLY, PyDoc_STR("most operations in flight")},
    {"variants", T_UINT, offsetof(Ring, variants), 0, PyDoc_STR("bits of operation codes that may be used")},
    {NULL, 0, 0, 0, NULL},
};

static PyTypeObject RingType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "kvstore.device._uring.Ring",
    .tp_basicsize = sizeof(Ring),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = PyDoc_STR("Ring(fd, depth, *, size_bytes, alignment_bytes, read, write, sync, part_type, scattered_type, "
                        "setup_flags=0)"),
    .tp_new = Ring_new,
    .tp_init = (initproc)Ring_init,
    .tp_dealloc = (destructor)Ring_dealloc,
    .tp_methods = Ring_methods,
    .tp_members = Ring_members,
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "kvstore.device._uring",
    .m_doc = PyDoc_STR("A small io_uring binding for one drive; see the head of _uring.c."),
    .m_size = -1,
};

static int add_constants(PyObject *made)
{
    const struct { const char *name; long value; } constants[] = {
        {"INTERFACE", KV_INTERFACE},
        {"VARIANT_PLAIN", KV_VARIANT_PLAIN},
        {"VARIANT_FIXED", KV_VARIANT_FIXED},
        {"VARIANT_VECTOR_FIXED", KV_VARIANT_VECTOR_FIXED},
        {"OP_READ", IORING_OP_READ},
        {"OP_WRITE", IORING_OP_WRITE},
        {"OP_READ_FIXED", IORING_OP_READ_FIXED},
        {"OP_WRITE_FIXED", IORING_OP_WRITE_FIXED},
        {"OP_READV_FIXED", KV_OP_READV_FIXED},
        {"OP_WRITEV_FIXED", KV_OP_WRITEV_FIXED},
        {"SETUP_COOP_TASKRUN", 1 << 8},
        {"SETUP_TASKRUN_FLAG", 1 << 9},
        {"SETUP_SINGLE_ISSUER", 1 << 12},
        {"SETUP_DEFER_TASKRUN", 1 << 13},
    };
    for (size_t i = 0; i < sizeof constants / sizeof constants[0]; i++)
        if (PyModule_AddIntConstant(made, constants[i].name, constants[i].value) < 0)
            return -1;
    return 0;
}

PyMODINIT_FUNC PyInit__uring(void)
{
    name_kind = PyUnicode_InternFromString("kind");
    name_offset = PyUnicode_InternFromString("offset");
    name_buffers = PyUnicode_InternFromString("buffers");
    name_done_bytes = PyUnicode_InternFromString("done_bytes");
    name_error = PyUnicode_InternFromString("error");
    name_offsets = PyUnicode_InternFromString("offsets");
    name_lengths = PyUnicode_InternFromString("lengths");
    name_faults = PyUnicode_InternFromString("faults");
    if (!name_kind || !name_offset || !name_buffers || !name_done_bytes || !name_error || !name_offsets || !name_lengths
        || !name_faults || PyType_Ready(&RingType) < 0)
        return NULL;
    PyObject *made = PyModule_Create(&module);
    if (made == NULL)
        return NULL;
    if (PyModule_AddObjectRef(made, "Ring", (PyObject *)&RingType) < 0 || add_constants(made) < 0) {
        Py_DECREF(made);
        return NULL;
    }
    return made;
}
