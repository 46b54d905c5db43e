#pragma once
#include <ptx/types.cuh>

// The parameters of every attention kernel, passed by value. cuflash/compiler/params_layout.py has the same records as NumPy
// dtypes; each translation unit asserts that all offsets agree.
// translation unit asserts that all offsets agree.
namespace cuflash::attention {

constexpr int kBatchAxes = 3;

// A stack of matrices [batch, heads, rows, columns]. Strides in elements; 0 where an axis broadcasts.
struct Matrices {
  void* data;
  int64_t batch_strides[kBatchAxes];
  int64_t head_stride;
  int64_t row_stride;
  int64_t column_stride;
  int64_t is_accumulator;  // elements are accumulators: gradients that are summed over broadcast axes, and lse
};

struct Shape {
  int32_t batch[kBatchAxes];
  int32_t first_batch;  // of the batch entries of this launch, among those that masks count
  int32_t num_heads;    // of the queries
  int32_t group_size;   // query heads that share a key/value head
  int32_t seqlen_q;
  int32_t seqlen_kv;
  int32_t head_dim;
  int32_t value_dim;
  int32_t heads_per_l2_group;     // matrices that tiles of queries are taken from in turn
  int32_t kv_heads_per_l2_group;  // and tiles of keys
  int32_t num_splits;             // blocks that share a tile's keys
  int32_t num_fused_dq_heads;     // batch entries and heads whose dQ the gradients' kernel finishes
  int32_t last_tile_lead, first_tile_lag;  // of their last and first keys
  double softmax_scale;
};

// The keys that a query may attend: a band, an interval for every row, or a list of blocks.
struct WorkList {
  int64_t lower, upper;  // lower <= j - i <= upper
  const int32_t* lo;     // [batch or 1, heads or 1, seqlen_q] lo <= j < hi; null where the band says it all
  const int32_t* hi;
  int64_t interval_batch_stride, interval_head_stride;
  const int32_t* row_pointers;  // [batch or 1, heads or 1, num_q_blocks], then one more; null without a list
  const int32_t* kv_blocks;     // of each entry; so are q_blocks, kinds and tiles
  const int32_t* q_blocks;
  const uint8_t* kinds;
  const int32_t* tiles;
  const uint8_t* bits;             // [tile, block_q, ceil(block_kv / 8)] key 8 c + r is bit r of byte c
  const int32_t* column_pointers;  // [batch or 1, heads or 1, num_kv_blocks], then one more
  const int32_t* column_entries;   // entry numbers, column after column
  const int32_t* column_steps;     // 4 * q_block + kind of each of those
  // [batch or 1, heads or 1, num_q_blocks] block rows, those of most entries first, or without a list of most keys; else null
  const int32_t* row_order;
  const int32_t* column_order;     // [batch or 1, heads or 1, num_kv_blocks] block columns likewise
  int32_t list_batch_stride, list_head_stride;  // in matrices of the list: 0 where it is shared
  int32_t block_q, block_kv;                    // of the list, or of the orders
  int32_t num_q_blocks, num_kv_blocks;
};

// Workspaces of the naive kernels alone: whole matrices [seqlen_q, seqlen_kv], float32.
struct NaiveMatrices {
  Matrices scores;  // S in base 2, then P in its place
  Matrices score_gradients;
};

// Partial results of blocks that share a tile's keys, float32: O and lse of each part, the rows of one part after those of
// another.
struct Parts {
  Matrices o_parts;    // [splits * seqlen_q, room for value_dim]
  Matrices lse_parts;  // [splits * seqlen_q]
};

struct Params {
  Matrices q, k, v, o, lse;  // lse and delta have one column; on Hopper delta is QueryStats, tile after tile
  Matrices do_, dq, dk, dv, dlse, delta, dq_sum;  // dq_sum is float32, before it is scaled and rounded
  // an int, where blocks go on to further tiles as they end; then, of each place, which tiles are done
  Matrices tile_counter;
  Shape shape;
  WorkList work;
  NaiveMatrices naive;
  Parts parts;
};

}  // namespace cuflash::attention
