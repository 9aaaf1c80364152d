// What g++ 12 and a glibc of its time take from glibc that 2.28 lacks. Hidden in each library that it is linked into (cmake/OldGlibc.cmake).
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <time.h>

// 2.32: whether libstdc++ may count references without atomic instructions. It may not.
char __libc_single_threaded = 0;

// 2.33: until then functions of other names, which were told the version of the struct.
#if defined(__x86_64__)
enum { kStatVersion = 1 };
#else
enum { kStatVersion = 0 };
#endif
extern int __xstat(int version, const char* path, struct stat* out);
extern int __lxstat(int version, const char* path, struct stat* out);
extern int __fxstat(int version, int file, struct stat* out);
int stat(const char* path, struct stat* out) { return __xstat(kStatVersion, path, out); }
int lstat(const char* path, struct stat* out) { return __lxstat(kStatVersion, path, out); }
int fstat(int file, struct stat* out) { return __fxstat(kStatVersion, file, out); }

// 2.30: a wait by a clock that nobody sets. Where glibc has it, that one; else by the clock that the variable has, in steps of a tenth of a
// second, so that somebody who sets it delays a wait by no more. A step that ends reads as a wake-up for nothing, which callers expect.
typedef int (*ClockWait)(pthread_cond_t*, pthread_mutex_t*, clockid_t, const struct timespec*);

static int64_t nanoseconds(const struct timespec* time) { return time->tv_sec * INT64_C(1000000000) + time->tv_nsec; }

int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock, const struct timespec* until) {
  static _Atomic(ClockWait) known;
  static _Atomic int looked;
  if (!looked) {
    known = (ClockWait)dlsym(RTLD_DEFAULT, "pthread_cond_clockwait");
    looked = 1;
  }
  const ClockWait real = known;
  if (real) return real(condition, mutex, clock, until);
  enum { kStep = 100000000 };
  struct timespec now, end;
  if (clock_gettime(clock, &now) != 0) return EINVAL;
  const int64_t left = nanoseconds(until) - nanoseconds(&now);
  if (left <= 0) return ETIMEDOUT;
  clock_gettime(CLOCK_REALTIME, &end);
  const int64_t at = nanoseconds(&end) + (left < kStep ? left : kStep);
  end.tv_sec = at / 1000000000;
  end.tv_nsec = at % 1000000000;
  const int status = pthread_cond_timedwait(condition, mutex, &end);
  return status == ETIMEDOUT && left > kStep ? 0 : status;
}

// 2.36: what std::random_device asks; nothing of ours makes one, but the linker takes it along.
uint32_t arc4random(void) {
  uint32_t value = 0;
  while (getrandom(&value, sizeof value, 0) != sizeof value) {}
  return value;
}
