// The column half of FlashAttention-2's backward pass (arXiv 2307.08691, algorithm 2): dK and dV of one tile of keys,
// summed over the query heads that share it, with P recomputed from lse. Scores are transposed here: rows are keys.
#include <attention/block_iterator.cuh>
#include <attention/config_simt.cuh>
#include <attention/dropout.cuh>
#include <attention/score_gradient.cuh>
#include <attention/score_slopes.cuh>
#include <ptx/shared.cuh>
#include <tile/gemm_simt.cuh>

namespace cuflash::simt {

using PtTile = tile::SharedTile<Accumulator, kBlockKv, kBlockQ>;
// Unrolled steps of a product. One step is 3 % slower than four, but compiles in 2/3 of the time.
constexpr int kUnroll = tile::kMmaRows > 0 ? 4 : 1;
constexpr int kSharedBytes = kBytesOf<KTile, VTile, QTile, DoTile, PtTile>;

}  // namespace cuflash::simt

extern "C" __global__ void __launch_bounds__(cuflash::tile::kThreads, 2)
simt_backward_columns(const __grid_constant__ cuflash::attention::Params params CUFLASH_FEATURES) {
  using namespace cuflash;
  using namespace cuflash::simt;
  using namespace cuflash::attention;
  const Shape& shape = params.shape;
  WorkTile work = key_tile(params, kBlockKv);
  if (work.is_empty()) return;
  const int first_head = work.batch_head.head, kv_head = first_head / shape.group_size;

  Accumulator* const smem = ptx::dynamic_shared<Accumulator>();
  const KTile k_smem{smem};
  const VTile v_smem{k_smem.data + KTile::kElements};
  const QTile q_smem{v_smem.data + VTile::kElements};
  const DoTile do_smem{q_smem.data + QTile::kElements};
  const PtTile p_smem{do_smem.data + DoTile::kElements};  // P^T, then dS^T
  tile::load(k_smem, matrix<Element>(params.k, work.batch_head, kv_head, shape.seqlen_kv, shape.head_dim)
                         .rows(work.first, work.last));
  tile::load(v_smem, matrix<Element>(params.v, work.batch_head, kv_head, shape.seqlen_kv, shape.value_dim)
                         .rows(work.first, work.last));

  tile::RegisterTile<Accumulator, kBlockKv, kHeadDim, kRun> dk;
  tile::RegisterTile<Accumulator, kBlockKv, kValueDim, kRun> dv;
  dk.fill(0);
  dv.fill(0);
  for (int head = first_head; head < first_head + shape.group_size; ++head) {
    work.batch_head.head = head;
    const auto q = matrix<Element>(params.q, work.batch_head, head, shape.seqlen_q, shape.head_dim);
    const auto d_o = matrix<Element>(params.do_, work.batch_head, head, shape.seqlen_q, shape.value_dim);
    const auto lse = matrix<Accumulator>(params.lse, work.batch_head, head, shape.seqlen_q, 1);
    const auto delta = matrix<Accumulator>(params.delta, work.batch_head, head, shape.seqlen_q, 1);
    const VisitRange visit_range = visit_range_of_keys(params, work);
    BlockIterator<kBlockQ, OverQBlocks> blocks(params, visit_range);
    for (KvBlock block; blocks.next(block);) {
      __syncthreads();  // all threads have read Q and dS of the last step
      load_statistics<kHeadDim>(q_smem, block, lse, delta);
      tile::load(q_smem, q.rows(block.start, block.stop));
      // The gradients of a query without a key are 0, whatever its rows contain.
      tile::load(do_smem, d_o.rows(block.start, block.stop), [&](int row) {
        return lse.at(block.start + row, 0) != ptx::negative_infinity<Accumulator>();
      });
      __syncthreads();  // Q and dO have arrived, and K and V before the first step
      tile::RegisterTile<Accumulator, kBlockKv, kBlockQ> s, dp;
      s.fill(0);
      dp.fill(0);
      tile::gemm_add_nt<kUnroll>(s, k_smem, q_smem);
      tile::gemm_add_nt<kUnroll>(dp, v_smem, do_smem);
      KeptWeights<decltype(s)> kept;
      if constexpr (Config::kHasDropout) {
        kept = kept_weights_of_keys(s, dropout, shape, work, block);
        drop_gradients(dp, kept, static_cast<Accumulator>(dropout.factor));
      }
      const auto lse_2 = [&](int row) { return q_smem.at(row, kHeadDim); };
      const auto delta_of = [&](int row) { return q_smem.at(row, kHeadDim + 1); };
      if constexpr (kHasScore) {
        scores_to_p_and_ds_of_keys([&](int i, int j) -> Accumulator& { return s.at[i][j]; }, dp, score_function, params,
                                   work, block, lse_2, delta_of);
      } else {
        probabilities_of_keys(s, params, work, block, lse_2);
        score_gradients_of_keys(dp, [&](int i, int j) { return s.at[i][j]; }, delta_of);
      }
      if constexpr (Config::kHasDropout) drop_weights(s, kept);
      tile::store(p_smem, s);
      __syncthreads();  // P is stored
      tile::gemm_add_nn<kUnroll>(dv, p_smem, do_smem);
      __syncthreads();  // all threads have read P
      tile::store(p_smem, dp);
      __syncthreads();  // dS is stored
      tile::gemm_add_nn<kUnroll>(dk, p_smem, q_smem);
    }
  }
  dk.scale(shape.softmax_scale);
  if constexpr (Config::kHasDropout) dv.scale(dropout.factor);
  store_gradient<Element>(params.dk, work, kv_head, shape.seqlen_kv, shape.head_dim, dk);
  store_gradient<Element>(params.dv, work, kv_head, shape.seqlen_kv, shape.value_dim, dv);
}
