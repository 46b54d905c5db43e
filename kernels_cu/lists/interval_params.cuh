#pragma once
#include <ptx/types.cuh>

// The parameters of the kernel that finds the row intervals of packed sequences. cuflash/planning/interval_kernels.py
// has the same record as a NumPy dtype. A matrix is a batch entry and head of the intervals.
namespace cuflash::lists {

constexpr int kBatchAxes = 3;

struct IntervalParams {
  // [*batch, num_offsets] sequence n has the queries offsets[n] <= i < offsets[n + 1]
  const void* q_offsets;
  const void* kv_offsets;  // likewise of the keys; null if they are those of the queries
  int64_t q_batch_strides[kBatchAxes];  // in bytes, 0 where an axis is broadcast; so are the next three
  int64_t kv_batch_strides[kBatchAxes];
  int64_t q_stride, kv_stride;
  const int32_t* rows_lo;  // row intervals that the sequences are intersected with, or null
  const int32_t* rows_hi;
  int64_t rows_batch_stride, rows_head_stride;  // in elements
  int32_t* lo;  // [matrix, query] the query sees lo <= j < hi
  int32_t* hi;
  // [matrix, q block] blocks of keys that a block of queries sees; null without orders
  int32_t* row_lengths;
  int32_t* column_lengths;  // [matrix, kv block] blocks of queries that see a block of keys
  // [matrix, q block] blocks of queries, the longest first; as in attention/params.cuh
  int32_t* row_order;
  int32_t* column_order;
  // [matrix, q tile, and one more] first query of tiles that end with sequences, or null
  int32_t* q_blocks;
  int32_t* kv_blocks;  // [matrix, kv tile, and one more] likewise of keys
  int32_t* tile_lengths;  // [matrix, kv tile] blocks of queries that see a tile of keys
  int32_t* column_entries;  // [matrix, kv tile] tiles of keys, the longest first
  int64_t left, right;  // keys on either side of the diagonal
  int32_t batch[kBatchAxes];  // extents of the batch axes
  int32_t num_matrices, num_heads;
  int32_t seqlen_q, seqlen_kv, num_offsets;
  int32_t q_itemsize, kv_itemsize;  // bytes of an offset
  int32_t is_q_signed, is_kv_signed;
  int32_t is_bottom_right;  // the diagonal ends with each sequence; else it starts with it
  int32_t block_q, block_kv, num_q_blocks, num_kv_blocks;
  int32_t tile_q, tile_kv, num_q_tiles, num_kv_tiles;  // tiles that end with sequences; 0 without
  int32_t padding;
};

}  // namespace cuflash::lists
