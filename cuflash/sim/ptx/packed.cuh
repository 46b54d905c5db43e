// Host twin of kernels_cu/ptx/packed.cuh.
#pragma once

#include <ptx/math.cuh>

namespace cuflash::ptx {

template <class T>
CUFLASH_DEVICE uint32_t multiply2(T, uint32_t x, uint32_t y) {
  const auto half = [](uint32_t both, int shift) { return to_float(T{static_cast<uint16_t>(both >> shift)}); };
  return pack2(T{}, half(x, 0) * half(y, 0), half(x, 16) * half(y, 16));
}

}  // namespace cuflash::ptx
