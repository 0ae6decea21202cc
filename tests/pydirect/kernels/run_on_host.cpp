#include "cuda_on_host.h"
#include "gather.cu"
template <typename Args> static void run(void (*kernel)(Args), int grid, int block, const Args& args) {
  gridDim.x = grid; blockDim.x = block;
  for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x)
    for (threadIdx.x = 0; threadIdx.x < blockDim.x; ++threadIdx.x) kernel(args);
}
extern "C" void run_gather(void (*kernel)(GatherArgs), int grid, int block, const GatherArgs* args) {
  run(kernel, grid, block, *args);
}
extern "C" void run_bucket(void (*kernel)(BucketArgs), int grid, int block, const BucketArgs* args) {
  run(kernel, grid, block, *args);
}
extern "C" void run_survey(void (*kernel)(SurveyArgs), int grid, int block, const SurveyArgs* args) {
  run(kernel, grid, block, *args);
}
extern "C" void run_repeat(void (*kernel)(RepeatArgs), int grid, int block, const RepeatArgs* args) {
  run(kernel, grid, block, *args);
}
