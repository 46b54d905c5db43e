#pragma once
#include <ptx/thread.cuh>

// A set of integers below a limit in shared memory: one bit for each integer. It can be listed in ascending order.
namespace cuflash::tile {

struct BitSet {
  uint32_t* words;  // [num_words]
  int num_words;

  CUFLASH_DEVICE static int words_of(int limit) { return (limit + 31) / 32; }

  // Remove all numbers. Called by all Threads.
  template <int Threads>
  CUFLASH_DEVICE void clear() const {
    for (int word = threadIdx.x; word < num_words; word += Threads) words[word] = 0;
  }
  // Insert a number. Threads may insert at the same time.
  CUFLASH_DEVICE void insert(int number) const { atomicOr(&words[number / 32], 1u << number % 32); }

  // Write the numbers in ascending order, and return how many there are. Called by one warp.
  CUFLASH_DEVICE int list(int32_t* numbers) const {
    int count = 0;
    for (int start = 0; start < num_words; start += 32) {
      const int word = start + ptx::lane();
      uint32_t bits = word < num_words ? words[word] : 0;
      const int own = __popc(bits);
      int before = own;  // count of the numbers in this word and in the words before it
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const int other = __shfl_up_sync(0xffffffffu, before, distance);
        if (ptx::lane() >= distance) before += other;
      }
      for (int at = count + before - own; bits != 0; bits &= bits - 1) numbers[at++] = 32 * word + __ffs(bits) - 1;
      count += __shfl_sync(0xffffffffu, before, 31);
    }
    return count;
  }
};

}  // namespace cuflash::tile
