#include <attention/params.cuh>

// Accesses an accumulator while a wgmma still writes it, so ptxas inserts a wait after each wgmma and reports it
// (C7510).
extern "C" __global__ void __launch_bounds__(128)
    sm90_serialised(const __grid_constant__ cuflash::attention::Params params) {
  float d[4] = {};
  uint64_t a = params.shape.seqlen_q, b = params.shape.seqlen_kv;
  for (int block = 0; block < params.shape.num_heads; ++block) {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %5, 1, 1, 1, 0, 0;"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "l"(a), "l"(b));
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    d[0] *= 2.0f;
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  }
  static_cast<float*>(params.o.data)[threadIdx.x] = d[0] + d[1] + d[2] + d[3];
}
