/* System calls that go wrong as FAULTY_CALLS says, one word each; loaded before the C library:
 *
 *   short=N         transfers move N bytes at most
 *   interrupt=CALL  every other CALL is interrupted by a signal before it has done anything
 *   CALL=NUMBER     CALL fails with this error
 *   lost=CALL       CALL succeeds, but is answered as if it had been asked for twice
 *   before=CALL, half=CALL, after=CALL   the process is killed then
 *
 * Only what is done to files of chunks counts; the others of the process are let through.
 */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

/* What follows `what` and "=" in the plan, if that begins so. */
static const char *plan(const char *what)
{
    const char *plan = getenv("FAULTY_CALLS");
    size_t n = strlen(what);
    return plan != NULL && strncmp(plan, what, n) == 0 && plan[n] == '=' ? plan + n + 1 : NULL;
}

static int planned(const char *what, const char *call)
{
    const char *found = plan(what);
    return found != NULL && strcmp(found, call) == 0;
}

/* `path` is that of an object, or of a file that will be one. */
static int is_chunk(const char *path)
{
    const char *suffix = strstr(path, ".kv");
    while (suffix != NULL && suffix[3] != 0 && suffix[3] != '.')
        suffix = strstr(suffix + 1, ".kv");
    return suffix != NULL;
}

static int is_chunk_fd(int fd)
{
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n < 0)
        return 0;
    path[n] = 0;
    return is_chunk(path);
}

static void kill_at(const char *moment, const char *call)
{
    if (planned(moment, call))
        kill(getpid(), SIGKILL);
}

/* Whether the call fails at once. */
static int enter(const char *call)
{
    static int turn;
    kill_at("before", call);
    if (planned("interrupt", call) && turn++ % 2 == 0) {
        errno = EINTR;
        return 1;
    }
    if (plan(call) != NULL) {
        errno = atoi(plan(call));
        return 1;
    }
    return 0;
}

static int leave(const char *call, int result)
{
    kill_at("after", call);
    if (planned("lost", call) && result == 0) {
        errno = EEXIST;
        return -1;
    }
    return result;
}

int open(const char *path, int flags, ...)
{
    va_list rest;
    va_start(rest, flags);
    mode_t mode = va_arg(rest, mode_t);
    va_end(rest);
    if (!is_chunk(path))
        return REAL(open)(path, flags, mode);
    return enter("open") ? -1 : leave("open", REAL(open)(path, flags, mode));
}

int access(const char *path, int mode)
{
    if (!is_chunk(path))
        return REAL(access)(path, mode);
    return enter("access") ? -1 : leave("access", REAL(access)(path, mode));
}

int link(const char *from, const char *to)
{
    if (!is_chunk(to))
        return REAL(link)(from, to);
    return enter("link") ? -1 : leave("link", REAL(link)(from, to));
}

int unlink(const char *path)
{
    if (!is_chunk(path))
        return REAL(unlink)(path);
    return enter("unlink") ? -1 : leave("unlink", REAL(unlink)(path));
}

int close(int fd)
{
    if (!is_chunk_fd(fd))
        return REAL(close)(fd);
    kill_at("before", "close");
    int result = REAL(close)(fd); /* it is closed, whatever it says */
    kill_at("after", "close");
    if (plan("close") == NULL)
        return result;
    errno = atoi(plan("close"));
    return -1;
}

/* The beginning of `parts`, as much as the plan says. */
static int cut(const struct iovec *parts, int n, size_t room, struct iovec *out)
{
    for (int i = 0; i < n; i++) {
        out[i] = parts[i];
        if (out[i].iov_len > room)
            out[i].iov_len = room;
        room -= out[i].iov_len;
    }
    return n;
}

typedef ssize_t (*transfer_call)(int, const struct iovec *, int, off_t);

static ssize_t transfer(const char *call, transfer_call real, int fd, const struct iovec *parts, int n, off_t at)
{
    struct iovec some[16];
    if (!is_chunk_fd(fd) || n > 16)
        return real(fd, parts, n, at);
    if (planned("half", call)) {
        real(fd, some, cut(parts, n, 20000, some), at);
        kill(getpid(), SIGKILL);
    }
    if (enter(call))
        return -1;
    if (plan("short") != NULL)
        n = cut(parts, n, (size_t)atoi(plan("short")), some), parts = some;
    ssize_t moved = real(fd, parts, n, at);
    kill_at("after", call);
    return moved;
}

ssize_t preadv(int fd, const struct iovec *parts, int n, off_t at)
{
    return transfer("preadv", REAL(preadv), fd, parts, n, at);
}

ssize_t pwritev(int fd, const struct iovec *parts, int n, off_t at)
{
    return transfer("pwritev", REAL(pwritev), fd, parts, n, at);
}

/* Python has them with flags; none are asked for. */
ssize_t preadv2(int fd, const struct iovec *parts, int n, off_t at, int flags)
{
    return flags ? REAL(preadv2)(fd, parts, n, at, flags) : preadv(fd, parts, n, at);
}

ssize_t pwritev2(int fd, const struct iovec *parts, int n, off_t at, int flags)
{
    return flags ? REAL(pwritev2)(fd, parts, n, at, flags) : pwritev(fd, parts, n, at);
}

/* Under the names that they have where files may be larger than 2 GiB. */
int open64(const char *path, int flags, ...) __attribute__((alias("open")));
ssize_t preadv64(int fd, const struct iovec *parts, int n, off_t at) __attribute__((alias("preadv")));
ssize_t pwritev64(int fd, const struct iovec *parts, int n, off_t at) __attribute__((alias("pwritev")));
ssize_t preadv64v2(int fd, const struct iovec *parts, int n, off_t at, int flags) __attribute__((alias("preadv2")));
ssize_t pwritev64v2(int fd, const struct iovec *parts, int n, off_t at, int flags)
    __attribute__((alias("pwritev2")));
