#pragma once
#include <ptx/types.cuh>

namespace cuflash::tile {

struct PhiloxWords {
  uint32_t at[4];
};

// Philox4x32-10 (Salmon et al., SC 2011) of several counters in their places. They take turns, round by round: in one of them
// each instruction waits for the one before. `key_of(n)` is the n-th word of the rounds' keys.
template <int Num, class KeyOf>
CUFLASH_DEVICE void philox4x32(PhiloxWords (&counters)[Num], KeyOf key_of) {
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint32_t k0 = key_of(2 * round), k1 = key_of(2 * round + 1);
#pragma unroll
    for (int n = 0; n < Num; ++n) {
      uint32_t(&c)[4] = counters[n].at;
      const uint64_t p0 = static_cast<uint64_t>(0xD2511F53u) * c[0], p1 = static_cast<uint64_t>(0xCD9E8D57u) * c[2];
      counters[n] = {{static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ k0, static_cast<uint32_t>(p1),
                      static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ k1, static_cast<uint32_t>(p0)}};
    }
  }
}

}  // namespace cuflash::tile
