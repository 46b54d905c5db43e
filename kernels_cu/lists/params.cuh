#pragma once
#include <ptx/thread.cuh>

// Four kernels list the blocks of a mask on the device: lists_classify determines the kind of each block of the grid,
// lists_ranks numbers the listed blocks of each block row and counts them by rows and columns, lists_pointers computes
// running sums of the counts, and lists_entries writes the lists that attention kernels visit.
namespace cuflash::lists {

constexpr int kBatchAxes = 3;
constexpr int kThreads = 32 * Config::kNumWarps;

// BlockKind of cuflash/blocks/classify.py, and kAbsent for blocks that are not listed.
enum Kind : int { kAbsent, kFull, kInterval, kBits };

// The parameters of every kernel of lists, passed by value. cuflash/planning/list_kernels.py has the same record as a
// NumPy dtype. A cell is a block of the grid [matrix, num_q_blocks, num_kv_blocks]; a matrix is a batch entry and head
// of the lists.
struct Params {
  const uint8_t* mask;  // booleans [*batch, heads, queries / divisor_q, keys / divisor_kv]
  int64_t mask_batch_strides[kBatchAxes];  // in bytes; 0 for a broadcast axis; so are the next three
  int64_t mask_head_stride, mask_row_stride, mask_column_stride;
  const int32_t* lo;  // row intervals that the mask is intersected with, or null
  const int32_t* hi;
  int64_t interval_batch_stride, interval_head_stride;  // strides in elements
  uint8_t* grid_kinds;  // [cells] a Kind; attention/params.cuh describes all other results except bits
  int32_t* ranks;  // [cells] rank of each listed cell in its block row
  int32_t* row_pointers;
  int32_t* kv_blocks;
  int32_t* q_blocks;
  uint8_t* kinds;
  int32_t* tiles;
  // [cell, block_q, ceil(block_kv / 8)]; null if the mask consists of whole blocks
  uint8_t* bits;
  int32_t* column_pointers;
  int32_t* column_entries;
  int32_t* column_steps;
  int32_t* row_order;
  int32_t* column_order;
  int32_t batch[kBatchAxes];  // extents of the batch axes of the lists
  int32_t num_matrices, num_heads;
  int32_t seqlen_q, seqlen_kv;
  int32_t block_q, block_kv, num_q_blocks, num_kv_blocks;
  int32_t divisor_q, divisor_kv;  // queries and keys per element of the mask
  int32_t padding;

  CUFLASH_DEVICE int num_rows() const { return num_matrices * num_q_blocks; }
  CUFLASH_DEVICE int num_columns() const { return num_matrices * num_kv_blocks; }
  CUFLASH_DEVICE int num_cells() const { return num_rows() * num_kv_blocks; }
};

// Return the index of this warp in the grid of the launch.
CUFLASH_DEVICE int warp_of_grid() { return blockIdx.x * Config::kNumWarps + ptx::thread_index() / 32; }

}  // namespace cuflash::lists
