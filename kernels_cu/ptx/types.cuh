// Types that all other files use: integers of known width, and types for the 8-bit and 16-bit floats.
// NVRTC has no <stdint.h>; the 64-bit types are spelled as in glibc, for compilers that also include its headers.
#pragma once

#define CUFLASH_DEVICE __device__ __forceinline__

typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef decltype(static_cast<char*>(nullptr) - static_cast<char*>(nullptr)) int64_t;
typedef decltype(sizeof(0)) uint64_t;

namespace cuflash::ptx {

// Storage types. Arithmetic uses float registers; ptx/math.cuh has the conversions.
struct Half { unsigned short bits; };
struct BFloat16 { unsigned short bits; };
struct Float8E4M3 { unsigned char bits; };  // 4 exponent bits, 3 mantissa bits, at most 448, no infinity

}  // namespace cuflash::ptx
