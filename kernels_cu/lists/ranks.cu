// Numbers and counts the listed cells of each block row, one warp per row, and counts those of each block column, one
// thread per column. The count of a row or column is stored where the start of the next row's or column's entries will
// be.
#include <lists/params.cuh>

namespace cuflash::lists {

// Number and count the listed cells of a block row. Called by a warp.
CUFLASH_DEVICE void rank_row(const Params& params, int row) {
  const uint8_t* kinds = params.grid_kinds + static_cast<int64_t>(row) * params.num_kv_blocks;
  int32_t* ranks = params.ranks + static_cast<int64_t>(row) * params.num_kv_blocks;
  int count = 0;
  for (int start = 0; start < params.num_kv_blocks; start += 32) {
    const int column = start + ptx::lane();
    const bool is_listed = column < params.num_kv_blocks && kinds[column] != kAbsent;
    const uint32_t listed = __ballot_sync(0xffffffffu, is_listed);
    if (is_listed) ranks[column] = count + __popc(listed & ((1u << ptx::lane()) - 1));
    count += __popc(listed);
  }
  if (ptx::lane() == 0) params.row_pointers[row + 1] = count;
}

// Count the listed cells of a block column. Called by one thread.
CUFLASH_DEVICE void count_column(const Params& params, int column) {
  const int matrix = column / params.num_kv_blocks;
  const uint8_t* kinds = params.grid_kinds + static_cast<int64_t>(matrix) * params.num_q_blocks * params.num_kv_blocks;
  int count = 0;
#pragma unroll 16
  for (int row = 0; row < params.num_q_blocks; ++row)
    count += kinds[static_cast<int64_t>(row) * params.num_kv_blocks + column % params.num_kv_blocks] != kAbsent;
  params.column_pointers[column + 1] = count;
}

}  // namespace cuflash::lists

extern "C" __global__ void __launch_bounds__(32 * cuflash::Config::kNumWarps)
lists_ranks(const __grid_constant__ cuflash::lists::Params params) {
  using namespace cuflash;
  using namespace cuflash::lists;
  const int num_rows = params.num_rows(), blocks_of_rows = (num_rows + Config::kNumWarps - 1) / Config::kNumWarps;
  const int block = blockIdx.x;
  if (block < blocks_of_rows) {
    if (warp_of_grid() < num_rows) rank_row(params, warp_of_grid());
    return;
  }
  const int column = (block - blocks_of_rows) * kThreads + ptx::thread_index();
  if (column < params.num_columns()) count_column(params, column);
}
