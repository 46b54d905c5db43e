#pragma once
#include <attention/integers.cuh>

// The parameters of the kernel that computes the row intervals of a mask whose arrays are on the device.
// cuflash/planning/interval_kernels.py has the same record as a NumPy dtype. A matrix is a batch entry and head of the
// intervals.
namespace cuflash::lists {

using attention::kBatchAxes;

// The integers in the arrays of a mask.
enum IntervalKind : int32_t {
  kSequences = 0,  // [*batch, num_offsets] offsets: sequence n has the queries offsets[n] <= i < offsets[n + 1]
  kLengths = 1,  // [*batch, 1] number of queries, and of keys
  kDocuments = 2,  // [*batch, length] document id of each query, and of each key
};

struct IntervalParams {
  const void* q_integers;  // integers of the queries; null for kLengths if the host knows q_length
  const void* kv_integers;  // integers of the keys; null if equal to the queries', or if the host knows kv_length
  int64_t q_batch_strides[kBatchAxes];  // in bytes; 0 for a broadcast axis; so are the next three
  int64_t kv_batch_strides[kBatchAxes];
  int64_t q_stride, kv_stride;
  const int32_t* rows_lo;  // row intervals that the sequences are intersected with, or null
  const int32_t* rows_hi;
  int64_t rows_batch_stride, rows_head_stride;  // in elements
  int32_t* lo;  // [matrix, query] the query sees lo <= j < hi
  int32_t* hi;
  // [matrix, q block] number of key blocks that a query block attends; null without orders
  int32_t* row_lengths;
  int32_t* column_lengths;  // [matrix, kv block] number of query blocks that see a key block
  // [matrix, q block] query blocks, the longest first; see attention/params.cuh
  int32_t* row_order;
  int32_t* column_order;
  // [matrix, q tile + 1] first query of sequence-aligned tiles, or null
  int32_t* q_blocks;
  int32_t* kv_blocks;  // [matrix, kv tile + 1] first key of sequence-aligned tiles
  int32_t* tile_lengths;  // [matrix, kv tile] number of query blocks that see a tile of keys
  int32_t* column_entries;  // [matrix, kv tile] indices of the key tiles, the longest first
  int64_t left, right;  // numbers of keys on either side of the diagonal of a sequence
  int64_t q_length, kv_length;  // for kLengths without an array
  int32_t batch[kBatchAxes];  // extents of the batch axes
  int32_t num_matrices, num_heads;
  int32_t seqlen_q, seqlen_kv, num_offsets;
  int32_t q_itemsize, kv_itemsize;  // bytes per integer
  int32_t is_q_signed, is_kv_signed;
  // Nonzero if the last query and key of a sequence are on its diagonal, instead of the first ones.
  int32_t is_bottom_right;
  int32_t block_q, block_kv, num_q_blocks, num_kv_blocks;
  int32_t tile_q, tile_kv, num_q_tiles, num_kv_tiles;  // sequence-aligned tiles; 0 if there are no such tiles
  IntervalKind kind;
};

}  // namespace cuflash::lists
