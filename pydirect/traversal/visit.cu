// Visit the edges of a frontier whose adjacency lists lie in host memory.
//
// Compiled at first use by NVRTC, and in tests by a host compiler (threads then run one
// after the other, so no kernel here may need its neighbours: no shuffles, no barriers
// that a host cannot leave out; what a warp stages together, there each thread stages
// alone).
//
// [Note: Four ways to walk] The link carries one request for the 32-byte sectors of one
// 128-byte line that a warp touches in one instruction (EMOGI, section 2.3).
//   naive    one thread a list: a request of 32 bytes for every sector.
//   merged   one warp a list, from its first element: whole lines, each in two pieces
//            where the list does not start on a line.
//   aligned  one warp a list, from the line before its first element.
//   lines    the frontier is sorted, so its lists lie in ascending order. The *lines*
//            they touch are numbered through, `sums` counting those that each list adds
//            to the lists before it, and dealt out evenly: every line is read once, by
//            one instruction, whole, also where lists meet inside it, and a hub's list
//            is shared by all warps.
// The first three are the dissertation's. A line here is a *unit* of 2^unit_shift
// edges: 128 bytes of the narrower of ids and weights, so that both arrays are read from
// the start of a line. (With 8-byte ids and 4-byte weights, 16 edges would align the ids
// and only half the weights.)

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#ifndef PYDIRECT_ON_HOST
#define DEVICE static __device__ __forceinline__
#define KERNEL extern "C" __global__
#define BLOCK_OF(THREADS) __launch_bounds__(THREADS)
#define TOGETHER(MASK) __syncwarp(MASK)
#define PER_BLOCK __shared__
// The lanes of a warp share work of which each needs the whole result.
#define LANE_OF_WARP (threadIdx.x & 31)
#define LANES 32
DEVICE int ones(u32 v) { return __popc(v); }
// A word of a line of which another warp of the block may need the rest.
DEVICE u32 load_word(const u32* p) { return *p; }
DEVICE int load_once(const int* p) {
  int v;
  asm volatile("ld.global.L1::no_allocate.s32 %0, [%1];" : "=r"(v) : "l"(p));
  return v;
}
DEVICE i64 load_once(const i64* p) {
  i64 v;
  asm volatile("ld.global.L1::no_allocate.s64 %0, [%1];" : "=l"(v) : "l"(p));
  return v;
}
DEVICE float load_once(const float* p) {
  float v;
  asm volatile("ld.global.L1::no_allocate.f32 %0, [%1];" : "=f"(v) : "l"(p));
  return v;
}
DEVICE double load_once(const double* p) {
  double v;
  asm volatile("ld.global.L1::no_allocate.f64 %0, [%1];" : "=d"(v) : "l"(p));
  return v;
}
DEVICE i64 bits_of(double v) { return __double_as_longlong(v); }
DEVICE double value_of(i64 v) { return __longlong_as_double(v); }
#endif

struct VisitArgs {
  const void* edges;      // host memory; element i is edge i
  const void* weights;    // host memory, or null
  const void* hot_edges;  // GPU memory: blocks of 2^block_shift edges
  const void* hot_weights;
  const int* slots;       // slot of each block of the edge list, -1: on the host; or null
  const i64* offsets;     // num_nodes + 1
  const i64* frontier;    // nodes with edges, ascending; null: node i is entry i
  const i64* sums;        // lines: inclusive sums of the units that each entry adds
  void* value;            // what the visit changes: see the operations
  const void* source;     // what it reads
  u8* marks;
  u32* seen;              // mark: see [Note: Seen bits]
  i64* counter;           // search: sectors of 32 bytes read
  const i64* first_blocks;  // compressed lists: the first block of each node
  const i64* positions;     // the first byte of each block
  i64 num_entries;
  i64 num_units;
  i64 limit;              // edges of a list that are visited, from its first
  i64 shift;              // edges from the line in front of the edge list to its start
  i64 now;
  int unit_shift;
  int block_shift;
  int contiguous;         // every block walks its own share of the units
  int weight_type;        // push, pull, tree: 0 without weights, else see weight_at
};

template <typename T>
DEVICE T fetch(const VisitArgs& a, const void* cold, const void* hot, i64 e) {
  if (a.slots) {
    const i64 place = e + a.shift;
    const i64 slot = a.slots[place >> a.block_shift];
    if (slot >= 0)
      return ((const T*)hot)[(slot << a.block_shift) +
                             (place & (((i64)1 << a.block_shift) - 1))];
  }
  return load_once((const T*)cold + e);
}

