// Included before all else into libraries that a wheel carries. What GCC 12 would take from glibc and libstdc++ is named
// as in glibc 2.28 and GCC 8, which PyTorch's own wheels need too; dev/wheel.py checks the result.
#pragma once

#if defined(__linux__) && !defined(__clang__)
#include <new>

#ifdef __x86_64__
__asm__(".symver pthread_setaffinity_np, pthread_setaffinity_np@GLIBC_2.3.4");
#elif defined(__aarch64__)
__asm__(".symver pthread_setaffinity_np, pthread_setaffinity_np@GLIBC_2.17");
#endif
__asm__(".symver _ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE, "
        "_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE@GLIBCXX_3.4.11");

namespace std {
[[gnu::weak, gnu::visibility("hidden"), noreturn]] void __throw_bad_array_new_length() { throw bad_alloc(); }
}  // namespace std
#endif
