// FlashAttention-3's backward pass (arXiv 2407.08608, appendix B) on Hopper: a block keeps a tile of keys and walks the
// queries that visit it, over the query heads that share it. One warpgroup brings Q, dO and what is known of each query;
// two multiply, 64 keys each. They make S and dP transposed: so P and dS, and dK and dV, stay in registers, and only dS
// goes through shared memory, for dQ, whose parts are added up in global memory.
#include <attention/query_ring.cuh>

namespace cuflash {

static_assert(!kIsWide && kBlockKv == 64 * kConsumers, "a warpgroup has 64 keys");

// Rows are keys.
using Scores = tile::WarpTile<1, kBlockQ / 8, 4 * kConsumers>;
using DkOfWarp = tile::WarpTile<1, kHeadDim / 8, 4 * kConsumers>;
using DvOfWarp = tile::WarpTile<1, kValueDim / 8, 4 * kConsumers>;
using Operand = tile::Rounded<Element, Scores>;  // P or dS
using DsPanels = tile::PanelTile<Element, kBlockQ, kBlockKv>;

// What a warpgroup makes of dQ: of 64 queries all columns, or of all queries 64 columns at most.
constexpr int kRowParts = kBlockQ / 64;
using KPart = tile::PanelTile<Element, kBlockKv, kHeadDim * kRowParts / kConsumers>;

// Which elements of scores a warp's queries see: bits of the warp's 16 keys stand together.
struct SeenByWarp {
  const uint16_t* bits;  // of a query, others kBlockKv / 16 further on
  int lane_row;