// One kernel serves all types of weights: the branch is the same for all threads.
const int I32 = 1, I64 = 2, F32 = 3;
DEVICE double weight_at(const VisitArgs& a, i64 e) {
  if (a.weight_type == I32) return fetch<int>(a, a.weights, a.hot_weights, e);
  if (a.weight_type == I64) return (double)fetch<i64>(a, a.weights, a.hot_weights, e);
  if (a.weight_type == F32) return fetch<float>(a, a.weights, a.hot_weights, e);
  return fetch<double>(a, a.weights, a.hot_weights, e);
}

DEVICE i64 node_of(const VisitArgs& a, i64 entry) {
  return a.frontier ? a.frontier[entry] : entry;
}

struct List {
  i64 begin, end;
};

DEVICE List list_of(const VisitArgs& a, i64 node) {
  List list;
  list.begin = a.offsets[node];
  list.end = a.offsets[node + 1];
  if (list.end - list.begin > a.limit) list.end = list.begin + a.limit;
  return list;
}

// Operations. Each handles edge e from `node` to `next`; the weight is fetched by those
// that have one.

// value: int32 levels, -1 where not reached yet; seen: a bit for each node that has one.

// [Note: Seen bits] An edge leads to a random node. Levels are larger than the L2 cache
// when graphs are; bits are not, so an edge to a node that has a level costs no access to
// memory, and levels are written once a node. Read past the L1 cache, which would keep
// bits that others have set since.
struct Mark {
  DEVICE void visit(const VisitArgs& a, i64 node, i64 next, i64 e) {
    u32* word = a.seen + (next >> 5);
    const u32 bit = 1u << (next & 31);
    if (*(volatile u32*)word & bit) return;
    if (atomicOr(word, bit) & bit) return;
    ((int*)a.value)[next] = (int)a.now + 1;
  }
};

// [Note: Distances as integers] value: distances, int64 or the bits of a non-negative
// double, which as integers are in the same order; so one atomic minimum serves both. A
// node whose distance falls is marked for the frontier, also while it is being visited.
template <typename Weight> struct Sum {
  DEVICE i64 plus(i64 distance, Weight weight) { return distance + weight; }
};
template <> struct Sum<float> {
  DEVICE i64 plus(i64 distance, float weight) {
    return bits_of(value_of(distance) + (double)weight);
  }
};
template <> struct Sum<double> {
  DEVICE i64 plus(i64 distance, double weight) {
    return bits_of(value_of(distance) + weight);
  }
};
template <typename Weight> struct Relax {
  DEVICE void visit(const VisitArgs& a, i64 node, i64 next, i64 e) {
    i64* distance = (i64*)a.value;
    const Weight weight = fetch<Weight>(a, a.weights, a.hot_weights, e);
    const i64 through = Sum<Weight>::plus(((volatile i64*)distance)[node], weight);
    if (through < distance[next] && through < atomicMin(distance + next, through))
      a.marks[next] = 1;
  }
};

// value: int64 parents; roots are their own. A root is hooked under the one whose number
// comes first after a multiplication that shuffles numbers: hooked by plain numbers, the
// trees of graphs whose neighbours have near numbers would be long chains.
DEVICE bool before(i64 one, i64 other) {
  return (u64)one * 0x9E3779B97F4A7C15ULL < (u64)other * 0x9E3779B97F4A7C15ULL;
}
// Parents are compared before roots are looked for: once most nodes have one root, every
// thread of the GPU would read that root's parent, and one line of the L2 cache serves a
// load a clock. (The order of steps is Afforest's: Sutton, Ben-Nun and Barak, IPDPS 2018.)
struct Link {
  DEVICE void visit(const VisitArgs& a, i64 node, i64 next, i64 e) {
    volatile i64* parent = (volatile i64*)a.value;
    i64 one = parent[node], other = parent[next];
    while (one != other) {
      const bool first = before(one, other);
      const i64 high = first ? other : one, low = first ? one : other;
      const i64 above = parent[high];
      if (above == low) return;
      if (above == high &&
          (i64)atomicCAS((u64*)a.value + high, (u64)high, (u64)low) == high)
        return;
      one = parent[parent[high]];
      other = parent[low];
    }
  }
};

