#pragma once
#include <attention/params.cuh>

// The scales of a cache of 8-bit numbers. cuflash/planning/cache_scales.py has the record as a NumPy dtype.
namespace cuflash::attention {

// Scales [num_pages, kv heads, page_size] in float32 by which rows of keys and values are multiplied: powers of two, or
// NaN.
struct CacheScales {
  Matrices k_scale, v_scale;
};

}  // namespace cuflash::attention
