// Host twin of kernels_cu/ptx/packed.cuh.
#pragma once

#include <ptx/math.cuh>

namespace cuflash::ptx {

template <class T>
CUFLASH_DEVICE uint32_t multiply2(T, uint32_t x, uint32_t y) {
  const auto half = [](uint32_t both, int shift) { return to_float(T{static_cast<uint16_t>(both >> shift)}); };
  return pack2(T{}, half(x, 0) * half(y, 0), half(x, 16) * half(y, 16));
}

CUFLASH_DEVICE uint32_t permute_bytes(uint32_t x, uint32_t y, uint32_t selector) {
  uint32_t z = 0;
  for (int byte = 0; byte < 4; ++byte) {
    const uint32_t chosen = selector >> 4 * byte & 0xf;
    const uint32_t bits = static_cast<uint32_t>((chosen & 4 ? y : x) >> 8 * (chosen & 3)) & 0xff;
    z |= (chosen & 8 ? (bits & 0x80 ? 0xffu : 0u) : bits) << 8 * byte;
  }
  return z;
}

}  // namespace cuflash::ptx
