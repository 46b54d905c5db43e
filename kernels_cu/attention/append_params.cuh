#pragma once
#include <attention/decode_params.cuh>

// The parameters of the kernel that appends to a cache. cuflash/planning/appending.py has the record as a NumPy dtype.
namespace cuflash::attention {

struct Append {
  Matrices k, v;  // [batch, kv heads, num_rows, dim]
  CachePages cache;
  int32_t* arrivals;  // [batch] number of blocks that have read the length; 0 before and after a launch
  int32_t num_rows, blocks_per_sequence;
};

// The elementwise minimum and maximum of the keys of each page, for the kernel that updates them.
struct KeyBounds {
  void* key_bounds;  // [num_pages, kv heads, 2, head_dim], in the dtype of keys
  int32_t pages_per_sequence;  // number of pages that new rows of a sequence can reach
  int32_t padding;
};

}  // namespace cuflash::attention
