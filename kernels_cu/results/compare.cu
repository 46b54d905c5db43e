// Compares the results of attention with and without a mask: for each query, the softmax mass exp(kept_lse - lse) that
// the mask keeps, and the Frobenius norm of the change of o, divided by that of o. Each thread block sums the squares
// of some elements, and the block that ends last adds the sums of all blocks in order, so that the error is bitwise
// reproducible. cuflash/study/recall.py is the specification.
#include <ptx/arrival.cuh>
#include <ptx/atomic_store.cuh>
#include <ptx/shared.cuh>
#include <results/params.cuh>
#include <tile/element.cuh>

namespace cuflash::results {

struct Squares {
  double change, whole;
};

// Shared memory: the sums of each warp, and a flag that is set in the thread block that ends last.
struct Shared {
  Squares of_warps[Config::kNumWarps];
  int32_t is_last, padding;
};

// Return the sums over all threads of the block, to its first thread. Called by all threads.
CUFLASH_DEVICE Squares sum_over_block(Squares sums) {
  Squares* const of_warps = ptx::dynamic_shared<Shared>()->of_warps;
  for (int offset = 16; offset > 0; offset /= 2) {
    sums.change += __shfl_xor_sync(0xffffffffu, sums.change, offset);
    sums.whole += __shfl_xor_sync(0xffffffffu, sums.whole, offset);
  }
  __syncthreads();  // an earlier call has read its sums
  if (ptx::lane() == 0) of_warps[ptx::thread_index() / 32] = sums;
  __syncthreads();
  if (ptx::thread_index() == 0)
    for (int warp = 1; warp < Config::kNumWarps; ++warp) {
      sums.change += of_warps[warp].change;
      sums.whole += of_warps[warp].whole;
    }
  return sums;
}

}  // namespace cuflash::results

extern "C" __global__ void __launch_bounds__(cuflash::results::kThreads)
results_compare(const __grid_constant__ cuflash::results::Comparison of) {
  using namespace cuflash;
  using namespace cuflash::results;
  using Accumulator = Config::Accumulator;
  using Element = Config::Element;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + ptx::thread_index();
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t row = first; row < of.num_rows; row += step) {
    const Accumulator lse = static_cast<const Accumulator*>(of.lse)[row];
    const Accumulator kept = static_cast<const Accumulator*>(of.kept_lse)[row];
    // only rounding can make the difference positive
    static_cast<Accumulator*>(of.mass)[row] = lse == ptx::negative_infinity<Accumulator>()
                                                  ? Accumulator(1)
                                                  : ptx::exp_accurate(tile::min_or_nan(kept - lse, Accumulator(0)));
  }
  Squares sums = {0, 0};
  for (int64_t n = first; n < of.num_elements; n += step) {
    const double x = static_cast<double>(tile::to_accumulator(static_cast<const Element*>(of.o)[n]));
    const double change = static_cast<double>(tile::to_accumulator(static_cast<const Element*>(of.kept_o)[n])) - x;
    sums.change += change * change;
    sums.whole += x * x;
  }
  sums = sum_over_block(sums);
  int32_t& is_last = ptx::dynamic_shared<Shared>()->is_last;
  if (ptx::thread_index() == 0) {
    of.sums[2 * blockIdx.x] = sums.change;
    of.sums[2 * blockIdx.x + 1] = sums.whole;
    is_last = ptx::fetch_add_acq_rel(of.num_arrived, 1) == static_cast<int>(gridDim.x) - 1;
  }
  __syncthreads();
  if (!is_last) return;
  sums = {0, 0};
  for (int block = ptx::thread_index(); block < static_cast<int>(gridDim.x); block += kThreads) {
    sums.change += of.sums[2 * block];
    sums.whole += of.sums[2 * block + 1];
  }
  sums = sum_over_block(sums);
  if (ptx::thread_index() != 0) return;
  const double infinite = -ptx::negative_infinity<double>();
  of.error[0] = sums.whole != 0 ? ptx::sqrt_accurate(sums.change) / ptx::sqrt_accurate(sums.whole)
                                : sums.change != 0 ? infinite : 0;
  ptx::store_relaxed(of.num_arrived, 0);  // reset for the next launch
}
