#pragma once
#include <ptx/thread.cuh>

// The parameters of the kernels that read results of attention: results_merge combines the results over disjoint keys,
// and results_compare compares the results with a mask and without. All arrays are in C order.
// cuflash/planning/_result_kernels.py has the same records as NumPy dtypes.
namespace cuflash::results {

constexpr int kThreads = 32 * Config::kNumWarps;
constexpr int kMostParts = 128;

// The parameters of results_merge: the results [rows, columns] and [rows] of each part, and those of their union.
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

// The parameters of results_compare: the results [rows, columns] and [rows] without a mask and with it, and the
// measures that compare them.
struct Comparison {
  const void* o;
  const void* lse;  // accumulators; so is kept_lse
  const void* kept_o;
  const void* kept_lse;
  double* sums;  // workspace of two numbers for each thread block
  int32_t* num_arrived;  // workspace: thread blocks that have written their sums; 0 before and after the launch
  void* mass;  // accumulators [rows]
  double* error;  // one number
  int64_t num_rows, num_elements;
};

}  // namespace cuflash::results
