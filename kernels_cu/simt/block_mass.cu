// The softmax mass of every block of a grid: exp(s - lse) summed over the keys and the queries of the block. A thread
// block owns whole rows of the grid, so that no two thread blocks add to the same mass. It walks over the keys of its
// queries once if lse is an input; otherwise twice, the first time to compute lse. If head_dim exceeds the width of a
// tile in shared memory, scores are summed over chunks of head_dim.
#include <attention/block_iterator.cuh>
#include <attention/block_mass.cuh>
#include <attention/config_simt.cuh>
#include <attention/mask_simt.cuh>
#include <attention/score.cuh>
#include <attention/softmax_simt.cuh>
#include <ptx/shared.cuh>
#include <tile/gemm_simt.cuh>

namespace cuflash::simt {

using Scores = tile::RegisterTile<Accumulator, kBlockQ, kBlockKv>;
using Rows = tile::Matrix<Element>;

// Compute the masked scores of a step in base 2. Q stays in shared memory from step to step if it is a single chunk.
template <class Score>
CUFLASH_DEVICE void step_scores(Scores& s, Accumulator* smem, const attention::Params& params,
                                const attention::WorkTile& work, const attention::KvBlock& block, const Rows& q,
                                const Rows& k, bool loads_q, const Score& score) {
  using namespace attention;
  const QTile q_smem{smem};
  const KTile k_smem{smem + QTile::kElements};
  const int head_dim = params.shape.head_dim;
  s.fill(0);
  for (int first = 0; first < head_dim; first += kHeadDim) {
    const int last = min(first + kHeadDim, head_dim);
    __syncthreads();  // all threads have read the previous Q and K, and the weights of the last step
    if (loads_q || head_dim > kHeadDim) tile::load(q_smem, q.columns(first, last));
    tile::load(k_smem, k.columns(first, last));
    __syncthreads();  // Q and K have arrived
    tile::gemm_add_nt(s, q_smem, k_smem);
  }
  if constexpr (kHasScore) score_of_queries(s, score, params.shape.softmax_scale, work, block, kLog2E);
  else s.scale(static_cast<Accumulator>(params.shape.softmax_scale * kLog2E));
  mask_scores(s, params, work, block);
}
constexpr int kSharedBytes = kBytesOf<QTile, KTile, PTile>;

}  // namespace cuflash::simt

extern "C" __global__ void __launch_bounds__(cuflash::tile::kThreads, 2)
simt_block_mass(const __grid_constant__ cuflash::attention::Params params,
                const __grid_constant__ cuflash::attention::MassGrid grid CUFLASH_FEATURES) {
  using namespace cuflash;
  using namespace cuflash::simt;
  using namespace cuflash::attention;
  const Shape& shape = params.shape;
  const WorkTile owned = query_rows(params, mass_queries(grid, kBlockQ));
  const BatchHead& batch_head = owned.batch_head;
  Accumulator* const smem = ptx::dynamic_shared<Accumulator>();
  const PTile p_smem{smem + QTile::kElements + KTile::kElements};
  const auto all_q = matrix<Element>(params.q, batch_head, batch_head.head, shape.seqlen_q, shape.head_dim);
  const auto all_k = matrix<Element>(params.k, batch_head, batch_head.head / shape.group_size, shape.seqlen_kv,
                                     shape.head_dim);
  const auto lse = matrix<Accumulator>(params.lse, batch_head, batch_head.head, shape.seqlen_q, 1);

  clear_masses<Accumulator, tile::kThreads>(grid, shape, owned);
  __syncthreads();  // the masses are 0
  WorkTile work = owned;
  for (; work.first < owned.last; work.first = work.last) {
    work.last = min(query_tile_end(params, work.first, kBlockQ), owned.last);
    const auto q = all_q.rows(work.first, work.last);
    const VisitRange visit_range = visit_range_of_queries(params, work);
    Scores s;
    KvBlock block;
    bool loads_q = true;
    Accumulator shift[Scores::kRows], factor[Scores::kRows];  // a weight is exp2(s - shift) times `factor`
    if (grid.has_lse) {
#pragma unroll
      for (int i = 0; i < Scores::kRows; ++i) {
        const Accumulator row_lse = lse.at(min(work.first + s.row(i), work.last - 1), 0);
        const bool is_empty = row_lse == ptx::negative_infinity<Accumulator>();
        shift[i] = is_empty ? Accumulator(0) : row_lse * Accumulator(kLog2E);
        factor[i] = is_empty ? 0 : 1;
      }
    } else {
      OnlineSoftmax<Accumulator, kBlockQ> softmax;
      tile::RegisterTile<Accumulator, kBlockQ, tile::kColumnLanes * tile::kMinRun> none;
      none.fill(0);
      BlockIterator<kBlockKv, OverKvBlocks> blocks(params, visit_range);
      for (; blocks.next(block); loads_q = false) {
        step_scores(s, smem, params, work, block, q, all_k.rows(block.start, block.stop), loads_q, score_function);
        softmax.update(s, none);
      }
#pragma unroll
      for (int i = 0; i < Scores::kRows; ++i) {
        const Accumulator sum = tile::row_sum(softmax.row_sum[i]);
        const Accumulator row_lse = softmax.finalize(i, none);
        const bool is_empty = row_lse == ptx::negative_infinity<Accumulator>();
        shift[i] = is_empty ? Accumulator(0) : softmax.row_max[i];
        factor[i] = is_empty ? Accumulator(0) : 1 / sum;
        const int row = work.first + s.row(i);
        if (tile::is_row_leader() && row < work.last) lse.at(row, 0) = row_lse;
      }
    }
    BlockIterator<kBlockKv, OverKvBlocks> blocks(params, visit_range);
    for (; blocks.next(block); loads_q = false) {
      step_scores(s, smem, params, work, block, q, all_k.rows(block.start, block.stop), loads_q, score_function);
#pragma unroll
      for (int i = 0; i < Scores::kRows; ++i)
#pragma unroll
        for (int j = 0; j < Scores::kColumns; ++j)
          s.at[i][j] = ptx::exp2_accurate(s.at[i][j] - shift[i]) * factor[i];
      tile::store(p_smem, s);
      __syncthreads();  // the weights are stored
      add_masses(grid, batch_head, p_smem, work.first, work.last, block.start, block.stop);
    }
    __syncthreads();  // all threads have read this tile's Q
  }
}
