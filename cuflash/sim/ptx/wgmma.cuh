// Host twin of kernels_cu/ptx/wgmma.cuh. Accumulators hold NaN until the kernel waits for their group.
#pragma once

#include <ptx/thread.cuh>

namespace cuflash::sim {

inline WgmmaElement wgmma_element(ptx::Half) { return WgmmaElement::kHalf; }
inline WgmmaElement wgmma_element(ptx::BFloat16) { return WgmmaElement::kBFloat16; }
inline WgmmaElement wgmma_element(ptx::Float8E4M3) { return WgmmaElement::kFloat8E4M3; }

}  // namespace cuflash::sim

namespace cuflash::ptx {

enum class Major { kK = 0, kMN = 1 };
enum class Swizzle { kNone = 0, k128 = 1, k64 = 2, k32 = 3 };

CUFLASH_DEVICE uint64_t wgmma_descriptor(Swizzle swizzle, uint32_t address, int leading_bytes, int stride_bytes,
                                         CUFLASH_SIM_WHERE) {
  return sim::wgmma_descriptor(static_cast<int>(swizzle), address, leading_bytes, stride_bytes, where);
}

CUFLASH_DEVICE void wgmma_fence(CUFLASH_SIM_WHERE) { sim::wgmma_fence(where); }

template <Major kMajorA, Major kMajorB, class T, int kCount>
CUFLASH_DEVICE void wgmma(T tag, float (&d)[kCount], uint64_t a, uint64_t b, bool adds, CUFLASH_SIM_WHERE) {
  static_assert((kCount % 8 == 0 && 8 <= kCount && kCount <= 128) || kCount == 20);
  static_assert(sizeof(T) == 2 || (kMajorA == Major::kK && kMajorB == Major::kK), "8-bit operands are K-major");
  sim::wgmma({d, kCount, adds, sim::wgmma_element(tag), false, kMajorA == Major::kMN, kMajorB == Major::kMN, {}, a, b},
             where);
}
template <Major kMajorB, class T, int kCount>
CUFLASH_DEVICE void wgmma(T tag, float (&d)[kCount], const uint32_t (&a)[4], uint64_t b, bool adds,
                          CUFLASH_SIM_WHERE) {
  static_assert((kCount % 8 == 0 && 8 <= kCount && kCount <= 128) || kCount == 20);
  static_assert(sizeof(T) == 2 || kMajorB == Major::kK, "8-bit operands are K-major");
  sim::wgmma({d, kCount, adds, sim::wgmma_element(tag), true, false, kMajorB == Major::kMN, {a[0], a[1], a[2], a[3]}, 0,
              b}, where);
}

CUFLASH_DEVICE void wgmma_commit(CUFLASH_SIM_WHERE) { sim::wgmma_commit(where); }

template <int kPending>
CUFLASH_DEVICE void wgmma_wait(CUFLASH_SIM_WHERE) { sim::wgmma_wait(kPending, where); }

template <int kCount>
CUFLASH_DEVICE void mark_undefined(float (&)[kCount]) {}
template <int kCount>
CUFLASH_DEVICE void fence_registers(float (&)[kCount]) {}
template <int kCount>
CUFLASH_DEVICE void fence_registers(uint32_t (&)[kCount]) {}

}  // namespace cuflash::ptx
