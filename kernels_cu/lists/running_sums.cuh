#pragma once
#include <ptx/shared.cuh>
#include <ptx/thread.cuh>

// Running sums, computed by a thread block.
namespace cuflash::lists {

// Replace each count [1 <= x <= length] by the sum of `start` and all counts up to it. Each of Threads threads sums a
// part. Called by all threads, after all counts have been written.
template <int Threads>
CUFLASH_DEVICE void sum_up(int32_t* counts, int length, int start) {
  int* const sums = ptx::dynamic_shared<int>();
  const int thread = ptx::thread_index(), share = (length + Threads - 1) / Threads;
  const int first = min(thread * share, length), last = min(first + share, length);
  int sum = 0;
  for (int at = first; at < last; ++at) sum += counts[at + 1];
  sums[thread] = sum;
  __syncthreads();
  for (int distance = 1; distance < Threads; distance *= 2) {
    const int before = thread >= distance ? sums[thread - distance] : 0;
    __syncthreads();  // all threads have read
    sums[thread] += before;
    __syncthreads();  // all threads have written
  }
  int end = start + sums[thread] - sum;
  for (int at = first; at < last; ++at) {
    end += counts[at + 1];
    counts[at + 1] = end;
  }
  if (thread == 0) counts[0] = start;
}

}  // namespace cuflash::lists
