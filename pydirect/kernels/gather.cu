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

// [Note: Loads before stores] A warp waits at its first store for the load behind it. The
// compiler knows that read-only loads (`ld.global.nc`) do not meet the stores and moves
// them past one another, until one load is in flight where the source says eight. Plain
// loads might meet any store, so they stay in front; predicates keep the code straight.

#ifndef PYDIRECT_ON_HOST
#define DEVICE static __device__ __forceinline__
#define KERNEL extern "C" __global__
#define BLOCK_OF(THREADS) __launch_bounds__(THREADS)
// A cache hint that benchmarks can set, such as ".L2::256B".
#ifndef LOAD_HINT
#define LOAD_HINT ""
#endif
#define LOAD "ld.global.L1::no_allocate" LOAD_HINT
struct alignas(16) u128 { u32 x, y, z, w; };
DEVICE void load_if(bool wanted, u128& v, const u128* from) {
  asm volatile("{ .reg .pred p; setp.ne.s32 p, %5, 0; @p " LOAD ".v4.u32 {%0,%1,%2,%3}, [%4]; }"
               : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
               : "l"(from), "r"((int)wanted));
}
DEVICE void load_if(bool wanted, u32& v, const u32* from) {
  asm volatile("{ .reg .pred p; setp.ne.s32 p, %2, 0; @p " LOAD ".u32 %0, [%1]; }"
               : "+r"(v) : "l"(from), "r"((int)wanted));
}
DEVICE void store_if(bool wanted, u128* to, const u128& v) {
  asm volatile("{ .reg .pred p; setp.ne.s32 p, %5, 0; @p st.global.v4.u32 [%4], {%0,%1,%2,%3}; }"
               : : "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "l"(to), "r"((int)wanted));
}
DEVICE void store_if(bool wanted, u32* to, u32 v) {
  asm volatile("{ .reg .pred p; setp.ne.s32 p, %2, 0; @p st.global.u32 [%1], %0; }"
               : : "r"(v), "l"(to), "r"((int)wanted));
}
DEVICE void store_if(bool wanted, u8* to, u8 v) {
  asm volatile("{ .reg .pred p; setp.ne.s32 p, %2, 0; @p st.global.u8 [%1], %0; }"
               : : "r"((u32)v), "l"(to), "r"((int)wanted));
}
#endif

// Words of a row that each lane holds before the first is stored, and rows likewise.
#ifndef ROWS_SHORT
#define ROWS_SHORT 8
#define WORDS_SHORT 1
#define ROWS_LONG 2
#define WORDS_LONG 4
#endif
// Words of 4 bytes: a row takes four times as many.
#ifndef ROWS_LONG_4
#define ROWS_LONG_4 2
#define WORDS_LONG_4 9
#endif
// What such rows are loaded in; benchmarks try u128.
#ifndef WORD_4
#define WORD_4 u32
#endif

// Where the hottest rows lie besides the host table: Listing 4.1 of the dissertation,
// with its order of evaluation put right. Rows are known by their rank in heat.
struct Tiers {
  const int* heat;       // rank of each row, or null: rows are numbered by it
  i64 replicated;        // ranks below: in this GPU's memory
  i64 spread;            // so many after them: dealt out to the GPUs, one by one
  int num_gpus;
  const u8* local;       // replicated rows, by rank
  const u8* share[8];    // spread rows of each GPU
};

struct GatherArgs {
  const u8* table;
  u8* out;
  const void* index;     // what to read, in reading order; int32 or int64
  const int* position;   // where each row goes, or null: where its index stands
  const int* total;      // device: how many places of the index are in use, or null: all
  const int* split;      // device: where rows of GPU memory begin; see [Note: Two queues]
  u64* error;            // device: taken by the first bad index
  i64* fault;            // host: [0] 1 + position of that index, [1] value, [2] rows
  i64 num_indices;
  i64 num_rows;
  i64 row_bytes;
  int lanes;             // lanes of one row, a power of two up to 32
  int align_bytes;       // power of two, at least one word; see [Note: Aligned starts]
  int contiguous;        // see [Note: Contiguous shares]
  int check;             // report bad indices (bucketing has reported its own)
  int wraps;             // negative indices count from the end of the table
  Tiers tiers;           // of the kernels for tiered tables
};

DEVICE i64 heat_of(const Tiers& t, i64 row) { return t.heat ? (i64)t.heat[row] : row; }

// The address of a row of the table; every rank that no GPU holds is in host memory.
DEVICE u64 tiered_address(const GatherArgs& a, i64 row) {
  const Tiers& t = a.tiers;
  const i64 rank = heat_of(t, row), dealt = rank - t.replicated;
  const u64 bytes = (u64)a.row_bytes;
  if (dealt < 0) return (u64)t.local + (u64)rank * bytes;
  if (dealt < t.spread)
    return (u64)t.share[dealt % t.num_gpus] + (u64)(dealt / t.num_gpus) * bytes;
  return (u64)a.table + (u64)row * bytes;
}

// The row that an index means; outside the table where the index is bad.
DEVICE i64 row_of(i64 value, i64 num_rows, int wraps) {
  return wraps && value < 0 ? value + num_rows : value;
}

// The first bad index wins; the others are dropped. See [Note: Errors without a wait].
template <typename Args> DEVICE void report(const Args& a, i64 position, i64 value) {
  if (atomicCAS(a.error, 0ULL, 1ULL) != 0ULL) return;
  volatile i64* fault = a.fault;
  fault[1] = value;
  fault[2] = a.num_rows;
  __threadfence_system();
  fault[0] = position + 1;
}

// A row as the lanes see it: `from` is where lane 0 starts, at or before `begin`.
struct Row {
  u64 from, begin, end;
  u8* out;
};

// ROWS rows from place `first` of the index on, `stride` apart; those from `last` on are
// empty. All loads of a kind together: each costs a round trip to memory.
template <typename Index, int ROWS, bool TIERED>
DEVICE void find_rows(const GatherArgs& a, i64 first, i64 stride, i64 last, Row* row) {
  const Index* index = (const Index*)a.index;
  i64 at[ROWS], value[ROWS], place[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const i64 j = first + r * stride;
    at[r] = j < last ? j : last - 1;
    value[r] = (i64)index[at[r]];
    place[r] = at[r];
  }
  if (a.position)
#pragma unroll
    for (int r = 0; r < ROWS; ++r) place[r] = a.position[at[r]];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const bool there = first + r * stride < last;
    const i64 wrapped = row_of(value[r], a.num_rows, a.wraps);
    const bool good = wrapped >= 0 && wrapped < a.num_rows;
    if (there && !good && a.check) report(a, place[r], value[r]);
    const bool wanted = there && good;
    const i64 read = wanted ? wrapped : 0;
    row[r].begin = TIERED ? tiered_address(a, read)
                          : (u64)a.table + (u64)read * (u64)a.row_bytes;
    row[r].end = row[r].begin + (wanted ? (u64)a.row_bytes : 0);
    row[r].from = row[r].begin & ~(u64)(a.align_bytes - 1);
    row[r].out = a.out + place[r] * a.row_bytes;
  }
}

