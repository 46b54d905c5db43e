#pragma once
#include <ptx/arrival.cuh>
#include <ptx/atomic.cuh>
#include <ptx/atomic_store.cuh>
#include <ptx/count.cuh>
#include <ptx/thread.cuh>
#include <ptx/tma.cuh>

// Counters in global memory: blocks take tile numbers from them, or signal completed work with them.
namespace cuflash::tile {

// Set a counter to 0 for the next launch, after the last of all additions to it. Called by one thread. The store is
// atomic: PTX orders it after the additions without a fence, but other memory models do not.
CUFLASH_DEVICE void reset(int* counter) { ptx::store_relaxed(counter, 0); }

// Take the next number. Called by one thread.
CUFLASH_DEVICE int fetch_increment(int* counter) { return ptx::fetch_add(counter, 1); }

// Count an arrival, with acquire and release semantics. Return true for the last of `total` arrivals, which resets the
// counter. Called by one thread.
CUFLASH_DEVICE bool arrives_last(int* arrivals, int total) {
  const bool is_last = ptx::fetch_add_acq_rel(arrivals, 1) == total - 1;
  if (is_last) reset(arrivals);
  return is_last;
}

// Take one number for a whole warp. The first function starts the atomic addition in lane 0, and the second passes its
// result to all lanes; other work can hide the latency in between.
CUFLASH_DEVICE int start_fetch_increment(int* counter) { return ptx::lane() == 0 ? fetch_increment(counter) : 0; }
CUFLASH_DEVICE int broadcast_lane_0(int number) { return __shfl_sync(0xffffffffu, number, 0); }

// Wait until a counter has all of `bits` set or, in the second function, has reached `threshold`. Copies that this warp
// starts afterwards read the data whose completion the counter signals. Called by whole warps.
CUFLASH_DEVICE void wait_for_bits(const int* counter, int bits) {
  ptx::wait_for_counter(counter, bits, bits);
  ptx::fence_proxy_async_global();
}
CUFLASH_DEVICE void wait_at_least(const int* counter, int threshold) {
  ptx::wait_for_counter(counter, ~0, threshold);
  ptx::fence_proxy_async_global();
}

// Reset one or several counters to 0, while no other warp reads them. Called by whole warps.
template <class Counts>
CUFLASH_DEVICE void reset_counter(Counts* semaphore) {
  __syncwarp();  // all lanes of this warp have finished waiting for the counters
  if (ptx::lane() == 0) *semaphore = {};
}

// Wait until all copies to global memory that the first lane started are complete. Called by whole warps.
CUFLASH_DEVICE void wait_bulk_copies() {
  ptx::bulk_wait<0>();
  ptx::fence_proxy_async_global();
}
// Add to a counter with release order, to signal completed work. Called by whole warps.
CUFLASH_DEVICE void signal(int* counter, int number) {
  if (number != 0 && ptx::lane() == 0) ptx::red_add_release(counter, number);
}

}  // namespace cuflash::tile
