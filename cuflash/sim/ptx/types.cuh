// Host twin of kernels_cu/ptx/types.cuh: the same names; the integers are the C library's.
#pragma once

#define CUFLASH_DEVICE __device__ __forceinline__

namespace cuflash::ptx {

struct Half { unsigned short bits; };
struct BFloat16 { unsigned short bits; };
struct Float8E4M3 { unsigned char bits; };

}  // namespace cuflash::ptx
