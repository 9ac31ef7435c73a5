/* What is done to the file of one chunk, in one call and without the interpreter lock.
 *
 * `put` is steps 1, 2, 3, 5, 6 and 7 of the write protocol at the top of posix.py, `get` its way to read. Both
 * hash the payload once, piece by piece. In Python each of these system calls, and the hash, gives up the interpreter lock and
 * takes it again, eight times for a chunk that is written; here it is once. What is rare (directories that are
 * missing, file systems without hard links, syncs, direct I/O) is left to posix.py.
 *
 * The hash is that of the xxhash package: `bind` finds its functions in the package's own library, so that
 * there is no second copy of them to keep right.
 */

#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>

#include <dlfcn.h>
#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define BLOCK 4096          /* objects are padded to a multiple of it */
#define DIGEST 16           /* bytes of a checksum */
#define INTERFACE 1         /* changes with what _calls.pyi says */
#define RAISED (-1)         /* in the place of the number of an error: Python knows of it */
#define PARTS 3             /* header, payload, and what may follow */
/* Bytes that are read or written at a time, and hashed while the core's cache has them: */
#define READ_PIECE (256u << 10)
#define WRITE_PIECE (512u << 10)

typedef struct { uint64_t low, high; } hash128;

typedef struct {
    void *(*create)(void);
    int (*release)(void *);
    int (*reset)(void *);
    int (*update)(void *, const void *, size_t);
    hash128 (*finish)(const void *);
    hash128 (*whole)(const void *, size_t);
} hash_functions;

static hash_functions xxh;

static const unsigned char zeros[BLOCK];
static unsigned char tail[BLOCK]; /* written by all, read by nobody */

/* In canonical form: big-endian, the high half first. */
static void write_digest(unsigned char *out, hash128 hash)
{
    for (int i = 0; i < 8; i++) {
        out[i] = (unsigned char)(hash.high >> (56 - 8 * i));
        out[8 + i] = (unsigned char)(hash.low >> (56 - 8 * i));
    }
}

static size_t min_size(size_t a, size_t b)
{
    return a < b ? a : b;
}

/* Zeros that follow a payload on storage. */
static uint64_t padding(uint64_t length)
{
    return -length % BLOCK;
}

/* The bytes from `start` to `end` of what `parts` are in a row; returns how many buffers that takes. */
static int slice(const struct iovec *parts, size_t start, size_t end, struct iovec *out)
{
    int used = 0;
    size_t first = 0;
    for (int i = 0; i < PARTS; i++) {
        size_t last = first + parts[i].iov_len;
        if (start < last && end > first) {
            size_t from = start > first ? start - first : 0;
            out[used].iov_base = (unsigned char *)parts[i].iov_base + from;
            out[used].iov_len = min_size(end, last) - first - from;
            used++;
        }
        first = last;
    }
    return used;
}

/* What follows returns 0, or the number of the error, unless it says otherwise. */

/* A signal has come. Ctrl-C and its like are handled at once, for what the thread waits for may never come. */
static int after_interrupt(void)
{
    PyGILState_STATE state = PyGILState_Ensure();
    int raised = PyErr_CheckSignals();
    PyGILState_Release(state);
    return raised ? RAISED : 0;
}

/* The descriptor of `path`; below 0 where there is none, and `error` says why. */
static int open_file(const char *path, int flags, int mode, int *error)
{
    for (;;) {
        int fd = open(path, flags | O_CLOEXEC, (mode_t)mode);
        if (fd >= 0)
            return fd;
        *error = errno == EINTR ? after_interrupt() : errno;
        if (*error)
            return -1;
    }
}

/* Writing. */

static int write_range(int fd, const struct iovec *parts, size_t start, size_t end)
{
    while (start < end) {
        struct iovec rest[PARTS];
        ssize_t count = pwritev(fd, rest, slice(parts, start, end, rest), (off_t)start);
        if (count > 0)
            start += (size_t)count;
        else if (count == 0)
            return EIO; /* else it might go on like that */
        else {
            int error = errno == EINTR ? after_interrupt() : errno;
            if (error)
                return error;
        }
    }
    return 0;
}

