// Enough of CUDA to run visit.cu on the CPU: threads one after the other.
#include <cstring>
#define PYDIRECT_ON_HOST
#define DEVICE static inline
#define KERNEL extern "C"
#define BLOCK_OF(THREADS)
#define TOGETHER(MASK) (void)(MASK)
#define PER_BLOCK static
#define LANE_OF_WARP 0
#define LANES 1
static inline int ones(unsigned v) { return __builtin_popcount(v); }
struct Dim { unsigned x; };
static Dim threadIdx, blockIdx, blockDim, gridDim;
static inline unsigned long long atomicCAS(unsigned long long* p, unsigned long long old,
                                           unsigned long long value) {
  unsigned long long seen = *p;
  if (seen == old) *p = value;
  return seen;
}
static inline unsigned long long atomicAdd(unsigned long long* p, unsigned long long v) {
  unsigned long long seen = *p;
  *p += v;
  return seen;
}
static inline unsigned atomicOr(unsigned* p, unsigned v) { unsigned seen = *p; *p |= v; return seen; }
static inline long long atomicMin(long long* p, long long v) {
  long long seen = *p;
  if (v < seen) *p = v;
  return seen;
}
static inline long long bits_of(double v) { long long b; std::memcpy(&b, &v, 8); return b; }
static inline double value_of(long long b) { double v; std::memcpy(&v, &b, 8); return v; }
// What a kernel read from host memory: its requests are counted from this.
struct Loads { long long* thread; long long* address; long long room, count; };
static Loads recorded;
template <typename T> static inline T load_once(const T* p) {
  if (recorded.count < recorded.room) {
    recorded.thread[recorded.count] = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    recorded.address[recorded.count] = (long long)p;
  }
  ++recorded.count;
  return *p;
}
static inline unsigned load_word(const unsigned* p) { return (unsigned)load_once((const int*)p); }
#include "visit.cu"
extern "C" void record(long long* thread, long long* address, long long room) {
  recorded = Loads{thread, address, room, 0};
}
extern "C" long long num_loads() { return recorded.count; }
extern "C" void run_visit(void (*kernel)(VisitArgs), int grid, int block, const VisitArgs* args) {
  gridDim.x = grid; blockDim.x = block;
  for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x)
    for (threadIdx.x = 0; threadIdx.x < blockDim.x; ++threadIdx.x) kernel(*args);
}