// The units of `word`, read at `at`, that belong to the row. Without a choice of units
// (they are words) the caller's predicate is enough.
template <typename Unit, typename Word>
DEVICE void store(bool wanted, const Row& row, u64 at, const Word& word) {
  const Unit* unit = (const Unit*)&word;
  const int units = sizeof(Word) / sizeof(Unit);
#pragma unroll
  for (int k = 0; k < units; ++k, at += sizeof(Unit))
    store_if(units == 1 ? wanted : at >= row.begin && at < row.end,
             (Unit*)(row.out + (at - row.begin)), unit[k]);
}

// The places of the index that a group of lanes takes: every `stride` from `first` on.
struct Turn {
  i64 first, last, stride;
};

// [Note: Two queues] An ordered index ends with the rows that GPUs hold. Dealt out in one
// piece, the blocks of its end would have rows of GPU memory alone and be done at once,
// and of eight blocks five would be left for the link (an epoch with a tenth of its rows
// near was as slow as one without). So every block takes its share of both parts at the
// same time: its last warps read GPU memory, the others the host. How many is by the
// rows' times: half of them for a quarter of the rows left too few requests for the link
// (37 GB/s of 50).
const i64 NEAR_ROWS_A_HOST_ROW = 6;
DEVICE i64 near_warps(i64 host, i64 near, i64 warps) {
  if (near <= 0) return 0;
  if (host <= 0) return warps;
  const i64 all = near + NEAR_ROWS_A_HOST_ROW * host;
  const i64 wanted = (warps * near + all - 1) / all;
  return wanted < warps ? wanted : warps - 1;
}

