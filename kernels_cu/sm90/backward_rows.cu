// The rows' half of FlashAttention-2's backward pass (arXiv 2307.08691, algorithm 2) as FlashAttention-3 multiplies
// (arXiv 2407.08608): dQ of 64 queries, which nobody adds to, P recomputed from lse. One warpgroup of a block brings Q, dO,
// and K and V step after step; the other multiplies. P, dS and dQ stay in registers. Another block of the multiprocessor
// multiplies while this one reckons.
#include <attention/fragment_gradient.cuh>
#include <attention/known_queries.cuh>
#include <attention/steps.cuh>
#include <attention/tensor_maps.cuh>
#include <attention/warpgroup_gradient.cuh>

namespace cuflash {

using config::kNumStages;

constexpr int kGroup = 128;  // threads of a warpgroup
constexpr int kProducerRegisters = 56, kConsumerRegisters = 200;  // 128 each, moved: as many as a block starts with
static_assert(kProducerRegisters + kConsumerRegisters <= 2 * 128, "else a group waits for ever");
static_assert(kBlockQ == 64 && kThreads == 2 * kGroup, "a warpgroup has 64 queries");

using Scores = tile::WarpTile<1, kBlockKv / 8, 4>;
using Gradient = tile::WarpTile<1, kHeadDim / 8, 4>;
using Operand = tile::Rounded<Element, Scores>;  // dS

using QPanels = tile::PanelTile<Element, kBlockQ, kHeadDim>;
using DoPanels = tile::PanelTile<Element, kBlockQ, kValueDim>;
using KPanels = tile::PanelTile<Element, kBlockKv, kHeadDim>;
using VPanels = tile::PanelTile<Element, kBlockKv, kValueDim>;
constexpr QPanels q_smem{0};
constexpr DoPanels do_smem{QPanels::kBytes};
constexpr int kK = do_smem.start + DoPanels::kBytes;  // stages of K, then of V
constexpr int kV = kK + kNumStages * KPanels::kBytes;
constexpr int kBoard = kV + kNumStages * VPanels::kBytes;
CUFLASH_DEVICE KPanels k_smem(int stage) { return {kK + stage * KPanels::kBytes}; }
CUFLASH_DEVICE VPanels v_smem(int stage) { return {kV + stage * VPanels::kBytes}; }

struct Note {
  attention::Step step;
  int start;  // keys before it were the last step's
  int is_last;
};

struct Board {
  tile::Room q, k[kNumStages], v[kNumStages];  // dO comes with Q
  Note notes[kNumStages];                      // with K
  attention::WorkTile work;
  attention::Reach reach;
  int has_steps;
};
CUFLASH_DEVICE Board& board() { return *reinterpret_cast<Board*>(ptx::dynamic_shared<unsigned char>() + kBoard); }

// The stage that a step has in the rings, and the parity of its phase.
struct Turn {
  int stage = 0, parity = 0;

