// Writes the lists: entries row by row, with one warp per row; their indices column by column, with one thread block
// per 32 columns; the orders of rows and columns, with one thread each; and zeros in the unused part after the last
// entry.
#include <lists/params.cuh>
#include <ptx/shared.cuh>

namespace cuflash::lists {

// Write the entries of a block row. Called by a warp.
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

// The rows of a block column. Each warp of a thread block lists a part of them, and each lane lists one column.
struct ColumnPart {
  static constexpr int kBatch = 16;  // number of rows that are read at once, so that their loads do not wait for stores

  const Params& params;
  int kv_block, first_row, start, stop;  // the first row is that of the matrix; start and stop are relative to it

  CUFLASH_DEVICE ColumnPart(const Params& p, int column)
      : params(p), kv_block(column % p.num_kv_blocks), first_row(column / p.num_kv_blocks * p.num_q_blocks) {
    const int rows = (p.num_q_blocks + Config::kNumWarps - 1) / Config::kNumWarps;
    start = min(ptx::thread_index() / 32 * rows, p.num_q_blocks);
    stop = column < p.num_columns() ? min(start + rows, p.num_q_blocks) : start;
  }

  CUFLASH_DEVICE int64_t cell(int q_block) const {
    return static_cast<int64_t>(first_row + q_block) * params.num_kv_blocks + kv_block;
  }

  CUFLASH_DEVICE int count() const {
    int found = 0;
#pragma unroll 16
    for (int q_block = start; q_block < stop; ++q_block) found += params.grid_kinds[cell(q_block)] != kAbsent;
    return found;
  }

  CUFLASH_DEVICE void list(int place) const {
    for (int first = start; first < stop; first += kBatch) {
      int kinds[kBatch], entries[kBatch];
#pragma unroll
      for (int n = 0; n < kBatch; ++n) {
        const int q_block = min(first + n, stop - 1);
        kinds[n] = first + n < stop ? params.grid_kinds[cell(q_block)] : kAbsent;
        entries[n] = kinds[n] == kAbsent ? 0 : params.row_pointers[first_row + q_block] + params.ranks[cell(q_block)];
      }
#pragma unroll
      for (int n = 0; n < kBatch; ++n) {
        if (kinds[n] == kAbsent) continue;
        params.column_entries[place] = entries[n];
        params.column_steps[place] = 4 * (first + n) + kinds[n];
        ++place;
      }
    }
  }
};

// Write the entries of 32 block columns. Called by all threads.
CUFLASH_DEVICE void list_columns(const Params& params, int first_column) {
  int* const counts = ptx::dynamic_shared<int>();  // [warps, lanes]
  const int column = first_column + ptx::lane();
  const ColumnPart part(params, column);
  counts[ptx::thread_index()] = part.count();
  __syncthreads();  // all warps have counted
  if (part.start >= part.stop) return;
  int place = params.column_pointers[column];
  for (int at = ptx::lane(); at < ptx::thread_index(); at += 32) place += counts[at];
  part.list(place);
}

// Write a block row or column at its place in its matrix's order of lengths: most entries first; of equal lengths, the
// last row or column first.
CUFLASH_DEVICE void put_in_order(const int32_t* pointers, int32_t* order, int number, int num_blocks) {
  const int first = number / num_blocks * num_blocks;
  const int length = pointers[number + 1] - pointers[number];
  int num_before = 0, start = pointers[first];
#pragma unroll 8
  for (int other = first; other < first + num_blocks; ++other) {
    const int stop = pointers[other + 1], other_length = stop - start;
    num_before += other_length > length || (other_length == length && other > number);
    start = stop;
  }
  order[first + num_before] = number - first;
}

// Set the part of the lists after the last entry to 0.
CUFLASH_DEVICE void clear_unused_entries(const Params& params) {
  const int num_entries = params.row_pointers[params.num_rows()], num_cells = params.num_cells();
  const int stride = gridDim.x * kThreads;
  for (int at = num_entries + blockIdx.x * kThreads + ptx::thread_index(); at < num_cells; at += stride) {
    params.column_entries[at] = params.column_steps[at] = 0;
    params.kv_blocks[at] = params.q_blocks[at] = params.tiles[at] = 0;
    params.kinds[at] = 0;
  }
}

}  // namespace cuflash::lists

extern "C" __global__ void __launch_bounds__(32 * cuflash::Config::kNumWarps)
lists_entries(const __grid_constant__ cuflash::lists::Params params) {
  using namespace cuflash;
  using namespace cuflash::lists;
  const int num_rows = params.num_rows(), num_columns = params.num_columns();
  const int blocks_of_rows = (num_rows + Config::kNumWarps - 1) / Config::kNumWarps;
  const int block = blockIdx.x;
  clear_unused_entries(params);
  if (block < blocks_of_rows) {
    if (warp_of_grid() < num_rows) list_row(params, warp_of_grid());
    return;
  }
  const int blocks_of_columns = (num_columns + 31) / 32;
  if (block < blocks_of_rows + blocks_of_columns) return list_columns(params, 32 * (block - blocks_of_rows));
  const int number = (block - blocks_of_rows - blocks_of_columns) * kThreads + ptx::thread_index();
  if (number < num_columns) {
    put_in_order(params.column_pointers, params.column_order, number, params.num_kv_blocks);
  } else if (number < num_columns + num_rows) {
    put_in_order(params.row_pointers, params.row_order, number - num_columns, params.num_q_blocks);
  }
}
