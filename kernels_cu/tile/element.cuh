#pragma once
#include <ptx/math.cuh>
#include <ptx/types.cuh>

// Storage types of elements, and the types in which kernels compute.
namespace cuflash::tile {

CUFLASH_DEVICE float to_accumulator(ptx::Half x) { return ptx::to_float(x); }
CUFLASH_DEVICE float to_accumulator(ptx::BFloat16 x) { return ptx::to_float(x); }
CUFLASH_DEVICE float to_accumulator(float x) { return x; }
CUFLASH_DEVICE double to_accumulator(double x) { return x; }

CUFLASH_DEVICE void to_element(float x, ptx::Half& to) { to = ptx::from_float<ptx::Half>(x); }
CUFLASH_DEVICE void to_element(float x, ptx::BFloat16& to) { to = ptx::from_float<ptx::BFloat16>(x); }
CUFLASH_DEVICE void to_element(float x, float& to) { to = x; }
CUFLASH_DEVICE void to_element(double x, double& to) { to = x; }

// Return the larger of two numbers; if one of them is NaN, return the other.
CUFLASH_DEVICE float maximum(float x, float y) { return fmaxf(x, y); }
CUFLASH_DEVICE double maximum(double x, double y) { return fmax(x, y); }
// Return the smaller of two numbers. If x is NaN, return NaN; fminf would return y.
template <class T>
CUFLASH_DEVICE T min_or_nan(T x, T y) { return y < x ? y : x; }

// Return the lowest finite number. It replaces -inf if -inf - (-inf) could occur.
template <class T>
CUFLASH_DEVICE T lowest();
template <>
CUFLASH_DEVICE float lowest<float>() { return -3.402823466e38f; }
template <>
CUFLASH_DEVICE double lowest<double>() { return -1.7976931348623157e308; }

}  // namespace cuflash::tile