template <bool TIERED> DEVICE Turn turn_of(const GatherArgs& a) {
  const i64 total = a.total ? *a.total : a.num_indices;
  i64 group = threadIdx.x / a.lanes, groups = blockDim.x / a.lanes;
  i64 low = 0, high = total;
  const i64 warps = blockDim.x / 32;
  if (TIERED && a.split && warps > 1) {
    const i64 warp = threadIdx.x / 32, a_warp = 32 / a.lanes, split = *a.split;
    const i64 far = warps - near_warps(split, total - split, warps);
    const bool near = warp >= far;
    low = near ? split : 0;
    high = near ? total : split;
    group = (near ? warp - far : warp) * a_warp + (threadIdx.x & 31) / a.lanes;
    groups = (near ? warps - far : far) * a_warp;
  }
  const i64 share = (high - low + gridDim.x - 1) / gridDim.x;
  const i64 begin = low + (a.contiguous ? blockIdx.x * share : 0);
  const i64 limit = a.contiguous ? begin + share : high;
  Turn turn;
  turn.last = limit < high ? limit : high;
  turn.stride = a.contiguous ? groups : groups * gridDim.x;
  turn.first = begin + group + (a.contiguous ? 0 : blockIdx.x * groups);
  return turn;
}

// ROWS rows by WORDS words of each are in flight per lane before the first is stored,
// in units of their common alignment.
template <typename Index, typename Word, typename Unit, int ROWS, int WORDS,
          bool TIERED = false>
DEVICE void gather(const GatherArgs& a) {
  const int lane = threadIdx.x & (a.lanes - 1);
  const Turn turn = turn_of<TIERED>(a);
  const i64 last = turn.last, stride = turn.stride;
  const u64 step = (u64)a.lanes * sizeof(Word);
  const u64 width = sizeof(Word);
  for (i64 i = turn.first; i < last; i += ROWS * stride) {
    Row row[ROWS];
    find_rows<Index, ROWS, TIERED>(a, i, stride, last, row);
    u64 span = 0;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const u64 own = row[r].end > row[r].begin ? row[r].end - row[r].from : 0;
      span = own > span ? own : span;
    }
    for (u64 done = lane * width; done < span; done += WORDS * step) {
      Word word[ROWS][WORDS];
#pragma unroll
      for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int w = 0; w < WORDS; ++w) {
          const u64 at = row[r].from + done + w * step;
          word[r][w] = Word();
          load_if(at + width > row[r].begin && at < row[r].end, word[r][w],
                  (const Word*)at);
        }
#pragma unroll
      for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int w = 0; w < WORDS; ++w) {
          const u64 at = row[r].from + done + w * step;
          store<Unit>(at + width > row[r].begin && at < row[r].end, row[r], at,
                      word[r][w]);
        }
    }
  }
}

#define GATHER(NAME, INDEX, WORD, UNIT, ROWS, WORDS)                             \
  KERNEL void BLOCK_OF(512) gather_##NAME##_short(GatherArgs a) {                \
    gather<INDEX, WORD, UNIT, ROWS_SHORT, WORDS_SHORT>(a);                       \
  }                                                                              \
  KERNEL void BLOCK_OF(512) gather_##NAME##_long(GatherArgs a) {                 \
    gather<INDEX, WORD, UNIT, ROWS, WORDS>(a);                                   \
  }
GATHER(i32_w16, int, u128, u128, ROWS_LONG, WORDS_LONG)
GATHER(i64_w16, i64, u128, u128, ROWS_LONG, WORDS_LONG)
GATHER(i32_w4, int, WORD_4, u32, ROWS_LONG_4, WORDS_LONG_4)
GATHER(i64_w4, i64, WORD_4, u32, ROWS_LONG_4, WORDS_LONG_4)
GATHER(i32_w1, int, u32, u8, ROWS_LONG, WORDS_LONG)
GATHER(i64_w1, i64, u32, u8, ROWS_LONG, WORDS_LONG)

#define TIERED(NAME, WORD, UNIT, ROWS, WORDS)                                    \
  KERNEL void BLOCK_OF(512) tiered_i64_##NAME##_short(GatherArgs a) {            \
    gather<i64, WORD, UNIT, ROWS_SHORT, WORDS_SHORT, true>(a);                   \
  }                                                                              \
  KERNEL void BLOCK_OF(512) tiered_i64_##NAME##_long(GatherArgs a) {             \
    gather<i64, WORD, UNIT, ROWS, WORDS, true>(a);                               \
  }
TIERED(w16, u128, u128, ROWS_LONG, WORDS_LONG)
TIERED(w4, WORD_4, u32, ROWS_LONG_4, WORDS_LONG_4)
TIERED(w1, u32, u8, ROWS_LONG, WORDS_LONG)

