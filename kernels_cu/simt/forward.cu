// FlashAttention-2's forward pass (arXiv 2307.08691, algorithm 1), products and sums in true float32 or float64.
// One block works on one tile of queries and walks their keys; K and V take turns in one shared tile.
#include <attention/mask_scores.cuh>
#include <attention/online_softmax.cuh>
#include <attention/operands.cuh>
#include <attention/score.cuh>
#include <attention/sink.cuh>
#include <ptx/shared.cuh>
#include <tile/product.cuh>

namespace cuflash {

constexpr int kWidest = kHeadDim > kValueDim ? kHeadDim : kValueDim;
using KvRoom = tile::SharedTile<Accumulator, kBlockKv, kWidest>;

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::tile::kThreads, 2)
simt_forward(const __grid_constant__ cuflash::attention::Params params CUFLASH_FEATURES) {
  using namespace cuflash;
  using namespace cuflash::attention;
  const Shape& shape = params.shape;
  const WorkTile work = query_tile(params, kBlockQ);
  if (work.is_empty()) return;
  const Place& place = work.place;
  const int kv_head = place.head / shape.group_size;
  const auto k = matrix<Element>(params.k, place, kv_head, shape.seqlen_kv, shape.head_dim);
  const auto v = matrix<Element>(params.v, place, kv_head, shape.seqlen_kv, shape.value_dim);

  Accumulator* const room = ptx::dynamic_shared<Accumulator>();
  const QTile q_smem{room};
  const KTile k_smem{room + QTile::kElements};
  const VTile v_smem{room + QTile::kElements};
  const PTile p_smem{room + QTile::kElements + KvRoom::kElements};
  tile::load(q_smem, matrix<Element>(params.q, place, place.head, shape.seqlen_q, shape.head_dim)
                         .rows(work.first, work.last));

  const Accumulator softmax_scale_log2 = shape.softmax_scale * kLog2E;
  OnlineSoftmax<Accumulator, kBlockQ> softmax;
  tile::RegisterTile<Accumulator, kBlockQ, kValueDim, kRun> o;
  o.fill(0);
  const Reach reach = reach_of_queries(params, work);
  Steps<kBlockKv, OverKeys> steps(params, reach);
  for (Step step; steps.next(step);) {
    __syncthreads();  // V and P of the last step are read
    tile::load(k_smem, k.rows(step.start, step.stop));
    __syncthreads();  // K, and Q before the first step, is there
    tile::RegisterTile<Accumulator, kBlockQ, kBlockKv> s;
    s.fill(0);
    tile::add_product_nt(s, q_smem, k_smem);
    __syncthreads();  // K is read
    tile::load(v_smem, v.rows(step.start, step.stop));
    if constexpr (kHasScore) score_of_queries(s, score_function, params, work, step, kLog2E);
    else s.scale(softmax_scale_log2);
    mask_scores(s, params, work, step);
    softmax.update(s, o);
    tile::store(p_smem, s);
    __syncthreads();  // V and P are there
    tile::add_product_nn(o, p_smem, v_smem);
  }

  const auto lse = matrix<Accumulator>(params.lse, place, place.head, shape.seqlen_q, 1).rows(work.first, work.last);
  const Accumulator logit = sink_logit<Accumulator>(sink, place, place.head);
#pragma unroll
  for (int i = 0; i < o.kRows; ++i) {
    Accumulator row_lse = softmax.finalize(i, o);
    if constexpr (config::kHasSink) o.scale_row(i, merge_sink(row_lse, logit));
    if (tile::leads_rows() && o.row(i) < lse.num_rows) lse.at(o.row(i), 0) = row_lse;
  }
  const auto all_o = matrix<Element>(params.o, place, place.head, shape.seqlen_q, shape.value_dim);
  tile::store_in_vectors(all_o.rows(work.first, work.last), o);
}
