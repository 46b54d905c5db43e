// A warpgroup passes numbers to two others through a ring in shared memory, with mbarriers that guard its slots.
#include <ptx/mbarrier.cuh>
#include <ptx/shared.cuh>
#include <ptx/warpgroup.cuh>
using namespace cuflash;

constexpr int kSlots = 3, kNumConsumers = 256;

extern "C" __global__ void __launch_bounds__(384, 1) ring(const int* numbers, int count, int* sums, int* elected) {
  int* slots = ptx::dynamic_shared<int>();
  const uint32_t full = ptx::shared_address(slots + 128 * kSlots), empty = full + 8 * kSlots;
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < kSlots; ++slot) {
      ptx::mbarrier_init(full + 8 * slot, 128);
      ptx::mbarrier_init(empty + 8 * slot, kNumConsumers / 32);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  const bool is_elected = ptx::elect_one();
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  atomicAdd(elected + warp, ptx::elect_one() && is_elected ? 1 : 0);
  if (warp < 4) {
    ptx::setmaxnreg_dec<24>();
    for (int i = 0; i < count; ++i) {
      const int slot = i % kSlots, turn = i / kSlots % 2;
      ptx::mbarrier_wait(empty + 8 * slot, turn ^ 1);
      slots[slot * 128 + threadIdx.x] = numbers[i * 128 + threadIdx.x];
      ptx::mbarrier_arrive(full + 8 * slot);
    }
  } else {
    ptx::setmaxnreg_inc<240>();
    const int mine = threadIdx.x - 128;
    int sum = 0;
    for (int i = 0; i < count; ++i) {
      const int slot = i % kSlots, turn = i / kSlots % 2;
      ptx::mbarrier_wait(full + 8 * slot, turn);
      sum = 3 * sum + slots[slot * 128 + (mine * 7 + i) % 128];
      __syncwarp();
      if (is_elected) ptx::mbarrier_arrive(empty + 8 * slot);
    }
    sums[mine] = sum;
  }
}
