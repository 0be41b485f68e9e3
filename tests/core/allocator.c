// The memory of torch's CPU tensors, of which the k-th block that a thread asks for is refused.
//
// torch takes each from posix_memalign; loaded before it (LD_PRELOAD), this one is found first.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stddef.h>

static __thread long asked = -1, refused;  // -1: nothing of this thread is counted

void count_from_here(long which) {
  asked = 0;
  refused = which;
}

long count_until_here(void) {
  long count = asked;
  asked = -1;
  return count;
}

int posix_memalign(void** place, size_t alignment, size_t bytes) {
  static int (*given)(void**, size_t, size_t);
  if (!given) given = (int (*)(void**, size_t, size_t))dlsym(RTLD_NEXT, "posix_memalign");
  if (asked >= 0 && ++asked == refused) return ENOMEM;
  return given(place, alignment, bytes);
}
