#pragma once
#include <ptx/types.cuh>

// The gradient of a score function's array, from sums that are bitwise reproducible in every order of additions.
namespace cuflash::attention {

enum class SumsOperation : int64_t { kSetZero, kRound, kAddParts };

// A kernel argument: the parameters of the kernel that prepares exact sums and writes a gradient from them.
// cuflash/planning/captured_sums.py has the record as a NumPy dtype.
struct CapturedSums {
  void* gradient;  // [num_elements] of Element if parts are added, else of Accumulator
  void* sums;  // [num_elements] exact sums, [num_parts, num_elements] of Element, or words to set to 0
  int64_t num_elements, num_parts;
  SumsOperation operation;
};

}  // namespace cuflash::attention
