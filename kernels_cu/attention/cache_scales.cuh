#pragma once
#include <attention/params.cuh>

// The scales of an FP8 cache. cuflash/planning/cache_scales.py has the record as a NumPy dtype.
namespace cuflash::attention {

// Float32 scales [num_pages, kv heads, page_size] that multiply rows of keys and values: powers of two, or NaN.
struct CacheScales {
  Matrices k_scale, v_scale;
};

}  // namespace cuflash::attention
