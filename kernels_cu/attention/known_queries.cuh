#pragma once
#include <attention/dq_visits.cuh>
#include <attention/mma_operands.cuh>
#include <attention/score_gradient.cuh>

// What gradients on Hopper know of a tile of queries before they walk it: as it lies in global memory, one copy brings it.
namespace cuflash {

constexpr int kLiveWords = kBlockQ / 16;  // halves: words of 32 bits may be NaN, which watched kernels leave none of
struct alignas(16) KnownQueries {
  float lse_2[kBlockQ];  // in base 2; +inf of queries without a key, and past the tile
  float delta[kBlockQ];
  uint32_t live[kLiveWords];  // bits of those that have a key
  int has_large;              // some lse is so large that its rounding lifts P by a thousandth above 1
  int has_dead;               // some query has no key
  attention::DqVisits visits;  // of a list

  static CUFLASH_DEVICE bool is_live(const uint32_t* live, int row) { return live[row / 16] >> row % 16 & 1; }
};
constexpr bool kFirstStoresDq = config::kIsListed && kHeadDim <= 128 && kValueDim <= 128;
constexpr bool kLastFinishesDq = kFirstStoresDq && config::kFinishesDq;
constexpr float kLargestLse2 = 1 << 14;

// Of the first tile of a matrix; others follow.
CUFLASH_DEVICE KnownQueries* known_queries(const attention::Params& params, const attention::Place& place) {
  return reinterpret_cast<KnownQueries*>(attention::matrix<float>(params.delta, place, place.head, 0, 0).data);
}

}  // namespace cuflash
