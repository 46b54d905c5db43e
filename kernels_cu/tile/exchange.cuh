#pragma once
#include <ptx/types.cuh>

namespace cuflash::tile {

// One half of two words that an even thread has, and of two that an odd one has: the first word's is the lower half.
struct HalvesOfPair {
  uint32_t even, odd;
};

// Of two words each of a pair of threads, whose numbers differ in the bit `lane_bit`, the halves that each wants: `half` is 0
// for the lower half, which the one wants whose words are the even ones, and 1 for the upper one, which the other wants.
// Called by whole warps.
CUFLASH_DEVICE HalvesOfPair exchange_halves(uint32_t first, uint32_t second, int half, int lane_bit) {
  const auto halves = [&](bool upper) {
    return upper ? first >> 16 | (second & 0xffff0000u) : (first & 0xffffu) | second << 16;
  };
  const uint32_t own = halves(half != 0), other = __shfl_xor_sync(0xffffffffu, halves(half == 0), lane_bit);
  return half == 0 ? HalvesOfPair{own, other} : HalvesOfPair{other, own};
}

}  // namespace cuflash::tile
