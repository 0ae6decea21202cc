// An experiment beside gather.cu: rows of host memory by Hopper's bulk copy engine, one
// thread and one slot of shared memory a row. Rows are a multiple of 16 bytes.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct BulkArgs {
  const u8* table;
  u8* out;
  const i64* index;
  i64 num_indices;
  i64 row_bytes;
  int slots;  // rows in flight per block: row_bytes * slots fit in shared memory
};

constexpr int BYTES = 45056;

extern "C" __global__ void bulk(BulkArgs a) {
  __shared__ alignas(128) u8 buffer[BYTES];
  __shared__ alignas(8) u64 barriers[128];
  const int t = threadIdx.x;
  if (t >= a.slots) return;
  const u32 slot = (u32)__cvta_generic_to_shared(buffer + t * a.row_bytes);
  const u32 barrier = (u32)__cvta_generic_to_shared(barriers + t);
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier));
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  u32 parity = 0;
  const u32 bytes = (u32)a.row_bytes;
  for (i64 i = (i64)blockIdx.x * a.slots + t; i < a.num_indices; i += (i64)gridDim.x * a.slots) {
    const u8* from = a.table + a.index[i] * a.row_bytes;
    u8* to = a.out + i * a.row_bytes;
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes));
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(slot),
        "l"(from), "r"(bytes), "r"(barrier)
        : "memory");
    u32 done = 0;
    while (!done)
      asm volatile(
          "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
          : "=r"(done)
          : "r"(barrier), "r"(parity)
          : "memory");
    parity ^= 1;
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(slot), "r"(bytes)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
  }
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
