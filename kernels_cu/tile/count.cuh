#pragma once
#include <ptx/atomic.cuh>
#include <ptx/count.cuh>
#include <ptx/thread.cuh>
#include <ptx/tma.cuh>

// Counts in global memory: from which blocks take numbers, or by which they tell each other what is done.
namespace cuflash::tile {

// The next number, which nobody else gets. By one thread.
CUFLASH_DEVICE int take_number(int* count) { return ptx::fetch_add(count, 1); }

// The same, for all lanes of a warp one number, by its first lane; and in two parts, as the answer is long in coming.
CUFLASH_DEVICE int ask_together(int* count) { return ptx::lane() == 0 ? take_number(count) : 0; }
CUFLASH_DEVICE int hear_together(int number) { return __shfl_sync(0xffffffffu, number, 0); }
CUFLASH_DEVICE int take_number_together(int* count) { return hear_together(ask_together(count)); }

// Wait until a count has all of these bits, or is no less than a number. Copies that this warp starts afterwards read what
// others told by it. By whole warps.
CUFLASH_DEVICE void await_bits(const int* count, int bits) {
  ptx::wait_for_count(count, bits, bits);
  ptx::fence_proxy_async_global();
}
CUFLASH_DEVICE void await_count(const int* count, int least) {
  ptx::wait_for_count(count, ~0, least);
  ptx::fence_proxy_async_global();
}

// Leave counts at 0, which nobody asks for meanwhile. By whole warps.
template <class Counts>
CUFLASH_DEVICE void reset(Counts* counts) {
  if (ptx::lane() == 0) *counts = {};
}

// Tell that all copies to global memory which the warp's first lane started are made, by adding to counts. By whole warps.
CUFLASH_DEVICE void await_copies() {
  ptx::bulk_wait<0>();
  ptx::fence_proxy_async_global();
}
CUFLASH_DEVICE void tell(int* count, int number) {
  if (number != 0 && ptx::lane() == 0) ptx::red_add_release(count, number);
}

}  // namespace cuflash::tile
