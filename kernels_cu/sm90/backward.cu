// FlashAttention-3's backward pass (arXiv 2407.08608, appendix B) on Hopper: a block keeps a tile of keys and walks the
// queries that visit it, over the query heads that share it, tile after tile. One warpgroup brings Q, dO and what is known
// of each query; two multiply, 64 keys each. They make S and dP transposed: so P and dS, and dK and dV, stay in registers,
// and only dS goes through shared memory, for dQ, whose parts are added up in global memory. Where sm90/backward_rows.cu
// makes dQ, nothing does, and one warpgroup multiplies.
#include <attention/query_ring.cuh>

namespace cuflash {

static_assert(!kIsWide && kBlockKv == 64 * kConsumers, "a warpgroup has 64 keys");

// Rows are keys.
using Scores = tile::WarpTile<1, kBlockQ / 8, 4 * kConsumers>;
using DkOfWarp = tile::WarpTile<1, kHeadDim / 8, 4 * kConsumers>;
using DvOfWarp = tile::WarpTile<1, kValueDim / 8, 4 * kConsumers>;
using Operand = tile::Rounded<Element, Scores>;  // P or dS
using DsPanels = tile::PanelTile<Element, kBlockQ, kBlockKv>;
constexpr DsPanels ds_smem{kScoreRoom};  // if dQ is made

// What a warpgroup makes of dQ: of 64 queries all columns, or of all queries 64 columns at most.
constexpr int kRowParts = kBlockQ / 64;
// Of 64 queries registers have room for the scores and dP of the step after too: P is made while dP is.
constexpr bool kDpIsAhead = kRowParts == 1;
using KPart = tile::PanelTile<Element, kBlockKv, kHeadDim * kRowParts / kConsumers>;

// A step's queries as a thread asks about them, from its first one on.
struct Asked {
  const Queries& queries;
  int first_query, kind;

  CUFLASH_DEVICE bool is_plain() const { return !(kind & (Note::kMasked | Note::kLarge)); }
  CUFLASH_DEVICE const float* lse_2() const { return queries.known.lse_2 + first_query; }
  CUFLASH_DEVICE const float* delta() const { return queries.known.delta + first_query; }
};

// Which elements of scores count: all, or, of a masked step, bits of the thread's keys, a word each 32 queries.
template <bool IsPlain>
struct SeenByThread {
  explicit CUFLASH_DEVICE SeenByThread(const Asked&) {}
  CUFLASH_DEVICE bool at(int, int) const { return true; }
};
template <>
struct SeenByThread<false> {
  uint32_t bits[Scores::kRows][kQueryWords];  // of the thread's first query on

  explicit CUFLASH_DEVICE SeenByThread(const Asked& step) {
    const uint32_t all = step.kind & Note::kMasked ? 0 : ~0u;  // where an lse is large, but nothing hidden
    const uint32_t(*const seen)[kQueryWords] = &step.queries.seen[Scores::first_row()];
#pragma unroll
    for (int i = 0; i < Scores::kRows; ++i)
#pragma unroll
      for (int x = 0; x < kQueryWords; ++x) bits[i][x] = (seen[Scores::row(i)][x] | all) >> step.first_query;
  }
  CUFLASH_DEVICE bool at(int i, int j) const {
    return bits[i][Scores::column(j) / 32] >> Scores::column(j) % 32 & 1;
  }
};

// What is known of the thread's queries: of as many as registers are free for at once, so that products which start
// meanwhile do not hold it up.
struct OfQueries {
  static constexpr int kAtOnce = 1024 / kBlockQ;
  static_assert(kAtOnce <= Scores::kColumns, "some, or all");
  const float* from;
  float first[kAtOnce];

  OfQueries() = default;
  explicit CUFLASH_DEVICE OfQueries(const float* from) : from(from) {
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) first[j] = from[Scores::column(j)];
  }
  CUFLASH_DEVICE float at(int j) const { return j < kAtOnce ? first[j % kAtOnce] : from[Scores::column(j)]; }
};

