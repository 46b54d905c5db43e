// Scores the blocks that a chosen key or a chosen distance between a query and a key crosses 1, and all others 0: one
// thread for each block of each matrix. cuflash/selectors/slashes.py is the specification.
#include <lists/selection.cuh>

namespace cuflash::lists {

// Return whether one of the bytes from `start` to `stop` is set, of those from 0 to `length`.
CUFLASH_DEVICE bool has_any(const uint8_t* bytes, int64_t start, int64_t stop, int64_t length) {
  start = start > 0 ? start : 0;
  stop = stop < length ? stop : length;
  bool is_found = false;
  for (int64_t at = start; at < stop && !is_found; ++at) is_found = bytes[at] != 0;
  return is_found;
}

}  // namespace cuflash::lists

extern "C" __global__ void __launch_bounds__(32 * cuflash::config::kNumWarps)
lists_crossings(const __grid_constant__ cuflash::lists::Crossings grid) {
  using namespace cuflash;
  using namespace cuflash::lists;
  const int64_t cell = static_cast<int64_t>(blockIdx.x) * kSelectionThreads + ptx::thread_index();
  const int64_t row = cell / grid.num_kv_blocks, matrix = row / grid.num_q_blocks;
  if (matrix >= grid.num_matrices) return;
  const int64_t start_q = row % grid.num_q_blocks * grid.block_q, start_kv = cell % grid.num_kv_blocks * grid.block_kv;
  const int64_t end_q = start_q + grid.block_q, stop_q = end_q < grid.seqlen_q ? end_q : grid.seqlen_q;
  const int64_t end_kv = start_kv + grid.block_kv, stop_kv = end_kv < grid.seqlen_kv ? end_kv : grid.seqlen_kv;
  // The distances run from the upper right to the lower left corner of the block.
  const bool is_crossed =
      has_any(grid.keys + matrix * grid.seqlen_kv, start_kv, stop_kv, grid.seqlen_kv) ||
      has_any(grid.distances + matrix * grid.num_distances, start_q + grid.offset - stop_kv + 1,
              stop_q + grid.offset - start_kv, grid.num_distances);
  static_cast<config::Accumulator*>(grid.scores)[cell] = static_cast<config::Accumulator>(is_crossed);
}
