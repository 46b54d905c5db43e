#pragma once
#include <attention/mma_operands.cuh>
#include <attention/score_gradient.cuh>
#include <tile/count.cuh>

// What gradients on Hopper know of a tile of queries before they walk it: as it lies in global memory, one copy brings it.
namespace cuflash {

constexpr int kLiveWords = kBlockQ / 16;  // halves: words of 32 bits may be NaN, which watched kernels leave none of
struct alignas(16) KnownQueries {
  float lse_2[kBlockQ];  // in base 2; +inf of queries without a key, and past the tile
  float delta[kBlockQ];
  uint32_t live[kLiveWords];  // bits of those that have a key
  int has_large;              // some lse is so large that its rounding lifts P by a thousandth above 1
  int has_dead;               // some query has no key
  // How many tiles of keys have come, and kDqIsStored; or, where the last of num_visits finishes dQ, kVisitIsDone for each that
  // is done.
  int visits;
  int num_visits;

  static CUFLASH_DEVICE bool is_live(const uint32_t* live, int row) { return live[row / 16] >> row % 16 & 1; }
};
// Of a list, whose sums of dQ few tiles add to: who comes first stores, so that nobody sets sums to 0 beforehand, and others
// wait until it has. It waits for nobody in between. Where very few come, the last of them finishes dQ.
constexpr bool kFirstStoresDq = config::kIsListed && kHeadDim <= 128 && kValueDim <= 128;
constexpr bool kLastFinishesDq = kFirstStoresDq && config::kFinishesDq;
constexpr int kDqIsStored = 1 << 30, kVisitIsDone = 1 << 16;
constexpr float kLargestLse2 = 1 << 14;

// Of the first tile of a matrix; others follow.
CUFLASH_DEVICE KnownQueries* known_queries(const attention::Params& params, const attention::Place& place) {
  return reinterpret_cast<KnownQueries*>(attention::matrix<float>(params.delta, place, place.head, 0, 0).data);
}

}  // namespace cuflash