// P in the place of q k^T, as attention::probability has it, or without its minimum. delta is asked for once lse is spent,
// and comes under the exponentials.
template <bool IsPlain>
CUFLASH_DEVICE void make_probabilities(Scores& s, const OfQueries& lse_2, OfQueries& delta, const Asked& step,
                                       float softmax_scale_log2) {
  const SeenByThread<IsPlain> seen(step);
#pragma unroll
  for (int j = 0; j < Scores::kColumns; ++j)
#pragma unroll
    for (int i = 0; i < Scores::kRows; ++i) s.at(i, j) = ptx::fma(s.at(i, j), softmax_scale_log2, -lse_2.at(j));
  ptx::keep_loads_apart();
  delta = OfQueries(step.delta());
#pragma unroll
  for (int j = 0; j < Scores::kColumns; ++j)
#pragma unroll
    for (int i = 0; i < Scores::kRows; ++i) {
      const float p = ptx::exp2_approx(s.at(i, j));
      s.at(i, j) = IsPlain ? p : seen.at(i, j) ? ptx::lesser_or_nan(p, 1) : 0.0f;
    }
}

// dS = P (dP - delta) in the place of dP, for 16 queries.
template <bool IsPlain>
CUFLASH_DEVICE void make_gradients(Scores& p, Scores& dp, const OfQueries& delta, const SeenByThread<IsPlain>& seen, int k) {
#pragma unroll
  for (int j = 4 * k; j < 4 * (k + 1); ++j)
#pragma unroll
    for (int i = 0; i < Scores::kRows; ++i)
      dp.at(i, j) = seen.at(i, j) ? p.at(i, j) * (dp.at(i, j) - delta.at(j)) : 0.0f;
}

// The same for all; and P and dS as left operands, and dS, transposed, where dQ's product reads it.
template <bool IsPlain>
CUFLASH_DEVICE void make_operands(Scores& s, Scores& dp, Operand& p, Operand& ds, const OfQueries& delta,
                                  const Asked& step, uint32_t own_ds) {
  const SeenByThread<IsPlain> seen(step);
#pragma unroll
  for (int k = 0; k < Operand::kSteps; ++k) {
    make_gradients(s, dp, delta, seen, k);
    p.round(s, k);
    ds.round(dp, k);
    if constexpr (kMakesDq) tile::store_transposed<DsPanels>(own_ds, ds, k);
  }
}

// P, of no more than 1, or dS of a step that is not plain, where all of it was made: 0 where it is hidden.
template <bool IsP>
CUFLASH_DEVICE void mend(Scores& x, const Asked& step) {
  const SeenByThread<false> seen(step);
#pragma unroll
  for (int j = 0; j < Scores::kColumns; ++j)
#pragma unroll
    for (int i = 0; i < Scores::kRows; ++i)
      x.at(i, j) = !seen.at(i, j) ? 0.0f : IsP ? ptx::lesser_or_nan(x.at(i, j), 1) : x.at(i, j);
  ptx::keep_in_place(tile::accumulators(x));
}

// P and dS, once dP is there, in their places: as of a plain step, and mended if it is none. Code that steps share is in one
// piece, which waits for no instructions.
CUFLASH_DEVICE void make_all(Scores& s, Scores& dp, const OfQueries& lse_2, const Asked& step, float softmax_scale_log2) {
  OfQueries delta;
  make_probabilities<true>(s, lse_2, delta, step, softmax_scale_log2);
  tile::wait_for<0>(dp);
  ptx::keep_in_place(tile::accumulators(s));
  if (!step.is_plain()) mend<true>(s, step);
  const SeenByThread<true> all(step);
#pragma unroll
  for (int k = 0; k < Operand::kSteps; ++k) make_gradients(s, dp, delta, all, k);
  ptx::keep_in_place(tile::accumulators(dp));
  if (!step.is_plain()) mend<false>(dp, step);
}

CUFLASH_DEVICE void start_scores(Scores& s, const Turn& turn, int part) {
  tile::start_product_nt(s, tile::RowsAlongSum<KPanels>(k_smem, 64 * part),
                         tile::RowsAlongSum<QPanels>(q_smem(turn.stage)));
}

CUFLASH_DEVICE void start_dp(Scores& dp, const Turn& turn, int part) {
  tile::start_product_nt(dp, tile::RowsAlongSum<VPanels>(v_smem, 64 * part),
                         tile::RowsAlongSum<DoPanels>(do_smem(turn.stage)));
}

