#pragma once
#include <ptx/thread.cuh>

// The parameters of the kernels of selectors: lists_pool computes means of blocks of rows, lists_draw draws scores of
// blocks, and lists_choose chooses blocks by their scores. cuflash/planning/selection_kernels.py has the same records
// as NumPy dtypes.
namespace cuflash::lists {

constexpr int kSelectionThreads = 32 * config::kNumWarps;

// Rows of blocks of a grid [matrices, num_q_blocks, num_kv_blocks] in C order; each row keeps a number of its columns.
struct Choice {
  const void* scores;      // accumulators
  const void* shares;      // accumulators: shares that count for `mass`; null if all eligible blocks count alike
  const uint8_t* allowed;  // whether each block may be kept; null if all may
  const uint8_t* forced;   // blocks that must be kept if they may, beside those of the numbers below; or null
  uint8_t* kept;
  double mass;             // the part of the shares that kept blocks hold, or 0
  double threshold;        // the score from which on blocks are kept
  int64_t offset;          // query i and key i + offset are on the diagonal
  int32_t num_rows, num_q_blocks, num_kv_blocks;
  int32_t seqlen_q, block_q, block_kv;
  int32_t count;           // blocks that are kept at least
  int32_t has_threshold;
  int32_t is_causal;       // blocks after a row's last diagonal one may not be kept
  int32_t num_sinks, num_local, has_diagonal;  // forced blocks
  int32_t keeps_places;    // shared memory has room for the places of a row of each warp
  int32_t padding;
};

// Arrays [*batch, heads, rows, columns], and means [batch and heads, blocks, columns] of their blocks of rows in C
// order.
struct PooledRows {
  const void* data;
  void* means;                // accumulators
  int64_t batch_strides[3];   // in elements; so are the others
  int64_t head_stride, row_stride, column_stride;
  int32_t batch[3];
  int32_t num_heads, num_rows, num_columns;
  int32_t block, num_blocks;  // rows of a block, and blocks of a matrix
};
struct Pooling {
  PooledRows q, k;
  int64_t num_thread_blocks_of_q;
};

struct Draw {
  float* numbers;  // of each cell
  uint64_t num_cells;
  uint64_t seed;
};

}  // namespace cuflash::lists
