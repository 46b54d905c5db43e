// Host twin of kernels_cu/ptx/types.cuh with the same names. Integer types come from the C library.
#pragma once

#define CUFLASH_DEVICE __device__ __forceinline__

namespace cuflash::ptx {

struct Half { unsigned short bits; };
struct BFloat16 { unsigned short bits; };
struct Float8E4M3 { unsigned char bits; };

}  // namespace cuflash::ptx
