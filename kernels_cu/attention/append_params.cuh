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

}  // namespace cuflash::attention
