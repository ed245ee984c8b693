// What AMX tiles reach when they are fed from caches and from memory, as our products feed them, and for how long.
//
//   g++ -O3 -march=native -fopenmp -o amx_ceiling benchmarks/amx_ceiling.cpp && ./amx_ceiling [threads]
//
// Blocks of 32 rows x 32 columns, bf16. A line has TFLOP/s of all threads together for several sizes of weights per thread,
// beside 128 rows that stay: the first that fit into the second-level cache show the unit, the last the memory. One thread
// is measured first and again at the end: where the processor throttles its tiles under load, the two differ.
#include <immintrin.h>
#include <omp.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

constexpr int64_t TILE_WORDS = 256, DEPTH_TILES = 16, ROWS = 128, LARGEST = 48 << 20;
constexpr int64_t ROW_BYTES = ROWS * DEPTH_TILES * 64, PANEL_BYTES = 32 * DEPTH_TILES * 64;

struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

static uint32_t* huge_pages(size_t bytes) {
  constexpr uintptr_t PAGE = 2 << 20;
  void* memory = mmap(nullptr, bytes + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) std::perror("mmap"), std::exit(1);
  memory = reinterpret_cast<void*>((uintptr_t(memory) + PAGE - 1) / PAGE * PAGE);
  madvise(memory, bytes, MADV_HUGEPAGE);
  std::memset(memory, 0, bytes);
  return static_cast<uint32_t*>(memory);
}

// 32 rows against one panel of 32 columns; while they are summed a quarter of the next panel comes nearer.
static void multiply_block(const uint32_t* rows, const uint32_t* panel, const uint32_t* ahead, float* sums) {
  asm volatile("" ::: "memory");
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t t = 0; t < DEPTH_TILES; ++t, rows += TILE_WORDS, panel += 2 * TILE_WORDS, ahead += 2 * TILE_WORDS) {
    for (int64_t line = 0; line < 8; ++line) _mm_prefetch(reinterpret_cast<const char*>(ahead + line * 16), _MM_HINT_T1);
    _tile_loadd(4, rows, 64);
    _tile_loadd(5, rows + DEPTH_TILES * TILE_WORDS, 64);
    _tile_loadd(6, panel, 64);
    _tile_loadd(7, panel + TILE_WORDS, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sums, 128);
  _tile_stored(1, sums + 16, 128);
  _tile_stored(2, sums + 512, 128);
  _tile_stored(3, sums + 528, 128);
}

static double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : omp_get_max_threads();
  if (syscall(SYS_arch_prctl, 0x1023, 18) != 0) return std::perror("no AMX"), 1;
  uint32_t* weights = huge_pages(LARGEST * threads);
  uint32_t* rows = huge_pages(ROW_BYTES * threads);
  const auto line = [&](int count) {
    std::printf("%2d threads:", count);
    for (int64_t bytes : {int64_t(128) << 10, int64_t(512) << 10, int64_t(1) << 20, int64_t(4) << 20, LARGEST}) {
      const int64_t panels = bytes / PANEL_BYTES, rounds = std::max<int64_t>(1, (64 << 20) / bytes);
      double best = 0;
      for (int turn = 0; turn < 3; ++turn) {
        double began = 0;
#pragma omp parallel num_threads(count)
        {
          const int id = omp_get_thread_num();
          const uint32_t *mine = weights + LARGEST / 4 * id, *own_rows = rows + ROW_BYTES / 4 * id;
          alignas(64) float sums[1024];
          const TileShapes shapes;
          _tile_loadconfig(&shapes);
#pragma omp barrier
#pragma omp master
          began = seconds();
          for (int64_t round = 0; round < rounds; ++round)
            for (int64_t p = 0; p < panels; ++p)
              for (int64_t r = 0; r < ROWS / 32; ++r) {
                const uint32_t* next = mine + (p + 1) % panels * PANEL_BYTES / 4 + r * 128;
                multiply_block(own_rows + 2 * r * DEPTH_TILES * TILE_WORDS, mine + p * PANEL_BYTES / 4, next, sums);
              }
          _tile_release();
        }
        const double flops = 2.0 * ROWS * 32 * DEPTH_TILES * 32 * double(panels) * double(rounds) * count;
        best = std::max(best, flops / (seconds() - began) / 1e12);
      }
      std::printf("  %lld KiB %.2f", static_cast<long long>(bytes >> 10), best);
    }
    std::printf("\n"), std::fflush(stdout);
  };
  line(1);
  for (int turn = 0; turn < 4; ++turn) line(threads);
  line(1);
}
