// Sums the weights exp(score - lse of the row) of each key over all queries, and those of each distance between a query
// and a key along that diagonal. A thread computes a sum, in the order of the queries; each thread block computes the lse
// of a row from the row's runs of keys. cuflash/selectors/slashes.py is the specification.
#include <lists/selection.cuh>
#include <ptx/math.cuh>
#include <ptx/shared.cuh>
#include <tile/element.cuh>

namespace cuflash::lists {

using Accumulator = Config::Accumulator;
constexpr int kBlockQ = Config::kBlockQ;

// Two numbers that convert a row's scores into masses: exp2(score - shift) * factor. The factor of a row without a key
// is 0.
struct RowMass {
  Accumulator shift, factor;
};

// Return these numbers for a row, from its runs of keys. Called by a warp.
CUFLASH_DEVICE RowMass mass_of_row(const KeyRun* runs, int num_runs) {
  Accumulator greatest = ptx::negative_infinity<Accumulator>(), sum = 0;
  for (int run = ptx::lane(); run < num_runs; run += 32) greatest = tile::maximum(greatest, runs[run].greatest);
  for (int offset = 16; offset > 0; offset /= 2)
    greatest = tile::maximum(greatest, __shfl_xor_sync(0xffffffffu, greatest, offset));
  const Accumulator shift = greatest == ptx::negative_infinity<Accumulator>() ? Accumulator(0) : greatest;
  for (int run = ptx::lane(); run < num_runs; run += 32)
    sum += runs[run].sum * ptx::exp2_accurate(runs[run].greatest - shift);
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  return {shift, sum == 0 ? Accumulator(0) : 1 / sum};
}

}  // namespace cuflash::lists

extern "C" __global__ void __launch_bounds__(32 * cuflash::Config::kNumWarps, cuflash::Config::kMinBlocks)
lists_slash_sums(const __grid_constant__ cuflash::lists::SlashSums sums) {
  using namespace cuflash;
  using namespace cuflash::lists;
  const int64_t sums_per_matrix = static_cast<int64_t>(sums.num_keys) + sums.num_distances;
  const int64_t blocks_per_matrix = (sums_per_matrix + kSelectionThreads - 1) / kSelectionThreads;
  const int64_t matrix = blockIdx.x / blocks_per_matrix;
  const int64_t place = blockIdx.x % blocks_per_matrix * kSelectionThreads + ptx::thread_index();
  const int64_t distance = place - sums.num_keys;
  const bool is_key = distance < 0;
  const Accumulator* const scores =
      static_cast<const Accumulator*>(sums.scores) + matrix * sums.num_rows * sums.num_keys;
  const KeyRun* const runs = static_cast<const KeyRun*>(sums.runs) + matrix * sums.num_rows * sums.num_runs;
  RowMass* const rows = ptx::dynamic_shared<RowMass>();
  Accumulator sum = 0;
  for (int first = 0; first < sums.num_rows; first += kBlockQ) {
    const int last = min(first + kBlockQ, sums.num_rows);
    __syncthreads();  // all threads have read the numbers of the previous rows
    for (int row = first + ptx::thread_index() / 32; row < last; row += Config::kNumWarps) {
      const RowMass mass = mass_of_row(runs + static_cast<int64_t>(row) * sums.num_runs, sums.num_runs);
      if (ptx::lane() == 0) rows[row - first] = mass;
    }
    __syncthreads();  // the numbers of all rows are stored
    if (place >= sums_per_matrix) continue;
#pragma unroll 4
    for (int64_t row = first; row < last; ++row) {
      const int64_t key = is_key ? place : row + sums.first_diagonal_key - distance;
      if (key >= 0 && key < sums.num_keys) {
        const RowMass& mass = rows[row - first];
        sum += ptx::exp2_accurate(scores[row * sums.num_keys + key] - mass.shift) * mass.factor;
      }
    }
  }
  if (place >= sums_per_matrix) return;
  if (is_key) static_cast<Accumulator*>(sums.of_keys)[matrix * sums.num_keys + place] = sum;
  else static_cast<Accumulator*>(sums.of_distances)[matrix * sums.num_distances + distance] = sum;
}
