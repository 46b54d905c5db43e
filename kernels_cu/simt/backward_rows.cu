// The row half of FlashAttention-2's backward pass (arXiv 2307.08691, algorithm 2): delta = rowsum(dO o O) - dlse and
// dQ of one tile of queries, with P recomputed from lse. The column half reads delta; results are bitwise reproducible.
#include <attention/block_iterator.cuh>
#include <attention/config_simt.cuh>
#include <attention/dropout.cuh>
#include <attention/score_gradient.cuh>
#include <attention/score_slopes.cuh>
#include <ptx/shared.cuh>
#include <tile/gemm_simt.cuh>

namespace cuflash::simt {

constexpr int kSharedBytes = kBytesOf<QTile, DoTile, KTile, VTile, PTile>;

}  // namespace cuflash::simt

extern "C" __global__ void __launch_bounds__(cuflash::tile::kThreads, 2)
simt_backward_rows(const __grid_constant__ cuflash::attention::Params params CUFLASH_FEATURES) {
  using namespace cuflash;
  using namespace cuflash::simt;
  using namespace cuflash::attention;
  const Shape& shape = params.shape;
  const WorkTile work = query_tile(params, kBlockQ);
  if (work.is_empty()) return;
  const BatchHead& batch_head = work.batch_head;
  const int kv_head = batch_head.head / shape.group_size;
  const auto k = matrix<Element>(params.k, batch_head, kv_head, shape.seqlen_kv, shape.head_dim);
  const auto v = matrix<Element>(params.v, batch_head, kv_head, shape.seqlen_kv, shape.value_dim);

  Accumulator* const smem = ptx::dynamic_shared<Accumulator>();
  const QTile q_smem{smem};
  const DoTile do_smem{q_smem.data + QTile::kElements};
  const KTile k_smem{do_smem.data + DoTile::kElements};
  const VTile v_smem{k_smem.data + KTile::kElements};
  const PTile ds_smem{v_smem.data + VTile::kElements};
  tile::load(q_smem, matrix<Element>(params.q, batch_head, batch_head.head, shape.seqlen_q, shape.head_dim)
                         .rows(work.first, work.last));
  tile::load(do_smem, matrix<Element>(params.do_, batch_head, batch_head.head, shape.seqlen_q, shape.value_dim)
                          .rows(work.first, work.last));

  tile::RegisterTile<Accumulator, kBlockQ, kHeadDim, kRun> dq;
  Accumulator lse_2[dq.kRows], delta[dq.kRows];
  row_statistics<Element, kBlockQ, kValueDim>(params, work, lse_2, delta);
  dq.fill(0);
  const VisitRange visit_range = visit_range_of_queries(params, work);
  BlockIterator<kBlockKv, OverKvBlocks> blocks(params, visit_range);
  for (KvBlock block; blocks.next(block);) {
    __syncthreads();  // all threads have read K and dS of the last step
    tile::load(k_smem, k.rows(block.start, block.stop));
    tile::load(v_smem, v.rows(block.start, block.stop));
    __syncthreads();  // K and V have arrived, and Q and dO before the first step
    tile::RegisterTile<Accumulator, kBlockQ, kBlockKv> s, dp;
    s.fill(0);
    dp.fill(0);
    tile::gemm_add_nt(s, q_smem, k_smem);
    tile::gemm_add_nt(dp, do_smem, v_smem);
    if constexpr (Config::kHasDropout)
      drop_gradients(dp, kept_weights_of_queries(dp, dropout, shape, work, block),
                     static_cast<Accumulator>(dropout.factor));
    if constexpr (kHasScore) scores_to_p_and_ds_of_queries(s, dp, score_function, params, work, block, lse_2, delta);
    else score_gradients_of_queries(s, dp, params, work, block, lse_2, delta);
    tile::store(ds_smem, dp);
    __syncthreads();  // dS is stored
    tile::gemm_add_nn(dq, ds_smem, k_smem);
  }
  dq.scale(shape.softmax_scale);
  store_gradient<Element>(params.dq, work, batch_head.head, shape.seqlen_q, shape.head_dim, dq);
}
