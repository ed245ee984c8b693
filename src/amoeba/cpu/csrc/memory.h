// Memory in whole pages, in huge ones where it is large.
#pragma once
#include <cstdint>
#include <cstdlib>
#ifdef __linux__
#include <sys/mman.h>
#endif

namespace [[gnu::visibility("hidden")]] amoeba {

constexpr size_t HUGE_PAGE = 2 << 20;

inline void ask_for_huge_pages(void* data, int64_t bytes) {  // fewer misses of the TLB; where it is refused, nothing is lost
#ifdef __linux__
  const uintptr_t begin = (uintptr_t(data) + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
  const uintptr_t end = (uintptr_t(data) + bytes) / HUGE_PAGE * HUGE_PAGE;
  if (end > begin) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)data, (void)bytes;
#endif
}

inline size_t whole_pages(size_t bytes) {
  const size_t page = bytes < HUGE_PAGE / 4 ? 4096 : HUGE_PAGE;
  return (bytes + page - 1) / page * page;
}

template <class T>
struct Buffer {  // grows, never shrinks
  T* data = nullptr;
  size_t size = 0;
  T* get(size_t count) {
    if (count > size) {
      std::free(data);
      const size_t bytes = whole_pages(count * sizeof(T));
      size = bytes / sizeof(T);
      data = static_cast<T*>(std::aligned_alloc(bytes < HUGE_PAGE ? 4096 : HUGE_PAGE, bytes));
      if (!data) std::abort();
      ask_for_huge_pages(data, int64_t(bytes));
    }
    return data;
  }
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { std::free(data); }
};

}  // namespace amoeba
