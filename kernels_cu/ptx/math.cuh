// Conversions between float and the 16-bit formats, and the few math functions that softmax needs.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cvt
#pragma once

#include <ptx/types.cuh>

namespace cuflash::ptx {

// Return 2^x with a relative error below 2^-22. Subnormal results become 0, and 2^-inf is 0.
CUFLASH_DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Return log2(x) with an error below 2^-22, relative if |log2(x)| > 1, else absolute. Subnormal x counts as 0.
CUFLASH_DEVICE float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Return 1 / x with an error of at most one unit in the last place. The result is infinite for subnormal x; subnormal
// results become 0.
CUFLASH_DEVICE float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// CUDA's math functions under one name for float and double.
CUFLASH_DEVICE float exp2_accurate(float x) { return ::exp2f(x); }
CUFLASH_DEVICE double exp2_accurate(double x) { return ::exp2(x); }
CUFLASH_DEVICE float log2_accurate(float x) { return ::log2f(x); }
CUFLASH_DEVICE double log2_accurate(double x) { return ::log2(x); }
CUFLASH_DEVICE float log_accurate(float x) { return ::logf(x); }
CUFLASH_DEVICE double log_accurate(double x) { return ::log(x); }

CUFLASH_DEVICE float exp_accurate(float x) { return ::expf(x); }
CUFLASH_DEVICE double exp_accurate(double x) { return ::exp(x); }
CUFLASH_DEVICE float pow_accurate(float x, float y) { return ::powf(x, y); }
CUFLASH_DEVICE double pow_accurate(double x, double y) { return ::pow(x, y); }
CUFLASH_DEVICE float sqrt_accurate(float x) { return ::sqrtf(x); }
CUFLASH_DEVICE double sqrt_accurate(double x) { return ::sqrt(x); }
CUFLASH_DEVICE double tanh_accurate(double x) { return ::tanh(x); }

// Return tanh(x) with a relative error below 2^-10.98. Requires sm_75 or higher.
CUFLASH_DEVICE float tanh_approx(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Return a * b + c, rounded once.
CUFLASH_DEVICE float fma(float a, float b, float c) { return ::fmaf(a, b, c); }
CUFLASH_DEVICE double fma(double a, double b, double c) { return ::fma(a, b, c); }

// Round a double to the nearest T, ties to even. Subnormal results are preserved; the compiler's own conversion sets
// them to 0 in code that flushes subnormal numbers.
template <class T>
CUFLASH_DEVICE T rounded_to(double x);
template <>
CUFLASH_DEVICE float rounded_to<float>(double x) {
  float y;
  asm("cvt.rn.f32.f64 %0, %1;" : "=f"(y) : "d"(x));
  return y;
}
template <>
CUFLASH_DEVICE double rounded_to<double>(double x) { return x; }

// Return the smaller of two numbers, or NaN if either is NaN.
CUFLASH_DEVICE float min_or_nan(float x, float y) {
  float z;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

// Return the larger of x and the magnitude of y, or NaN if either is NaN; subnormal numbers are not flushed. Requires
// sm_80 or higher.
CUFLASH_DEVICE float larger_magnitude(float x, float y) {
  float z;
  asm("{\n.reg .f32 magnitude;\nabs.f32 magnitude, %2;\nmax.NaN.f32 %0, %1, magnitude;\n}" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

// Return a word with bit `first` and all higher bits set: all bits if `first` is negative, none if it is 32 or more.
CUFLASH_DEVICE uint32_t bits_at_or_above(int first) {
  uint32_t bits;
  asm("shl.b32 %0, %1, %2;" : "=r"(bits) : "r"(~0u), "r"(max(first, 0)));
  return bits;
}

// Return four bytes chosen from x (bytes 0 to 3) and y (bytes 4 to 7). Each four bits of the selector choose one byte
// of the result, the lowest byte first. If the highest of these four bits is set, the result byte repeats the highest
// bit of the chosen byte.
CUFLASH_DEVICE uint32_t permute_bytes(uint32_t x, uint32_t y, uint32_t selector) {
  uint32_t z;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(z) : "r"(x), "r"(y), "r"(selector));
  return z;
}

template <class T>
CUFLASH_DEVICE T negative_infinity();
template <>
CUFLASH_DEVICE float negative_infinity<float>() { return __int_as_float(static_cast<int>(0xff800000u)); }
template <>
CUFLASH_DEVICE double negative_infinity<double>() {
  return __longlong_as_double(static_cast<long long>(0xfff0000000000000ull));
}

CUFLASH_DEVICE float to_float(float x) { return x; }

CUFLASH_DEVICE float to_float(Half x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}

// A bfloat16 is the upper half of a float, so a shift converts it; a conversion instruction exists only from sm_90 on.
CUFLASH_DEVICE float to_float(BFloat16 x) { return __uint_as_float(static_cast<uint32_t>(x.bits) << 16); }

// Round a float to nearest, ties to even. Values that are too large become infinity.
template <class T>
CUFLASH_DEVICE T from_float(float x);

template <>
CUFLASH_DEVICE float from_float<float>(float x) { return x; }

template <>
CUFLASH_DEVICE Half from_float<Half>(float x) {
  Half y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}

template <>
CUFLASH_DEVICE BFloat16 from_float<BFloat16>(float x) {
  BFloat16 y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}

// Return from_float<BFloat16>(x), computed with integers: chips before sm_80 have no instruction for it.
CUFLASH_DEVICE BFloat16 bfloat16_by_integers(float x) {
  const uint32_t bits = __float_as_uint(x);
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return {static_cast<uint16_t>(is_nan ? 0x7fffu : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
}

// Pack two floats into one register of an mma operand, `lo` in the lower half. The instruction takes the upper half
// first.
CUFLASH_DEVICE uint32_t pack2(Half, float lo, float hi) {
  uint32_t y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
  return y;
}

CUFLASH_DEVICE uint32_t pack2(BFloat16, float lo, float hi) {
  uint32_t y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
  return y;
}

// Pack four floats into one register of an operand of 8-bit elements, `a` in the lowest byte. They are rounded to
// nearest, ties to even, and clamped to a magnitude of 448; NaN stays NaN. Requires sm_89 or higher.
CUFLASH_DEVICE uint32_t pack4(Float8E4M3, float a, float b, float c, float d) {
  uint32_t y;
  asm("{\n.reg .b16 lo, hi;\ncvt.rn.satfinite.e4m3x2.f32 lo, %2, %1;\ncvt.rn.satfinite.e4m3x2.f32 hi, %4, %3;\n"
      "mov.b32 %0, {lo, hi};\n}"
      : "=r"(y) : "f"(a), "f"(b), "f"(c), "f"(d));
  return y;
}

// Return the bits of x rounded to tf32 (10 mantissa bits), ties away from zero, for operands of mma_m16n8k8_tf32.
CUFLASH_DEVICE uint32_t to_tf32(float x) {
  uint32_t y;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
  return y;
}

}  // namespace cuflash::ptx
