// Bulk copies of bytes to shared memory and back, two at a time, with copies and additions; additions of four floats at
// once; and a grid that depends on another.
#include <ptx/atomic.cuh>
#include <ptx/grid.cuh>
#include <ptx/mbarrier.cuh>
#include <ptx/shared.cuh>
#include <ptx/tma.cuh>
using namespace cuflash;

extern "C" __global__ void __launch_bounds__(64) bulk(const float* from, float* copies, float* sums, int half, float* fours) {
  ptx::griddepcontrol_wait();
  const uint32_t shared = ptx::shared_address(ptx::dynamic_shared<float>()), barrier = shared + 2 * half;
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(barrier, 2);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x % 32 == 0) {
    const int start = threadIdx.x / 32 * half;
    ptx::mbarrier_arrive_expect_tx(barrier, half);
    ptx::bulk_load(shared + start, from + start / 4, half, barrier);
  }
  while (!ptx::mbarrier_try_wait(barrier, 0)) {}
  const int start = threadIdx.x / 32 * half;
  if (threadIdx.x % 32 == 0) ptx::bulk_store(copies + start / 4, shared + start, half);
  ptx::bulk_commit();
  ptx::bulk_add(sums + start / 4, shared + start, half);
  ptx::bulk_add(sums + start / 4, shared + half - start, half);
  ptx::bulk_commit();
  ptx::bulk_wait<1>();
  ptx::bulk_wait_read<0>();
  const float id = threadIdx.x;
  ptx::red_add_4(fours + threadIdx.x % 16 * 4, {id, 2 * id, -id, 1.0f});
  ptx::griddepcontrol_launch_dependents();
}
