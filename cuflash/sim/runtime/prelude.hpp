// Included before a kernel's text: the CUDA C++ words that are part of the language instead of a library.
#pragma once

#include <stdint.h>

#include <bit>

// Declares C's functions, but not the C++ library's own, which would add 40 ms to the compile time of every kernel.
#define _GLIBCXX_INCLUDE_NEXT_C_HEADERS
#include <math.h>
#undef _GLIBCXX_INCLUDE_NEXT_C_HEADERS

#include "floats.hpp"
#include "interface.hpp"

#define __global__
#define __device__
#define __host__
#define __constant__ const
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define __forceinline__ inline __attribute__((always_inline))  // reports then name the kernel's line
#else
#define __forceinline__ inline  // compiles in two thirds of the time, and runs no slower
#endif
#define __noinline__ __attribute__((noinline))
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(...)
#define __grid_constant__
// __shared__ is refused, because a static object would be shared by all blocks, and neither poisoned nor checked.
#define __shared__ \
  _Pragma("GCC error \"shared memory comes from ptx::dynamic_shared<T>(), not from __shared__\"") static
#define threadIdx (::cuflash::sim::current->index)
#define blockIdx (::cuflash::sim::current->block->index)
#define blockDim (::cuflash::sim::current->block->block_dim)
#define gridDim (::cuflash::sim::current->block->grid_dim)
constexpr int warpSize = 32;

#define CUFLASH_SIM_WHERE ::cuflash::sim::Location where = ::cuflash::sim::Location::current()

#include "words/warp.hpp"
#include "words/atomics.hpp"
#include "words/math.hpp"

inline void __syncthreads(CUFLASH_SIM_WHERE) {
  ::cuflash::sim::barrier(0, ::cuflash::sim::block_threads(), true, where);
}
inline void __threadfence() { ::cuflash::sim::fence_device(); }
inline void __threadfence_block() { ::cuflash::sim::fence(); }
inline void __nanosleep(unsigned, CUFLASH_SIM_WHERE) { ::cuflash::sim::spin(where); }
[[noreturn]] inline void __trap(CUFLASH_SIM_WHERE) { ::cuflash::sim::fail(where, "__trap: the kernel gave up"); }
template <class T> inline T __ldg(const T* pointer) { return *pointer; }
