#pragma once
#include <ptx/thread.cuh>

// The parameters of the kernels that process results of attention: results_merge combines results over disjoint keys,
// and results_compare compares the results with and without a mask. All arrays are in C order.
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

}  // namespace cuflash::results
