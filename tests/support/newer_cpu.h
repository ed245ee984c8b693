// Instructions of AMX, AVX512-BF16 and AVX512-VBMI that this CPU does not have: newer_cpu.py has the compiler include
// this file before all else. Numbers are those of Intel's manual (operation of TDPBF16PS, VDPBF16PS and the others), with
// its order of sums and its treatment of denormals. What a CPU or Linux answers with a signal ends the process with a
// message, which pytest shows with -s. Unlike a real one, a tile's instruction tells the compiler what memory it reads.
//
// Where the compiler is told of a CPU with AMX, or without AVX-512 and VNNI, this changes nothing.
#pragma once
#if defined(__AVX512VNNI__) && !defined(__AMX_TILE__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace [[gnu::visibility("hidden")]] newer_cpu {

inline constexpr unsigned FLUSHING = 0x9fc0;  // MXCSR: denormals are zeros, in and out; to nearest even; no traps

[[noreturn]] inline void die(const char* why) {
  std::fprintf(stderr, "newer_cpu.h: %s\n", why);
  std::abort();
}

// ------------------------------------------------------------------------------------------------------ AVX512-BF16

#ifndef __AVX512BF16__
// The halves with odd numbers first, then the even ones, each by a fused product.
inline __m512 dpbf16(__m512 sum, __m512bh a, __m512bh b) {
  const __m512i odd = _mm512_set1_epi32(int(0xffff0000u));
  const __m512i a1 = _mm512_and_si512((__m512i)a, odd), b1 = _mm512_and_si512((__m512i)b, odd);
  const __m512i a0 = _mm512_slli_epi32((__m512i)a, 16), b0 = _mm512_slli_epi32((__m512i)b, 16);
  unsigned before;
  asm("vstmxcsr %[before]\n\tvldmxcsr %[flushing]\n\t"
      "vfmadd231ps %[a1], %[b1], %[sum]\n\tvfmadd231ps %[a0], %[b0], %[sum]\n\tvldmxcsr %[before]"
      : [sum] "+&v"(sum), [before] "=m"(before)
      : [a1] "v"(a1), [b1] "v"(b1), [a0] "v"(a0), [b0] "v"(b0), [flushing] "m"(FLUSHING));
  return sum;
}
inline __m256i to_bf16(__m512 v) {  // denormals become zeros, a NaN keeps its upper bits and is quiet
  const __m512i bits = (__m512i)v, top = _mm512_srli_epi32(bits, 16);
  const __m512i odd = _mm512_and_si512(top, _mm512_set1_epi32(1));
  const __m512i bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
  const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, bias), 16);
  const __mmask16 nan = _mm512_fpclass_ps_mask(v, 0x81), denormal = _mm512_fpclass_ps_mask(v, 0x20);
  __m512i result = _mm512_mask_or_epi32(rounded, nan, top, _mm512_set1_epi32(0x40));
  result = _mm512_mask_and_epi32(result, denormal, top, _mm512_set1_epi32(0x8000));
  return _mm512_cvtepi32_epi16(result);
}
inline __m512bh to_bf16(__m512 upper, __m512 lower) {
  return (__m512bh)_mm512_inserti64x4(_mm512_castsi256_si512(to_bf16(lower)), to_bf16(upper), 1);
}
#endif

// ------------------------------------------------------------------------------------------------------ AVX512-VBMI

#ifndef __AVX512VBMI__
[[gnu::noinline]] inline __m512i permute_bytes(const __m512i* tables, unsigned mask, __m512i index) {
  alignas(64) uint8_t from[128], at[64], to[64];
  std::memcpy(from, tables, mask + 1);
  std::memcpy(at, &index, 64);
  for (int i = 0; i < 64; ++i) to[i] = from[at[i] & mask];
  return _mm512_load_si512(to);
}
inline __m512i permute_bytes(__m512i index, __m512i table) { return permute_bytes(&table, 63, index); }
inline __m512i permute_bytes_of_two(__m512i first, __m512i index, __m512i second) {
  const __m512i tables[2] = {first, second};
  return permute_bytes(tables, 127, index);
}
[[gnu::noinline]] inline __m512i multishift(__m512i control, __m512i data) {
  alignas(64) uint8_t shift[64], to[64];
  uint64_t from[8];
  std::memcpy(shift, &control, 64);
  std::memcpy(from, &data, 64);
  for (int i = 0; i < 64; ++i) {
    const uint64_t word = from[i / 8];
    const int by = shift[i] & 63;
    to[i] = uint8_t(by ? word >> by | word << (64 - by) : word);
  }
  return _mm512_load_si512(to);
}
#endif

// -------------------------------------------------------------------------------------------------------------- AMX

constexpr const char* PERMITTED = "NEWER_CPU_TILES_ARE_PERMITTED";  // a process has more than one library

template <class... Arguments>
long system_call(long number, Arguments... arguments) {
  if (number != SYS_arch_prctl) return ::syscall(number, arguments...);
  const long asked[] = {long(arguments)..., 0, 0};
  if (asked[0] != 0x1023 || asked[1] != 18) die("not a request for the data of tiles");
  return ::setenv(PERMITTED, "1", 1);
}

struct Shapes {
  uint8_t palette, start_row, reserved[14];
  uint16_t bytes_per_row[16];
  uint8_t rows[16];
};
struct Thread {
  Shapes shapes;
  alignas(64) uint8_t tile[8][16][64];
};
inline thread_local Thread here;

