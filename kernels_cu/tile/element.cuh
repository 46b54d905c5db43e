#pragma once
#include <ptx/math.cuh>
#include <ptx/types.cuh>

// Elements as they are stored, and the numbers that kernels reckon with.
namespace cuflash::tile {

CUFLASH_DEVICE float widen(ptx::Half x) { return ptx::to_float(x); }
CUFLASH_DEVICE float widen(ptx::BFloat16 x) { return ptx::to_float(x); }
CUFLASH_DEVICE float widen(float x) { return x; }
CUFLASH_DEVICE double widen(double x) { return x; }

CUFLASH_DEVICE void narrow(float x, ptx::Half& to) { to = ptx::from_float<ptx::Half>(x); }
CUFLASH_DEVICE void narrow(float x, ptx::BFloat16& to) { to = ptx::from_float<ptx::BFloat16>(x); }
CUFLASH_DEVICE void narrow(float x, float& to) { to = x; }
CUFLASH_DEVICE void narrow(double x, double& to) { to = x; }

// Of a number and a NaN, the number.
CUFLASH_DEVICE float greater(float x, float y) { return fmaxf(x, y); }
CUFLASH_DEVICE double greater(double x, double y) { return fmax(x, y); }
// NaN if x is: fminf would give y.
template <class T>
CUFLASH_DEVICE T lesser_or_nan(T x, T y) { return y < x ? y : x; }

// The least finite number: what -inf is replaced by where -inf - (-inf) could arise.
template <class T>
CUFLASH_DEVICE T lowest();
template <>
CUFLASH_DEVICE float lowest<float>() { return -3.402823466e38f; }
template <>
CUFLASH_DEVICE double lowest<double>() { return -1.7976931348623157e308; }

}  // namespace cuflash::tile