// value: int64 sums in fixed point, source: int64 shares, or with weights the float64
// share of each unit of weight. Integers add up to the same in any order: see
// [Note: Ranks in fixed point] in pagerank.py.
DEVICE u64 sent(const VisitArgs& a, i64 sender, i64 e) {
  if (!a.weight_type) return ((const u64*)a.source)[sender];
  return (u64)(i64)(((const double*)a.source)[sender] * weight_at(a, e));
}
struct Push {
  DEVICE void visit(const VisitArgs& a, i64 node, i64 next, i64 e) {
    atomicAdd((u64*)a.value + next, sent(a, node, e));
  }
};
struct Pull {
  DEVICE void visit(const VisitArgs& a, i64 node, i64 next, i64 e) {
    atomicAdd((u64*)a.value + node, sent(a, next, e));
  }
};

// value: int64 predecessors, source: distances as integers, marks: the nodes that look for
// a predecessor; now: 1 takes edges that add nothing, 0 the others. See predecessors.py.
struct Tree {
  DEVICE void visit(const VisitArgs& a, i64 node, i64 next, i64 e) {
    if (!a.marks[next]) return;
    const i64* distance = (const i64*)a.source;
    const i64 near = distance[node], far = distance[next];
    if (a.now ? near != far : near >= far) return;
    i64 through = near + 1;
    if (a.weight_type == I32)
      through = near + fetch<int>(a, a.weights, a.hot_weights, e);
    else if (a.weight_type == I64)
      through = near + fetch<i64>(a, a.weights, a.hot_weights, e);
    else if (a.weight_type)
      through = bits_of(value_of(near) + weight_at(a, e));
    if (through == far) atomicMin((i64*)a.value + next, node);
  }
};

DEVICE i64 thread_number() { return blockIdx.x * (i64)blockDim.x + threadIdx.x; }
DEVICE i64 num_threads() { return gridDim.x * (i64)blockDim.x; }

template <typename Id, typename Op> DEVICE void naive(const VisitArgs& a, Op op) {
  for (i64 i = thread_number(); i < a.num_entries; i += num_threads()) {
    const i64 node = node_of(a, i);
    const List list = list_of(a, node);
    for (i64 e = list.begin; e < list.end; ++e)
      op.visit(a, node, (i64)fetch<Id>(a, a.edges, a.hot_edges, e), e);
  }
}

template <typename Id, typename Op, bool ALIGNED>
DEVICE void by_warp(const VisitArgs& a, Op op) {
  const i64 lane = threadIdx.x & 31;
  const i64 unit = (i64)1 << a.unit_shift;
  for (i64 i = thread_number() / 32; i < a.num_entries; i += num_threads() / 32) {
    const i64 node = node_of(a, i);
    const List list = list_of(a, node);
    const i64 back = ALIGNED ? (list.begin + a.shift) & (unit - 1) : 0;
    for (i64 e = list.begin - back + lane; e < list.end; e += 32)
      if (e >= list.begin)
        op.visit(a, node, (i64)fetch<Id>(a, a.edges, a.hot_edges, e), e);
  }
}

// The first entry whose sum exceeds `unit`, at or after `from`: in doubling steps, as
// units come in ascending order.
DEVICE i64 entry_of(const VisitArgs& a, i64 unit, i64 from) {
  i64 low = from, step = 1;
  while (low + step < a.num_entries && a.sums[low + step - 1] <= unit) {
    low += step;
    step *= 2;
  }
  i64 high = low + step < a.num_entries ? low + step : a.num_entries;
  while (low < high) {
    const i64 middle = low + (high - low) / 2;
    if (a.sums[middle] <= unit) low = middle + 1; else high = middle;
  }
  return low;
}

// The units of one group of `width` threads.
struct Turns {
  i64 first, last, stride;
};

DEVICE Turns turns_of(const VisitArgs& a, int width) {
  const i64 groups = blockDim.x / width, group = threadIdx.x / width;
  const i64 share = (a.num_units + gridDim.x - 1) / gridDim.x;
  const i64 begin = a.contiguous ? blockIdx.x * share : 0;
  const i64 limit = a.contiguous ? begin + share : a.num_units;
  Turns turns;
  turns.first = begin + group + (a.contiguous ? 0 : blockIdx.x * groups);
  turns.last = limit < a.num_units ? limit : a.num_units;
  turns.stride = a.contiguous ? groups : groups * gridDim.x;
  return turns;
}

