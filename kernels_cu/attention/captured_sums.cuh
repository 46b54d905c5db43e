#pragma once
#include <ptx/types.cuh>

// The gradient of a score function's array from sums whose bits do not depend on the order of additions.
namespace cuflash::attention {

// The parameters of the kernel that writes it, an argument of its own. cuflash/planning/captured_sums.py has the record as a
// NumPy dtype.
struct CapturedSums {
  config::Accumulator* gradient;  // [num_elements]
  void* sums;                     // exact: words of each element; else [num_parts, num_elements] numbers
  int64_t num_elements, num_parts;
  int64_t is_exact;
};

}  // namespace cuflash::attention
