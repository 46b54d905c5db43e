// Writes the lists: entries row after row, a warp for a row; their numbers column after column, a thread for a column; the orders
// of rows and columns, a thread for each; and zeros in the room behind the last entry.
#include <lists/params.cuh>

namespace cuflash::lists {

CUFLASH_DEVICE void list_row(const Params& params, int row) {
  const int64_t first_cell = static_cast<int64_t>(row) * params.num_kv_blocks;
  for (int column = ptx::lane(); column < params.num_kv_blocks; column += 32) {
    const int kind = params.grid_kinds[first_cell + column];
    if (kind == kAbsent) continue;
    const int entry = params.row_pointers[row] + params.ranks[first_cell + column];
    params.kv_blocks[entry] = column;
    params.q_blocks[entry] = row % params.num_q_blocks;
    params.kinds[entry] = static_cast<uint8_t>(kind);
    params.tiles[entry] = kind == kBits ? static_cast<int32_t>(first_cell + column) : -1;
  }
}

CUFLASH_DEVICE void list_column(const Params& params, int column) {
  const int first_row = column / params.num_kv_blocks * params.num_q_blocks, kv_block = column % params.num_kv_blocks;
  constexpr int kBatch = 16;  // rows that are read at once, whose loads do not wait for stores
  int place = params.column_pointers[column];
  for (int start = 0; start < params.num_q_blocks; start += kBatch) {
    int kinds[kBatch], entries[kBatch];
#pragma unroll
    for (int n = 0; n < kBatch; ++n) {
      const int q_block = start + n < params.num_q_blocks ? start + n : start, row = first_row + q_block;
      const int64_t cell = static_cast<int64_t>(row) * params.num_kv_blocks + kv_block;
      kinds[n] = start + n < params.num_q_blocks ? params.grid_kinds[cell] : kAbsent;
      entries[n] = kinds[n] == kAbsent ? 0 : params.row_pointers[row] + params.ranks[cell];
    }
#pragma unroll
    for (int n = 0; n < kBatch; ++n) {
      if (kinds[n] == kAbsent) continue;
      params.column_entries[place] = entries[n];
      params.column_steps[place] = 4 * (start + n) + kinds[n];
      ++place;
    }
  }
}

// Sets the position of a block row, or column, of a matrix in the order: most entries first, the last one first among equals.
CUFLASH_DEVICE void put_in_order(const int32_t* pointers, int32_t* order, int number, int num_blocks) {
  const int first = number / num_blocks * num_blocks;
  const int length = pointers[number + 1] - pointers[number];
  int num_before = 0;
  for (int other = first; other < first + num_blocks; ++other) {
    const int other_length = pointers[other + 1] - pointers[other];
    num_before += other_length > length || (other_length == length && other > number);
  }
  order[first + num_before] = number - first;
}

CUFLASH_DEVICE void clear_room(const Params& params) {
  const int num_entries = params.row_pointers[params.num_rows()], num_cells = params.num_cells();
  const int stride = gridDim.x * kThreads;
  for (int at = num_entries + blockIdx.x * kThreads + ptx::thread_index(); at < num_cells; at += stride) {
    params.kv_blocks[at] = params.q_blocks[at] = params.tiles[at] = params.column_entries[at] = params.column_steps[at] = 0;
    params.kinds[at] = 0;
  }
}

}  // namespace cuflash::lists

extern "C" __global__ void __launch_bounds__(32 * cuflash::config::kNumWarps)
lists_entries(const __grid_constant__ cuflash::lists::Params params) {
  using namespace cuflash;
  using namespace cuflash::lists;
  const int num_rows = params.num_rows(), num_columns = params.num_columns();
  const int blocks_of_rows = (num_rows + config::kNumWarps - 1) / config::kNumWarps;
  const int block = blockIdx.x;
  clear_room(params);
  if (block < blocks_of_rows) {
    if (warp_of_grid() < num_rows) list_row(params, warp_of_grid());
    return;
  }
  const int number = (block - blocks_of_rows) * kThreads + ptx::thread_index();
  if (number < num_columns) {
    list_column(params, number);
    put_in_order(params.column_pointers, params.column_order, number, params.num_kv_blocks);
  } else if (number < num_columns + num_rows) {
    put_in_order(params.row_pointers, params.row_order, number - num_columns, params.num_q_blocks);
  }
}