  CUFLASH_DEVICE void go_on() {
    const bool is_last = stage == kNumStages - 1;
    stage = is_last ? 0 : stage + 1;
    parity ^= is_last;
  }
};

CUFLASH_DEVICE bool leads() { return ptx::is_elected(); }

// ---- the producers: a warp brings Q, dO and K, and one V ----

// Fill a room with rows first <= x < last of an operand. `clears` asks for zeros past them, where the matrix goes on. By a
// warp.
CUFLASH_DEVICE void fill(const tile::Panels& to, const attention::Mapped& map, const attention::Matrices& matrices, int head,
                         int num_columns, int first, int last, const tile::Room& room, bool clears) {
  using namespace attention;
  const Place& place = board().work.place;
  if (is_mapped(map, matrices) && !clears) {
    if (leads()) tile::start_copies(to, map, in_stack(matrices, place, head), first, room.full);
    else if (tile::kArrivals > 1) ptx::mbarrier_arrive(ptx::shared_address(&room.full));
    return;
  }
  const auto all = matrix<Element>(matrices, place, head, 0, num_columns);
  tile::copy<32>(to, all.rows(first, last), ptx::lane(), [](int) { return true; });
  tile::arrive(room.full);
}

// The tile's steps, for one operand, in its rings. By a warp.
template <class Bring>
CUFLASH_DEVICE void each_step(const attention::Params& params, const tile::Room (&rooms)[kNumStages], Bring bring) {
  using namespace attention;
  const Reach& reach = board().reach;
  const int length = params.shape.seqlen_kv;
  Steps<kBlockKv, OverKeys, Listed> steps(params, reach);
  Step step;
  for (Turn turn; steps.next(step); turn.go_on()) {
    const int start = step.start;
    widen<kBlockKv, config::kIsListed>(step, reach, length);
    const bool clears = step.stop - step.start < kBlockKv && step.stop < length;
    tile::await_empty(rooms[turn.stage], turn.parity);
    __syncwarp();
    bring(step, start, turn.stage, clears, !steps.has_next());
  }
}

CUFLASH_DEVICE void bring_keys(const attention::Params& params, const attention::TensorMaps& maps) {
  using namespace attention;
  Board& own = board();
  const Shape& shape = params.shape;
  const int head = own.work.place.head, kv_head = head / shape.group_size;
  fill(tile::Panels(q_smem), maps.q, params.q, head, shape.head_dim, own.work.first, own.work.last, own.q, false);
  fill(tile::Panels(do_smem), maps.do_, params.do_, head, shape.value_dim, own.work.first, own.work.last, own.q, false);
  each_step(params, own.k, [&](const Step& step, int start, int stage, bool clears, bool is_last) {
    if (leads()) own.notes[stage] = {step, start, is_last};
    __syncwarp();
    fill(tile::Panels(k_smem(stage)), maps.k, params.k, kv_head, shape.head_dim, step.start, step.stop, own.k[stage],
         clears);
  });
}

CUFLASH_DEVICE void bring_values(const attention::Params& params, const attention::TensorMaps& maps) {
  using namespace attention;
  Board& own = board();
  const Shape& shape = params.shape;
  const int kv_head = own.work.place.head / shape.group_size;
  each_step(params, own.v, [&](const Step& step, int, int stage, bool clears, bool) {
    fill(tile::Panels(v_smem(stage)), maps.v, params.v, kv_head, shape.value_dim, step.start, step.stop, own.v[stage], clears);
  });
}

// ---- the consumers ----

// lse and delta of a thread's rows.
CUFLASH_DEVICE attention::RowStatistics<Scores> row_statistics(const attention::Params& params) {
  using namespace attention;
  const WorkTile& work = board().work;
  const KnownQueries& known = known_queries(params, work.place)[query_tile_number<Listed>(params, work.first, kBlockQ)];
  RowStatistics<Scores> row;
#pragma unroll
  for (int i = 0; i < Scores::kRows; ++i) {
    row.lse_2[i] = known.lse_2[Scores::first_row() + Scores::row(i)];
    row.delta[i] = known.delta[Scores::first_row() + Scores::row(i)];
  }
  return row;
}

CUFLASH_DEVICE void mask(const attention::Params& params, Scores& s, const Note& note) {
  using namespace attention;
  const WorkTile& work = board().work;
  if (!config::kIsListed && params.work.lo == nullptr) {
    const Interval band{bounded(work.first + params.work.lower), bounded(work.first + params.work.upper + 1)};
    return mask_band(s, note.step, band, note.start);
  }
  mask_rows<config::kIsListed>(s, note.step, [&](int row) {
    Seen seen = seen_by_row(params, work, note.step, row);
    seen.lo = max(seen.lo, note.start);
    return seen;
  });
}

// P in the place of q k^T.
template <bool IsPlain>
CUFLASH_DEVICE void make_probabilities(Scores& s, const attention::RowStatistics<Scores>& row, float softmax_scale_log2) {
#pragma unroll
  for (int j = 0; j < Scores::kColumns; ++j)
#pragma unroll
    for (int i = 0; i < Scores::kRows; ++i) {
      const float p = attention::probability(s.at(i, j), softmax_scale_log2, row.lse_2[i]);
      s.at(i, j) = IsPlain || s.at(i, j) != ptx::negative_infinity<float>() ? p : 0.0f;
    }
}

// dS in the place of dP, which may be anything where P is 0 by a mask.
template <bool IsPlain>
CUFLASH_DEVICE void make_gradients(Scores& p, Scores& dp, const attention::RowStatistics<Scores>& row) {
#pragma unroll
  for (int j = 0; j < Scores::kColumns; ++j)
#pragma unroll
    for (int i = 0; i < Scores::kRows; ++i) {
      const float ds = p.at(i, j) * (dp.at(i, j) - row.delta[i]);
      dp.at(i, j) = IsPlain || p.at(i, j) != 0 ? ds : 0.0f;
    }
}

CUFLASH_DEVICE void start_scores(Scores& s, const Turn& turn) {
  tile::await_full(board().k[turn.stage], turn.parity);
  tile::start_product_nt(s, tile::RowsAlongSum<QPanels>(q_smem), tile::RowsAlongSum<KPanels>(k_smem(turn.stage)));
}
CUFLASH_DEVICE void start_dp(Scores& dp, const Turn& turn) {
  tile::await_full(board().v[turn.stage], turn.parity);
  tile::start_product_nt(dp, tile::RowsAlongSum<DoPanels>(do_smem), tile::RowsAlongSum<VPanels>(v_smem(turn.stage)));
}

// Walk all keys. Scores and dP of the next step are multiplied behind this one's dQ, and P is made under dP.
CUFLASH_DEVICE void walk(const attention::Params& params, Gradient& dq) {
  Board& own = board();
  const float softmax_scale_log2 = params.shape.softmax_scale * attention::kLog2E;
  const auto row = row_statistics(params);
  Turn turn;
  Scores s, dp;
  tile::await_full(own.q, 0);
  start_scores(s, turn);
  start_dp(dp, turn);
  tile::wait_for<1>(s);
  while (true) {
    const Note& note = own.notes[turn.stage];
    const bool is_plain = attention::is_whole<kBlockKv>(note.step) && note.start == note.step.start, is_last = note.is_last;
    if (is_plain) {
      make_probabilities<true>(s, row, softmax_scale_log2);
    } else {
      mask(params, s, note);
      make_probabilities<false>(s, row, softmax_scale_log2);
    }
    tile::wait_for<0>(dp);
    tile::arrive(own.v[turn.stage].empty);
    if (is_plain) make_gradients<true>(s, dp, row);
    else make_gradients<false>(s, dp, row);
    Operand ds;
    ds = dp;
    tile::start_sum_nn(dq, ds, tile::RowsAcrossSum<KPanels>(k_smem(turn.stage)));
    const tile::Room& k = own.k[turn.stage];
    turn.go_on();
    if (is_last) break;
    start_scores(s, turn);
    start_dp(dp, turn);
    tile::wait_for<1>(s);
    ptx::keep_in_place(tile::accumulators(dq));
    tile::keep_in_place(ds);
    tile::arrive(k.empty);
  }
  tile::wait_for<0>(dq);
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, cuflash::config::kMinBlocks)
sm90_backward_rows(const __grid_constant__ cuflash::attention::Params params,
                   const __grid_constant__ cuflash::attention::TensorMaps maps) {
  using namespace cuflash;
  using namespace cuflash::attention;
  Board& own = board();
  if (threadIdx.x == 0) {
    own.work = query_tile<Listed>(params, kBlockQ);
    if (!own.work.is_empty()) own.reach = reach_of_queries(params, own.work);
    own.has_steps = Steps<kBlockKv, OverKeys, Listed>(params, own.reach).has_next();
    ptx::mbarrier_init(ptx::shared_address(&own.q.full), 2 * tile::kArrivals);  // of Q, and of dO
    const tile::Room* const rooms = own.k;  // and V's
    for (int i = 0; i < 2 * kNumStages; ++i) {
      ptx::mbarrier_init(ptx::shared_address(&rooms[i].full), tile::kArrivals);
      ptx::mbarrier_init(ptx::shared_address(&rooms[i].empty), 4 * tile::kArrivals);
    }
    ptx::mbarrier_init_fence();
  }
  __syncthreads();
  if (own.work.is_empty()) return;
  if (threadIdx.x < kGroup) {
    ptx::setmaxnreg_dec<kProducerRegisters>();
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    if (!own.has_steps) return;
    if (warp == 0) bring_keys(params, maps);
    else if (warp == 1) bring_values(params, maps);
  } else {
    ptx::setmaxnreg_inc<kConsumerRegisters>();
    Gradient dq;
    dq.fill(0);
    if (own.has_steps) walk(params, dq);
    dq.scale(params.shape.softmax_scale);
    write_gradient(params.dq, own.work, own.work.place.head, params.shape.head_dim, dq);
  }
}
