#pragma once
#include <ptx/atomic.cuh>
#include <ptx/thread.cuh>
#include <tile/exact_sum.cuh>

// Sums in global memory to which many thread blocks add: either numbers, which are rounded after each addition, or the
// words of exact sums, whose bits do not depend on the order of additions.
namespace cuflash::tile {

// Add x to a sum, atomically.
template <class T>
CUFLASH_DEVICE void add(T* address, T x) {
  ptx::red_add(address, x);
}
template <class T>
CUFLASH_DEVICE void add(int64_t* words, T x) {
  ExactSum<T>::add(words, x);
}

// Add the sum of all threads' values in a warp to one address. Called by whole warps.
template <class Address, class T>
CUFLASH_DEVICE void add_of_warp(Address* address, T x) {
#pragma unroll
  for (int lane_offset = 16; lane_offset > 0; lane_offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, lane_offset);
  if (ptx::lane() == 0) add(address, x);
}

// A sum of a thread's consecutive values for one element of global memory, which is added to the element once.
template <class T, class Address = T>
struct RunningSum {
  Address* address = nullptr;
  T sum = 0;

  // Add x to an element. The sum stays in a register while the element stays the same; a new element first adds the old
  // sum to memory.
  CUFLASH_DEVICE void add(Address* element, T x) {
    if (element != address) {
      if (address != nullptr) tile::add(address, sum);
      address = element;
      sum = 0;
    }
    sum += x;
  }

  // Add each thread's x to an element, as `add` does. In each call, all threads of the warp must pass the same element.
  // Called by whole warps.
  CUFLASH_DEVICE void join(Address* element, T x) {
    if (element != address) {
      flush();
      address = element;
      sum = 0;
    }
    sum += x;
  }

  // Add the remaining sum to memory, once per warp if all of its threads have the same element. Called by whole warps.
  CUFLASH_DEVICE void flush() const {
    const auto own = reinterpret_cast<unsigned long long>(address);
    const auto first = __shfl_sync(0xffffffffu, own, 0);
    if (first != 0 && __all_sync(0xffffffffu, own == first)) {
      add_of_warp(address, sum);
    } else if (address != nullptr) {
      tile::add(address, sum);
    }
  }
};

}  // namespace cuflash::tile
