// Conversions of 8-bit floats, 16-bit floats and TF32 by integer arithmetic, which give equal bits on every host without
// special CPU instructions.
#pragma once

#include <bit>
#include <cstdint>

namespace cuflash::sim {

// Returns a zero for a subnormal number.
inline float flushed(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  return (bits & 0x7f800000) == 0 ? std::bit_cast<float>(bits & 0x80000000) : x;
}

// Conversions between float and double that keep subnormal floats even while operations flush them.
inline double exact_double(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x), magnitude = bits & 0x7fffffff;
  if (magnitude >= 0x00800000) return x;
  return static_cast<double>(magnitude) * (bits == magnitude ? 0x1p-149 : -0x1p-149);
}

inline float rounded_float(double x) {
  const double magnitude = x < 0 ? -x : x;
  if (!(magnitude < 0x1p-126)) return static_cast<float>(x);
  const double units = magnitude * 0x1p149 + 0x1p52;  // to nearest, ties to even
  const auto sign = static_cast<uint32_t>(std::bit_cast<uint64_t>(x) >> 32 & 0x80000000);
  return std::bit_cast<float>(static_cast<uint32_t>(units - 0x1p52) | sign);
}

inline float half_to_float(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16, rest = bits & 0x7fff;
  if (rest < 0x400) return std::bit_cast<float>(std::bit_cast<uint32_t>(static_cast<float>(rest) * 0x1p-24f) | sign);
  return std::bit_cast<float>((rest >= 0x7c00 ? 0x7f800000 | rest << 13 : 0x38000000 + (rest << 13)) | sign);
}

inline uint16_t float_to_half(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x), magnitude = bits & 0x7fffffff;
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
  if (magnitude > 0x7f800000) return 0x7fff;               // NaN: the one that the GPU's conversion makes
  if (magnitude >= 0x477ff000) return sign | 0x7c00;       // 65520 and above round to infinity
  if (magnitude < 0x38800000) {                            // below 2^-14: adding 1/2 leaves the rounded subnormal
    const float aligned = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(aligned) - 0x3f000000));
  }
  const uint32_t odd = magnitude >> 13 & 1;                // to nearest, ties to even
  return static_cast<uint16_t>(sign | ((magnitude - 0x38000000 + 0xfff + odd) >> 13));
}

inline float bfloat16_to_float(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

inline uint16_t float_to_bfloat16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Rounds a float to 10 mantissa bits, ties away from zero, and returns its bits.
inline uint32_t float_to_tf32(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fffffff;
  return (bits + 0x1000) & ~0x1fffu;
}

inline float e4m3_to_float(uint8_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x80) << 24, rest = bits & 0x7f;
  if (rest == 0x7f) return std::bit_cast<float>(0x7fc00000 | sign);
  if (rest < 8) return std::bit_cast<float>(std::bit_cast<uint32_t>(static_cast<float>(rest) * 0x1p-9f) | sign);
  return std::bit_cast<float>((0x3c000000 + (rest << 20)) | sign);
}

// Rounds to nearest, ties to even; magnitudes above 448 become 448.
inline uint8_t float_to_e4m3(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x), magnitude = bits & 0x7fffffff;
  const auto sign = static_cast<uint8_t>(bits >> 24 & 0x80);
  if (magnitude > 0x7f800000) return 0x7f;
  if (magnitude >= 0x43e00000) return sign | 0x7e;         // 448
  if (magnitude < 0x3c800000) {                            // below 2^-6: adding 2^14 leaves the rounded subnormal
    const float aligned = std::bit_cast<float>(magnitude) + 0x1p14f;
    return static_cast<uint8_t>(sign | (std::bit_cast<uint32_t>(aligned) - 0x46800000));
  }
  const uint32_t odd = magnitude >> 20 & 1;
  return static_cast<uint8_t>(sign | ((magnitude - 0x3c000000 + 0x7ffff + odd) >> 20));
}

}  // namespace cuflash::sim
