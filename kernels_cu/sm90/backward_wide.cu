// FlashAttention-3's backward pass (arXiv 2407.08608, appendix B) on Hopper where dK and dV of 128 keys are more than
// registers hold: a tile has fewer keys. Two warpgroups make S and dP of half of them each; P and dS go through shared
// memory, since each then makes dK and dV of all keys, transposed: for half of their columns, as rows. dQ of half of the
// columns is added up in global memory.
#include <attention/query_ring.cuh>
#include <ptx/store.cuh>

namespace cuflash {

static_assert(kIsWide && kBlockQ == 64 && kBlockKv % 16 == 0, "a warpgroup has all queries, and half of the keys");

// Rows are queries, columns the warpgroup's keys.
using Scores = tile::WarpTile<1, kBlockKv / 16, 4, kConsumers>;
using Operand = tile::Rounded<Element, Scores>;
using TransposedScores = tile::PanelTile<Element, kBlockKv, kBlockQ>;  // P or dS of all keys
CUFLASH_DEVICE TransposedScores p_smem(bool is_odd) { return {kScoreRoom + is_odd * kScoreBytes}; }
constexpr TransposedScores ds_smem{kScoreRoom + 2 * kScoreBytes};

// What a warpgroup makes of dQ at a time: of its half of the columns no more than registers are left for.
constexpr int kDqSlices = kHeadDim > 192 ? 2 : 1;
using DqSlice = tile::WarpTile<1, DqOfWarp::kColumnTiles / kDqSlices, 4, kConsumers>;
using KSlice = tile::PanelTile<Element, kBlockKv, 8 * DqSlice::kColumnTiles, KPanels::kPanelWidth>;

// A warpgroup's part of dK or dV, transposed: rows are columns of the gradient, those of whole panels of Q or dO. Of an odd
// number of panels both warpgroups have the last, half of the keys each.
template <class Left>
struct Gradient {
  static constexpr int kOwn = Left::kPanels / kConsumers;
  static constexpr bool kShares = Left::kPanels % kConsumers != 0;
  static constexpr int kOthers = kOwn - 1 + kShares;  // products beside the first panel's
  static constexpr int kLast = Left::kPanels - 1;
  static_assert(kOwn == 1 || kOwn == 2, "128 to 256 columns");
  using AllKeys = tile::WarpTile<1, kBlockKv / 8, 4>;
  using HalfOfKeys = tile::WarpTile<1, kBlockKv / 16, 4, kConsumers>;

  using Columns = tile::RowsAcrossSum<Left>;
  using Keys = tile::RowsAlongSum<TransposedScores>;

  AllKeys own[kOwn];
  HalfOfKeys shared;

  // Call it with each part, the part's panel and its first key.
  template <class Call>
  CUFLASH_DEVICE void each(int part, Call call) {
#pragma unroll
    for (int x = 0; x < kOwn; ++x) call(own[x], part * kOwn + x, 0);
    if constexpr (kShares) call(shared, kLast, part * kBlockKv / kConsumers);
  }

  // The first panel, or what is left.
  CUFLASH_DEVICE void start_first_sum(Left left, TransposedScores right, int part) {
    left = tile::of_warp(left);
    right = tile::of_warp(right);
    tile::start_sum_tt(own[0], Columns(left, part * kOwn), Keys(right));
  }
  CUFLASH_DEVICE void start_other_sums(Left left, TransposedScores right, int part) {
    left = tile::of_warp(left);
    right = tile::of_warp(right);
    if constexpr (kOwn > 1) tile::start_sum_tt(own[1], Columns(left, part * kOwn + 1), Keys(right));
    if constexpr (kShares) tile::start_sum_tt(shared, Columns(left, kLast), Keys(right, part * kBlockKv / kConsumers));
  }
  CUFLASH_DEVICE void keep_in_place() {
    each(0, [](auto& sums, int, int) { ptx::keep_in_place(tile::accumulators(sums)); });
  }
};
using DkOfGroup = Gradient<QPanels>;
using DvOfGroup = Gradient<DoPanels>;

// Which elements of scores a thread's queries see: eight of the warpgroup's keys are a byte.
struct SeenByThread {
  static constexpr int kRowBytes = 4 * kKeyWords;
  const uint8_t* bits;
  int first;