// [Note: Order without a sort] What saves translations is that rows of one page are read
// together. So indices are counted by page, each page gets its stretch of the order, and
// a second pass places them: no radix sort, and no library whose kernels take the whole
// GPU. Repeats are found before, in a hash table of positions: the first index of a row
// to arrive owns it, only owners are ordered and read, and the others are copied from
// their owner's place in the output.
struct BucketArgs {
  const void* index;
  int* counts;           // num_buckets + 2; the last but one is for bad indices, the
                         // last is how many places are in use
  int* sums;             // of the runs of buckets, then of blocks of runs
  int* rank;             // place inside the bucket, one an index
  i64* order;            // row numbers in bucket order; -1 for a bad index
  int* position;         // where each of them stood in the index
  int* owner;            // position of the first index of the same row, or null: no look
  int* slots;            // num_slots positions, -1 where free: twice as many as indices
  u64* error;
  i64* fault;
  i64 num_indices;
  i64 num_rows;
  i64 row_bytes;
  i64 num_buckets;
  i64 num_sums;
  i64 num_slots;         // a power of two
  int shift;             // a bucket is 2^shift bytes of the table
  int wraps;
  int near_buckets;      // the last so many are for rows that GPUs hold, by position
  Tiers tiers;
};

DEVICE i64 bucket_of(const BucketArgs& a, i64 row, i64 i) {
  if (row < 0 || row >= a.num_rows) return a.num_buckets;
  if (a.near_buckets && heat_of(a.tiers, row) < a.tiers.replicated + a.tiers.spread)
    return a.num_buckets - a.near_buckets + (i >> 6) % a.near_buckets;
  return (i64)(((u64)row * (u64)a.row_bytes) >> a.shift);
}

DEVICE u64 hash_of(u64 value) { return value * 0x9E3779B97F4A7C15ULL >> 20; }

#define EACH(I, COUNT)                                                \
  for (i64 I = blockIdx.x * (i64)blockDim.x + threadIdx.x; I < (COUNT); \
       I += (i64)gridDim.x * blockDim.x)

KERNEL void BLOCK_OF(512) bucket_clear(BucketArgs a) {
  EACH(i, a.num_buckets + 2 + a.num_sums) (i < a.num_buckets + 2 ? a.counts[i]
      : a.sums[i - a.num_buckets - 2]) = 0;
  if (a.slots) EACH(i, a.num_slots) a.slots[i] = -1;
}

template <typename Index>
DEVICE void bucket_elect(const BucketArgs& a) {
  const Index* index = (const Index*)a.index;
  EACH(i, a.num_indices) {
    const i64 row = row_of((i64)index[i], a.num_rows, a.wraps);
    int owner = (int)i;
    u64 at = hash_of((u64)row);
    // Bad indices own themselves, so that each of them is seen by the count.
    while (row >= 0 && row < a.num_rows) {
      int* slot = a.slots + (at++ & (u64)(a.num_slots - 1));
      int held = *(volatile int*)slot;  // most looks at a hot row need no atomic
      if (held < 0) held = atomicCAS(slot, -1, (int)i);
      if (held < 0) break;
      if (row_of((i64)index[held], a.num_rows, a.wraps) != row) continue;
      owner = held;
      break;
    }
    a.owner[i] = owner;
  }
}

template <typename Index>
DEVICE void bucket_count(const BucketArgs& a) {
  EACH(i, a.num_indices) {
    if (a.owner && a.owner[i] != i) continue;
    const i64 value = (i64)((const Index*)a.index)[i];
    const i64 bucket = bucket_of(a, row_of(value, a.num_rows, a.wraps), i);
    if (bucket == a.num_buckets) report(a, i, value);
    a.rank[i] = atomicAdd(a.counts + bucket, 1);
  }
}

// Counts become first places in two launches, without barriers: sums of runs of buckets
// and of blocks of runs, then each run adds up what lies before it. The order must be
// that of addresses: with runs in any order the same rows took 4.5 ms instead of 3.
const int RUN = 32, RUNS = 64;
KERNEL void BLOCK_OF(512) bucket_sum(BucketArgs a) {
  const i64 buckets = a.num_buckets + 1, runs = (buckets + RUN - 1) / RUN;
  EACH(run, runs) {
    int sum = 0;
#pragma unroll
    for (int k = 0; k < RUN; ++k)
      sum += run * RUN + k < buckets ? a.counts[run * RUN + k] : 0;
    a.sums[run] = sum;
    if (sum) atomicAdd(a.sums + runs + run / RUNS, sum);
    if (sum) atomicAdd(a.counts + buckets, sum);
  }
}

