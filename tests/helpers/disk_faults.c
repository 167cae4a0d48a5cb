/* Count the calls that change the disk below a folder, and fail or kill at a chosen one.
 *
 * Loaded with LD_PRELOAD. $IMAGEMILL_FAULTS names a file of `struct control` that every process of a command maps;
 * tests/helpers/disk_faults.py writes it. System calls are made directly, so that nothing is looked up at a fault.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum mode { COUNT, KILL, ENOSPC_FROM, EIO_ONCE };
enum kind { TAKES_SPACE, NAMES, FREES }; /* a full disk fails the first, a call that names only at the fault itself */

struct control {
    int64_t mode, number, count, counts[3]; /* of the history, the ledger, and all else */
    char call[32], path[992], folder[1024], history[1024], ledger[1024];
    int64_t from; /* 0: all are counted; 1: not the history; 2: neither history nor ledger */
};

static struct control *control;

__attribute__((constructor)) static void map_control(void) {
    const char *name = getenv("IMAGEMILL_FAULTS");
    int handle = name ? syscall(SYS_openat, AT_FDCWD, name, O_RDWR | O_CLOEXEC, 0) : -1;
    if (handle < 0) return;
    void *at = mmap(NULL, sizeof(struct control), PROT_READ | PROT_WRITE, MAP_SHARED, handle, 0);
    close(handle);
    if (at != MAP_FAILED) control = at;
}

static void link_of(int fd, char *out, size_t size) {
    char name[64];
    if (fd == AT_FDCWD) strcpy(name, "/proc/self/cwd");
    else snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, name, out, size - 1);
    out[length < 0 ? 0 : length] = 0;
}

/* Full path of a name relative to a folder's descriptor, or of a descriptor itself (name NULL). */
static void full_path(int fd, const char *name, char *out, size_t size) {
    out[0] = 0;
    if (name && name[0] == '/') { snprintf(out, size, "%s", name); return; }
    link_of(fd, out, size);
    size_t length = strlen(out);
    if (name) snprintf(out + length, size - length, "/%s", name);
}

static int is_below(const char *path, const char *folder) {
    size_t length = strlen(folder);
    return length && !strncmp(path, folder, length) && (!path[length] || path[length] == '/');
}

static void die(void) {
    kill(0, SIGKILL);
    for (;;) pause();
}

/* Count one call. Returns 0 to make it, an errno to fail with, or -1 to be killed. */
static int step(enum kind kind, const char *call, int fd, const char *name) {
    char path[4096];
    if (!control || !control->folder[0]) return 0;
    full_path(fd, name, path, sizeof path);
    if (!is_below(path, control->folder)) return 0;
    int room = is_below(path, control->history) ? 0 : strncmp(path, control->ledger, strlen(control->ledger)) ? 2 : 1;
    __atomic_add_fetch(&control->counts[room], 1, __ATOMIC_SEQ_CST);
    if (room < control->from) return 0;
    int64_t n = __atomic_add_fetch(&control->count, 1, __ATOMIC_SEQ_CST), at = control->number;
    if (control->mode == COUNT || n < at) return 0;
    if (n == at) {
        snprintf(control->call, sizeof control->call, "%s", call);
        snprintf(control->path, sizeof control->path, "%.900s", path + strlen(control->folder));
    }
    if (control->mode == KILL) return -1;
    if (control->mode == EIO_ONCE) return n == at ? EIO : 0;
    return kind == TAKES_SPACE || (kind == NAMES && n == at) ? ENOSPC : 0;
}

#define GUARD(kind, fd, name)                            \
    do {                                                 \
        int fault = step(kind, __func__, fd, name);      \
        if (fault < 0) die();                            \
        if (fault) { errno = fault; return -1; }         \
    } while (0)

static int open_at(const char *call, int fd, const char *name, int flags, mode_t mode) {
    int creates = (flags & O_TMPFILE) == O_TMPFILE;
    if ((flags & O_CREAT) && syscall(SYS_faccessat, fd, name, F_OK)) creates = 1;
    if (creates || (flags & O_TRUNC)) {
        int fault = step(creates ? TAKES_SPACE : FREES, call, fd, name);
        if (fault < 0) die();
        if (fault) { errno = fault; return -1; }
    }
    return syscall(SYS_openat, fd, name, flags, mode);
}

#define MODE_OF(flags)                                   \
    mode_t mode = 0;                                     \
    if (flags & (O_CREAT | O_TMPFILE)) {                 \
        va_list list;                                    \
        va_start(list, flags);                           \
        mode = va_arg(list, mode_t);                     \
        va_end(list);                                    \
    }

int open(const char *name, int flags, ...) { MODE_OF(flags) return open_at("open", AT_FDCWD, name, flags, mode); }
int open64(const char *name, int flags, ...) { MODE_OF(flags) return open_at("open", AT_FDCWD, name, flags, mode); }
int openat(int fd, const char *name, int flags, ...) { MODE_OF(flags) return open_at("openat", fd, name, flags, mode); }
int openat64(int fd, const char *name, int flags, ...) { MODE_OF(flags) return open_at("openat", fd, name, flags, mode); }
int creat(const char *name, mode_t mode) { return open_at("creat", AT_FDCWD, name, O_CREAT | O_WRONLY | O_TRUNC, mode); }

