// Sets the sums for the gradient of a score function's array to 0 before other kernels add to them, or writes the
// gradient afterwards: exact sums are rounded, and partial sums are added in the order of their indices.
#include <attention/captured_sums.cuh>
#include <attention/config_simt.cuh>
#include <attention/params.cuh>
#include <tile/element.cuh>
#include <tile/exact_sum.cuh>

extern "C" __global__ void __launch_bounds__(32 * cuflash::Config::kNumWarps)
simt_captured_sums(const __grid_constant__ cuflash::attention::Params params,
                   const __grid_constant__ cuflash::attention::CapturedSums captured) {
  using namespace cuflash;
  using attention::SumsOperation;
  constexpr int kThreads = 32 * Config::kNumWarps;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t n = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; n < captured.num_elements; n += stride) {
    if (captured.operation == SumsOperation::kSetZero) {
      static_cast<int*>(captured.sums)[n] = 0;
    } else if (captured.operation == SumsOperation::kRound) {
      using Exact = tile::ExactSum<Accumulator>;
      static_cast<Accumulator*>(captured.gradient)[n] =
          Exact::rounded(static_cast<const int64_t*>(captured.sums) + Exact::kNumWords * n);
    } else {
      const auto* const parts = static_cast<const Element*>(captured.sums);
      Accumulator sum = 0;
      for (int64_t part = 0; part < captured.num_parts; ++part)
        sum += tile::to_accumulator(parts[part * captured.num_elements + n]);
      tile::to_element(sum, static_cast<Element*>(captured.gradient)[n]);
    }
  }
}
