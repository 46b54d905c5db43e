#pragma once
#include <ptx/math.cuh>
#include <tile/copy.cuh>
#include <tile/element.cuh>
#include <tile/global_sum.cuh>
#include <tile/thread_bins.cuh>

// The operations of score functions that are not C++ operators. The texts that cuflash/compiler/score_text.py prints
// call them. Like NumPy's functions, they return NaN if an argument is NaN.
namespace cuflash::score {

CUFLASH_DEVICE float absolute(float x) { return ::fabsf(x); }
CUFLASH_DEVICE double absolute(double x) { return ::fabs(x); }
CUFLASH_DEVICE int absolute(int x) { return x < 0 ? -x : x; }

// Return the smaller of two numbers or, in the second function, the greater; the first one if they are equal.
template <class T>
CUFLASH_DEVICE T minimum(T x, T y) {
  return x <= y || x != x ? x : y;
}
template <class T>
CUFLASH_DEVICE T maximum(T x, T y) {
  return x >= y || x != x ? x : y;
}

template <class T>
CUFLASH_DEVICE T sign(T x) {
  return x > 0 ? T(1) : x < 0 ? T(-1) : x == 0 ? T(0) : x;
}

template <class T>
CUFLASH_DEVICE bool is_finite(T x) {
  return x - x == 0;
}

// Return the result of Python's // or, in the second function, of Python's %, for a positive divisor.
CUFLASH_DEVICE int floor_divide(int x, int by) { return x / by - (x % by < 0); }
CUFLASH_DEVICE int remainder(int x, int by) { return x % by + (x % by < 0 ? by : 0); }

// Return tanh(x) = 1 - 2 / (1 + exp 2x), with the exponential in base 2. Its error is below 8 units of 2^-24. The
// exponential errs by 2^-22.5, and at most half of that reaches the result; the quotient adds three
// units, and the result is rounded once more.
CUFLASH_DEVICE float tangent(float x) {
  constexpr float kTwoLog2E = 2.88539008177792681f;
  return ptx::fma(-2.0f, ptx::reciprocal_approx(1.0f + ptx::exp2_approx(x * kTwoLog2E)), 1.0f);
}
// Return 1 / (1 + 2^x). Functions of q . k compute tanh from it: tanh(y) = 1 - 2 logistic(2 log2(e) y). Its error is
// that of `tangent`.
CUFLASH_DEVICE float logistic(float x) { return ptx::reciprocal_approx(1.0f + ptx::exp2_approx(x)); }
CUFLASH_DEVICE double tangent(double x) { return ptx::tanh_accurate(x); }
CUFLASH_DEVICE float tangent_fast(float x) { return ptx::tanh_approx(x); }
CUFLASH_DEVICE double tangent_fast(double x) { return ptx::tanh_accurate(x); }

// Return dF times a slope, or 0 if dF is 0, even if the slope is infinite.
template <class T>
CUFLASH_DEVICE T df_times(T df, T slope) {
  return df == 0 ? T(0) : df * slope;
}

// Return an element of a captured array in the type in which the function computes.
template <class T, class Element>
CUFLASH_DEVICE T real(Element x) {
  return static_cast<T>(tile::to_accumulator(x));
}

// Return an element of a captured array of integers as an int; numbers outside the range of int are clamped to it.
template <class Element>
CUFLASH_DEVICE int whole(Element x) {
  constexpr int kMost = 0x7fffffff;
  if constexpr (sizeof(Element) >= sizeof(int)) {
    if (x > static_cast<Element>(kMost)) return kMost;
    if constexpr (static_cast<Element>(-1) < 0 && sizeof(Element) > sizeof(int))
      if (x < static_cast<Element>(-kMost - 1)) return -kMost - 1;
  }
  return static_cast<int>(x);
}

// Return the offset of a batch entry's matrices in an array whose leading axes have these extents.
template <int NumAxes>
CUFLASH_DEVICE int64_t leading_offset(int b, const int64_t* extents, const int64_t* strides) {
  int64_t offset = 0;
#pragma unroll
  for (int axis = NumAxes - 1; axis >= 0; --axis) {
    const int extent = static_cast<int>(extents[axis]);
    offset += b % extent * strides[axis];
    b /= extent;
  }
  return offset;
}

}  // namespace cuflash::score
