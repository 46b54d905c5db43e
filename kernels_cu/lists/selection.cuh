#pragma once
#include <ptx/thread.cuh>

// The parameters of the selectors' kernels: lists_pool computes means of blocks of rows, lists_draw draws scores of
// blocks, lists_spread sums the masses of compressed keys, lists_key_scores multiplies queries by single keys,
// lists_slash_sums sums the masses of keys and of distances, lists_crossings converts a choice of these into blocks,
// lists_page_bounds bounds the scores of pages, and lists_choose and lists_choose_wide choose blocks by their scores.
// cuflash/planning/selection_kernels.py has the same records as NumPy dtypes.
namespace cuflash::lists {

constexpr int kSelectionThreads = 32 * Config::kNumWarps;

// A choice in each row of a grid of blocks [matrices, num_q_blocks, num_kv_blocks] in C order: which of its columns
// each row keeps.
struct Choice {
  const void* scores;  // accumulators
  const void* shares;  // accumulators: shares for `mass`; null if all eligible blocks have equal shares
  const uint8_t* allowed;  // whether each block may be kept; null if all blocks may
  const uint8_t* forced;  // blocks that must be kept if they may be, besides those of the fields below; or null
  // one byte for each block; with `keeps_bits`, one bit for each block, in 32-bit words of a row from the lowest bit
  // on; with `list_length`, one int32 for each entry of a row's list
  uint8_t* kept;
  double mass;  // fraction of all shares that the kept blocks must reach, or 0
  double threshold;  // blocks with at least this score are kept
  int64_t offset;  // query i and key i + offset are on the diagonal
  int32_t num_rows, num_q_blocks, num_kv_blocks;
  int32_t seqlen_q, block_q, block_kv;
  int32_t count;  // minimum number of kept blocks
  int32_t has_threshold;
  int32_t is_causal;  // whether blocks after a row's last diagonal block may not be kept
  int32_t num_sinks, num_local, has_diagonal;  // forced blocks
  int32_t keeps_places;  // whether shared memory holds the places of all rows from which a thread block chooses
  int32_t keeps_bits;  // only lists_choose_wide reads it
  int32_t most;  // maximum number of kept blocks, or 0
  int32_t list_length;  // number of entries of a row's list: ascending, then -1; 0 if the result is not a list
  int32_t is_past_only;  // whether blocks that end after the row's last query may be kept only if they are forced
};
// The parameters of lists_choose_wide.
struct Choices {
  Choice first, second;  // the second choice may have no rows
};

// An array [*batch, heads, rows, columns], and the means [batch and heads, blocks, columns] of its blocks of rows, in C
// order.
struct PooledRows {
  const void* data;
  void* means;  // accumulators
  int64_t batch_strides[3];  // in elements, like all other strides
  int64_t head_stride, row_stride, column_stride;
  int32_t batch[3];
  int32_t num_heads, num_rows, num_columns;
  int32_t block, num_blocks;  // rows per block, and blocks per matrix
};
// The parameters of lists_pool.
struct Pooling {
  PooledRows q, k;
  int64_t num_thread_blocks_of_q;
};

// The parameters of lists_spread: the masses [groups, heads of a group, num_q_blocks, num_compressed] of compressed
// keys, and the scores [groups, heads of a group, num_q_blocks, num_kv_blocks] of blocks. Keys are divided into parts
// of equal length.
struct Spread {
  const void* masses;  // accumulators
  void* scores;  // accumulators; equal for all heads of a group
  int32_t num_groups, group_size;
  int32_t num_q_blocks, num_kv_blocks, num_compressed;
  int32_t num_parts;  // compressed key n represents the parts n to n + num_parts - 1
  int32_t parts_of_block;
  int32_t padding;
};

// An array [*batch, heads, rows, columns].
struct StridedRows {
  const void* data;
  int64_t batch_strides[3];  // in elements, like all other strides
  int64_t head_stride, row_stride, column_stride;
};

// The parameters of lists_key_scores: queries; keys, which a group of heads shares; their scores [*batch, heads,
// queries, keys] in base 2; and the runs of keys [*batch, heads, queries, runs].
struct KeyScores {
  StridedRows q, k;
  void* scores;  // accumulators; -inf if the causal mask excludes the key
  void* runs;  // KeyRun records
  double scale_log2;  // the softmax scale times log2(e)
  int64_t first_diagonal_key;  // last key that query 0 attends under a causal mask; it may be past the last key
  int32_t batch[3];
  int32_t num_heads, group_size, num_rows, num_keys, num_columns;
  int32_t is_causal, padding;
};

// The greatest score of a query in a run of keys, and the sum of exp2(score - greatest), or 0 if the query sees no key.
struct KeyRun {
  Config::Accumulator greatest, sum;
};

// The parameters of lists_slash_sums: scores [matrices, rows, keys] of single keys in base 2 and their runs [matrices,
// rows, runs], and sums of masses [matrices, keys] and [matrices, distances]. Distance o of row r is at key r +
// first_diagonal_key - o.
struct SlashSums {
  const void* scores;  // accumulators, like the sums
  const void* runs;  // KeyRun records
  void* of_keys;
  void* of_distances;
  int64_t first_diagonal_key;
  int32_t num_matrices, num_rows, num_keys, num_distances, num_runs;
  int32_t padding;
};

// The parameters of lists_crossings: bits of the chosen keys [matrices, keys], as a choice stores them, followed by
// bits of the chosen distances [matrices, distances]; and the blocks that they cross.
struct Crossings {
  const uint32_t* chosen;
  uint8_t* kept;
  Choice grid;  // a choice without arrays and scores: which blocks may be kept, and which must be kept
  int32_t seqlen_kv, num_distances;
};

// The parameters of lists_page_bounds: queries; keys, which a group of heads shares; and the bounds [*batch, heads,
// queries, pages].
struct PageBounds {
  StridedRows q, k;
  void* bounds;  // accumulators
  int64_t num_bounds;
  int32_t batch[3];
  int32_t num_heads, group_size, num_queries, num_keys, num_columns, num_pages, page_size;
};

// The parameters of lists_draw.
struct Draw {
  float* numbers;  // [cells]
  uint64_t num_cells;
  uint64_t seed;
};

}  // namespace cuflash::lists
