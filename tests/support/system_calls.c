/* Counts the system calls on what lies in one folder, makes one of them fail, or writes them down.

   Preloaded before libc (LD_PRELOAD).  Nothing happens before begin_calls() is called, which Python does through ctypes.
   A call belongs to the folder if its path does; that of a handle is what /proc/self/fd says. */

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

/* Kinds of calls: a mask of those that count. */
enum { ASKS = 1, READS = 2, CREATES = 4, WRITES = 8, CHANGES = 16, SYNCS = 32 };

/* What happens at the call: nothing, an error once, an error at it and at all that follow, half of it, half of it and
   the end of the process, that end before it; or somebody cuts the file, or changes a byte of it, or sends a signal. */
enum { NOTHING, ONCE, FROM_THEN_ON, HALF, TORN, KILLED, CUT, CHANGED, SIGNALLED };

static char folder[PATH_MAX];
static size_t folder_length;
static int mask, how, error_number, log_handle = -1;
static long strike_at;
static atomic_long calls, calls_of[6];
static pthread_mutex_t order = PTHREAD_MUTEX_INITIALIZER;

void begin_calls(const char *path, int of_kinds, long at, int what, int error, int log) {
    snprintf(folder, sizeof folder, "%s", path);
    mask = of_kinds, how = what, error_number = error, log_handle = log, strike_at = at, calls = 0;
    memset(calls_of, 0, sizeof calls_of);
    folder_length = strlen(folder);
}

/* How many there were, of each kind. */
void end_calls(long *counts) {
    folder_length = 0;
    for (int bit = 0; bit < 6; bit++) counts[bit] = calls_of[bit];
}

static const char *path_at(int directory, const char *path, char *space) {
    if (path && (path[0] == '/' || directory == AT_FDCWD)) return path;
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", directory);
    ssize_t length = readlink(link, space, PATH_MAX - 1);
    if (length < 0) return "";
    if (path && path[0]) snprintf(space + length, PATH_MAX - length, "/%s", path);
    else space[length] = 0;
    return space;
}

static int inside(const char *path) { return folder_length && !strncmp(path, folder, folder_length); }

static void end_here(void) {
    kill(getpid(), SIGKILL);
    for (;;) pause();
}

#define REAL_AS(name, as) \
    static __typeof__(name) *as; \
    if (!as) as = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)
#define REAL(name) REAL_AS(name, real)

static void change(const char *path) {
    REAL(open);
    REAL_AS(pwrite64, put);
    REAL_AS(pread64, get);
    struct stat64 status;
    int handle = real(path, O_RDWR);
    if (handle < 0) return;
    if (!syscall(SYS_fstat, handle, &status) && status.st_size) {
        char byte;
        if (how == CUT) syscall(SYS_ftruncate, handle, status.st_size / 2);
        else if (get(handle, &byte, 1, status.st_size / 2) == 1) byte ^= 4, put(handle, &byte, 1, status.st_size / 2);
    }
    close(handle);
}

/* 0: go on; 1: fail; 2: do half of it, where it has halves. */
static int struck(int kind, const char *path) {
    if (!(mask & kind) || !inside(path)) return 0;
    long number = ++calls;
    calls_of[__builtin_ctz(kind)]++;
    if (how == NOTHING || !strike_at || (how == FROM_THEN_ON ? number < strike_at : number != strike_at)) return 0;
    if (how == KILLED) end_here();
    if (how == HALF || how == TORN) return 2;
    if (how == CUT || how == CHANGED) return change(path), 0;
    if (how == SIGNALLED) return raise(error_number), 0;
    errno = error_number;
    return 1;
}

static void written_down(const char *call, const char *path, const char *other, long long number, const void *data,
                         size_t length) {
    if (log_handle < 0 || !(inside(path) || inside(other))) return;
    int saved = errno;
    char head[2 * PATH_MAX + 128];
    int size = snprintf(head, sizeof head, "%s\t%s\t%s\t%lld\t%zu\n", call, path, other, number, length);
    struct iovec parts[3] = {{head, size}, {(void *)data, length}, {"\n", 1}};
    if (writev(log_handle, parts, 3) < 0) end_here();
    errno = saved;
}

/* A call that fails, or happens and is written down, in one order for all threads. */
#define DONE(kind, path, call, note) \
    if (struck(kind, path) == 1) return -1; \
    if (log_handle < 0) return call; \
    pthread_mutex_lock(&order); \
    __typeof__(call) result = call; \
    if (result >= 0) note; \
    pthread_mutex_unlock(&order); \
    return result

static int makes(int flags) { return flags & (O_CREAT | O_TRUNC) ? CREATES : ASKS; }

#define OPENS(name, before, directory, ...) \
    int name(before const char *path, int flags, ...) { \
        REAL(name); \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
        va_end(rest); \
        char space[PATH_MAX]; \
        const char *full = path_at(directory, path, space); \
        DONE(makes(flags), full, real(__VA_ARGS__, flags, mode), \
             if (makes(flags) == CREATES) written_down("open", full, "", flags & O_TRUNC, "", 0)); \
    }
#define NONE
#define COMMA ,
OPENS(open, NONE, AT_FDCWD, path)
OPENS(open64, NONE, AT_FDCWD, path)
OPENS(openat, int directory COMMA, directory, directory, path)
OPENS(openat64, int directory COMMA, directory, directory, path)

