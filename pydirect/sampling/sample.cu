// Draw neighbours, read them where the edges lie, and number the nodes of a batch.
//
// Compiled at first use by NVRTC, and in tests by a host compiler (threads then run one
// after the other). What is drawn, and how nodes are numbered, is defined by philox.py,
// draws.py and numbering.py, bit for bit.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#ifndef PYDIRECT_ON_HOST
#define DEVICE static __device__ __forceinline__
#define KERNEL extern "C" __global__
DEVICE double product(double a, double b) { return __dmul_rn(a, b); }  // never fused
DEVICE double sum(double a, double b) { return __dadd_rn(a, b); }
#endif

struct SampleArgs {
  const void* parts[16];  // the edges: blocks of 2^part_shift take turns over the parts
  const double* weights;  // weighted: scaled list by list
  const double* running;  // weighted: running sums of the weights, anew in each list
  const i64* positive;    // weighted: edges a node with a weight above 0
  const i64* offsets;
  const i64* nodes;       // the frontier
  const i64* starts;      // num_nodes + 1: where each node's draws go
  i64* edge;              // drawn: number of the edge
  i64* target;            // drawn: position in the frontier
  i64* neighbor;          // drawn: the neighbour
  int* slot;              // a node: -1 - its number; or the first draw of it; or INT_MAX
  int* rank;              // a draw: 1 if it brings a new node, then running sums of that
  i64* added;             // new nodes
  i64* source;            // a draw: the neighbour's number
  i64 num_nodes;
  i64 room;               // draws there is room for
  i64 base;               // nodes numbered before
  u64 key;
  u32 relation;
  int part_shift;
  int num_parts;
  int patience;           // see draws.py
};

DEVICE i64 thread_number() { return blockIdx.x * (i64)blockDim.x + threadIdx.x; }
DEVICE i64 num_threads() { return gridDim.x * (i64)blockDim.x; }

// See [Note: Keyed draws] in philox.py.
struct Draws {
  u64 key;
  u32 relation, word[4];
  i64 node, pair;
  DEVICE Draws of(const SampleArgs& a, i64 node) {
    Draws d;
    d.key = a.key;
    d.relation = a.relation;
    d.node = node;
    d.pair = -1;
    return d;
  }
};

DEVICE double draw(Draws& d, i64 number) {
  if (d.pair != number / 2) {
    d.pair = number / 2;
    u32 x0 = (u32)d.node, x1 = (u32)(d.node >> 32), x2 = (u32)d.pair, x3 = d.relation;
    u32 low = (u32)d.key, high = (u32)(d.key >> 32);
    for (int round = 0; round < 10; ++round) {
      const u64 one = (u64)x0 * 0xD2511F53u, other = (u64)x2 * 0xCD9E8D57u;
      const u32 y0 = (u32)(other >> 32) ^ x1 ^ low, y2 = (u32)(one >> 32) ^ x3 ^ high;
      x1 = (u32)other;
      x3 = (u32)one;
      x0 = y0;
      x2 = y2;
      low += 0x9E3779B9u;
      high += 0xBB67AE85u;
    }
    d.word[0] = x0; d.word[1] = x1; d.word[2] = x2; d.word[3] = x3;
  }
  const int at = (int)(number & 1) * 2;
  return (double)((u64)d.word[at] << 21 | d.word[at + 1] >> 11) * 0x1p-53;
}

DEVICE bool among(const i64* drawn, i64 num, i64 value) {
  for (i64 j = 0; j < num; ++j)
    if (drawn[j] == value) return true;
  return false;
}

DEVICE void uniform_distinct(const SampleArgs& a, Draws& d, i64 begin, i64 size, i64 num, i64* edge) {
  for (i64 j = 0; j < num; ++j) {  // Floyd's algorithm
    const i64 last = size - num + j;
    const i64 picked = begin + (i64)product(draw(d, j), (double)(last + 1));
    edge[j] = among(edge, j, picked) ? begin + last : picked;
  }
}

// The edge of a list under whose weight `at` falls; the last with a weight if none.
DEVICE i64 under(const SampleArgs& a, i64 begin, i64 end, double at) {
  const double top = a.running[end - 1];
  i64 low = begin, high = end - 1;
  while (low < high) {
    const i64 middle = low + (high - low) / 2;
    const bool right = at < top ? a.running[middle] <= at : a.running[middle] < top;
    if (right) low = middle + 1; else high = middle;
  }
  return low;
}

DEVICE i64 weighted_one(const SampleArgs& a, Draws& d, i64 begin, i64 end, i64 number) {
  return under(a, begin, end, product(draw(d, number), a.running[end - 1]));
}

