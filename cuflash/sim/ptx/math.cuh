// Host twin of kernels_cu/ptx/math.cuh.
#pragma once

#include <ptx/types.cuh>

namespace cuflash::ptx {

// The NaN that instructions return for operands with any NaN.
constexpr uint32_t kCanonicalNan = 0x7fffffffu;

// Flushes subnormal operands and results to zero, as the instruction does.
CUFLASH_DEVICE float exp2_approx(float x) {
  const float y = ::exp2f(x);
  return y != y ? __uint_as_float(kCanonicalNan) : y < 0x1p-126f ? 0.0f : y;
}

CUFLASH_DEVICE float log2_approx(float x) {
  const float y = ::log2f(sim::flushed(x));
  return y != y ? __uint_as_float(kCanonicalNan) : y;
}

CUFLASH_DEVICE float reciprocal_approx(float x) { return sim::flushed(1 / sim::flushed(x)); }

CUFLASH_DEVICE float exp2_accurate(float x) { return ::exp2f(x); }
CUFLASH_DEVICE double exp2_accurate(double x) { return ::exp2(x); }
// Some C libraries scale subnormal operands of logarithms and powers, which fails if operations flush them.
CUFLASH_DEVICE float log2_accurate(float x) { return ::log2f(sim::flushed(x)); }
CUFLASH_DEVICE double log2_accurate(double x) { return ::log2(x); }
CUFLASH_DEVICE float log_accurate(float x) { return ::logf(sim::flushed(x)); }
CUFLASH_DEVICE double log_accurate(double x) { return ::log(x); }

CUFLASH_DEVICE float exp_accurate(float x) { return ::expf(x); }
CUFLASH_DEVICE double exp_accurate(double x) { return ::exp(x); }
CUFLASH_DEVICE float pow_accurate(float x, float y) { return ::powf(sim::flushed(x), y); }
CUFLASH_DEVICE double pow_accurate(double x, double y) { return ::pow(x, y); }
CUFLASH_DEVICE float sqrt_accurate(float x) { return ::sqrtf(x); }
CUFLASH_DEVICE double sqrt_accurate(double x) { return ::sqrt(x); }
CUFLASH_DEVICE double tanh_accurate(double x) { return ::tanh(x); }

// Computes the hyperbolic tangent, and truncates it to the bits that the instruction's error leaves correct.
CUFLASH_DEVICE float tanh_approx(float x) {
  const float y = sim::flushed(x) == 0 ? x : ::tanhf(x);
  return y != y ? __uint_as_float(kCanonicalNan) : __uint_as_float(__float_as_uint(y) & 0xffffe000u);
}

CUFLASH_DEVICE float fma(float a, float b, float c) { return ::fmaf(a, b, c); }
CUFLASH_DEVICE double fma(double a, double b, double c) { return ::fma(a, b, c); }

template <class T>
CUFLASH_DEVICE T rounded_to(double x);
template <>
CUFLASH_DEVICE float rounded_to<float>(double x) { return sim::rounded_float(x); }
template <>
CUFLASH_DEVICE double rounded_to<double>(double x) { return x; }

CUFLASH_DEVICE float min_or_nan(float x, float y) {
  return x != x || y != y ? __uint_as_float(kCanonicalNan) : sim::exact_double(x) < sim::exact_double(y) ? x : y;
}

CUFLASH_DEVICE float larger_magnitude(float x, float y) {
  const float magnitude = ::fabsf(y);
  if (x != x || y != y) return __uint_as_float(kCanonicalNan);
  return sim::exact_double(x) < sim::exact_double(magnitude) ? magnitude : x;
}

CUFLASH_DEVICE uint32_t bits_at_or_above(int first) { return first > 31 ? 0 : ~0u << (first < 0 ? 0 : first); }

CUFLASH_DEVICE uint32_t permute_bytes(uint32_t x, uint32_t y, uint32_t selector) {
  uint32_t z = 0;
  for (int byte = 0; byte < 4; ++byte) {
    const uint32_t chosen = selector >> 4 * byte & 0xf;
    const uint32_t bits = static_cast<uint32_t>((chosen & 4 ? y : x) >> 8 * (chosen & 3)) & 0xff;
    z |= (chosen & 8 ? (bits & 0x80 ? 0xffu : 0u) : bits) << 8 * byte;
  }
  return z;
}

template <class T>
CUFLASH_DEVICE T negative_infinity();
template <>
CUFLASH_DEVICE float negative_infinity<float>() { return -__builtin_inff(); }
template <>
CUFLASH_DEVICE double negative_infinity<double>() { return -__builtin_inf(); }

CUFLASH_DEVICE float to_float(float x) { return x; }
CUFLASH_DEVICE float to_float(Half x) { return sim::half_to_float(x.bits); }
CUFLASH_DEVICE float to_float(BFloat16 x) { return sim::bfloat16_to_float(x.bits); }

template <class T>
CUFLASH_DEVICE T from_float(float x);
template <>
CUFLASH_DEVICE float from_float<float>(float x) { return x; }
template <>
CUFLASH_DEVICE Half from_float<Half>(float x) { return {sim::float_to_half(x)}; }
template <>
CUFLASH_DEVICE BFloat16 from_float<BFloat16>(float x) { return {sim::float_to_bfloat16(x)}; }

CUFLASH_DEVICE BFloat16 bfloat16_by_integers(float x) { return {sim::float_to_bfloat16(x)}; }

CUFLASH_DEVICE uint32_t pack2(Half, float lo, float hi) {
  return sim::float_to_half(lo) | static_cast<uint32_t>(sim::float_to_half(hi)) << 16;
}
CUFLASH_DEVICE uint32_t pack2(BFloat16, float lo, float hi) {
  return sim::float_to_bfloat16(lo) | static_cast<uint32_t>(sim::float_to_bfloat16(hi)) << 16;
}

CUFLASH_DEVICE uint32_t pack4(Float8E4M3, float a, float b, float c, float d) {
  return sim::float_to_e4m3(a) | static_cast<uint32_t>(sim::float_to_e4m3(b)) << 8 |
         static_cast<uint32_t>(sim::float_to_e4m3(c)) << 16 | static_cast<uint32_t>(sim::float_to_e4m3(d)) << 24;
}

CUFLASH_DEVICE uint32_t to_tf32(float x) { return sim::float_to_tf32(x); }

}  // namespace cuflash::ptx
