// Adds up masses of single keys, [matrices, rows, keys], over the rows of each key, and over the rows of each distance
// between a query and a key: one thread for each sum, in the order of the rows. cuflash/selectors/slashes.py is the
// specification.
#include <lists/selection.cuh>

extern "C" __global__ void __launch_bounds__(32 * cuflash::config::kNumWarps)
lists_slash_sums(const __grid_constant__ cuflash::lists::SlashSums sums) {
  using namespace cuflash;
  using config::Accumulator;
  const int64_t number = static_cast<int64_t>(blockIdx.x) * lists::kSelectionThreads + ptx::thread_index();
  const int64_t of_matrix = static_cast<int64_t>(sums.num_keys) + sums.num_distances, matrix = number / of_matrix;
  if (matrix >= sums.num_matrices) return;
  const int64_t place = number % of_matrix, distance = place - sums.num_keys;
  const bool is_key = distance < 0;
  const Accumulator* const masses =
      static_cast<const Accumulator*>(sums.masses) + matrix * sums.num_rows * sums.num_keys;
  Accumulator sum = 0;
  for (int64_t row = 0; row < sums.num_rows; ++row) {
    const int64_t key = is_key ? place : row + sums.first_diagonal_key - distance;
    if (key >= 0 && key < sums.num_keys) sum += masses[row * sums.num_keys + key];
  }
  if (is_key) static_cast<Accumulator*>(sums.of_keys)[matrix * sums.num_keys + place] = sum;
  else static_cast<Accumulator*>(sums.of_distances)[matrix * sums.num_distances + distance] = sum;
}
