#pragma once
#include <attention/page_table.cuh>

// The parameters of the kernel that computes the cached keys that each query sees. cuflash/planning/prefill.py has the
// record as a NumPy dtype.
namespace cuflash::attention {

struct QueryIntervals {
  Matrices o, lse;  // [batch, query heads, num_queries, value_dim]
  Pages pages;
  int32_t* lo;  // [batch, num_queries] a query sees lo <= j < hi
  int32_t* hi;
  int32_t* tile_counter;  // tile counter of the kernel that follows; null if it has none
  int32_t num_heads, value_dim;
  int32_t left, right;  // numbers of keys that a query sees before and after its own position
  int32_t blocks_per_sequence, unused;
};

}  // namespace cuflash::attention