/* The header waits for the digest of the payload: it goes first with a short one, and last with others. */
static int write_object(int fd, const struct iovec *parts, Py_ssize_t digest_at)
{
    unsigned char *header = parts[0].iov_base;
    const unsigned char *payload = parts[1].iov_base;
    size_t start = parts[0].iov_len, length = parts[1].iov_len, total = start + length + parts[2].iov_len;
    size_t covered = start - DIGEST, done = 0;
    hash128 hash;
    int error = 0;
    if (length <= WRITE_PIECE) {
        hash = xxh.whole(payload, length);
    } else {
        void *state = xxh.create();
        if (state == NULL)
            return ENOMEM;
        xxh.reset(state);
        while (done < length && !error) {
            size_t piece = min_size(WRITE_PIECE, length - done);
            xxh.update(state, payload + done, piece);
            size_t end = done + piece == length ? total : start + done + piece;
            error = write_range(fd, parts, start + done, end);
            done += piece;
        }
        hash = xxh.finish(state);
        xxh.release(state);
    }
    write_digest(header + digest_at, hash);
    write_digest(header + covered, xxh.whole(header, covered));
    return error ? error : write_range(fd, parts, 0, done ? start : total);
}

static int create_exclusively(const char *temp, int mode, const struct iovec *parts, Py_ssize_t digest_at)
{
    int error = 0;
    int fd = open_file(temp, O_WRONLY | O_CREAT | O_EXCL, mode, &error);
    if (fd < 0)
        return error;
    error = write_object(fd, parts, digest_at);
    if (close(fd) != 0 && !error)
        error = errno;
    if (error)
        unlink(temp);
    return error;
}

static int publish(const char *temp, const char *target, int *created)
{
    if (link(temp, target) == 0) {
        *created = 1;
        return 0;
    }
    if (errno != EEXIST)
        return errno;
    struct stat found;
    /* A lost reply makes an NFS client repeat the request, and the repetition finds our own link. */
    *created = stat(temp, &found) == 0 && found.st_nlink > 1;
    return 0;
}

static int put(const char *target, const char *temp, int mode, Py_buffer *header, Py_buffer *payload,
               Py_ssize_t digest_at, int *created)
{
    *created = 0;
    if (access(target, F_OK) == 0)
        return 0;
    struct iovec parts[PARTS] = {
        {header->buf, (size_t)header->len},
        {payload->buf, (size_t)payload->len},
        {(void *)zeros, (size_t)padding((uint64_t)payload->len)},
    };
    int error = create_exclusively(temp, mode, parts, digest_at);
    if (error)
        return error;
    error = publish(temp, target, created);
    unlink(temp); /* what stays is swept by age */
    return error;
}

/* Reading. */

typedef struct {
    size_t header;  /* bytes of the header, which comes first */
    size_t room;    /* bytes of the buffer for the payload */
    size_t size;    /* bytes of the object that have come, some of them behind the buffer */
    size_t hashed;  /* bytes of the payload that the digest covers */
    uint64_t length; /* of the payload, as the header has it */
} progress;

/* What has come of the payload goes into the digest, but nothing that the header does not announce. */
static void hash_news(void *state, progress *at, const unsigned char *payload)
{
    size_t there = min_size(at->size - at->header, at->room);
    size_t wanted = at->length < there ? (size_t)at->length : there;
    if (wanted > at->hashed) {
        xxh.update(state, payload + at->hashed, wanted - at->hashed);
        at->hashed = wanted;
    }
}

static int is_whole(const progress *at)
{
    uint64_t rest = at->size - at->header;
    return at->size >= at->header && (rest == at->length || rest == at->length + padding(at->length));
}

