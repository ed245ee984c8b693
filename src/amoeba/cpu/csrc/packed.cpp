// Frozen weights packed once, in bf16 or int8, in the layout of packed_layout.h; what multiplies them is node.cpp. The caller
// checked its tensors.
#include <cerrno>

#include "jobs.h"
#include "pack.h"
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

using namespace amoeba;

extern "C" {

// The best path that was compiled in.
int amoeba_packed_best_path() {
#if defined(AMOEBA_AMX)
  return AMX;
#elif defined(AMOEBA_AVX512)
  return AVX512;
#else
  return GENERIC;
#endif
}

// Linux gives a process the tile registers only when it asks: 0, or the errno of the refusal.
int amoeba_request_amx() {
#ifdef AMOEBA_AMX
  constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
  return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0 ? 0 : errno;
#else
  return ENOSYS;
#endif
}

void amoeba_ask_for_huge_pages(void* data, int64_t bytes) { ask_for_huge_pages(data, bytes); }

// Bytes of one packed expert.
int64_t amoeba_packed_bytes(int int8, int64_t columns, int64_t depth) {
  return packed_words(columns, depth, int8 ? Int8::PER_WORD : Bf16::PER_WORD) * int64_t(sizeof(uint32_t));
}

// weight[e][column][k] at any strides, fp32 or bf16. scale and sum (experts x columns) are written for int8 only.
void amoeba_pack(int int8, int is_float, int64_t experts, int64_t columns, int64_t depth, const void* weight,
                 int64_t stride_e, int64_t stride_column, int64_t stride_k, void* packed, float* scale, int32_t* sum,
                 int threads) {
  const int64_t bytes = amoeba_packed_bytes(int8, columns, depth);
  run_jobs(experts, threads, [&](int64_t e) {
    const auto pack = [&](const auto* source) {
      source += e * stride_e;
      char* out = static_cast<char*>(packed) + e * bytes;
      if (int8)
        pack_int8(columns, depth, source, stride_column, stride_k, reinterpret_cast<int8_t*>(out), scale + e * columns,
                  sum + e * columns);
      else
        pack_bf16(columns, depth, source, stride_column, stride_k, reinterpret_cast<uint16_t*>(out));
    };
    if (is_float)
      pack(static_cast<const float*>(weight));
    else
      pack(static_cast<const uint16_t*>(weight));
  });
}

// The same values packed for the product along the other dimension; sum (experts x depth) is written for int8 only.
void amoeba_pack_transposed(int int8, int64_t experts, int64_t columns, int64_t depth, const void* packed,
                            void* transposed, int32_t* sum, int threads) {
  const int64_t from = amoeba_packed_bytes(int8, columns, depth), to = amoeba_packed_bytes(int8, depth, columns);
  run_jobs(experts, threads, [&](int64_t e) {
    const char* source = static_cast<const char*>(packed) + e * from;
    char* out = static_cast<char*>(transposed) + e * to;
    const auto* words = reinterpret_cast<const uint32_t*>(source);
    if (int8)
      transpose_int8(columns, depth, words, reinterpret_cast<uint32_t*>(out), sum + e * depth);
    else
      transpose_bf16(columns, depth, words, reinterpret_cast<uint32_t*>(out));
  });
}

}  // extern "C"
