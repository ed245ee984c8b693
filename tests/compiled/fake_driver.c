/* Stands for libcuda on a machine without a GPU: kernels can be loaded, and a launch notes down what it was handed. */
#include "cuda.h"
#include <string.h>

static int count_of[4096], size_of[4096][64];
static char noted[65536];
static long length;

void set_sizes(long function, int count, const int *sizes) {
  count_of[function] = count;
  memcpy(size_of[function], sizes, count * sizeof(int));
}
long take_noted(char *out) {
  long taken = length;
  memcpy(out, noted, length);
  length = 0;
  return taken;
}
static void note(const void *from, long bytes) {
  memcpy(noted + length, from, bytes);
  length += bytes;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
  long handle = (long)function;
  note(&handle, sizeof handle);
  note(config, 7 * sizeof(unsigned)); /* grid, block, shared memory */
  note(&config->hStream, sizeof config->hStream);
  note(&config->numAttrs, sizeof config->numAttrs);
  for (int i = 0; i < count_of[handle]; ++i)
    note(parameters[i], size_of[handle][i]);
  return CUDA_SUCCESS;
}
CUresult cuFuncGetParamInfo(CUfunction function, size_t index, size_t *offset, size_t *size) {
  if ((int)index >= count_of[(long)function])
    return CUDA_ERROR_INVALID_VALUE;
  *offset = 0;
  *size = size_of[(long)function][index];
  return CUDA_SUCCESS;
}
CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType dtype, cuuint32_t rank, void *address,
                                const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  if ((unsigned long)map % 64)
    return CUDA_ERROR_INVALID_VALUE;
  unsigned long words[] = {(unsigned long)address, dtype, rank, sizes[0], sizes[1], strides[0], box[0], box[1],
                           steps[0], steps[1], interleave, swizzle, promotion, fill};
  memset(map, 0, sizeof *map);
  memcpy(map, words, sizeof words);
  return CUDA_SUCCESS;
}
CUresult cuTensorMapReplaceAddress(CUtensorMap *map, void *address) {
  memcpy(map, &address, sizeof address);
  return CUDA_SUCCESS;
}
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  static long last = 100;
  *function = (CUfunction)++last;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  *value = attribute == CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN ? 232448 : 1024;
  return CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext *context) {
  *context = (CUcontext)8;
  return CUDA_SUCCESS;
}
CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer) {
  *(CUdeviceptr *)data = pointer;
  return CUDA_SUCCESS;
}
