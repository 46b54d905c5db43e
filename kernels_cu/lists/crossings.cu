// Keeps the blocks that a chosen key, or a chosen distance between a query and a key, crosses, and the forced blocks,
// if they may be kept: one thread per block of each matrix. cuflash/selectors/slashes.py is the specification.
#include <lists/row_choice.cuh>

namespace cuflash::lists {

// Return whether a bit in start <= x < stop is set, ignoring positions outside of 0 <= x < length.
CUFLASH_DEVICE bool has_any(const uint32_t* words, int64_t start, int64_t stop, int64_t length) {
  start = start > 0 ? start : 0;
  stop = stop < length ? stop : length;
  if (start >= stop) return false;
  const int first = static_cast<int>(start / 32), last = static_cast<int>((stop - 1) / 32);
  uint32_t found = 0;
  for (int word = first; word <= last; ++word) {
    uint32_t bits = words[word];
    if (word == first) bits &= ~0u << start % 32;
    if (word == last) bits &= ~0u >> (31 - (stop - 1) % 32);
    found |= bits;
  }
  return found != 0;
}

}  // namespace cuflash::lists

extern "C" __global__ void __launch_bounds__(32 * cuflash::Config::kNumWarps)
lists_crossings(const __grid_constant__ cuflash::lists::Crossings crossings) {
  using namespace cuflash;
  using namespace cuflash::lists;
  const Choice& grid = crossings.grid;
  const int64_t cell = static_cast<int64_t>(blockIdx.x) * kSelectionThreads + ptx::thread_index();
  const int64_t number = cell / grid.num_kv_blocks, matrix = number / grid.num_q_blocks;
  if (number >= grid.num_rows) return;
  const BlocksOfRow row(grid, static_cast<int>(number));
  const int64_t num_keys = crossings.seqlen_kv, num_distances = crossings.num_distances;
  const int column = static_cast<int>(cell % grid.num_kv_blocks);
  const int64_t start_q = number % grid.num_q_blocks * grid.block_q;
  const int64_t start_kv = static_cast<int64_t>(column) * grid.block_kv;
  const int64_t end_q = start_q + grid.block_q, stop_q = end_q < grid.seqlen_q ? end_q : grid.seqlen_q;
  const int64_t end_kv = start_kv + grid.block_kv, stop_kv = end_kv < num_keys ? end_kv : num_keys;
  const int64_t words_of_keys = (num_keys + 31) / 32, num_matrices = grid.num_rows / grid.num_q_blocks;
  const uint32_t* const keys = crossings.chosen + matrix * words_of_keys;
  const uint32_t* const distances =
      crossings.chosen + num_matrices * words_of_keys + matrix * ((num_distances + 31) / 32);
  // The distances run from the upper right to the lower left corner of the block.
  crossings.kept[cell] =
      row.is_eligible(column) &&
      (row.is_forced(column) || has_any(keys, start_kv, stop_kv, num_keys) ||
       has_any(distances, start_q + grid.offset - stop_kv + 1, stop_q + grid.offset - start_kv, num_distances));
}
