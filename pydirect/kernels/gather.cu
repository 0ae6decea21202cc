// Rows of host memory to GPU memory: zero-copy gather, page-order bucketing, duplicates.
//
// Compiled at first use by NVRTC, and in tests by a host compiler (threads then run one
// after the other, so no kernel here may need its neighbours: no shuffles, no barriers).
//
// [Note: Aligned starts] The link carries one request for the sectors of one 128-byte
// line that a warp touches in one instruction. A row that starts inside a line would
// split every later instruction over two lines. So the lanes of a row start at the line
// in front of it and mask what lies before: same requests as the circular shift of
// PyTorch-Direct (Figure 4.5), without its wrap-around. `align_bytes` = 1 word turns
// this off.
//
// [Note: Contiguous shares] On large tables the limit is address translation, and every
// part of the GPU that touches a page translates it again. So with `contiguous` each
// block walks its own share of the (sorted) index instead of interleaving with others.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#ifndef PYDIRECT_ON_HOST
#define DEVICE static __device__ __forceinline__
#define KERNEL extern "C" __global__
// A cache hint that benchmarks can set, such as ".L2::256B".
#ifndef LOAD_HINT
#define LOAD_HINT ""
#endif
struct alignas(16) u128 { u32 x, y, z, w; };
DEVICE u128 load(const u128* p) {
  u128 v;
  asm volatile("ld.global.nc.L1::no_allocate" LOAD_HINT ".v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
DEVICE u32 load(const u32* p) {
  u32 v;
  asm volatile("ld.global.nc.L1::no_allocate" LOAD_HINT ".u32 %0, [%1];" : "=r"(v) : "l"(p));
  return v;
}
#endif

#ifndef ROWS_SHORT
#define ROWS_SHORT 8
#define WORDS_SHORT 1
#define ROWS_LONG 2
#define WORDS_LONG 4
#endif

struct GatherArgs {
  const u8* table;
  u8* out;
  const void* index;     // what to read, in reading order; int32 or int64
  const int* position;   // where each row goes, or null: where its index stands
  u64* error;            // device: taken by the first bad index
  i64* fault;            // host: [0] 1 + position of that index, [1] value, [2] rows
  i64 num_indices;
  i64 num_rows;
  i64 row_bytes;
  int lanes;             // lanes of one row, a power of two up to 32
  int align_bytes;       // power of two, at least one word; see [Note: Aligned starts]
  int contiguous;        // see [Note: Contiguous shares]
  int position_stride;   // in int32: 2 reads the low halves of int64 positions
  int check;             // report bad indices (bucketing has reported its own)
  int skip_repeats;      // read a row only where it differs from the one before it
};

// The first bad index wins; the others are dropped. See [Note: Errors without a wait].
template <typename Args> DEVICE void report(const Args& a, i64 position, i64 value) {
  if (atomicCAS(a.error, 0ULL, 1ULL) != 0ULL) return;
  volatile i64* fault = a.fault;
  fault[1] = value;
  fault[2] = a.num_rows;
  __threadfence_system();
  fault[0] = position + 1;
}

DEVICE i64 place_of(const GatherArgs& a, i64 j) {
  return a.position ? (i64)(u32)a.position[j * a.position_stride] : j;
}

// A row as the lanes see it: `from` is where lane 0 starts, at or before `begin`.
struct Row {
  u64 from, begin, end;
  u8* out;
};

template <typename Index>
DEVICE Row row_at(const GatherArgs& a, i64 j, i64 last) {
  Row row = {0, 0, 0, 0};
  if (j >= last) return row;
  const Index* index = (const Index*)a.index;
  const i64 value = (i64)index[j];
  if (value < 0 || value >= a.num_rows) {
    if (a.check) report(a, place_of(a, j), value);
    return row;
  }
  if (a.skip_repeats && j > 0 && (i64)index[j - 1] == value) return row;
  row.begin = (u64)a.table + (u64)value * (u64)a.row_bytes;
  row.end = row.begin + (u64)a.row_bytes;
  row.from = row.begin & ~(u64)(a.align_bytes - 1);
  row.out = a.out + place_of(a, j) * a.row_bytes;
  return row;
}

template <typename Word, bool BYTES>
DEVICE void store(const Row& row, u64 at, const Word& word) {
  if (!BYTES) {
    *(Word*)(row.out + (at - row.begin)) = word;
    return;
  }
  const u8* bytes = (const u8*)&word;
  for (int k = 0; k < (int)sizeof(Word); ++k)
    if (at + k >= row.begin && at + k < row.end) row.out[at + k - row.begin] = bytes[k];
}

// ROWS rows by WORDS words of each are in flight per lane before the first is stored.
template <typename Index, typename Word, bool BYTES, int ROWS, int WORDS>
DEVICE void gather(const GatherArgs& a) {
  const int lane = threadIdx.x & (a.lanes - 1);
  const i64 group = threadIdx.x / a.lanes, groups = blockDim.x / a.lanes;
  const i64 share = (a.num_indices + gridDim.x - 1) / gridDim.x;
  const i64 begin = a.contiguous ? blockIdx.x * share : 0;
  const i64 limit = a.contiguous ? begin + share : a.num_indices;
  const i64 last = limit < a.num_indices ? limit : a.num_indices;
  const i64 stride = a.contiguous ? groups : groups * gridDim.x;
  const i64 first = begin + group + (a.contiguous ? 0 : blockIdx.x * groups);
  const u64 step = (u64)a.lanes * sizeof(Word);
  const u64 width = sizeof(Word);
  for (i64 i = first; i < last; i += ROWS * stride) {
    Row row[ROWS];
    u64 span = 0;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      row[r] = row_at<Index>(a, i + r * stride, last);
      const u64 own = row[r].end - row[r].from;
      span = own > span ? own : span;
    }
    for (u64 done = lane * width; done < span; done += WORDS * step) {
      Word word[ROWS][WORDS];
#pragma unroll
      for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int w = 0; w < WORDS; ++w) {
          const u64 at = row[r].from + done + w * step;
          if (at + width > row[r].begin && at < row[r].end)
            word[r][w] = load((const Word*)at);
        }
#pragma unroll
      for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int w = 0; w < WORDS; ++w) {
          const u64 at = row[r].from + done + w * step;
          if (at + width > row[r].begin && at < row[r].end)
            store<Word, BYTES>(row[r], at, word[r][w]);
        }
    }
  }
}

