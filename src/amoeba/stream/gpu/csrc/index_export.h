/* Which experts a layer asks for, in memory that a GPU writes and the host reads: the host's side, for any runtime.
 *
 * Needs neither CUDA nor Python. Compile index_export.c into a shared library, and include this header:
 *
 *     cc -O2 -fPIC -shared index_export.c -o libamoeba_index_export.so
 *
 * A row is int32:   row[0] missing   row[1] asked for   row[2] serial   row[3..] distinct ids, the missing ones first
 *
 * A router's kernel writes row[0], row[1] and the ids, then a fence for the whole system (__threadfence_system), then
 * the serial: the host that sees the serial sees the rest. It reads these few numbers while the GPU goes on, without a
 * synchronisation of the device.
 *
 *     void *memory;                                           // pinned and mapped, at the address that kernels use
 *     cudaHostAlloc(&memory, amoeba_index_bytes(layers, experts, ids), cudaHostAllocMapped);
 *     amoeba_index *index = amoeba_index_init(memory, layers, experts, ids);
 *
 *     int32_t serial, *row = amoeba_index_launch(index, layer, &serial);
 *     my_top_k<<<1, 32, 0, stream>>>(scores, slot_of_expert, row, serial);
 *     ...                                                     // other work; amoeba_index_ready() says whether it is there
 *     amoeba_index_wait(index, layer, 1.0);
 *     int missing, asked = amoeba_index_read(index, layer, experts_asked, capacity, &missing);
 *
 * One thread at a time may use a layer; different layers may be used by different threads. */
#ifndef AMOEBA_INDEX_EXPORT_H
#define AMOEBA_INDEX_EXPORT_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
  AMOEBA_INDEX_HEADER = 3, /* numbers of a row ahead of its ids */
  AMOEBA_INDEX_BAD = -1,   /* no such layer, nothing was launched, or too little room */
  AMOEBA_INDEX_LATE = -2   /* the row is not there (yet) */
};

typedef struct amoeba_index amoeba_index;

/* Bytes of the rows of all layers, two of each: one can be read while the next pass writes the other. ids: the most of
 * one pass, tokens times experts per token. 0 where a number is below 1 or the sizes overflow. */
size_t amoeba_index_bytes(int layers, int experts, int ids);

/* Over memory of that many bytes, aligned to 4, which stays the caller's and is cleared. NULL where a number is below 1
 * or there is no memory. */
amoeba_index *amoeba_index_init(void *memory, int layers, int experts, int ids);
void amoeba_index_free(amoeba_index *index);

/* The row that the layer's next kernel writes, and the serial that it writes last; NULL for no such layer. */
int32_t *amoeba_index_launch(amoeba_index *index, int layer, int32_t *serial);

/* Whether the row of the latest launch is there: 1, 0, or AMOEBA_INDEX_BAD. Never waits. */
int amoeba_index_ready(const amoeba_index *index, int layer);

/* Until it is there, or that many seconds have passed: 0, AMOEBA_INDEX_LATE or AMOEBA_INDEX_BAD. */
int amoeba_index_wait(const amoeba_index *index, int layer, double seconds);

/* Distinct ids of the latest launch, once it is there: their number, of which the first *missing are missing; or
 * AMOEBA_INDEX_LATE, or AMOEBA_INDEX_BAD where `capacity` is too small. Both lists ascend. */
int amoeba_index_read(const amoeba_index *index, int layer, int32_t *ids, int capacity, int *missing);

/* What a kernel does, for a router on the CPU: chosen[count] are ids, those outside [0, experts) are nobody's;
 * slot_of[experts] is below 0 where an expert is missing. 0, or AMOEBA_INDEX_BAD where the row has too little room:
 * `room` is that of its ids. */
int amoeba_index_write(int32_t *row, int32_t serial, int room, const int64_t *chosen, int count,
                       const int32_t *slot_of, int experts);

#ifdef __cplusplus
}
#endif
#endif
