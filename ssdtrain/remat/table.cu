// Elementwise functions of 16-bit numbers by table. A persistent block per processor
// keeps all 65,536 results in shared memory (128 KiB), so a value costs one 2-byte
// access there, and the kernel runs at the speed of device memory.

constexpr int NUM_THREADS = 1024;
constexpr int NUM_ENTRIES = 65536;
constexpr int UNROLL = 4;

__device__ __forceinline__ unsigned pair(const unsigned short* entries, unsigned bits) {
    return entries[bits & 0xffffu] | (unsigned)entries[bits >> 16] << 16;
}

__device__ __forceinline__ uint4 octet(const unsigned short* entries, uint4 bits) {
    return make_uint4(pair(entries, bits.x), pair(entries, bits.y),
                      pair(entries, bits.z), pair(entries, bits.w));
}

// target[i] = table[source[i]] for 8 * num_vectors + num_rest numbers. With
// num_vectors > 0 source and target start at multiples of 16 bytes.
extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1)
look_up(const uint4* __restrict__ table, const unsigned short* __restrict__ source,
        unsigned short* __restrict__ target, long long num_vectors, long long num_rest) {
    extern __shared__ uint4 shared[];
    constexpr int NUM_PARTS = NUM_ENTRIES * 2 / 16;
    for (int i = threadIdx.x; i < NUM_PARTS; i += NUM_THREADS) shared[i] = table[i];
    __syncthreads();
    const auto* entries = reinterpret_cast<const unsigned short*>(shared);
    const auto* from = reinterpret_cast<const uint4*>(source);
    auto* to = reinterpret_cast<uint4*>(target);
    const long long first = (long long)blockIdx.x * NUM_THREADS + threadIdx.x;
    const long long stride = (long long)gridDim.x * NUM_THREADS;
    long long i = first;
    for (; i + (UNROLL - 1) * stride < num_vectors; i += UNROLL * stride) {
        uint4 bits[UNROLL];
#pragma unroll
        for (int k = 0; k < UNROLL; ++k) bits[k] = __ldcs(from + i + k * stride);
#pragma unroll
        for (int k = 0; k < UNROLL; ++k) to[i + k * stride] = octet(entries, bits[k]);
    }
    for (; i < num_vectors; i += stride) to[i] = octet(entries, from[i]);
    for (long long j = first; j < num_rest; j += stride)
        target[8 * num_vectors + j] = entries[source[8 * num_vectors + j]];
}