  CUFLASH_DEVICE SeenByThread(const Queries& queries, int part)
      : bits(reinterpret_cast<const uint8_t*>(queries.seen) + Scores::first_row() * kRowBytes + part * kBlockKv / 16),
        first(ptx::lane() % 4 * 2) {}
  CUFLASH_DEVICE bool at(int i, int j) const {
    return bits[Scores::row(i) * kRowBytes + j / 2] >> (first + j % 2) & 1;
  }
};

// P in the place of q k^T.
template <bool IsMasked>
CUFLASH_DEVICE void make_probabilities(Scores& s, const Queries& queries, float softmax_scale_log2, int part) {
  const SeenByThread seen(queries, part);
#pragma unroll
  for (int i = 0; i < Scores::kRows; ++i) {
    const float lse_2 = queries.known.lse_2[Scores::first_row() + Scores::row(i)];
#pragma unroll
    for (int j = 0; j < Scores::kColumns; ++j) {
      const float p = attention::probability(s.at(i, j), softmax_scale_log2, lse_2);
      s.at(i, j) = !IsMasked || seen.at(i, j) ? p : 0.0f;
    }
  }
}

// dS = P (dP - delta) in the place of dP.
template <bool IsMasked>
CUFLASH_DEVICE void make_gradients(Scores& p, Scores& dp, const Queries& queries, int part) {
  const SeenByThread seen(queries, part);
#pragma unroll
  for (int i = 0; i < Scores::kRows; ++i) {
    const float delta = queries.known.delta[Scores::first_row() + Scores::row(i)];
#pragma unroll
    for (int j = 0; j < Scores::kColumns; ++j)
      dp.at(i, j) = !IsMasked || seen.at(i, j) ? p.at(i, j) * (dp.at(i, j) - delta) : 0.0f;
  }
}

// Where a tile lies is reckoned when it is asked for: registers are for accumulators.
template <class Tile>
CUFLASH_DEVICE Tile anew(Tile tile) {
  return tile::of_warp(Tile{ptx::opaque(tile.start)});
}

CUFLASH_DEVICE void start_s(Scores& s, const Turn& turn, int part) {
  ptx::forget(tile::accumulators(s));
  tile::start_product_nt(s, tile::RowsAlongSum<QPanels>(tile::of_warp(q_smem(turn.stage))),
                         tile::RowsAlongSum<KPanels>(anew(k_smem), part * kBlockKv / kConsumers));
}

CUFLASH_DEVICE void start_dp(Scores& dp, const Turn& turn, int part) {
  tile::await_full(board().d_o[do_stage(turn)], do_parity(turn));
  ptx::forget(tile::accumulators(dp));
  tile::start_product_nt(dp, tile::RowsAlongSum<DoPanels>(tile::of_warp(do_smem(do_stage(turn)))),
                         tile::RowsAlongSum<VPanels>(anew(v_smem), part * kBlockKv / kConsumers));
}

CUFLASH_DEVICE void start_dq(DqSlice& dq, int part, int slice) {
  const KSlice k_slice{anew(k_smem).start + (part * kDqSlices + slice) * KSlice::kBytes};
  tile::start_product_tn(dq, tile::RowsAcrossSum<TransposedScores>(anew(ds_smem)), tile::RowsAcrossSum<KSlice>(k_slice));
}

// Have P or dS where both warpgroups find all of it.
CUFLASH_DEVICE void share(TransposedScores to, const Scores& from, int part) {
  Operand rounded;
  rounded = from;
  tile::store_transposed(to, rounded, Scores::warp_row(), part * kBlockKv / kConsumers);
  ptx::fence_proxy_async();
  ptx::bar_sync(kConsumersMeet, kConsumers * kGroup);
}

// Columns of a gradient, transposed, from first_column on: of float32, which is summed over broadcast axes afterwards.
template <class Sums>
CUFLASH_DEVICE void write_wide(const tile::Matrix<float>& to, Sums& sums, int first_key, int first_column) {
  const int key = first_key + ptx::lane() % 4 * 2, column = first_column + Sums::first_row();
  float* const first = &to.at(key, column);  // in memory of our own: no stride of columns
#pragma unroll
  for (int j = 0; j < Sums::kColumns; ++j) {
    float* const row = first + Sums::column(j) * to.row_stride;
#pragma unroll
    for (int i = 0; i < Sums::kRows; ++i)
      ptx::store_if(key + Sums::column(j) < to.num_rows && column + Sums::row(i) < to.num_columns, row + Sums::row(i),
                    sums.at(i, j));
  }
}
// Rounded, into a room for all of it.
template <class Room, class Sums>
CUFLASH_DEVICE void round(Room to, const Sums& sums, int first_key, int first_column) {
  tile::Rounded<Element, Sums> rounded;
  rounded = sums;
  tile::store_transposed(to, rounded, first_column + Sums::warp_row(), first_key);
}
template <class Left, class Room>
CUFLASH_DEVICE void put(const attention::Matrices& to, const attention::WorkTile& work, int head, int num_columns,
                        Gradient<Left>& gradient, Room room, int part) {
  const auto wide = attention::matrix<float>(to, work.place, head, work.last, num_columns).rows(work.first, work.last);
  gradient.each(part, [&](auto& sums, int panel, int first_key) {
    if (to.is_wide) write_wide(wide, sums, first_key, 64 * panel);
    else round(room, sums, first_key, 64 * panel);
  });
}

// Of a tile, all of whose steps were walked: through the rooms of K and V, which are its own yet.
CUFLASH_DEVICE void write_gradients(const attention::Params& params, const attention::WorkTile& work, DkOfGroup& dk,
                                    DvOfGroup& dv, int part) {
  using namespace attention;
  const int kv_head = work.place.head / params.shape.group_size;
  dk.each(part, [&](auto& sums, int, int) { sums.scale(params.shape.softmax_scale); });
  ptx::bar_sync(kConsumersMeet, kConsumers * kGroup);  // both have read K and V
  put(params.dk, work, kv_head, params.shape.head_dim, dk, k_smem, part);
  put(params.dv, work, kv_head, params.shape.value_dim, dv, v_smem, part);
  ptx::bar_sync(kConsumersMeet, kConsumers * kGroup);
  const auto copy = [&](const Matrices& to, int num_columns, const tile::Panels& from) {
    if (to.is_wide) return;
    const auto all = matrix<Element>(to, work.place, kv_head, work.last, num_columns);
    tile::copy<kConsumers * kGroup>(all.rows(work.first, work.last), from, threadIdx.x - kGroup);
  };
  copy(params.dk, params.shape.head_dim, tile::Panels(k_smem));
  copy(params.dv, params.shape.value_dim, tile::Panels(v_smem));
  ptx::fence_proxy_async();  // the next tile's may be copied there
  leave_keys();
}

// Walk all steps, tile after tile. Tensor cores always have a product ahead of the one that is waited for: P is made under
// dP, dS under dV, and dQ is added under dK and under the next scores.
CUFLASH_DEVICE void consume(const attention::Params& params, int part) {
  using namespace attention;
  Board& own = board();
  Turn turn;
  int kind = await_step(turn);
  if (kind == Note::kEnd) return;
  await_keys(kind);
  DkOfGroup dk;
  DvOfGroup dv;
  const auto clear = [](auto& sums, int, int) { sums.fill(0); };
  dk.each(part, clear);
  dv.each(part, clear);
  Scores s, dp;
  start_s(s, turn, part);
  start_dp(dp, turn, part);
  for (bool is_odd = false;; is_odd = !is_odd) {
    const Queries& queries = own.queries[turn.stage];
    const Note& note = own.notes[turn.stage];
    const bool is_whole = !(kind & Note::kMasked);
    tile::wait_for<1>(s);
    if (is_whole) make_probabilities<false>(s, queries, own.softmax_scale_log2, part);
    else make_probabilities<true>(s, queries, own.softmax_scale_log2, part);
    share(p_smem(is_odd), s, part);
    dv.start_first_sum(do_smem(do_stage(turn)), p_smem(is_odd), part);
    dv.start_other_sums(do_smem(do_stage(turn)), p_smem(is_odd), part);
    tile::wait_for<1 + DvOfGroup::kOthers>(dp);
    if (is_whole) make_gradients<false>(s, dp, queries, part);
    else make_gradients<true>(s, dp, queries, part);
    share(ds_smem, dp, part);
    const DqSum sum(note.dq_sum);
    DqSlice dq;
    start_dq(dq, part, 0);
    dk.start_first_sum(q_smem(turn.stage), anew(ds_smem), part);
    tile::wait_for<1>(dq);
    dv.keep_in_place();
    if constexpr (kLeavesDo) tile::arrive(own.d_o[do_stage(turn)].empty);  // else with Q
    if constexpr (kDqSlices == 2) {
      sum.add(dq);
      start_dq(dq, part, 1);
    }
    dk.start_other_sums(q_smem(turn.stage), anew(ds_smem), part);
    if constexpr (kDqSlices == 2) tile::wait_for<DkOfGroup::kOthers>(dq);
    else sum.add(dq);
    const Turn next = turn.next();
    kind = await_step(next);
    await_other_k(kind);
    if (is_of_next_tile(kind)) {
      ptx::wgmma_wait<0>();
      dk.keep_in_place();
      if constexpr (kDqSlices == 2) sum.add(dq, DqSlice::kColumnTiles);
      write_gradients(params, own.works[note.work].tile, dk, dv, part);
      if (kind == Note::kEnd) return;
      dk.each(part, clear);
      dv.each(part, clear);
      await_keys(kind);
      start_s(s, next, part);
    } else {
      start_s(s, next, part);
      if constexpr (kDqSlices == 2) sum.add(dq, DqSlice::kColumnTiles);
      ptx::wgmma_wait<1>();
      dk.keep_in_place();
    }
    tile::arrive(own.q[turn.stage].empty);
    start_dp(dp, next, part);
    turn = next;
  }
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, cuflash::config::kMinBlocks)
sm90_backward_wide(const __grid_constant__ cuflash::attention::Params params,
                   const __grid_constant__ cuflash::attention::TensorMaps maps) {
  using namespace cuflash;
  share_work(params, maps, [&](int part) { consume(params, part); });
}
