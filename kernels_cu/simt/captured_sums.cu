// Writes the gradient of a score function's array once all kernels have added to its sums: exact sums are rounded, and partial
// sums are added in the order of their numbers.
#include <attention/captured_sums.cuh>
#include <attention/config_simt.cuh>
#include <attention/params.cuh>
#include <ptx/thread.cuh>
#include <tile/exact_sum.cuh>

extern "C" __global__ void __launch_bounds__(32 * cuflash::config::kNumWarps)
simt_captured_sums(const __grid_constant__ cuflash::attention::Params params,
                   const __grid_constant__ cuflash::attention::CapturedSums captured) {
  using namespace cuflash;
  constexpr int kThreads = 32 * config::kNumWarps;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t element = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; element < captured.num_elements; element += stride) {
    config::Accumulator sum = 0;
    if (captured.is_exact) {
      using Exact = tile::ExactSum<config::Accumulator>;
      sum = Exact::rounded(static_cast<const int64_t*>(captured.sums) + Exact::kNumWords * element);
    } else {
      const auto* const parts = static_cast<const config::Accumulator*>(captured.sums);
      for (int64_t part = 0; part < captured.num_parts; ++part) sum += parts[part * captured.num_elements + element];
    }
    captured.gradient[element] = sum;
  }
}
