/* A runtime that streams experts, in C: while a layer is routed, the host reads which experts it asks for and loads them.
 *
 *     SOURCE=src/amoeba/stream/gpu/csrc
 *     cc -O2 -fPIC -shared $SOURCE/index_export.c -o libamoeba_index_export.so
 *     cc -I $SOURCE examples/index_export.c -L. -lamoeba_index_export -Wl,-rpath,. -lpthread -o index_export
 *     ./index_export
 *
 * A thread stands for the GPU here, so it runs anywhere. With one, `memory` comes from cudaHostAlloc, and the kernel of
 * the router writes the row. */
#include <index_export.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

enum { LAYERS = 3, EXPERTS = 16, TOP_K = 4, SLOTS = 6, TOKENS = 40 };

struct launch {
  int32_t *row, serial;
  const int32_t *slot_of;
  int64_t chosen[TOP_K];
};

static void *router(void *given) {
  struct launch *launch = given;
  amoeba_index_write(launch->row, launch->serial, TOP_K, launch->chosen, TOP_K, launch->slot_of, EXPERTS);
  return NULL;
}

int main(void) {
  void *memory = malloc(amoeba_index_bytes(LAYERS, EXPERTS, TOP_K));
  amoeba_index *index = amoeba_index_init(memory, LAYERS, EXPERTS, TOP_K);
  if (index == NULL) return 1;
  int32_t slot_of[LAYERS][EXPERTS], expert_in[LAYERS][SLOTS];
  for (int layer = 0; layer < LAYERS; ++layer) {
    for (int expert = 0; expert < EXPERTS; ++expert) slot_of[layer][expert] = -1;
    for (int slot = 0; slot < SLOTS; ++slot) expert_in[layer][slot] = -1;
  }
  unsigned state = 1;
  int asked_in_all = 0, loaded = 0;
  for (int token = 0; token < TOKENS; ++token) {
    for (int layer = 0; layer < LAYERS; ++layer) {
      struct launch launch = {.slot_of = slot_of[layer]};
      for (int k = 0; k < TOP_K; ++k) {
        state = state * 1664525u + 1013904223u;
        launch.chosen[k] = (state >> 16) % EXPERTS;
      }
      launch.row = amoeba_index_launch(index, layer, &launch.serial);
      pthread_t gpu;
      if (pthread_create(&gpu, NULL, router, &launch) != 0) return 1;

      int32_t experts[TOP_K];
      int missing;
      if (amoeba_index_wait(index, layer, 10.0) != 0) return 1; /* the GPU may go on meanwhile */
      const int asked = amoeba_index_read(index, layer, experts, TOP_K, &missing);
      pthread_join(gpu, NULL);
      if (asked < 0) return 1;
      for (int n = 0; n < missing; ++n) { /* into a slot whose expert is not asked for now */
        int slot = 0;
        for (int m = 0; m < asked; ++m)
          if (expert_in[layer][slot] == experts[m]) ++slot, m = -1;
        if (expert_in[layer][slot] >= 0) slot_of[layer][expert_in[layer][slot]] = -1;
        expert_in[layer][slot] = experts[n], slot_of[layer][experts[n]] = slot;
      }
      for (int k = 0; k < TOP_K; ++k)
        if (slot_of[layer][launch.chosen[k]] < 0) return 1;
      asked_in_all += asked, loaded += missing;
    }
  }
  printf("%d experts asked for, %d loaded\n", asked_in_all, loaded);
  amoeba_index_free(index);
  free(memory);
  return 0;
}