// What the keys add to dQ of a step, a part of it for each warpgroup. Called by both, each once it has stored dS of its keys.
CUFLASH_DEVICE void start_dq(DqOfWarp& dq, int part) {
  ptx::fence_proxy_async();
  ptx::bar_sync(kConsumersMeet, kConsumers * kGroup);  // dS is there
  const KPart k_part{k_smem.start + (kRowParts == 1 ? part * KPart::kBytes : 0)};
  tile::start_product_nn(dq, tile::RowsAlongSum<DsPanels>(ds_smem, kRowParts == 1 ? 0 : 64 * part),
                         tile::RowsAcrossSum<KPart>(k_part));
}

// A warpgroup may write dS anew, once the other has left it.
CUFLASH_DEVICE void await_ds(int part) {
  if constexpr (kMakesDq) ptx::bar_sync(kDsIsRead + part, kConsumers * kGroup);
}
CUFLASH_DEVICE void leave_ds(int part) {
  if constexpr (kMakesDq) ptx::bar_arrive(kDsIsRead + (1 - part), kConsumers * kGroup);
}

// Have it added up, or finish it: in its room, once that is free, or has the sums of what other tiles of keys made.
CUFLASH_DEVICE void await_room(int part) { ptx::bar_sync(kDqIsRead + part, kGroup + 32); }
CUFLASH_DEVICE void hand_over(const DqOfWarp& dq, float* room, int part) {
  DqSum::put(room, dq);
  ptx::bar_arrive(kDqIsThere + part, kGroup + 32);
}
// Of all queries of the tile, whichever the step goes on to. Four columns of 8 at a time, as registers are few.
CUFLASH_DEVICE void finish(const attention::Params& params, DqOfWarp& dq, const float* room, const Note& note, int part,
                           bool adds) {
  const attention::Place& place = board().works[note.work].tile.place;
  const auto all = attention::matrix<Element>(params.dq, place, place.head, params.shape.seqlen_q, params.shape.head_dim);
  const auto rows = all.rows(note.step.start, attention::query_tile_end<Listed>(params, note.step.start, kBlockQ));
  const float scale = static_cast<float>(params.shape.softmax_scale);
#pragma unroll
  for (int first = 0; first < DqOfWarp::kColumnTiles; first += 4) {
    if (adds) DqSum::add_from(room, dq, first, 4);
    tile::store_whole(rows, dq, first, scale);
  }
  ptx::bar_arrive(kDqIsThere + part, kGroup + 32);
}

// Of a tile, all of whose steps were walked.
CUFLASH_DEVICE void write_gradients(const attention::Params& params, const attention::WorkTile& work, DkOfWarp& dk,
                                    DvOfWarp& dv) {
  const int kv_head = work.place.head / params.shape.group_size;
  dk.scale(params.shape.softmax_scale);
  write_gradient(params.dk, work, kv_head, params.shape.head_dim, dk);
  write_gradient(params.dv, work, kv_head, params.shape.value_dim, dv);
}

