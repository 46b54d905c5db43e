// Host twin of kernels_cu/ptx/packed.cuh.
#pragma once

#include <ptx/math.cuh>

namespace cuflash::ptx {

template <class T>
CUFLASH_DEVICE uint32_t multiply2(T, uint32_t x, uint32_t y) {
  const auto half = [](uint32_t both, int shift) {
    return sim::exact_double(to_float(T{static_cast<uint16_t>(both >> shift)}));
  };
  return pack2(T{}, sim::rounded_float(half(x, 0) * half(y, 0)), sim::rounded_float(half(x, 16) * half(y, 16)));
}

}  // namespace cuflash::ptx
