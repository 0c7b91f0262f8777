/* Remembers how long each file was at its last fsync or fdatasync, so that a test can play a power cut:
 * SIGKILL, then every file loses what came after (tests/fault/machines.py).
 *
 * A line for each: "inode length path". The length is taken before the sync begins: what another
 * thread writes meanwhile is not promised to be on disk. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

static int side = -1;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("GUARDD_FSYNC_LOG");
    if (path) side = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    if (side < 0) abort(); /* a cut that knows of no sync would prove nothing */
}

static int noted(int fd, int (*sync)(int)) {
    struct stat file;
    int known = fstat(fd, &file) == 0 && S_ISREG(file.st_mode);
    int result = sync(fd);
    if (result == 0 && known) {
        int saved = errno;
        char link[64], path[512], line[640];
        snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
        ssize_t length = readlink(link, path, sizeof path - 1);
        path[length < 0 ? 0 : length] = 0;
        int size = snprintf(line, sizeof line, "%llu %lld %s\n", (unsigned long long)file.st_ino, (long long)file.st_size, path);
        if (write(side, line, size) != size) abort();
        errno = saved;
    }
    return result;
}

int fsync(int fd) {
    return noted(fd, (int (*)(int))dlsym(RTLD_NEXT, "fsync"));
}

int fdatasync(int fd) {
    return noted(fd, (int (*)(int))dlsym(RTLD_NEXT, "fdatasync"));
}