  CUFLASH_DEVICE SeenByWarp(const Queries& queries)
      : bits(reinterpret_cast<const uint16_t*>(queries.seen) + Scores::warp_row() / 16 +
             Scores::first_column() * (kBlockKv / 16)),
        lane_row(ptx::lane() / 4) {}
  CUFLASH_DEVICE bool at(int i, int j) const {
    return bits[Scores::column(j) * (kBlockKv / 16)] >> (lane_row + Scores::row(i)) & 1;
  }
};

// P = exp2(scale log2(e) q k^T - lse) in the place of q k^T. At logits of 1e6 and more the rounding of lse alone would lift
// P above 1, hence the minimum.
template <bool IsMasked>
CUFLASH_DEVICE void make_probabilities(Scores& s, const Queries& queries, float softmax_scale_log2) {
  const SeenByWarp seen(queries);
  const float* const lse_2 = queries.lse_2 + Scores::first_column();
#pragma unroll
  for (int j = 0; j < Scores::kColumns; ++j)
#pragma unroll
    for (int i = 0; i < Scores::kRows; ++i) {
      const float p = ptx::exp2_approx(ptx::fma(s.at(i, j), softmax_scale_log2, -lse_2[Scores::column(j)]));
      s.at(i, j) = !IsMasked || seen.at(i, j) ? ptx::lesser_or_nan(p, 1) : 0.0f;
    }
}

// dS = P (dP - delta) in the place of dP.
template <bool IsMasked>
CUFLASH_DEVICE void make_gradients(Scores& p, Scores& dp, const Queries& queries) {
  const SeenByWarp seen(queries);
  const float* const delta = queries.delta + Scores::first_column();
#pragma unroll
  for (int j = 0; j < Scores::kColumns; ++j)
#pragma unroll
    for (int i = 0; i < Scores::kRows; ++i)
      dp.at(i, j) = !IsMasked || seen.at(i, j) ? p.at(i, j) * (dp.at(i, j) - delta[Scores::column(j)]) : 0.0f;
}

CUFLASH_DEVICE void start_scores(Scores& s, const Turn& turn, int part) {
  tile::start_product_nt(s, tile::RowsAlongSum<KPanels>(k_smem, 64 * part),
                         tile::RowsAlongSum<QPanels>(q_smem(turn.stage)));
}

// What the keys add to dQ of a step, a part of it for each warpgroup. Called by both, each with dS of its keys.
CUFLASH_DEVICE void start_dq(DqOfWarp& dq, const Operand& ds, int part, bool is_odd) {
  const DsPanels ds_smem{kScoreRoom + is_odd * DsPanels::kBytes};
  tile::store_transposed(ds_smem, ds, Scores::warp_row());
  ptx::fence_proxy_async();
  ptx::bar_sync(kConsumersMeet, kConsumers * kGroup);  // dS is there; that of the step before the last is read
  const KPart k_part{k_smem.start + (kRowParts == 1 ? part * KPart::kBytes : 0)};
  tile::start_product_nn(dq, tile::RowsAlongSum<DsPanels>(ds_smem, kRowParts == 1 ? 0 : 64 * part),
                         tile::RowsAcrossSum<KPart>(k_part));
}

// Walk all steps. A product's registers are variables of their own where they live: what starts anew is no one's before.
CUFLASH_DEVICE void walk(DkOfWarp& dk, DvOfWarp& dv, float softmax_scale_log2, int part) {
  using namespace attention;
  Board& own = board();
  Turn turn;
  int num_k = 0;
  if (!await_step(turn, num_k)) return;
  tile::await_full(own.v, 0);
  Scores s;
  start_scores(s, turn, part);
  tile::wait_for<0>(s);
  for (bool is_odd = false;; is_odd = !is_odd) {
    const Queries& queries = own.queries[turn.stage];
    const Note& note = own.notes[turn.stage];
    Scores dp;
    tile::await_full(own.d_o[turn.stage], turn.parity);
    tile::start_product_nt(dp, tile::RowsAlongSum<VPanels>(v_smem, 64 * part),
                           tile::RowsAlongSum<DoPanels>(do_smem(turn.stage)));
    const bool is_whole = note.kind == Note::kWhole;
    if (is_whole) make_probabilities<false>(s, queries, softmax_scale_log2);
    else make_probabilities<true>(s, queries, softmax_scale_log2);
    tile::wait_for<0>(dp);
    if (is_whole) make_gradients<false>(s, dp, queries);
    else make_gradients<true>(s, dp, queries);
    Operand p, ds;
    p = s;
    ds = dp;
    tile::start_sum_nn(dv, p, tile::RowsAcrossSum<DoPanels>(do_smem(turn.stage)));
    DqOfWarp dq;
    start_dq(dq, ds, part, is_odd);
    tile::start_sum_nn(dk, ds, tile::RowsAcrossSum<QPanels>(q_smem(turn.stage)));
    tile::wait_for<1>(dv);
    tile::keep_in_place(p);
    ptx::keep_in_place(tile::accumulators(dq));
    tile::arrive(own.d_o[turn.stage].empty);
    const Turn next = turn.next();
    if (!await_step(next, num_k)) {
      tile::wait_for<0>(dk);
      tile::keep_in_place(ds);
      DqSum(note.dq_sum).add(dq);
      return;
    }
    Scores next_s;
    start_scores(next_s, next, part);
    tile::await_full(own.d_o[next.stage], next.parity);  // a branch, before which the compiler moves no addition
    DqSum(note.dq_sum).add(dq);  // under products, and after all have been issued: many additions at once wait for memory
    tile::wait_for<0>(next_s);
    ptx::keep_in_place(tile::accumulators(dk));
    tile::keep_in_place(ds);
    tile::arrive(own.q[turn.stage].empty);
    s = next_s;
    turn = next;
  }
}

CUFLASH_DEVICE void consume(const attention::Params& params, int part) {
  using namespace attention;
  DkOfWarp dk;
  DvOfWarp dv;
  dk.fill(0);
  dv.fill(0);
  walk(dk, dv, params.shape.softmax_scale * kLog2E, part);
  const WorkTile work = key_tile<Listed>(params, kBlockKv);
  const int kv_head = work.place.head / params.shape.group_size;
  dk.scale(params.shape.softmax_scale);
  write_gradient(params.dk, work, kv_head, params.shape.head_dim, dk);
  write_gradient(params.dv, work, kv_head, params.shape.value_dim, dv);
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, cuflash::config::kMinBlocks)
sm90_backward(const __grid_constant__ cuflash::attention::Params params,
              const __grid_constant__ cuflash::attention::TensorMaps maps) {
  using namespace cuflash;
  share_work(params, maps, [&](int part) { consume(params, part); });
}
