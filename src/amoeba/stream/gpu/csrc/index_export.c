#define _POSIX_C_SOURCE 200809L /* clock_gettime, whatever standard is asked for */

#include "index_export.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#define ROWS 2 /* of each layer */

struct amoeba_index {
  int32_t *rows;
  int layers, length, room; /* numbers of a row, and of its ids */
  int32_t serials[];        /* of the latest launch of each layer; 0: none */
};

static int room_of(int experts, int ids) { return experts < ids ? experts : ids; }

size_t amoeba_index_bytes(int layers, int experts, int ids) {
  if (layers < 1 || experts < 1 || ids < 1) return 0;
  const size_t row = (AMOEBA_INDEX_HEADER + (size_t)room_of(experts, ids)) * sizeof(int32_t) * ROWS;
  return (size_t)layers > SIZE_MAX / row ? 0 : (size_t)layers * row;
}

amoeba_index *amoeba_index_init(void *memory, int layers, int experts, int ids) {
  const size_t bytes = amoeba_index_bytes(layers, experts, ids);
  if (memory == NULL || bytes == 0) return NULL;
  amoeba_index *index = calloc(1, sizeof(*index) + (size_t)layers * sizeof(int32_t));
  if (index == NULL) return NULL;
  index->rows = memset(memory, 0, bytes);
  index->layers = layers;
  index->room = room_of(experts, ids);
  index->length = AMOEBA_INDEX_HEADER + index->room;
  return index;
}

void amoeba_index_free(amoeba_index *index) { free(index); }

static int32_t *row_of(const amoeba_index *index, int layer) {
  const size_t place = (size_t)layer * ROWS + (uint32_t)index->serials[layer] % ROWS;
  return index->rows + place * (size_t)index->length;
}

static int has(const amoeba_index *index, int layer) { return index != NULL && layer >= 0 && layer < index->layers; }

int32_t *amoeba_index_launch(amoeba_index *index, int layer, int32_t *serial) {
  if (!has(index, layer) || serial == NULL) return NULL;
  uint32_t next = (uint32_t)index->serials[layer] + 1;
  if (next == 0) next = 2; /* 0 is no launch, and the other row is written next */
  *serial = index->serials[layer] = (int32_t)next;
  return row_of(index, layer);
}

int amoeba_index_ready(const amoeba_index *index, int layer) {
  if (!has(index, layer) || index->serials[layer] == 0) return AMOEBA_INDEX_BAD;
  /* acquires: what was written ahead of the serial is read after it */
  return __atomic_load_n(row_of(index, layer) + 2, __ATOMIC_ACQUIRE) == index->serials[layer];
}

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

int amoeba_index_wait(const amoeba_index *index, int layer, double seconds) {
  const double end = now() + seconds;
  for (;;) {
    for (int looks = 0; looks < 64; ++looks) {
      const int ready = amoeba_index_ready(index, layer);
      if (ready != 0) return ready < 0 ? AMOEBA_INDEX_BAD : 0;
    }
    if (now() >= end) return AMOEBA_INDEX_LATE;
  }
}

int amoeba_index_read(const amoeba_index *index, int layer, int32_t *ids, int capacity, int *missing) {
  const int ready = amoeba_index_ready(index, layer);
  if (ready != 1) return ready < 0 ? AMOEBA_INDEX_BAD : AMOEBA_INDEX_LATE;
  const int32_t *row = row_of(index, layer);
  const int32_t absent = row[0], asked = row[1];
  /* the numbers come from another program: they are not trusted to fit */
  if (asked < 0 || asked > index->room || absent < 0 || absent > asked || asked > capacity) return AMOEBA_INDEX_BAD;
  memcpy(ids, row + AMOEBA_INDEX_HEADER, (size_t)asked * sizeof(int32_t));
  if (missing != NULL) *missing = absent;
  return asked;
}

int amoeba_index_write(int32_t *row, int32_t serial, int room, const int64_t *chosen, int count,
                       const int32_t *slot_of, int experts) {
  int counts[2] = {0, 0}; /* missing, there */
  int32_t *place = row + AMOEBA_INDEX_HEADER;
  for (int there = 0; there < 2; ++there) {
    for (int32_t expert = 0; expert < experts; ++expert) {
      int asked = 0;
      for (int n = 0; n < count && !asked; ++n) asked = chosen[n] == expert;
      if (!asked || (slot_of[expert] >= 0) != there) continue;
      if (counts[0] + counts[1] == room) return AMOEBA_INDEX_BAD;
      *place++ = expert;
      ++counts[there];
    }
  }
  row[0] = counts[0];
  row[1] = counts[0] + counts[1];
  __atomic_store_n(row + 2, serial, __ATOMIC_RELEASE);
  return 0;
}