/* A killed write is torn: the first half of it reaches the disk. */
#define TORN(fault, half) do { if (fault < 0) { half; die(); } if (fault) { errno = fault; return -1; } } while (0)

ssize_t write(int fd, const void *data, size_t size) {
    int fault = step(TAKES_SPACE, __func__, fd, NULL);
    TORN(fault, syscall(SYS_write, fd, data, size / 2));
    return syscall(SYS_write, fd, data, size);
}
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t offset) {
    int fault = step(TAKES_SPACE, __func__, fd, NULL);
    TORN(fault, syscall(SYS_pwrite64, fd, data, size / 2, offset));
    return syscall(SYS_pwrite64, fd, data, size, offset);
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) { return pwrite64(fd, data, size, offset); }
ssize_t writev(int fd, const struct iovec *parts, int count) {
    int fault = step(TAKES_SPACE, __func__, fd, NULL);
    TORN(fault, syscall(SYS_writev, fd, parts, count / 2));
    return syscall(SYS_writev, fd, parts, count);
}
ssize_t copy_file_range(int in, off64_t *from, int out, off64_t *to, size_t size, unsigned flags) {
    int fault = step(TAKES_SPACE, __func__, out, NULL);
    TORN(fault, syscall(SYS_copy_file_range, in, from, out, to, size / 2, flags));
    return syscall(SYS_copy_file_range, in, from, out, to, size, flags);
}
ssize_t sendfile64(int out, int in, off64_t *offset, size_t size) {
    int fault = step(TAKES_SPACE, __func__, out, NULL);
    TORN(fault, syscall(SYS_sendfile, out, in, offset, size / 2));
    return syscall(SYS_sendfile, out, in, offset, size);
}
ssize_t sendfile(int out, int in, off_t *offset, size_t size) { return sendfile64(out, in, offset, size); }

int renameat2(int from_fd, const char *from, int fd, const char *name, unsigned flags) {
    GUARD(NAMES, fd, name);
    return syscall(SYS_renameat2, from_fd, from, fd, name, flags);
}
int renameat(int from_fd, const char *from, int fd, const char *name) { return renameat2(from_fd, from, fd, name, 0); }
int rename(const char *from, const char *name) { return renameat2(AT_FDCWD, from, AT_FDCWD, name, 0); }
int linkat(int from_fd, const char *from, int fd, const char *name, int flags) {
    GUARD(TAKES_SPACE, fd, name);
    return syscall(SYS_linkat, from_fd, from, fd, name, flags);
}
int link(const char *from, const char *name) { return linkat(AT_FDCWD, from, AT_FDCWD, name, 0); }
int symlinkat(const char *target, int fd, const char *name) {
    GUARD(TAKES_SPACE, fd, name);
    return syscall(SYS_symlinkat, target, fd, name);
}
int symlink(const char *target, const char *name) { return symlinkat(target, AT_FDCWD, name); }
int unlinkat(int fd, const char *name, int flags) {
    GUARD(FREES, fd, name);
    return syscall(SYS_unlinkat, fd, name, flags);
}
int unlink(const char *name) { return unlinkat(AT_FDCWD, name, 0); }
int rmdir(const char *name) { return unlinkat(AT_FDCWD, name, AT_REMOVEDIR); }
int mkdirat(int fd, const char *name, mode_t mode) {
    GUARD(TAKES_SPACE, fd, name);
    return syscall(SYS_mkdirat, fd, name, mode);
}
int mkdir(const char *name, mode_t mode) { return mkdirat(AT_FDCWD, name, mode); }
int truncate64(const char *name, off64_t size) {
    GUARD(NAMES, AT_FDCWD, name);
    return syscall(SYS_truncate, name, size);
}
int truncate(const char *name, off_t size) { return truncate64(name, size); }
int ftruncate64(int fd, off64_t size) {
    GUARD(NAMES, fd, NULL);
    return syscall(SYS_ftruncate, fd, size);
}
int ftruncate(int fd, off_t size) { return ftruncate64(fd, size); }
int fallocate64(int fd, int mode, off64_t offset, off64_t size) {
    GUARD(TAKES_SPACE, fd, NULL);
    return syscall(SYS_fallocate, fd, mode, offset, size);
}
int fallocate(int fd, int mode, off_t offset, off_t size) { return fallocate64(fd, mode, offset, size); }
int posix_fallocate64(int fd, off64_t offset, off64_t size) { return fallocate64(fd, 0, offset, size) ? errno : 0; }
int posix_fallocate(int fd, off_t offset, off_t size) { return posix_fallocate64(fd, offset, size); }
int fsync(int fd) {
    GUARD(NAMES, fd, NULL);
    return syscall(SYS_fsync, fd);
}
int fdatasync(int fd) {
    GUARD(NAMES, fd, NULL);
    return syscall(SYS_fdatasync, fd);
}
