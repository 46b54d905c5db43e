#pragma once
#include <ptx/thread.cuh>

// The order of numbers in which NaN is the result of every comparison with it.
namespace cuflash::lists {

// Return the lesser, and below the greater, of two numbers; NaN if one of them is NaN.
template <class T>
CUFLASH_DEVICE T lesser(T x, T y) {
  return x <= y || x != x ? x : y;
}
template <class T>
CUFLASH_DEVICE T greater(T x, T y) {
  return x >= y || x != x ? x : y;
}

}  // namespace cuflash::lists