template <typename Id, typename Op> DEVICE void lines(const VisitArgs& a, Op op) {
  const int width = 1 << a.unit_shift;  // at most a warp
  const i64 lane = threadIdx.x & (width - 1);
  const Turns turns = turns_of(a, width);
  i64 found = 0;
  for (i64 unit = turns.first; unit < turns.last; unit += turns.stride) {
    found = entry_of(a, unit, found);
    i64 entry = found, node = node_of(a, entry);
    List list = list_of(a, node);
    // The units that an entry adds end with the one of its last edge.
    const i64 own = (list.end - 1 + a.shift) >> a.unit_shift;
    const i64 line = own - (a.sums[entry] - 1 - unit);
    const i64 e = (line << a.unit_shift) + lane - a.shift;
    while (e >= list.end && ++entry < a.num_entries) {
      node = node_of(a, entry);
      list = list_of(a, node);
    }
    if (e >= list.begin && e < list.end)
      op.visit(a, node, (i64)fetch<Id>(a, a.edges, a.hot_edges, e), e);
  }
}

// Backwards: entries are nodes not reached yet, and each looks for a neighbour of the
// level `now` in its own list, a unit at a time, until it has found one.
template <typename Id> DEVICE void search(const VisitArgs& a) {
  const int width = 1 << a.unit_shift;
  const i64 lane = threadIdx.x & (width - 1);
  const u32 mask = (width == 32 ? 0xFFFFFFFFu : (1u << width) - 1)
                   << (threadIdx.x & 31 & ~(width - 1));
  const i64 groups = num_threads() >> a.unit_shift;
  volatile int* level = (volatile int*)a.value;
  const i64 per_sector = 32 / sizeof(Id);
  i64 sectors = 0;
  for (i64 i = thread_number() >> a.unit_shift; i < a.num_entries; i += groups) {
    const i64 node = node_of(a, i);
    const List list = list_of(a, node);
    i64 start = ((list.begin + a.shift) & ~(i64)(width - 1)) - a.shift;
    for (; start < list.end && level[node] < 0; start += width) {
      const i64 e = start + lane;
      TOGETHER(mask);
      if (e >= list.begin && e < list.end &&
          level[(i64)fetch<Id>(a, a.edges, a.hot_edges, e)] == (int)a.now)
        level[node] = (int)a.now + 1;
      if (lane == 0) {
        const i64 first = start > list.begin ? start : list.begin;
        const i64 last = start + width < list.end ? start + width - 1 : list.end - 1;
        sectors += (last + a.shift) / per_sector - (first + a.shift) / per_sector + 1;
      }
      TOGETHER(mask);
    }
  }
  if (sectors) atomicAdd((u64*)a.counter, (u64)sectors);
}

// Compressed lists: see [Note: Compressed lists] in compressed.py. A unit is a block of a
// list, and a warp copies its bytes to shared memory line by line before lanes decode.
const int BLOCK_EDGES = 64;
const int ROOM_WORDS = 72;  // 16 bytes of lengths, 64 times 4, words at both ends

struct Block {
  const u32* words;
  int lead;   // bytes in front of the block in its first word
  int count;  // elements
};

DEVICE u32 word_at(const Block& b, int byte) {
  const int shift = 8 * (byte & 3);
  const u32 low = b.words[byte >> 2] >> shift;
  return shift ? low | b.words[(byte >> 2) + 1] << (32 - shift) : low;
}

DEVICE u32 difference(const Block& b, int i) {
  int at = b.lead + (b.count + 3) / 4 + i;  // each has a byte at least
  for (int k = 0; k < i; k += 16) {
    u32 codes = word_at(b, b.lead + k / 4);
    if (i - k < 16) codes &= (1u << 2 * (i - k)) - 1;
    at += ones(codes & 0x55555555u) + 2 * ones(codes & 0xAAAAAAAAu);
  }
  const u32 code = word_at(b, b.lead + i / 4) >> (2 * (i & 3)) & 3;
  return word_at(b, at) & (0xFFFFFFFFu >> (24 - 8 * code));
}

DEVICE i64 element(const Block& b, int i) {
  i64 sum = difference(b, 0);
  for (int j = i; j > 0; j &= j - 1) sum += difference(b, j);
  return sum;
}

DEVICE Block staged(const VisitArgs& a, i64 block, int count, u32* room) {
  const i64 begin = a.positions[block], end = a.positions[block + 1];
  const i64 first = begin >> 2, last = (end + 3) >> 2, shift = a.shift >> 2;
  const u32* words = (const u32*)a.edges;
  TOGETHER(0xFFFFFFFFu);  // nobody reads the block before any more
  for (i64 w = ((first + shift) & ~(i64)31) - shift + LANE_OF_WARP; w < last; w += LANES)
    if (w >= first) room[w - first] = load_word(words + w);
  TOGETHER(0xFFFFFFFFu);
  Block b;
  b.words = room;
  b.lead = (int)(begin & 3);
  b.count = count;
  return b;
}

