/* Faults that a test cannot ask a machine for: a wall clock that jumps, and file handles that a server of files has forgotten. Laid before
 * the C library of `cox` by LD_PRELOAD. Two numbers in the file that COX_TEST_SHIM names, which a test changes while `cox` runs: seconds by
 * which the wall clock is wrong, and how often all handles of files below COX_TEST_STALE have gone stale; while that is
 * negative, their server is away. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

enum { FILES = 1 << 16 };
static volatile int64_t *numbers;
static const char *below;
/* 1 + how often handles had gone stale when this one was opened; 0 for files that are not watched. */
static int64_t opened[FILES];

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("COX_TEST_SHIM");
    int file = path ? syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC, 0) : -1;
    if (file < 0) return;
    void *mapped = mmap(NULL, 16, PROT_READ, MAP_SHARED, file, 0);
    if (mapped != MAP_FAILED) numbers = mapped;
    syscall(SYS_close, file);
    below = getenv("COX_TEST_STALE");
}

static int64_t wrong_by(clockid_t clock) {
    return numbers && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) ? numbers[0] : 0;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int result = syscall(SYS_clock_gettime, clock, now);
    if (result == 0) now->tv_sec += wrong_by(clock);
    return result;
}

int gettimeofday(struct timeval *now, void *zone) {
    int result = syscall(SYS_gettimeofday, now, zone);
    if (result == 0) now->tv_sec += wrong_by(CLOCK_REALTIME);
    return result;
}

time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}

static int watched(int file, const char *path) {
    if (file >= 0 && file < FILES) opened[file] = numbers && below && path && strstr(path, below) ? 1 + (numbers[1] < 0 ? 0 : numbers[1]) : 0;
    return file;
}

static int is_stale(int file) {
    int stale = file >= 0 && file < FILES && opened[file] && numbers && opened[file] != 1 + numbers[1];
    if (stale) errno = numbers[1] < 0 ? ETIMEDOUT : ESTALE;
    return stale;
}

#define OPEN(name)                                                                                                                         \
    int name(const char *path, int flags, ...) {                                                                                           \
        va_list rest;                                                                                                                      \
        va_start(rest, flags);                                                                                                             \
        mode_t mode = va_arg(rest, mode_t);                                                                                                \
        va_end(rest);                                                                                                                      \
        return watched(syscall(SYS_openat, AT_FDCWD, path, flags, mode), path);                                                            \
    }
OPEN(open)
OPEN(open64)

int close(int file) {
    if (file >= 0 && file < FILES) opened[file] = 0;
    return syscall(SYS_close, file);
}

#define IO(type, name, number, parameters, ...)                                                                                            \
    type name parameters {                                                                                                                 \
        return is_stale(file) ? -1 : syscall(number, __VA_ARGS__);                                                                         \
    }
IO(ssize_t, read, SYS_read, (int file, void *to, size_t count), file, to, count)
IO(ssize_t, write, SYS_write, (int file, const void *from, size_t count), file, from, count)
IO(ssize_t, pread64, SYS_pread64, (int file, void *to, size_t count, off64_t at), file, to, count, at)
IO(ssize_t, pwrite64, SYS_pwrite64, (int file, const void *from, size_t count, off64_t at), file, from, count, at)
IO(off64_t, lseek64, SYS_lseek, (int file, off64_t to, int whence), file, to, whence)
IO(int, fsync, SYS_fsync, (int file), file)
IO(int, fdatasync, SYS_fdatasync, (int file), file)
IO(int, ftruncate64, SYS_ftruncate, (int file, off64_t length), file, length)
