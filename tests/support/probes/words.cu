#include <ptx/store.cuh>

extern "C" __global__ void words(int* shuffled, unsigned* votes, int* reduced, double* wide, float* stored) {
  const int lane = threadIdx.x % 32;
  int* mine = shuffled + 8 * threadIdx.x;
  mine[0] = __shfl_sync(0xffffffffu, 10 * lane, lane + 5, 8);
  mine[1] = __shfl_xor_sync(0xffffffffu, 10 * lane, 9, 16);
  mine[2] = __shfl_up_sync(0xffffffffu, 10 * lane, 3, 8);
  mine[3] = __shfl_down_sync(0xffffffffu, 10 * lane, 3, 8);
  mine[4] = __shfl_sync(0xffffffffu, 10 * lane, 40);
  mine[5] = __shfl_xor_sync(0xffffffffu, 10 * lane, 4, 4);
  // The halves of the warp diverge.
  if (lane < 16) mine[6] = __shfl_down_sync(0x0000ffffu, lane, 1, 16);
  else mine[6] = __shfl_up_sync(0xffff0000u, lane, 1, 16);
  votes[4 * threadIdx.x] = __ballot_sync(0xffffffffu, lane % 3 == 0);
  votes[4 * threadIdx.x + 1] = __any_sync(0xffffffffu, lane == 7);
  votes[4 * threadIdx.x + 2] = __all_sync(0xffffffffu, lane < 32);
  votes[4 * threadIdx.x + 3] = __all_sync(0xffffffffu, lane != 31);
  reduced[6 * threadIdx.x] = __reduce_add_sync(0xffffffffu, lane - 20);
  reduced[6 * threadIdx.x + 1] = __reduce_min_sync(0xffffffffu, lane - 20);
  reduced[6 * threadIdx.x + 2] = __reduce_max_sync(0xffffffffu, lane - 20);
  reduced[6 * threadIdx.x + 3] = static_cast<int>(__reduce_or_sync(0xffffffffu, 1u << lane % 5));
  reduced[6 * threadIdx.x + 4] = static_cast<int>(__reduce_max_sync(0xffffffffu, static_cast<unsigned>(lane - 20)));
  reduced[6 * threadIdx.x + 5] = max(-1, lane) + min(lane, 3) + __popc(lane) + __clz(lane | 1) + __ffs(lane);
  wide[threadIdx.x] = __shfl_xor_sync(0xffffffffu, lane + 0.5, 1) + fmaxf(1.0f, __int_as_float(0x7fc00000));
  cuflash::ptx::store_if(lane % 3 == 1, stored + threadIdx.x, lane + 0.25f);
}
