// The choices of a simulated launch that do not affect the results of correct kernels, all drawn from one seed.
#pragma once

#include <cstdint>

namespace cuflash::sim {

enum class Order : int32_t { round_robin, first_warp, last_warp, random, priorities };
enum class Copies : int32_t { eager, late, random };

// The schedule of a launch; sim/launch.py has the same layout.
struct Schedule {
  uint64_t seed;
  Order order;
  Copies copies;
  int32_t poison;          // shared memory and the destinations of pending copies hold bytes 0xFF, NaN in any float type
  int32_t shuffle_lanes;
  int32_t resident_blocks; // how many blocks of a grid run concurrently
};

// SplitMix64: its state is a counter, so that adjacent seeds give independent numbers too.
struct Random {
  uint64_t state;
  uint64_t next() {
    uint64_t z = state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
  }
  uint32_t below(uint32_t bound) { return static_cast<uint32_t>((next() >> 32) * bound >> 32); }
  bool one_in(uint32_t chance) { return below(chance) == 0; }
};

}  // namespace cuflash::sim