/* Read piece by piece until the object ends, or the buffers do; what is left then is too long for a chunk. */
static int read_all(int fd, const struct iovec *parts, Py_ssize_t length_at, void *state, progress *at)
{
    size_t end_of_room = at->header + at->room, total = end_of_room + parts[2].iov_len;
    size_t end = 0;
    while (at->size < total) {
        if (at->size >= end) {
            end += READ_PIECE;
            if (end >= end_of_room)
                end = total;
        }
        struct iovec piece[PARTS];
        ssize_t count = preadv(fd, piece, slice(parts, at->size, end, piece), (off_t)at->size);
        if (count < 0) {
            int error = errno == EINTR ? after_interrupt() : errno;
            if (error)
                return error;
            continue;
        }
        at->size += (size_t)count;
        if (at->size < at->header && count > 0)
            continue;
        if (at->size >= at->header) {
            memcpy(&at->length, (unsigned char *)parts[0].iov_base + length_at, sizeof at->length);
            at->length = le64toh(at->length);
            hash_news(state, at, parts[1].iov_base);
        }
        if (count == 0 || (at->size < end && is_whole(at)))
            return 0;
    }
    return 0;
}

static void stamp(int fd, double after)
{
    struct stat found;
    struct timespec now;
    if (after <= 0 || fstat(fd, &found) != 0 || clock_gettime(CLOCK_REALTIME, &now) != 0)
        return;
    if ((double)now.tv_sec - (double)found.st_mtim.tv_sec > after)
        (void)!futimens(fd, NULL); /* where that is allowed: by its owner, or by those who may write it */
}

static int get(const char *path, Py_buffer *header, Py_buffer *out, Py_ssize_t length_at, double stamp_after,
               unsigned char *digest, size_t *size)
{
    int error = 0;
    int fd = open_file(path, O_RDONLY, 0, &error);
    if (fd < 0)
        return error;
    void *state = xxh.create();
    if (state == NULL) {
        close(fd);
        return ENOMEM;
    }
    xxh.reset(state);
    struct iovec parts[PARTS] = {
        {header->buf, (size_t)header->len},
        {out->buf, (size_t)out->len},
        {tail, sizeof tail},
    };
    progress at = {.header = (size_t)header->len, .room = (size_t)out->len};
    error = read_all(fd, parts, length_at, state, &at);
    if (!error)
        stamp(fd, stamp_after);
    close(fd);
    write_digest(digest, xxh.finish(state));
    xxh.release(state);
    *size = at.size;
    return error;
}

/* For Python; _calls.pyi has what each of them takes and returns. */

static PyObject *fail(int error, const char *path)
{
    PyObject *name = error == RAISED ? NULL : PyUnicode_DecodeFSDefault(path);
    if (name != NULL) {
        errno = error;
        PyErr_SetFromErrnoWithFilenameObject(PyExc_OSError, name);
        Py_DECREF(name);
    }
    return NULL;
}

static int check(Py_buffer *header, Py_ssize_t at, size_t size)
{
    if (header->len < 2 * DIGEST || at < 0 || (size_t)at + size > (size_t)header->len - DIGEST) {
        PyErr_SetString(PyExc_ValueError, "the header has no room for this field");
        return 0;
    }
    if (xxh.whole == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "bind() comes first");
        return 0;
    }
    return 1;
}

static PyObject *py_put(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *target, *temp, *answer = NULL;
    int mode, created = 0;
    Py_buffer header, payload;
    Py_ssize_t digest_at;
    if (!PyArg_ParseTuple(args, "O&O&iw*y*n", PyUnicode_FSConverter, &target, PyUnicode_FSConverter, &temp, &mode,
                          &header, &payload, &digest_at))
        return NULL;
    if (check(&header, digest_at, DIGEST)) {
        const char *target_name = PyBytes_AsString(target), *temp_name = PyBytes_AsString(temp);
        int error;
        Py_BEGIN_ALLOW_THREADS
        error = put(target_name, temp_name, mode, &header, &payload, digest_at, &created);
        Py_END_ALLOW_THREADS
        answer = error ? fail(error, target_name) : PyBool_FromLong(created);
    }
    PyBuffer_Release(&header);
    PyBuffer_Release(&payload);
    Py_DECREF(target);
    Py_DECREF(temp);
    return answer;
}

