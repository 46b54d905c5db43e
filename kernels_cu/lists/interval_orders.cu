// Orders the query blocks, the key blocks, and the key tiles that end with sequences, of each matrix by length: the
// longest first; of equal lengths, the last one first. A warp finds the place of a block by counting the blocks that
// come before it.
#include <lists/interval_params.cuh>
#include <ptx/thread.cuh>

namespace cuflash::lists {

// Write a block at its place in the order of its matrix. Called by a warp.
CUFLASH_DEVICE void put_in_order(const int32_t* lengths, int32_t* order, int number, int num_blocks) {
  const int first = number / num_blocks * num_blocks, length = lengths[number];
  const int end = first + num_blocks;
  int num_before = 0;
  for (int start = first; start < end; start += 32) {
    const int other = start + ptx::lane(), other_length = other < end ? lengths[other] : -1;
    const bool is_before = other_length > length || (other_length == length && other > number);
    num_before += __popc(__ballot_sync(0xffffffffu, is_before));
  }
  if (ptx::lane() == 0) order[first + num_before] = number - first;
}

}  // namespace cuflash::lists

extern "C" __global__ void __launch_bounds__(32 * cuflash::Config::kNumWarps)
lists_interval_orders(const __grid_constant__ cuflash::lists::IntervalParams params) {
  using namespace cuflash;
  using namespace cuflash::lists;
  const int warp = blockIdx.x * Config::kNumWarps + ptx::thread_index() / 32;
  const int num_rows = params.num_matrices * params.num_q_blocks;
  const int num_columns = params.num_matrices * params.num_kv_blocks;
  if (warp < num_rows) put_in_order(params.row_lengths, params.row_order, warp, params.num_q_blocks);
  else if (warp < num_rows + num_columns)
    put_in_order(params.column_lengths, params.column_order, warp - num_rows, params.num_kv_blocks);
  else if (warp < num_rows + num_columns + params.num_matrices * params.num_kv_tiles)
    put_in_order(params.tile_lengths, params.column_entries, warp - num_rows - num_columns, params.num_kv_tiles);
}
