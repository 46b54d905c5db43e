#pragma once
#include <attention/params.cuh>

// What a cache of 8-bit numbers has beside its pages. cuflash/planning/cache_scales.py has the record as a NumPy dtype.
namespace cuflash::attention {

// Float32 numbers [num_pages, kv heads, page_size] that rows of keys and values are to be multiplied by: powers of two, or NaN.
struct CacheScales {
  Matrices k_scale, v_scale;
};

}  // namespace cuflash::attention