static PyObject *py_get(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *path, *answer = NULL;
    Py_buffer header, out;
    Py_ssize_t length_at;
    double stamp_after;
    if (!PyArg_ParseTuple(args, "O&w*w*nd", PyUnicode_FSConverter, &path, &header, &out, &length_at, &stamp_after))
        return NULL;
    if (check(&header, length_at, sizeof(uint64_t))) {
        const char *name = PyBytes_AsString(path);
        unsigned char digest[DIGEST];
        size_t size = 0;
        int error;
        Py_BEGIN_ALLOW_THREADS
        error = get(name, &header, &out, length_at, stamp_after, digest, &size);
        Py_END_ALLOW_THREADS
        if (error == ENOENT)
            answer = Py_NewRef(Py_None);
        else
            answer = error ? fail(error, name)
                           : Py_BuildValue("ny#", (Py_ssize_t)size, (const char *)digest, (Py_ssize_t)DIGEST);
    }
    PyBuffer_Release(&header);
    PyBuffer_Release(&out);
    Py_DECREF(path);
    return answer;
}

static PyObject *py_digest(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer data;
    Py_ssize_t piece;
    unsigned char digest[DIGEST];
    if (!PyArg_ParseTuple(args, "y*n", &data, &piece))
        return NULL;
    if (xxh.whole == NULL || piece <= 0) {
        PyBuffer_Release(&data);
        PyErr_SetString(PyExc_RuntimeError, "bind() comes first, and pieces have at least one byte");
        return NULL;
    }
    void *state = data.len > piece ? xxh.create() : NULL;
    if (state == NULL) {
        write_digest(digest, xxh.whole(data.buf, (size_t)data.len));
    } else {
        xxh.reset(state);
        for (Py_ssize_t at = 0; at < data.len; at += piece)
            xxh.update(state, (unsigned char *)data.buf + at, min_size((size_t)piece, (size_t)(data.len - at)));
        write_digest(digest, xxh.finish(state));
        xxh.release(state);
    }
    PyBuffer_Release(&data);
    return PyBytes_FromStringAndSize((const char *)digest, DIGEST);
}

/* The first of two names that `library` has. */
static void *find(void *library, const char *better, const char *good)
{
    void *found = dlsym(library, better);
    return found != NULL ? found : dlsym(library, good);
}

static PyObject *py_bind(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *path;
    if (!PyArg_ParseTuple(args, "O&", PyUnicode_FSConverter, &path))
        return NULL;
    void *library = dlopen(PyBytes_AsString(path), RTLD_NOW | RTLD_LOCAL);
    Py_DECREF(path);
    if (library == NULL) {
        PyObject *why = PyUnicode_DecodeFSDefault(dlerror());
        if (why != NULL) {
            PyErr_SetObject(PyExc_ImportError, why);
            Py_DECREF(why);
        }
        return NULL;
    }
    hash_functions found;
    *(void **)&found.create = dlsym(library, "XXH3_createState");
    *(void **)&found.release = dlsym(library, "XXH3_freeState");
    *(void **)&found.reset = dlsym(library, "XXH3_128bits_reset");
    *(void **)&found.update = find(library, "XXH3_128bits_update_dispatch", "XXH3_128bits_update");
    *(void **)&found.finish = dlsym(library, "XXH3_128bits_digest");
    *(void **)&found.whole = find(library, "XXH3_128bits_dispatch", "XXH3_128bits");
    if (found.create && found.release && found.reset && found.update && found.finish && found.whole) {
        xxh = found; /* the library stays open */
        return Py_NewRef(Py_None);
    }
    dlclose(library);
    PyErr_SetString(PyExc_ImportError, "this xxhash keeps its functions to itself");
    return NULL;
}

static PyMethodDef methods[] = {
    {"bind", py_bind, METH_VARARGS, NULL},
    {"digest", py_digest, METH_VARARGS, NULL},
    {"get", py_get, METH_VARARGS, NULL},
    {"put", py_put, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static int fill_module(PyObject *module)
{
    return PyModule_AddIntConstant(module, "INTERFACE", INTERFACE);
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, fill_module},
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_calls",
    .m_size = 0,
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__calls(void)
{
    return PyModuleDef_Init(&definition);
}
