#pragma once
#include <ptx/atomic.cuh>
#include <ptx/count.cuh>
#include <ptx/thread.cuh>
#include <ptx/tma.cuh>

// Counts in global memory: from which blocks take numbers, or by which they tell each other what is done.
namespace cuflash::tile {

// The next number, which nobody else gets. By one thread.
CUFLASH_DEVICE int fetch_increment(int* counter) { return ptx::fetch_add(counter, 1); }

// The same, for all lanes of a warp one number, by its first lane; and in two parts, as the answer is long in coming.
CUFLASH_DEVICE int start_fetch_increment(int* counter) { return ptx::lane() == 0 ? fetch_increment(counter) : 0; }
CUFLASH_DEVICE int broadcast_lane_0(int number) { return __shfl_sync(0xffffffffu, number, 0); }
CUFLASH_DEVICE int warp_fetch_increment(int* counter) { return broadcast_lane_0(start_fetch_increment(counter)); }

// Wait until a count has all of these bits, or is no less than a number. Copies that this warp starts afterwards read what
// others told by it. By whole warps.
CUFLASH_DEVICE void wait_for_bits(const int* counter, int bits) {
  ptx::wait_for_counter(counter, bits, bits);
  ptx::fence_proxy_async_global();
}
CUFLASH_DEVICE void wait_at_least(const int* counter, int threshold) {
  ptx::wait_for_counter(counter, ~0, threshold);
  ptx::fence_proxy_async_global();
}

// Leave counts at 0, which nobody asks for meanwhile. By whole warps.
template <class Counts>
CUFLASH_DEVICE void reset_counter(Counts* semaphore) {
  if (ptx::lane() == 0) *semaphore = {};
}

// Tell that all copies to global memory which the warp's first lane started are made, by adding to counts. By whole warps.
CUFLASH_DEVICE void wait_bulk_copies() {
  ptx::bulk_wait<0>();
  ptx::fence_proxy_async_global();
}
CUFLASH_DEVICE void signal(int* counter, int number) {
  if (number != 0 && ptx::lane() == 0) ptx::red_add_release(counter, number);
}

}  // namespace cuflash::tile
