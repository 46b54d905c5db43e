#pragma once
#include <ptx/types.cuh>

// The random numbers of Philox4x32-10 (Salmon et al., SC 2011): four words for a counter and a key.
namespace cuflash::tile {

// The four words of a counter, or the random words that replace them.
struct PhiloxWords {
  uint32_t at[4];
};

// A key of Philox: two words from the seed. Each round adds a Weyl constant to each word.
struct PhiloxKey {
  uint32_t low, high;

  CUFLASH_DEVICE void next() {
    low += 0x9E3779B9u;
    high += 0xBB67AE85u;
  }
};

// Run one round on several counters, in place. Their instructions are interleaved, since each instruction of one
// counter waits for the previous one.
template <int Num>
CUFLASH_DEVICE void philox_round(PhiloxWords (&counters)[Num], const PhiloxKey& key) {
#pragma unroll
  for (int n = 0; n < Num; ++n) {
    uint32_t(&c)[4] = counters[n].at;
    const uint64_t p0 = static_cast<uint64_t>(0xD2511F53u) * c[0], p1 = static_cast<uint64_t>(0xCD9E8D57u) * c[2];
    counters[n] = {{static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ key.low, static_cast<uint32_t>(p1),
                    static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ key.high, static_cast<uint32_t>(p0)}};
  }
}

// Replace counters by the random words drawn for them, in ten rounds. In the first two rounds, counters of one row
// share products; the other rounds are a loop, whose code stays in the instruction cache.
template <int Num>
CUFLASH_DEVICE void philox4x32(PhiloxWords (&counters)[Num], PhiloxKey key) {
#pragma unroll
  for (int round = 0; round < 2; ++round, key.next()) philox_round(counters, key);
#pragma unroll 1
  for (int round = 2; round < 10; round += 2) {
    philox_round(counters, key);
    key.next();
    philox_round(counters, key);
    key.next();
  }
}

}  // namespace cuflash::tile