KERNEL void BLOCK_OF(512) bucket_base(BucketArgs a) {
  const i64 buckets = a.num_buckets + 1, runs = (buckets + RUN - 1) / RUN;
  EACH(run, runs) {
    int place = 0;
    for (i64 block = 0; block < run / RUNS; ++block) place += a.sums[runs + block];
    for (i64 before = run - run % RUNS; before < run; ++before) place += a.sums[before];
#pragma unroll
    for (int k = 0; k < RUN; ++k) {
      const i64 b = run * RUN + k;
      if (b >= buckets) break;
      const int count = a.counts[b];
      a.counts[b] = place;
      place += count;
    }
  }
}

template <typename Index>
DEVICE void bucket_place(const BucketArgs& a) {
  EACH(i, a.num_indices) {
    if (a.owner && a.owner[i] != i) continue;
    const i64 row = row_of((i64)((const Index*)a.index)[i], a.num_rows, a.wraps);
    const i64 bucket = bucket_of(a, row, i);
    const i64 place = a.counts[bucket] + a.rank[i];
    a.order[place] = bucket == a.num_buckets ? -1 : row;
    a.position[place] = (int)i;
  }
}

KERNEL void BLOCK_OF(512) bucket_elect_i32(BucketArgs a) { bucket_elect<int>(a); }
KERNEL void BLOCK_OF(512) bucket_elect_i64(BucketArgs a) { bucket_elect<i64>(a); }
KERNEL void BLOCK_OF(512) bucket_count_i32(BucketArgs a) { bucket_count<int>(a); }
KERNEL void BLOCK_OF(512) bucket_count_i64(BucketArgs a) { bucket_count<i64>(a); }
KERNEL void BLOCK_OF(512) bucket_place_i32(BucketArgs a) { bucket_place<int>(a); }
KERNEL void BLOCK_OF(512) bucket_place_i64(BucketArgs a) { bucket_place<i64>(a); }

struct RepeatArgs {
  u8* out;
  const int* owner;
  i64 num_indices;
  i64 row_bytes;
};

// `from` and `to` are different rows of the output; lanes of a warp, four words each.
template <typename Word>
DEVICE void copy_row(u8* to, const u8* from, i64 row_bytes, int lane) {
  const i64 step = 32 * sizeof(Word);
  for (i64 done = lane * (i64)sizeof(Word); done < row_bytes; done += 4 * step) {
    Word word[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      word[w] = Word();
      load_if(done + w * step < row_bytes, word[w], (const Word*)(from + done + w * step));
    }
#pragma unroll
    for (int w = 0; w < 4; ++w)
      store_if(done + w * step < row_bytes, (Word*)(to + done + w * step), word[w]);
  }
}

// Rows that are not read: a copy from where their owner went.
KERNEL void BLOCK_OF(512) copy_repeats(RepeatArgs a) {
  const int lane = threadIdx.x & 31;
  const i64 warps = (i64)gridDim.x * (blockDim.x / 32);
  for (i64 i = blockIdx.x * (i64)(blockDim.x / 32) + threadIdx.x / 32; i < a.num_indices;
       i += warps) {
    const i64 owner = a.owner[i];
    if (owner == i) continue;
    const u8* from = a.out + owner * a.row_bytes;
    u8* to = a.out + i * a.row_bytes;
    const u64 bits = (u64)from | (u64)to | (u64)a.row_bytes;
    if (bits % 16 == 0)
      copy_row<u128>(to, from, a.row_bytes, lane);
    else if (bits % 4 == 0)
      copy_row<u32>(to, from, a.row_bytes, lane);
    else
      for (i64 b = lane; b < a.row_bytes; b += 32) to[b] = from[b];
  }
}

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
  int breaks = 0, fresh = 0;
  EACH(i, a.num_indices) {
    const u64 value = (u64)(i64)index[i];
    breaks += i > 0 && (i64)index[i - 1] + 1 != (i64)value;
    const u64 bit = hash_of(value) & (u64)(a.num_bits - 1);
    const u32 mask = 1u << (bit & 31);
    fresh += !(atomicOr(a.bitmap + (bit >> 5), mask) & mask);
  }
  if (breaks) atomicAdd(a.counts, breaks);
  if (fresh) atomicAdd(a.counts + 1, fresh);
}

KERNEL void BLOCK_OF(512) survey_i32(SurveyArgs a) { survey<int>(a); }
KERNEL void BLOCK_OF(512) survey_i64(SurveyArgs a) { survey<i64>(a); }