#define GATHER(NAME, INDEX, WORD, BYTES)                                         \
  KERNEL void gather_##NAME##_short(GatherArgs a) {                              \
    gather<INDEX, WORD, BYTES, ROWS_SHORT, WORDS_SHORT>(a);                      \
  }                                                                              \
  KERNEL void gather_##NAME##_long(GatherArgs a) {                               \
    gather<INDEX, WORD, BYTES, ROWS_LONG, WORDS_LONG>(a);                        \
  }
GATHER(i32_w16, int, u128, false)
GATHER(i64_w16, i64, u128, false)
GATHER(i32_w4, int, u32, false)
GATHER(i64_w4, i64, u32, false)
GATHER(i32_w1, int, u32, true)
GATHER(i64_w1, i64, u32, true)

struct BucketArgs {
  const void* index;
  int* counts;           // num_buckets + 1; the last one holds bad indices
  int* rank;             // place inside the bucket, one an index
  i64* order;            // row numbers in bucket order; -1 for a bad index
  int* position;         // where each of them stood in the index
  u64* error;
  i64* fault;
  i64 num_indices;
  i64 num_rows;
  i64 row_bytes;
  i64 num_buckets;
  int shift;             // a bucket is 2^shift bytes of the table
};

DEVICE i64 bucket_of(const BucketArgs& a, i64 value) {
  if (value < 0 || value >= a.num_rows) return a.num_buckets;
  return (i64)(((u64)value * (u64)a.row_bytes) >> a.shift);
}

template <typename Index>
DEVICE void bucket_count(const BucketArgs& a) {
  const i64 step = (i64)gridDim.x * blockDim.x;
  for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i < a.num_indices; i += step) {
    const i64 value = (i64)((const Index*)a.index)[i];
    const i64 bucket = bucket_of(a, value);
    if (bucket == a.num_buckets) report(a, i, value);
    a.rank[i] = atomicAdd(a.counts + bucket, 1);
  }
}