template <typename Op> DEVICE void blocks(const VisitArgs& a, Op op) {
  PER_BLOCK u32 rooms[32][ROOM_WORDS];
  u32* room = rooms[threadIdx.x >> 5];
  const Turns turns = turns_of(a, 32);
  i64 found = 0;
  for (i64 unit = turns.first; unit < turns.last; unit += turns.stride) {
    found = entry_of(a, unit, found);
    const i64 node = node_of(a, found);
    const i64 number = unit - (found ? a.sums[found - 1] : 0);
    const i64 begin = a.offsets[node] + number * BLOCK_EDGES;
    const i64 left = a.offsets[node + 1] - begin;
    const int count = left < BLOCK_EDGES ? (int)left : BLOCK_EDGES;
    const i64 wanted = list_of(a, node).end - begin;
    const Block b = staged(a, a.first_blocks[node] + number, count, room);
    for (int i = threadIdx.x & 31; i < count && i < wanted; i += 32)
      op.visit(a, node, element(b, i), begin + i);
  }
}

DEVICE void search_blocks(const VisitArgs& a) {
  PER_BLOCK u32 rooms[32][ROOM_WORDS];
  u32* room = rooms[threadIdx.x >> 5];
  volatile int* level = (volatile int*)a.value;
  i64 sectors = 0;
  for (i64 i = thread_number() >> 5; i < a.num_entries; i += num_threads() >> 5) {
    const i64 node = node_of(a, i);
    const i64 end = a.offsets[node + 1];
    i64 block = a.first_blocks[node];
    for (i64 begin = a.offsets[node]; begin < end && level[node] < 0;
         begin += BLOCK_EDGES, ++block) {
      const int count = end - begin < BLOCK_EDGES ? (int)(end - begin) : BLOCK_EDGES;
      const Block b = staged(a, block, count, room);
      for (int k = threadIdx.x & 31; k < count; k += 32)
        if (level[element(b, k)] == (int)a.now) level[node] = (int)a.now + 1;
      if ((threadIdx.x & 31) == 0)
        sectors += ((a.positions[block + 1] - 1 + a.shift) >> 5) -
                   ((a.positions[block] + a.shift) >> 5) + 1;
      TOGETHER(0xFFFFFFFFu);
    }
  }
  if (sectors) atomicAdd((u64*)a.counter, (u64)sectors);
}

#define WAYS(NAME, ID, OP)                                                             \
  KERNEL void BLOCK_OF(1024) naive_##NAME(VisitArgs a) { naive<ID>(a, OP()); }         \
  KERNEL void BLOCK_OF(1024) merged_##NAME(VisitArgs a) { by_warp<ID, OP, false>(a, OP()); } \
  KERNEL void BLOCK_OF(1024) aligned_##NAME(VisitArgs a) { by_warp<ID, OP, true>(a, OP()); } \
  KERNEL void BLOCK_OF(1024) lines_##NAME(VisitArgs a) { lines<ID>(a, OP()); }
#define IDS(LETTERS, ID)                             \
  WAYS(mark_##LETTERS, ID, Mark)                     \
  WAYS(relax_i32_##LETTERS, ID, Relax<int>)          \
  WAYS(relax_i64_##LETTERS, ID, Relax<i64>)          \
  WAYS(relax_f32_##LETTERS, ID, Relax<float>)        \
  WAYS(relax_f64_##LETTERS, ID, Relax<double>)       \
  WAYS(link_##LETTERS, ID, Link)                     \
  WAYS(push_##LETTERS, ID, Push)                     \
  WAYS(pull_##LETTERS, ID, Pull)                     \
  WAYS(tree_##LETTERS, ID, Tree)                     \
  KERNEL void BLOCK_OF(1024) search_##LETTERS(VisitArgs a) { search<ID>(a); }
IDS(i32, int)
IDS(i64, i64)
#define BLOCKS(NAME, OP) \
  KERNEL void BLOCK_OF(1024) blocks_##NAME(VisitArgs a) { blocks(a, OP()); }
BLOCKS(mark, Mark)
BLOCKS(relax_i32, Relax<int>)
BLOCKS(relax_i64, Relax<i64>)
BLOCKS(relax_f32, Relax<float>)
BLOCKS(relax_f64, Relax<double>)
BLOCKS(link, Link)
BLOCKS(push, Push)
BLOCKS(pull, Pull)
BLOCKS(tree, Tree)
KERNEL void BLOCK_OF(1024) blocks_search(VisitArgs a) { search_blocks(a); }
