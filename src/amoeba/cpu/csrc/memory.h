// Memory in whole pages, in huge ones where it is large, and on which NUMA node it is.
#pragma once
#include <cstdint>
#include <cstdlib>
#ifdef __linux__
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
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

// Of one NUMA node; where that is full, memory comes from another. The system calls have no other header.
#ifdef __linux__
struct NodeMask {
  static constexpr int PREFERRED = 1, MOVE = 2;  // MPOL_PREFERRED, MPOL_MF_MOVE
  static constexpr int WORD = 8 * sizeof(unsigned long), NODES = 1024;
  unsigned long bits[NODES / WORD] = {};
  explicit NodeMask(int node) { bits[node / WORD] = 1ul << node % WORD; }
};
#endif

// Memory that this thread is the first to touch from now on, whatever policy it was started with. False: refused.
inline bool prefer_memory_of(int node) {
#ifdef __linux__
  if (node < 0 || node >= NodeMask::NODES) return false;
  const NodeMask mask(node);
  return syscall(SYS_set_mempolicy, NodeMask::PREFERRED, mask.bits, NodeMask::NODES + 1ul) == 0;
#else
  return (void)node, false;
#endif
}

// The whole pages of this memory: those that are elsewhere are moved.
inline bool move_memory_to(int node, void* data, int64_t bytes) {
#ifdef __linux__
  if (node < 0 || node >= NodeMask::NODES) return false;
  const NodeMask mask(node);
  const uintptr_t page = uintptr_t(sysconf(_SC_PAGESIZE));
  const uintptr_t begin = (uintptr_t(data) + page - 1) / page * page, end = (uintptr_t(data) + bytes) / page * page;
  return begin >= end || syscall(SYS_mbind, begin, end - begin, NodeMask::PREFERRED, mask.bits, NodeMask::NODES + 1ul,
                                 NodeMask::MOVE) == 0;
#else
  return (void)node, (void)data, (void)bytes, false;
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