// `counts` holds inclusive sums by now.
template <typename Index>
DEVICE void bucket_place(const BucketArgs& a) {
  const i64 step = (i64)gridDim.x * blockDim.x;
  for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i < a.num_indices; i += step) {
    const i64 value = (i64)((const Index*)a.index)[i];
    const i64 bucket = bucket_of(a, value);
    const i64 place = a.counts[bucket] - 1 - a.rank[i];
    a.order[place] = bucket == a.num_buckets ? -1 : value;
    a.position[place] = (int)i;
  }
}

KERNEL void bucket_count_i32(BucketArgs a) { bucket_count<int>(a); }
KERNEL void bucket_count_i64(BucketArgs a) { bucket_count<i64>(a); }
KERNEL void bucket_place_i32(BucketArgs a) { bucket_place<int>(a); }
KERNEL void bucket_place_i64(BucketArgs a) { bucket_place<i64>(a); }

// Rows that `skip_repeats` left out: copy from where the first of their kind went.
template <typename Index>
DEVICE void copy_repeats(const GatherArgs& a) {
  const Index* index = (const Index*)a.index;
  const int lane = threadIdx.x & 31;
  const i64 warps = (i64)gridDim.x * (blockDim.x / 32);
  for (i64 j = blockIdx.x * (i64)(blockDim.x / 32) + threadIdx.x / 32; j < a.num_indices;
       j += warps) {
    const i64 value = (i64)index[j];
    if (j == 0 || (i64)index[j - 1] != value || value < 0 || value >= a.num_rows) continue;
    i64 low = 0, high = j;  // the first place that holds `value`
    while (low < high) {
      const i64 middle = (low + high) / 2;
      if ((i64)index[middle] < value) low = middle + 1; else high = middle;
    }
    const u8* from = a.out + place_of(a, low) * a.row_bytes;
    u8* to = a.out + place_of(a, j) * a.row_bytes;
    const bool wide = (((u64)from | (u64)to | (u64)a.row_bytes) & 15) == 0;
    const bool words = (((u64)from | (u64)to | (u64)a.row_bytes) & 3) == 0;
    if (wide)
      for (i64 b = lane * 16; b < a.row_bytes; b += 512) *(u128*)(to + b) = *(const u128*)(from + b);
    else if (words)
      for (i64 b = lane * 4; b < a.row_bytes; b += 128) *(u32*)(to + b) = *(const u32*)(from + b);
    else
      for (i64 b = lane; b < a.row_bytes; b += 32) to[b] = from[b];
  }
}

KERNEL void copy_repeats_i32(GatherArgs a) { copy_repeats<int>(a); }
KERNEL void copy_repeats_i64(GatherArgs a) { copy_repeats<i64>(a); }

// How an index looks: [0] places where a run of consecutive rows breaks, [1] distinct
// values, counted as bits that were clear in a hashed bitmap of num_bits (a power of 2).
struct SurveyArgs {
  const void* index;
  u32* bitmap;
  int* counts;
  i64 num_indices;
  i64 num_bits;
};

template <typename Index>
DEVICE void survey(const SurveyArgs& a) {
  const Index* index = (const Index*)a.index;
  const i64 step = (i64)gridDim.x * blockDim.x;
  int breaks = 0, fresh = 0;
  for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i < a.num_indices; i += step) {
    const u64 value = (u64)(i64)index[i];
    breaks += i > 0 && (i64)index[i - 1] + 1 != (i64)value;
    const u64 bit = (value * 0x9E3779B97F4A7C15ULL >> 20) & (u64)(a.num_bits - 1);
    const u32 mask = 1u << (bit & 31);
    fresh += !(atomicOr(a.bitmap + (bit >> 5), mask) & mask);
  }
  if (breaks) atomicAdd(a.counts, breaks);
  if (fresh) atomicAdd(a.counts + 1, fresh);
}

KERNEL void survey_i32(SurveyArgs a) { survey<int>(a); }
KERNEL void survey_i64(SurveyArgs a) { survey<i64>(a); }
