// FlashAttention-2's forward pass (arXiv 2307.08691, algorithm 1), with products and sums in true float32 or float64. A
// thread block computes one tile of queries and walks over their keys; K and V take turns in one tile of shared memory.
#include <attention/config_simt.cuh>
#include <attention/dropout.cuh>
#include <attention/mask_simt.cuh>
#include <attention/score.cuh>
#include <attention/sink.cuh>
#include <attention/softmax_simt.cuh>
#include <ptx/shared.cuh>
#include <tile/gemm_simt.cuh>

namespace cuflash::simt {

constexpr int kWidest = kHeadDim > kValueDim ? kHeadDim : kValueDim;
using KvTile = tile::SharedTile<Accumulator, kBlockKv, kWidest>;
constexpr int kSharedBytes = kBytesOf<QTile, KvTile, PTile>;

}  // namespace cuflash::simt

extern "C" __global__ void __launch_bounds__(cuflash::tile::kThreads, 2)
simt_forward(const __grid_constant__ cuflash::attention::Params params CUFLASH_FEATURES) {
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
  const KTile k_smem{smem + QTile::kElements};
  const VTile v_smem{smem + QTile::kElements};
  const PTile p_smem{smem + QTile::kElements + KvTile::kElements};
  tile::load(q_smem, matrix<Element>(params.q, batch_head, batch_head.head, shape.seqlen_q, shape.head_dim)
                         .rows(work.first, work.last));

  const Accumulator softmax_scale_log2 = shape.softmax_scale * kLog2E;
  OnlineSoftmax<Accumulator, kBlockQ> softmax;
  tile::RegisterTile<Accumulator, kBlockQ, kValueDim, kRun> o;
  o.fill(0);
  const VisitRange visit_range = visit_range_of_queries(params, work);
  BlockIterator<kBlockKv, OverKvBlocks> blocks(params, visit_range);
  for (KvBlock block; blocks.next(block);) {
    __syncthreads();  // all threads have read V and P of the last step
    tile::load(k_smem, k.rows(block.start, block.stop));
    __syncthreads();  // K has arrived, and Q before the first step
    tile::RegisterTile<Accumulator, kBlockQ, kBlockKv> s;
    s.fill(0);
    tile::gemm_add_nt(s, q_smem, k_smem);
    __syncthreads();  // all threads have read K
    tile::load(v_smem, v.rows(block.start, block.stop));
    if constexpr (kHasScore) score_of_queries(s, score_function, params.shape.softmax_scale, work, block, kLog2E);
    else s.scale(softmax_scale_log2);
    mask_scores(s, params, work, block);
    softmax.update(s, o);
    if constexpr (Config::kHasDropout) drop_weights(s, kept_weights_of_queries(s, dropout, shape, work, block));
    tile::store(p_smem, s);
    __syncthreads();  // V has arrived, and P is stored
    tile::gemm_add_nn(o, p_smem, v_smem);
  }

  const auto lse = matrix<Accumulator>(params.lse, batch_head, batch_head.head, shape.seqlen_q, 1).rows(work.first,
                                                                                                        work.last);
  const Accumulator logit = sink_logit<Accumulator>(sink, batch_head, batch_head.head);
#pragma unroll
  for (int i = 0; i < o.kRows; ++i) {
    Accumulator row_lse = softmax.finalize(i, o);
    if constexpr (Config::kHasSink) o.scale_row(i, merge_sink(row_lse, logit));
    if constexpr (Config::kHasDropout) o.scale_row(i, dropout.factor);
    if (tile::is_row_leader() && o.row(i) < lse.num_rows) lse.at(o.row(i), 0) = row_lse;
  }
  const auto all_o = matrix<Element>(params.o, batch_head, batch_head.head, shape.seqlen_q, shape.value_dim);
  tile::store_vectorized(all_o.rows(work.first, work.last), o);
}
