#pragma once
#include <ptx/thread.cuh>

// The parameters of the kernels that process results of attention: results_merge combines results over disjoint keys,
// results_compare compares the results with and without a mask, and results_add_rows adds rows of several arrays. The
// columns of a row are adjacent, and so are the rows of a matrix; arrays of the first two kernels are in C order.
// cuflash/planning/_result_kernels.py has the same records as NumPy dtypes.
namespace cuflash::results {

constexpr int kThreads = 32 * Config::kNumWarps;
constexpr int kMostParts = 128;

// The parameters of results_merge: the results [rows, columns] and [rows] of each part, and those of the union of the
// keys.
struct Merge {
  const void* outs[kMostParts];
  const void* lses[kMostParts];  // accumulators
  void* o;
  void* lse;
  int64_t num_rows;
  int32_t num_parts, num_columns;
  int32_t threads_per_row;
  int32_t padding;
};

// The parameters of results_compare: the results [rows, columns] and [rows] without and with a mask, and the numbers
// that compare them.
struct Comparison {
  const void* o;
  const void* lse;  // accumulators; so is kept_lse
  const void* kept_o;
  const void* kept_lse;
  double* sums;  // workspace of two numbers for each thread block
  int32_t* num_arrived;  // workspace: number of thread blocks that have written their sums; 0 before and after a launch
  void* mass;  // accumulators [rows]
  double* error;  // a single number
  int64_t num_rows, num_elements;
};

// Arrays [batch, heads, rows, columns] that results_add_rows reads and writes. The strides are those of batch entries and
// of heads, in elements.
struct Rows {
  const void* own;       // terms with numbers below num_own_rows
  const void* received;  // all other terms
  void* to;
  int64_t own_strides[2], received_strides[2], to_strides[2];
  int32_t num_columns, padding;
};

// The parameters of results_add_rows, which writes rows of two arrays, such as keys and values.
struct RowSums {
  Rows arrays[2];
  const int32_t* table;  // [num_rows, 1 + num_terms]: a row that is written, and its terms in order; -1 if none
  int32_t num_rows, num_terms, num_own_rows;
  int32_t num_heads, num_matrices, rows_per_block;
  int32_t is_wide;  // terms are accumulators
  int32_t padding;
};

}  // namespace cuflash::results