inline uint8_t (*valid(int t))[64] {
  const Shapes& s = here.shapes;
  if (s.palette != 1 || t < 0 || t > 7 || !s.rows[t]) die("a tile is used that is not configured in this thread");
  return here.tile[t];
}
[[gnu::noinline]] inline void configure(const void* from) {
  Shapes s;
  std::memcpy(&s, from, sizeof(s));
  if (!std::getenv(PERMITTED)) die("tiles are configured before the process asked Linux for them");
  bool good = s.palette == 1 && !s.start_row;
  for (const uint8_t zero : s.reserved) good &= !zero;
  for (int t = 0; t < 16; ++t)
    good &= t < 8 ? s.bytes_per_row[t] <= 64 && s.bytes_per_row[t] % 4 == 0 && s.rows[t] <= 16 &&
                        !s.bytes_per_row[t] == !s.rows[t]
                  : !s.bytes_per_row[t] && !s.rows[t];
  if (!good) die("LDTILECFG refuses these shapes");
  std::memset(&here, 0, sizeof(here));
  here.shapes = s;
}
inline void release() { std::memset(&here, 0, sizeof(here)); }
inline void zero(int t) { std::memset(valid(t), 0, 16 * 64); }
[[gnu::noinline]] inline void load(int t, const void* base, long stride) {
  auto* tile = valid(t);
  std::memset(tile, 0, 16 * 64);
  for (int r = 0; r < here.shapes.rows[t]; ++r)
    std::memcpy(tile[r], static_cast<const char*>(base) + r * stride, here.shapes.bytes_per_row[t]);
}
[[gnu::noinline]] inline void store(int t, void* base, long stride) {
  auto* tile = valid(t);
  for (int r = 0; r < here.shapes.rows[t]; ++r)
    std::memcpy(static_cast<char*>(base) + r * stride, tile[r], here.shapes.bytes_per_row[t]);
}

// Three tiles that fit each other, and the rows and steps of depth of their product.
struct Product {
  uint8_t (*sum)[64], (*a)[64], (*b)[64];
  int rows, steps;
};
inline Product product(int sum, int a, int b) {
  const Shapes& s = here.shapes;
  const Product found = {valid(sum), valid(a), valid(b), s.rows[sum], s.rows[b]};
  if (sum == a || sum == b || a == b || s.rows[sum] != s.rows[a] || s.bytes_per_row[a] != 4 * s.rows[b] ||
      s.bytes_per_row[sum] != s.bytes_per_row[b])
    die("a product of tiles that do not fit");
  return found;
}
// The halves with even numbers and the odd ones are summed apart over the depth of a tile, then added to each other and
// to the result. What is past the columns of a tile is zero.
[[gnu::noinline]] inline void bf16_sums(const Product& of) {
  const __m512i odd = _mm512_set1_epi32(int(0xffff0000u));
  for (int r = 0; r < of.rows; ++r) {
    __m512 sums[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    for (int k = 0; k < of.steps; ++k) {
      int word;
      std::memcpy(&word, of.a[r] + 4 * k, 4);
      const __m512i a = _mm512_set1_epi32(word), b = _mm512_load_si512(of.b[k]);
      sums[0] = _mm512_fmadd_ps((__m512)_mm512_slli_epi32(a, 16), (__m512)_mm512_slli_epi32(b, 16), sums[0]);
      sums[1] = _mm512_fmadd_ps((__m512)_mm512_and_si512(a, odd), (__m512)_mm512_and_si512(b, odd), sums[1]);
    }
    const __m512 both = _mm512_add_ps(sums[0], sums[1]);
    _mm512_store_ps(of.sum[r], _mm512_add_ps(_mm512_load_ps(of.sum[r]), both));
  }
}
[[gnu::noinline]] inline void dpbf16_tiles(int sum, int a, int b) {
  const Product of = product(sum, a, b);
  const unsigned before = _mm_getcsr();
  _mm_setcsr(FLUSHING);
  bf16_sums(of);
  _mm_setcsr(before);
}
[[gnu::noinline]] inline void dpbusd_tiles(int sum, int a, int b) {  // bytes of a without sign, of b with it
  const Product of = product(sum, a, b);
  for (int r = 0; r < of.rows; ++r)
    for (int k = 0; k < of.steps; ++k) {
      int word;
      std::memcpy(&word, of.a[r] + 4 * k, 4);
      const __m512i columns = _mm512_load_si512(of.b[k]), before = _mm512_load_si512(of.sum[r]);
      _mm512_store_si512(of.sum[r], _mm512_dpbusd_epi32(before, _mm512_set1_epi32(word), columns));
    }
}

}  // namespace newer_cpu

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_dpbusd
#define _tile_loadconfig newer_cpu::configure
#define _tile_release newer_cpu::release
#define _tile_zero newer_cpu::zero
#define _tile_loadd newer_cpu::load
#define _tile_stored newer_cpu::store
#define _tile_dpbf16ps newer_cpu::dpbf16_tiles
#define _tile_dpbusd newer_cpu::dpbusd_tiles
#define syscall newer_cpu::system_call
#define __AMX_TILE__ 1
#define __AMX_INT8__ 1
#define __AMX_BF16__ 1

#ifndef __AVX512BF16__
#define __AVX512BF16__ 1
#define _mm512_dpbf16_ps newer_cpu::dpbf16
#define _mm512_cvtneps_pbh(V) ((__m256bh)newer_cpu::to_bf16(V))
#define _mm512_cvtne2ps_pbh newer_cpu::to_bf16
#endif
#ifndef __AVX512VBMI__
#define __AVX512VBMI__ 1
#define _mm512_permutexvar_epi8 newer_cpu::permute_bytes
#define _mm512_permutex2var_epi8 newer_cpu::permute_bytes_of_two
#define _mm512_multishift_epi64_epi8 newer_cpu::multishift
#endif
#endif
