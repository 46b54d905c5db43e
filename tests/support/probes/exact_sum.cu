#include <tile/exact_sum.cuh>

// A block adds the terms of a row to the words of its exact sum, and rounds it.
extern "C" __global__ void exact_sums(const probe::Number* terms, int num_terms, int64_t* words, probe::Number* rounded) {
  using Sum = cuflash::tile::ExactSum<probe::Number>;
  static_assert(Sum::kNumWords == probe::kNumWords, "words of a sum");
  int64_t* const own = words + blockIdx.x * Sum::kNumWords;
  for (int n = threadIdx.x; n < num_terms; n += blockDim.x) Sum::add(own, terms[blockIdx.x * num_terms + n]);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) rounded[blockIdx.x] = Sum::rounded(own);
}
