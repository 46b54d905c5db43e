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
  known.visits.count = 0;
}

// write(row, delta) of each row, as each_delta has it, of whole rows of a whole tile; false where it is none. A thread asks for
// a few chunks of O and of dO at once.
template <class Write>
CUFLASH_DEVICE bool each_delta_of_whole(const attention::Params& params, const attention::WorkTile& work, Write write) {
  using namespace attention;
  using Chunk = tile::Chunk<Element>;
  using Share = tile::ChunksOfThread<kThreads, OTile>;
  constexpr int kWidth = OTile::kChunk * Share::kThreadsOfRow, kHeight = Share::kRowsAtOnce;
  if constexpr (kValueDim % kWidth != 0 || kBlockQ % kHeight != 0) {
    return false;
  } else {
    constexpr int kOwn = kValueDim / kWidth, kOwnRows = kBlockQ / kHeight;  // chunks of a row, and rows, of a thread
    constexpr int kRows = kOwn * kOwnRows <= 4 ? (kOwnRows + 1) / 2 : kOwn < 4 ? 4 / kOwn : 1;  // at once; if all, ptxas spills
    static_assert(kOwnRows % kRows == 0, "all rows are some thread's");
    const Shape& shape = params.shape;
    const Place& place = work.place;
    const auto o = matrix<Element>(params.o, place, place.head, shape.seqlen_q, shape.value_dim);
    const auto d_o = matrix<Element>(params.do_, place, place.head, shape.seqlen_q, shape.value_dim);
    if (!tile::has_chunks(o) || !tile::has_chunks(d_o) || shape.value_dim != kValueDim || work.last - work.first != kBlockQ)
      return false;
    const auto lse = matrix<float>(params.lse, place, place.head, shape.seqlen_q, 1);
    const auto dlse = matrix<float>(params.dlse, place, place.head, shape.seqlen_q, 1);
    const int first_column = Share::first_chunk() * OTile::kChunk;
#pragma unroll 1
    for (int row = work.first + Share::first_row(); row < work.last; row += kRows * kHeight) {
      Chunk a[kRows][kOwn], b[kRows][kOwn];
      float lse_of[kRows];
#pragma unroll
      for (int x = 0; x < kRows; ++x) {
        lse_of[x] = lse.at(row + x * kHeight, 0);
#pragma unroll
        for (int c = 0; c < kOwn; ++c) {
          a[x][c] = reinterpret_cast<const Chunk&>(o.at(row + x * kHeight, first_column + c * kWidth));
          b[x][c] = reinterpret_cast<const Chunk&>(d_o.at(row + x * kHeight, first_column + c * kWidth));
        }
      }
#pragma unroll
      for (int x = 0; x < kRows; ++x) {
        float sum = 0;
#pragma unroll
        for (int c = 0; c < kOwn; ++c)
#pragma unroll
          for (int e = 0; e < OTile::kChunk; ++e) sum += tile::widen(a[x][c].at[e]) * tile::widen(b[x][c].at[e]);
#pragma unroll
        for (int step = 1; step < Share::kThreadsOfRow; step *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
        if (first_column != 0) continue;
        const int own = row + x * kHeight;
        const bool is_empty = lse_of[x] == ptx::negative_infinity<float>();
        write(own, is_empty ? 0.0f : params.dlse.data == nullptr ? sum : sum - dlse.at(own, 0));
      }
    }
    return true;
  }
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
  KnownQueries& known = known_queries(params, work.place)[query_tile_number<Listed>(params, work.first, kBlockQ)];
  if (threadIdx.x < 32) {
    know(known, params, work);
    if constexpr (kLastFinishesDq) expect_visits<kBlockKv, Element>(params, work, known.visits);
  }
  ptx::keep_loads_apart();  // else ptxas spills what it moves ahead of here
  const auto write = [&](int row, float sum) { known.delta[row - work.first] = sum; };
  if (!each_delta_of_whole(params, work, write)) each_delta(params, work, write);
  if (!kFirstStoresDq && !stores_dq<kBlockKv>(params, work)) clear_dq_sum(params, work);
}
