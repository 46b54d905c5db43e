// What FlashAttention-3's backward pass (arXiv 2407.08608, appendix B) starts with: of each tile of queries lse in base 2 and
// delta = rowsum(dO o O) - dlse, 0 in rows without a key, as one copy brings them later. The sums of dQ are set to 0 where
// nobody will store them.
#include <attention/delta.cuh>
#include <attention/dq_turns.cuh>
#include <attention/known_queries.cuh>

namespace cuflash {

// All but delta of the rows that are there. By a warp.
CUFLASH_DEVICE void know(KnownQueries& known, const attention::Params& params, const attention::WorkTile& work) {
  using namespace attention;
  const auto lse = matrix<float>(params.lse, work.place, work.place.head, params.shape.seqlen_q, 1);
  bool is_large = false, is_dead = false;
  for (int first = 0; first < kBlockQ; first += 32) {
    const int row = first + ptx::lane();
    const bool is_there = work.first + row < work.last;
    const float lse_2 = is_there ? base_2(lse.at(work.first + row, 0)) : -ptx::negative_infinity<float>();
    known.lse_2[row] = lse_2;
    if (!is_there) known.delta[row] = 0;
    const bool is_live = lse_2 != -ptx::negative_infinity<float>();
    is_dead |= is_there && !is_live;
    is_large |= is_live && fabsf(lse_2) > kLargestLse2;
    const uint32_t live = __ballot_sync(0xffffffffu, is_live);
    if (ptx::lane() < 2) known.live[first / 16 + ptx::lane()] = live >> 16 * ptx::lane() & 0xffff;
  }
  is_large = __any_sync(0xffffffffu, is_large);
  is_dead = __any_sync(0xffffffffu, is_dead);
  if (ptx::lane() != 0) return;
  known.has_large = is_large;
  known.has_dead = is_dead;
  known.visits = 0;
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::kThreads)
sm90_backward_statistics(const __grid_constant__ cuflash::attention::Params params) {
  using namespace cuflash;
  using namespace cuflash::attention;
  reset_numbers(params);
  const WorkTile work = query_tile_from_last<Listed>(params, kBlockQ);
  if (work.is_empty()) return;
  if (work.first == 0 && threadIdx.x == 0) reset_dq_counts(params, work.place);
  const bool clears = !kFirstStoresDq && !stores_dq<kBlockKv>(params, work);
  KnownQueries& known = known_queries(params, work.place)[query_tile_number<Listed>(params, work.first, kBlockQ)];
  if (threadIdx.x < 32) know(known, params, work);
  if constexpr (config::kIsListed) __syncwarp();  // else ptxas spills what it moves ahead of here
  each_delta(params, work, [&](int row, float sum) { known.delta[row - work.first] = sum; });
  if (clears) clear_dq_sum(params, work);
}