#define ONE_PATH(name, kind, parameters, directory, arguments, note) \
    int name parameters { \
        REAL(name); \
        char space[PATH_MAX]; \
        const char *full = path_at(directory, path, space); \
        DONE(kind, full, real arguments, note); \
    }
#define NOTED(call) written_down(call, full, "", 0, "", 0)
ONE_PATH(mkdir, CREATES, (const char *path, mode_t mode), AT_FDCWD, (path, mode), NOTED("mkdir"))
ONE_PATH(mkdirat, CREATES, (int at, const char *path, mode_t mode), at, (at, path, mode), NOTED("mkdir"))
ONE_PATH(rmdir, CHANGES, (const char *path), AT_FDCWD, (path), NOTED("unlink"))
ONE_PATH(unlink, CHANGES, (const char *path), AT_FDCWD, (path), NOTED("unlink"))
ONE_PATH(unlinkat, CHANGES, (int at, const char *path, int flags), at, (at, path, flags), NOTED("unlink"))
ONE_PATH(stat64, ASKS, (const char *path, struct stat64 *to), AT_FDCWD, (path, to), (void)0)
ONE_PATH(lstat64, ASKS, (const char *path, struct stat64 *to), AT_FDCWD, (path, to), (void)0)
ONE_PATH(fstatat64, ASKS, (int at, const char *path, struct stat64 *to, int flags), at, (at, path, to, flags), (void)0)

#define TWO_PATHS(name, parameters, first, second, arguments, call) \
    int name parameters { \
        REAL(name); \
        char space[PATH_MAX], more[PATH_MAX]; \
        const char *from = path_at(first, path, space), *to = path_at(second, other, more); \
        DONE(CREATES, to, real arguments, written_down(call, from, to, 0, "", 0)); \
    }
TWO_PATHS(rename, (const char *path, const char *other), AT_FDCWD, AT_FDCWD, (path, other), "rename")
TWO_PATHS(renameat, (int a, const char *path, int b, const char *other), a, b, (a, path, b, other), "rename")
TWO_PATHS(link, (const char *path, const char *other), AT_FDCWD, AT_FDCWD, (path, other), "link")
TWO_PATHS(linkat, (int a, const char *path, int b, const char *other, int flags), a, b, (a, path, b, other, flags),
          "link")

#define HANDLE(name, kind, parameters, arguments, note) \
    int name parameters { \
        REAL(name); \
        if (!folder_length) return real arguments; \
        char space[PATH_MAX]; \
        const char *full = path_at(handle, NULL, space); \
        DONE(kind, full, real arguments, note); \
    }
HANDLE(fsync, SYNCS, (int handle), (handle), NOTED("sync"))
HANDLE(fdatasync, SYNCS, (int handle), (handle), NOTED("sync"))
HANDLE(ftruncate64, WRITES, (int handle, off64_t size), (handle, size), written_down("cut", full, "", size, "", 0))
HANDLE(fstat64, ASKS, (int handle, struct stat64 *to), (handle, to), (void)0)

int posix_fallocate64(int handle, off64_t offset, off64_t length) { /* gives the error, and does not set it */
    REAL(posix_fallocate64);
    char space[PATH_MAX];
    const char *full = folder_length ? path_at(handle, NULL, space) : "";
    if (struck(WRITES, full) == 1) return error_number;
    int result = real(handle, offset, length);
    if (!result) written_down("extend", full, "", offset + length, "", 0);
    return result;
}

/* Reads and writes, of which half may happen. */
#define MOVES(name, kind, parameters, arguments, least, halved, note) \
    ssize_t name parameters { \
        REAL(name); \
        if (!folder_length || handle == log_handle) return real arguments; \
        char space[PATH_MAX]; \
        const char *full = path_at(handle, NULL, space); \
        int strike = struck(kind, full); \
        if (strike == 1) return -1; \
        if (strike == 2 && (long)count > least) { \
            halved; \
            if (how == TORN) { \
                if (real arguments < 0) return -1; \
                end_here(); \
            } \
        } \
        if (kind == READS || log_handle < 0) return real arguments; \
        pthread_mutex_lock(&order); \
        ssize_t result = real arguments; \
        if (result > 0) note; \
        pthread_mutex_unlock(&order); \
        return result; \
    }
#define AT(offset) written_down("write", full, "", offset, data, result)
MOVES(read, READS, (int handle, void *data, size_t count), (handle, data, count), 1, count /= 2, (void)0)
MOVES(pread64, READS, (int handle, void *data, size_t count, off64_t offset), (handle, data, count, offset),
      1, count /= 2, (void)0)
MOVES(preadv64v2, READS, (int handle, const struct iovec *parts, int count, off64_t offset, int flags),
      (handle, parts, count, offset, flags), 0,
      static __thread struct iovec half; half.iov_base = parts[0].iov_base; half.iov_len = parts[0].iov_len / 2;
      if (half.iov_len) parts = &half COMMA count = 1, (void)0)
MOVES(write, WRITES, (int handle, const void *data, size_t count), (handle, data, count), 1, count /= 2,
      AT(lseek(handle, 0, SEEK_CUR) - result))
MOVES(pwrite64, WRITES, (int handle, const void *data, size_t count, off64_t offset), (handle, data, count, offset),
      1, count /= 2, AT(offset))

DIR *opendir(const char *path) {
    REAL(opendir);
    return struck(ASKS, path) == 1 ? NULL : real(path);
}
