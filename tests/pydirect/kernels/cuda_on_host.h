// Enough of CUDA to run gather.cu on the CPU: threads one after the other.
#pragma once
#include <cstring>
#define PYDIRECT_ON_HOST
#define DEVICE static inline
#define KERNEL extern "C"
#define BLOCK_OF(THREADS)
struct Dim { unsigned x; };
static Dim threadIdx, blockIdx, blockDim, gridDim;
struct alignas(16) u128 { unsigned x, y, z, w; };
static unsigned long long loads = 0;
// The lines of 128 bytes that one lane's load touches must be one: a load that
// straddles two would be two requests on the link.
template <typename Word> static inline void load_if(bool wanted, Word& v, const Word* p) {
  if (!wanted) return;
  ++loads;
  if ((unsigned long long)p % sizeof(Word)) __builtin_trap();
  std::memcpy(&v, p, sizeof(Word));
}
template <typename Unit> static inline void store_if(bool wanted, Unit* p, const Unit& v) {
  if (wanted) std::memcpy(p, &v, sizeof(Unit));
}
static inline unsigned long long atomicCAS(unsigned long long* p, unsigned long long old,
                                           unsigned long long value) {
  unsigned long long seen = *p;
  if (seen == old) *p = value;
  return seen;
}
static inline int atomicCAS(int* p, int old, int value) {
  int seen = *p;
  if (seen == old) *p = value;
  return seen;
}
static inline int atomicAdd(int* p, int value) { int seen = *p; *p += value; return seen; }
static inline unsigned atomicOr(unsigned* p, unsigned value) { unsigned seen = *p; *p |= value; return seen; }
static inline void __threadfence_system() {}