// One of the edges not drawn yet, by adding up their weights in order.
DEVICE i64 weighted_rest(const SampleArgs& a, Draws& d, i64 begin, i64 end, i64 number,
                         const i64* edge, i64 num) {
  double total = 0.0;
  for (i64 e = begin; e < end; ++e)
    if (!among(edge, num, e)) total = sum(total, a.weights[e]);
  const double at = product(draw(d, number), total);
  double passed = 0.0;
  i64 last = -1;
  for (i64 e = begin; e < end; ++e) {
    if (a.weights[e] <= 0.0 || among(edge, num, e)) continue;
    passed = sum(passed, a.weights[e]);
    last = e;
    if (passed > at) break;
  }
  return last;
}

DEVICE void weighted_distinct(const SampleArgs& a, Draws& d, i64 begin, i64 end, i64 num, i64* edge) {
  i64 found = 0, number = 0;
  for (; found < num && number < a.patience; ++number) {
    const i64 picked = weighted_one(a, d, begin, end, number);
    if (!among(edge, found, picked)) edge[found++] = picked;
  }
  for (; found < num; ++found, ++number)
    edge[found] = weighted_rest(a, d, begin, end, number, edge, found);
}

template <bool WEIGHTED, bool REPLACE> DEVICE void pick(const SampleArgs& a) {
  for (i64 i = thread_number(); i < a.num_nodes; i += num_threads()) {
    const i64 node = a.nodes[i], begin = a.offsets[node], end = a.offsets[node + 1];
    const i64 start = a.starts[i], num = a.starts[i + 1] - start;
    i64* edge = a.edge + start;
    Draws d = Draws::of(a, node);
    if (num == 0) continue;
    if (REPLACE)
      for (i64 j = 0; j < num; ++j)
        edge[j] = WEIGHTED ? weighted_one(a, d, begin, end, j)
                           : begin + (i64)product(draw(d, j), (double)(end - begin));
    else if (!WEIGHTED && num < end - begin)
      uniform_distinct(a, d, begin, end - begin, num, edge);
    else if (WEIGHTED && num < a.positive[node])
      weighted_distinct(a, d, begin, end, num, edge);
    else
      for (i64 e = begin, j = 0; e < end; ++e)
        if (!WEIGHTED || a.weights[e] > 0.0) edge[j++] = e;
    for (i64 j = 0; j < num; ++j) a.target[start + j] = i;
  }
}

KERNEL void pick_uniform_distinct(SampleArgs a) { pick<false, false>(a); }
KERNEL void pick_uniform_replace(SampleArgs a) { pick<false, true>(a); }
KERNEL void pick_weighted_distinct(SampleArgs a) { pick<true, false>(a); }
KERNEL void pick_weighted_replace(SampleArgs a) { pick<true, true>(a); }

// Whole lists: a hub's may be longer than all others together, so by draws.
KERNEL void pick_all(SampleArgs a) {
  for (i64 t = thread_number(); t < a.starts[a.num_nodes]; t += num_threads()) {
    i64 low = 0, high = a.num_nodes - 1;  // the last node that starts at or before t
    while (low < high) {
      const i64 middle = high - (high - low) / 2;
      if (a.starts[middle] > t) high = middle - 1; else low = middle;
    }
    a.edge[t] = a.offsets[a.nodes[low]] + t - a.starts[low];
    a.target[t] = low;
  }
}

template <typename Id> DEVICE i64 id_of(const SampleArgs& a, i64 e) {
  if (a.num_parts == 1) return (i64)((const Id*)a.parts[0])[e];
  const i64 block = e >> a.part_shift, mask = ((i64)1 << a.part_shift) - 1;
  const Id* part = (const Id*)a.parts[block % a.num_parts];
  return (i64)part[(block / a.num_parts << a.part_shift) | (e & mask)];
}

// Read the neighbours; the first draw of a new node claims it.
template <typename Id> DEVICE void read(const SampleArgs& a) {
  for (i64 t = thread_number(); t < a.starts[a.num_nodes]; t += num_threads()) {
    const i64 neighbor = id_of<Id>(a, a.edge[t]);
    a.neighbor[t] = neighbor;
    atomicMin(a.slot + neighbor, (int)t);
  }
}
KERNEL void read_i32(SampleArgs a) { read<int>(a); }
KERNEL void read_i64(SampleArgs a) { read<i64>(a); }

KERNEL void mark_new(SampleArgs a) {
  for (i64 t = thread_number(); t < a.room; t += num_threads())
    a.rank[t] = t < a.starts[a.num_nodes] && a.slot[a.neighbor[t]] == (int)t;
}

KERNEL void number_new(SampleArgs a) {
  for (i64 t = thread_number(); t < a.starts[a.num_nodes]; t += num_threads()) {
    const int rank = a.rank[t] - 1;
    if (a.rank[t] == (t ? a.rank[t - 1] : 0)) continue;
    a.added[rank] = a.neighbor[t];
    a.slot[a.neighbor[t]] = -1 - (int)(a.base + rank);
  }
}

KERNEL void find_sources(SampleArgs a) {
  for (i64 t = thread_number(); t < a.starts[a.num_nodes]; t += num_threads())
    a.source[t] = -1 - (i64)a.slot[a.neighbor[t]];
}