// Walk all steps, tile after tile. A product's registers are variables of their own where they live: what starts anew is no
// one's before. There is one loop, each time of one step, at whose end no product is under way: so the compiler knows that
// where operands lie is one number for the warp, and waits for none by itself.
CUFLASH_DEVICE void consume(const attention::Params& params, int part) {
  using namespace attention;
  Board& own = board();
  Turn turn;
  int kind = await_step(turn);
  if (kind & Note::kEnd) return;
  const int first_query = Scores::first_column();
  float* const own_dq = reinterpret_cast<float*>(ptx::dynamic_shared<unsigned char>() + kDqRoom) + DqSum::place();
  const float softmax_scale_log2 = own.softmax_scale_log2;
  int own_ds = 0;
  if constexpr (kMakesDq)  // opaque: else reckoned anew in each step
    own_ds = ptx::opaque(tile::place_transposed(ds_smem, Scores::warp_row()));
  const auto make_p = [&](Scores& s, OfQueries& delta, const OfQueries& lse_2, const Turn& turn) {
    const Asked step{own.queries[turn.stage], first_query, kind};
    if (step.is_plain()) make_probabilities<true>(s, lse_2, delta, step, softmax_scale_log2);
    else make_probabilities<false>(s, lse_2, delta, step, softmax_scale_log2);
  };
  await_keys(kind);
  DkOfWarp dk;
  DvOfWarp dv;
  dk.fill(0);
  dv.fill(0);
  Scores s, dp;
  OfQueries delta;
  start_scores(s, turn, part);
  leave_ds(part);
  tile::await_full(own.d_o[turn.stage], turn.parity);
  if constexpr (kDpIsAhead) {
    const OfQueries lse_2(own.queries[turn.stage].known.lse_2 + first_query);
    start_dp(dp, turn, part);
    tile::wait_for<1>(s);
    make_p(s, delta, lse_2, turn);
    tile::wait_for<0>(dp);
  } else {
    tile::wait_for<0>(s);
  }
  while (true) {
    const Asked step{own.queries[turn.stage], first_query, kind};
    Operand p, ds;
    if constexpr (kDpIsAhead) {
      await_ds(part);
      if (step.is_plain()) make_operands<true>(s, dp, p, ds, delta, step, own_ds);
      else make_operands<false>(s, dp, p, ds, delta, step, own_ds);
    } else {
      const OfQueries lse_2(step.lse_2());
      start_dp(dp, turn, part);
      make_all(s, dp, lse_2, step, softmax_scale_log2);
      p = s;
      ds = dp;
      await_ds(part);
      tile::store_transposed<DsPanels>(own_ds, ds);
    }
    tile::start_sum_nn(dv, p, tile::RowsAcrossSum<DoPanels>(do_smem(turn.stage)));
    DqOfWarp dq;
    if constexpr (kMakesDq) start_dq(dq, part);
    tile::start_sum_nn(dk, ds, tile::RowsAcrossSum<QPanels>(q_smem(turn.stage)));
    const Turn next = turn.next();
    Finish how = kFinishesInTurn && kind & Note::kFinishesDq ? Finish::kWithSums : Finish::kNot;
    OfQueries next_lse_2;
    if constexpr (kDpIsAhead) {  // asked before stores of dQ, and the next scores, ask shared memory for all it gives
      kind = await_step(next);
      next_lse_2 = OfQueries(own.queries[next.stage].known.lse_2 + first_query);
    }
    tile::wait_for<1>(dv);
    tile::keep_in_place(p);
    if constexpr (kMakesDq) ptx::keep_in_place(tile::accumulators(dq));
    if constexpr (kLeavesDo) tile::arrive(own.d_o[turn.stage].empty);
    if constexpr (!kDpIsAhead) kind = await_step(next);
    await_other_k(kind);
    if constexpr (kLastFinishesDq) {
      await_room(part);
      how = own.finish;
    }
    const bool finishes = how != Finish::kNot;
    if (is_of_next_tile(kind) || finishes) {  // one branch: steps that do neither run through one piece of code
      if (is_of_next_tile(kind)) leave_keys();
      tile::wait_for<0>(dk);
      if constexpr (kMakesDq && !kLastFinishesDq) await_room(part);
      if (finishes) finish(params, dq, own_dq, own.notes[turn.stage], part, how == Finish::kWithSums);
      else if constexpr (kMakesDq) hand_over(dq, own_dq, part);
      if (is_of_next_tile(kind)) {
        write_gradients(params, own.works[own.notes[turn.stage].work].tile, dk, dv);
        if (kind & Note::kEnd) return;
        leave_ds(part);
        dk.fill(0);
        dv.fill(0);
        await_keys(kind);
      } else {
        leave_ds(part);
      }
    } else {
      leave_ds(part);
      if constexpr (kMakesDq && !kLastFinishesDq) await_room(part);
      if constexpr (kMakesDq) hand_over(dq, own_dq, part);
    }
    Scores next_s;
    start_scores(next_s, next, part);
    tile::await_full(own.d_o[next.stage], next.parity);  // a branch: without one the compiler serializes products
    if constexpr (kDpIsAhead) {
      tile::wait_for<1>(dk);
      tile::keep_in_place(ds);
      Scores next_dp;
      tile::arrive(own.q[turn.stage].empty);
      start_dp(next_dp, next, part);
      tile::wait_for<1>(next_s);
      make_p(next_s, delta, next_lse_2, next);
      tile::wait_for<0>(next_dp);
      dp = next_dp;
    } else {
      tile::wait_for<0>(next_s);
      ptx::keep_in_place(tile::accumulators(dk));
      tile::keep_in_place(ds);
      tile::arrive(own.q[turn.stage].empty);
    }
    s = next_s;
    turn = next;
  }
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, cuflash::config::kMinBlocks)
sm90_backward(const __grid_constant__ cuflash::attention::Params params,
              const __grid_constant__ cuflash::attention::TensorMaps maps) {
  using namespace cuflash;
  share_work(params, maps, [&](int part) { consume(params, part); });
}
