#pragma once
#include <ptx/types.cuh>

// The parameters of every attention kernel, passed by value. cuflash/planning/_params.py has the same records as
// NumPy dtypes; each translation unit asserts that all offsets agree.
namespace cuflash::attention {

constexpr int kBatchAxes = 3;

// A stack of matrices [batch, heads, rows, columns]. Strides are in elements; an axis that broadcasts has stride 0.
struct Matrices {
  void* data;
  int64_t batch_strides[kBatchAxes];
  int64_t head_stride;
  int64_t row_stride;
  int64_t column_stride;
  // nonzero if elements have the accumulator's type: lse, and gradients that are later summed over broadcast axes
  int64_t is_accumulator;
};

struct Shape {
  int32_t batch[kBatchAxes];
  int32_t first_batch;  // first batch entry of this launch, in the numbering of masks
  int32_t num_heads;  // number of query heads
  int32_t group_size;  // query heads that share a key/value head
  int32_t seqlen_q;
  int32_t seqlen_kv;
  int32_t head_dim;
  int32_t value_dim;
  int32_t heads_per_l2_group;  // number of heads whose tiles of queries are taken alternately
  int32_t kv_heads_per_l2_group;  // number of heads whose tiles of keys are taken alternately
  int32_t num_splits;  // number of blocks that share the keys of a tile
  int32_t num_fused_dq_heads;  // number of pairs of batch entry and head whose dQ the backward kernel finishes
  // numbers of rounds by which the last tiles of these heads are taken earlier, and their first tiles later
  int32_t last_tile_lead, first_tile_lag;
  double softmax_scale;
};

// The keys that a query may attend: a band, an interval for every row, or a list of blocks.
struct WorkList {
  int64_t lower, upper;  // lower <= j - i <= upper
  const int32_t* lo;  // [batch or 1, heads or 1, seqlen_q] lo <= j < hi; null if the mask is a band
  const int32_t* hi;
  int64_t interval_batch_stride, interval_head_stride;
  const int32_t* row_pointers;  // [batch or 1, heads or 1, num_q_blocks] and one final element; null without a list
  // [entries], like q_blocks, kinds and tiles. Without a list, in kernels with sequence-aligned tiles: [batch or 1,
  // heads or 1, num_kv_blocks + 1], the first key of each such tile; q_blocks then has the first query of each tile
  const int32_t* kv_blocks;
  const int32_t* q_blocks;
  const uint8_t* kinds;
  const int32_t* tiles;
  const uint8_t* bits;  // [tile, block_q, ceil(block_kv / 8)] key 8 c + r is bit r of byte c
  const int32_t* column_pointers;  // [batch or 1, heads or 1, num_kv_blocks] and one final element
  // indices of the entries, column by column; without a list, indices of the key tiles in kv_blocks, the longest first
  const int32_t* column_entries;
  const int32_t* column_steps;  // [entries] 4 * q_block + kind, in the order of column_entries
  // [batch or 1, heads or 1, num_q_blocks] block rows in descending order of their entries, or without a list of their
  // keys, if the kernel uses an order; otherwise null
  const int32_t* row_order;
  const int32_t* column_order;  // [batch or 1, heads or 1, num_kv_blocks] block columns in the same order
  int32_t list_batch_stride, list_head_stride;  // in matrices of the list; 0 along an axis that shares one list
  int32_t block_q, block_kv;  // sizes of a block of the list, or of the orders
  int32_t num_q_blocks, num_kv_blocks;  // blocks of a list, or sequence-aligned tiles
};

struct Params {
  Matrices q, k, v, o, lse;  // lse and delta have one column
  Matrices do_, dq, dk, dv, dlse, delta, dq_sum;  // dq_sum is float32, before it is scaled and rounded
  int32_t* tile_counter;  // counter of the next tile, for persistent blocks
  Shape shape;
  WorkList work;
};

}  // namespace cuflash::attention
