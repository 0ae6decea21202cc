// Enough of CUDA to run sample.cu on the CPU: threads one after the other.
#define PYDIRECT_ON_HOST
#define DEVICE static inline
#define KERNEL extern "C"
struct Dim { unsigned x; };
static Dim threadIdx, blockIdx, blockDim, gridDim;
static inline int atomicMin(int* p, int v) { int seen = *p; if (v < seen) *p = v; return seen; }
static inline double product(double a, double b) { volatile double c = a * b; return c; }
static inline double sum(double a, double b) { volatile double c = a + b; return c; }
#include "sample.cu"
extern "C" void run_sample(void (*kernel)(SampleArgs), int grid, int block, const SampleArgs* args) {
  gridDim.x = grid; blockDim.x = block;
  for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x)
    for (threadIdx.x = 0; threadIdx.x < blockDim.x; ++threadIdx.x) kernel(*args);
}
