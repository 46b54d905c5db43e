// Vectors of eight host floats, in one or two registers, with the same bits as eight scalar computations.
#pragma once

#include <cstdint>
#include <cstring>

// CUFLASH_SIM_WIDE compiles a function a second time for hosts with AVX2; functions marked CUFLASH_SIM_WITHIN are inlined
// into both versions.
#if defined(__x86_64__)
#define CUFLASH_SIM_WIDE __attribute__((target_clones("avx2", "default")))
#else
#define CUFLASH_SIM_WIDE
#endif
#define CUFLASH_SIM_WITHIN inline __attribute__((always_inline))

namespace cuflash::sim {

using Eight = float __attribute__((vector_size(32)));
using EightBits = int32_t __attribute__((vector_size(32)));

// Conversions like half_to_float and bfloat16_to_float in floats.hpp.
CUFLASH_SIM_WITHIN Eight to_floats(const void* sixteen_bytes, bool is_bfloat16) {
  uint16_t __attribute__((vector_size(16))) narrow;
  memcpy(&narrow, sixteen_bytes, sizeof narrow);
  const EightBits bits = __builtin_convertvector(narrow, EightBits), rest = bits & 0x7fff;
  const EightBits scaled = reinterpret_cast<EightBits>(reinterpret_cast<Eight>(rest << 13) * 0x1p112f);
  const EightBits of_half = (rest >= 0x7c00 ? 0x7f800000 | rest << 13 : scaled) | (bits & 0x8000) << 16;
  return reinterpret_cast<Eight>(is_bfloat16 ? bits << 16 : of_half);
}

}  // namespace cuflash::sim
