// FlashAttention-3's backward pass (arXiv 2407.08608, appendix B) on Hopper: a block keeps a tile of keys and walks the
// queries that visit it, over the query heads that share it. One warpgroup brings Q, dO and what is known of each query;
// two multiply, 64 keys each. They make S and dP transposed: so P and dS, and dK and dV, stay in registers, and only dS
// goes through shared memory, for dQ, whose parts are added up in global memory.
#include <attention/steps.cuh>
#include <attention/tensor_maps.cuh>
#include <attention/warpgroup_gradient.cuh>
#include <ptx/barrier.cuh>
#include <ptx/warpgroup.cuh>
#include <tile/rooms.cuh>

namespace cuflash {

using config::kNumStages;

constexpr int kGroup = 128;  // threads of a warpgroup
constexpr int kHelpers = kGroup - 32;
constexpr int kConsumers = 2;
constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;  // 168 each, moved: as many as a block starts with
static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <= 168 * (1 + kConsumers), "else groups wait for ever");
static_assert(kThreads == kGroup * (1 + kConsumers) && kBlockKv == 64 * kConsumers, "a warpgroup has 64 keys");
static_assert(kNumStages >= 2, "Q of a step is read while scores of the next are made");

// Names of barriers.
constexpr int kProducersMeet = 1, kHelpersMeet = 2, kConsumersMeet = 3;

// Rows are keys.
using Scores = tile::WarpTile<1, kBlockQ / 8, 4 * kConsumers>;
using DkOfWarp = tile::WarpTile<1, kHeadDim / 8, 4 * kConsumers>;
using DvOfWarp = tile::WarpTile<1, kValueDim / 8, 4 * kConsumers>;
using Operand = tile::Rounded<Element, Scores>;  // P or dS

using KPanels = tile::PanelTile<Element, kBlockKv, kHeadDim>;
using VPanels = tile::PanelTile<Element, kBlockKv, kValueDim>;
using QPanels = tile::PanelTile<Element, kBlockQ, kHeadDim>;
using DoPanels = tile::PanelTile<Element, kBlockQ, kValueDim>;
using DsPanels = tile::PanelTile<Element, kBlockQ, kBlockKv>;
constexpr KPanels k_smem{0};
constexpr VPanels v_smem{KPanels::kBytes};
constexpr int kQ = v_smem.start + VPanels::kBytes;  // stages of Q, then of dO
constexpr int kDo = kQ + kNumStages * QPanels::kBytes;
constexpr int kDs = kDo + kNumStages * DoPanels::kBytes;  // of even and of odd steps
constexpr int kBoard = kDs + 2 * DsPanels::kBytes;
CUFLASH_DEVICE QPanels q_smem(int stage) { return {kQ + stage * QPanels::kBytes}; }
CUFLASH_DEVICE DoPanels do_smem(int stage) { return {kDo + stage * DoPanels::kBytes}; }

// What a warpgroup makes of dQ: of 64 queries all columns, or of all queries 64 columns at most.
constexpr int kRowParts = kBlockQ / 64;
using KPart = tile::PanelTile<Element, kBlockKv, kHeadDim * kRowParts / kConsumers>;

// What the producer says of a step.
struct Note {
  enum { kEnd, kWhole, kMasked } kind;
  int brings_k, brings_v;
  int copies_k, copies_v, copies_q, copies_do;  // helpers do
  attention::WorkTile work;
  attention::Step step;
  float* dq_sum;
};

// What is known of the queries of a step, and which keys of the tile each sees: bit r of 16 is key r of a warp.
struct Queries {
  float lse_2[kBlockQ], delta[kBlockQ];
  uint32_t seen[kBlockQ][kBlockKv / 32];

  CUFLASH_DEVICE bool is_live(int row) const { return lse_2[row] != -ptx::negative_infinity<float>(); }
};

// The stage that a step has in the rings, and the parity of its phase.
struct Turn {
  int stage = 0, parity = 0;

  CUFLASH_DEVICE Turn next() const {
    const bool is_last = stage == kNumStages - 1;
    return {is_last ? 0 : stage + 1, parity ^ is_last};
  }
};

struct Board {
  Queries queries[kNumStages];
  tile::Room k, v, q[kNumStages], d_o[kNumStages];
  Note notes[kNumStages];
  // The producer's own, whose registers are few.
  Turn turn;
  attention::WorkTile work;
  attention::Reach reach;
  attention::Step step;
  const float* lse;
  int kv_head;
  int num_k;          // times that K was brought
  int is_other_head;  // which sees other keys: K is to be brought again
};
CUFLASH_DEVICE Board& board() { return *reinterpret_cast<Board*>(ptx::dynamic_shared<unsigned char>() + kBoard); }

// ---- the producer ----

// Its first warp says what is to be brought and has it copied by the tensor memory accelerator; the other warps find out
// about a step's queries, and copy what the accelerator cannot.

CUFLASH_DEVICE bool leads() { return threadIdx.x == 0; }

CUFLASH_DEVICE bool is_mapped(const attention::Mapped& map, const attention::Matrices& matrices) {
  return map.is_there && reinterpret_cast<uint64_t>(matrices.data) % 16 == 0;
}

// The keys of the tile that some query of the head may see. What stands at others must not reach dQ, where it would meet
// a dS of 0.
CUFLASH_DEVICE attention::Interval seen_keys(const attention::Params& params, const attention::WorkTile& work) {
  using namespace attention;
  return {max(work.first, interval(params, work.place, 0).lo),
          min(work.last, interval(params, work.place, params.shape.seqlen_q - 1).hi)};
}

// Whether the room of a step has rows that must be 0: queries without a key, whatever they bring, and rows of the matrix
// past the step. Called by the first warp.
CUFLASH_DEVICE bool has_dead_rows(const attention::Params& params) {
  using namespace attention;
  const Step& step = board().step;
  if (step.stop < min(step.start + kBlockQ, params.shape.seqlen_q)) return true;
  if (step.kind == Kind::kFull) return false;
  if (!Listed::in(params.work) && params.work.lo == nullptr) {  // of a band, which ends at both ends
    const Place& place = board().work.place;
    const Interval first = interval(params, place, step.start), last = interval(params, place, step.stop - 1);
    return first.lo >= first.hi || last.lo >= last.hi;
  }
  bool is_dead = false;
#pragma unroll 1
  for (int query = step.start + ptx::lane(); query < step.stop; query += 32)
    is_dead |= board().lse[query * params.lse.row_stride] == ptx::negative_infinity<float>();
  return __any_sync(0xffffffffu, is_dead);
}

// Axes of stride 0 have extent 1 in a tensor map.
CUFLASH_DEVICE tile::InStack in_stack(const attention::Matrices& matrices, const attention::Place& place, int head) {
  const auto& strides = matrices.batch_strides;
  const int inner = strides[2] == 0 ? 0 : place.batch[2], outer = strides[1] == 0 ? 0 : place.batch[1];
  return {matrices.head_stride == 0 ? 0 : head, inner, outer};
}

// Have an operand brought, or say that a helper brings it.
CUFLASH_DEVICE void fill(const tile::Panels& to, const attention::Mapped& map, const attention::Matrices& matrices,
                         int head, int first, const tile::Room& room, bool helpers_copy) {
  if (helpers_copy) ptx::mbarrier_arrive(ptx::shared_address(&room.full));
  else tile::start_copies(to, map, in_stack(matrices, board().work.place, head), first, room.full);
}

CUFLASH_DEVICE void produce(const attention::Params& params, const attention::TensorMaps& maps) {
  using namespace attention;
  Board& own = board();
  const Shape& shape = params.shape;
  const Turn& turn = own.turn;
  if (leads()) {
    own.kv_head = own.work.place.head / shape.group_size;
    own.num_k = 0;
    own.turn = {};
  }
  for (int head = 0; head < shape.group_size; ++head) {
    __syncwarp();
    if (leads()) {
      if (head > 0) ++own.work.place.head;
      own.is_other_head = head > 0 && params.work.interval_head_stride != 0;
      own.reach = from_whole_tiles(params, reach_of_keys(params, own.work), kBlockQ);
      own.lse = matrix<float>(params.lse, own.work.place, own.work.place.head, 0, 0).data;
    }
    __syncwarp();
    Steps<kBlockQ, OverQueries, Listed> steps(params, own.reach);
    while (true) {
      Step next;
      if (!steps.next(next)) break;
      const Step& step = own.step;
      if (leads()) own.step = next;
      __syncwarp();
      Note& note = own.notes[turn.stage];
      const bool clears = has_dead_rows(params);
      const bool brings_v = own.num_k == 0, brings_k = brings_v || own.is_other_head;
      if (leads()) {
        tile::await_empty(own.q[turn.stage], turn.parity);
        const WorkTile& work = own.work;
        const bool is_whole = step.kind == Kind::kFull && step.stop - step.start == kBlockQ &&
                              work.last - work.first == kBlockKv;
        note.kind = is_whole ? Note::kWhole : Note::kMasked;
        note.brings_k = brings_k;
        note.brings_v = brings_v;
        note.copies_q = clears || !is_mapped(maps.q, params.q);
        note.copies_do = clears || !is_mapped(maps.do_, params.do_);
        note.copies_v = brings_v && !is_mapped(maps.v, params.v);
        if (brings_k) {
          const Interval keys = seen_keys(params, work);
          note.copies_k = keys.lo > work.first || keys.hi < min(work.first + kBlockKv, shape.seqlen_kv) ||
                          !is_mapped(maps.k, params.k);
        }
        note.work = work;
        note.step = step;
        note.dq_sum = matrix<float>(params.dq_sum, work.place, work.place.head, 0, 0).data +
                      query_tile_number(params, step.start, kBlockQ) * params.dq_sum.row_stride;
        fill(tile::Panels(q_smem(turn.stage)), maps.q, params.q, work.place.head, step.start, own.q[turn.stage],
             note.copies_q);
      }
      ptx::bar_sync(kProducersMeet, kGroup);  // the note is there for helpers
      if (leads()) {
        const WorkTile& work = own.work;
        if (brings_k) {
          tile::await_empty(own.k, own.num_k % 2);
          fill(tile::Panels(k_smem), maps.k, params.k, own.kv_head, work.first, own.k, note.copies_k);
          ++own.num_k;
          own.is_other_head = 0;
        }
        if (brings_v) fill(tile::Panels(v_smem), maps.v, params.v, own.kv_head, work.first, own.v, note.copies_v);
        tile::await_empty(own.d_o[turn.stage], turn.parity);
        fill(tile::Panels(do_smem(turn.stage)), maps.do_, params.do_, work.place.head, step.start, own.d_o[turn.stage],
             note.copies_do);
      }
      if (leads()) own.turn = turn.next();
    }
  }
  if (leads()) {
    tile::await_empty(own.q[turn.stage], turn.parity);
    own.notes[turn.stage].kind = Note::kEnd;
    ptx::mbarrier_arrive(ptx::shared_address(&own.q[turn.stage].full));
  }
  ptx::bar_sync(kProducersMeet, kGroup);
}

// Which of the 32 keys from `first` on a query sees; there are none from `last` on.
CUFLASH_DEVICE uint32_t seen_bits(const attention::Seen& seen, int first, int last) {
  const int lo = seen.lo - first, hi = min(seen.hi, last) - first;
  const uint32_t before_hi = hi >= 32 ? ~0u : hi <= 0 ? 0u : (1u << hi) - 1;
  const uint32_t before_lo = lo >= 32 ? ~0u : lo <= 0 ? 0u : (1u << lo) - 1;
  uint32_t bits = before_hi & ~before_lo;
  if (config::kIsListed && seen.bits != nullptr) {
    uint32_t listed = 0;
#pragma unroll 1
    for (int key = 0; key < 32 && first + key < last; key += 8)
      listed |= static_cast<uint32_t>(seen.bits[(first + key - seen.first_key) / 8]) << key;
    bits &= listed;
  }
  return bits;
}

CUFLASH_DEVICE void know_queries(const attention::Params& params, const Note& note, Queries& queries, int thread) {
  using namespace attention;
  const WorkTile& work = note.work;
  const auto lse = matrix<float>(params.lse, work.place, work.place.head, params.shape.seqlen_q, 1);
  const auto delta = matrix<float>(params.delta, work.place, work.place.head, params.shape.seqlen_q, 1);
#pragma unroll 1
  for (int row = thread; row < kBlockQ; row += kHelpers) {
    const int query = note.step.start + row;
    const bool is_there = query < note.step.stop;
    queries.lse_2[row] = is_there ? base_2(lse.at(query, 0)) : -ptx::negative_infinity<float>();
    queries.delta[row] = is_there ? delta.at(query, 0) : 0.0f;
    if (note.kind == Note::kWhole) continue;
    const Seen seen = note.step.seen(params, work.place, min(query, note.step.stop - 1));
#pragma unroll 1
    for (int x = 0; x < kBlockKv / 32; ++x)
      queries.seen[row][x] = is_there ? seen_bits(seen, work.first + 32 * x, work.last) : 0;
  }
}

CUFLASH_DEVICE void help(const attention::Params& params) {
  using namespace attention;
  Board& own = board();
  const Shape& shape = params.shape;
  const int thread = threadIdx.x - 32;
  int num_k = 0;
  for (Turn turn;; turn = turn.next()) {
    ptx::bar_sync(kProducersMeet, kGroup);  // the note is there
    const Note& note = own.notes[turn.stage];
    const tile::Room &q = own.q[turn.stage], &d_o = own.d_o[turn.stage];
    if (note.kind == Note::kEnd) return tile::arrive(q.full);
    const WorkTile& work = note.work;
    Queries& queries = own.queries[turn.stage];
    know_queries(params, note, queries, thread);
    if (note.copies_q || note.copies_do) ptx::bar_sync(kHelpersMeet, kHelpers);  // is_live knows
    const auto is_live = [&](int row) { return queries.is_live(row); };
    if (note.copies_q) {
      const auto all = matrix<Element>(params.q, work.place, work.place.head, shape.seqlen_q, shape.head_dim);
      tile::copy<kHelpers>(tile::Panels(q_smem(turn.stage)), all.rows(note.step.start, note.step.stop), thread, is_live);
    }
    tile::arrive(q.full);
    if (note.brings_k) {
      if (note.copies_k) {
        const Interval keys = seen_keys(params, work);
        const auto all = matrix<Element>(params.k, work.place, own.kv_head, shape.seqlen_kv, shape.head_dim);
        tile::await_empty(own.k, num_k % 2);
        tile::copy<kHelpers>(tile::Panels(k_smem), all.rows(work.first, keys.hi), thread,
                       [&](int row) { return work.first + row >= keys.lo; });
      }
      tile::arrive(own.k.full);
      ++num_k;
    }
    if (note.brings_v) {
      const auto all = matrix<Element>(params.v, work.place, own.kv_head, shape.seqlen_kv, shape.value_dim);
      const auto is_kept = [](int) { return true; };
      if (note.copies_v) tile::copy<kHelpers>(tile::Panels(v_smem), all.rows(work.first, work.last), thread, is_kept);
      tile::arrive(own.v.full);
    }
    if (note.copies_do) {
      const auto all = matrix<Element>(params.do_, work.place, work.place.head, shape.seqlen_q, shape.value_dim);
      tile::await_empty(d_o, turn.parity);
      tile::copy<kHelpers>(tile::Panels(do_smem(turn.stage)), all.rows(note.step.start, note.step.stop), thread, is_live);
    }
    tile::arrive(d_o.full);
  }
}

// ---- the consumers ----

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

// Wait for a step. False where none is left.
CUFLASH_DEVICE bool await_step(const Turn& turn, int& num_k) {
  using namespace attention;
  tile::await_full(board().q[turn.stage], turn.parity);
  const Note& note = board().notes[turn.stage];
  if (note.kind == Note::kEnd) return false;
  if (note.brings_k) {
    if (num_k > 0) tile::arrive(board().k.empty);  // its last product was waited for
    tile::await_full(board().k, num_k % 2);
    ++num_k;
  }
  return true;
}

CUFLASH_DEVICE void start_scores(Scores& s, const Turn& turn, int part) {
  tile::start_product_nt(s, tile::RowsAlongSum<KPanels>(k_smem, 64 * part),
                         tile::RowsAlongSum<QPanels>(q_smem(turn.stage)));
}

// What the keys add to dQ of a step, a part of it for each warpgroup. Called by both, each with dS of its keys.
CUFLASH_DEVICE void start_dq(DqOfWarp& dq, const Operand& ds, int part, bool is_odd) {
  const DsPanels ds_smem{kDs + is_odd * DsPanels::kBytes};
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

CUFLASH_DEVICE void consume(const attention::Params& params, int group) {
  using namespace attention;
  DkOfWarp dk;
  DvOfWarp dv;
  dk.fill(0);
  dv.fill(0);
  walk(dk, dv, params.shape.softmax_scale * kLog2E, group % kConsumers);
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
  const attention::WorkTile work = attention::key_tile<Listed>(params, kBlockKv);
  if (work.is_empty()) return;
  const int group = __shfl_sync(0xffffffffu, threadIdx.x / kGroup, 0);  // one for the warp: branches do not part it
  if (threadIdx.x == 0) {
    board().work = work;
    tile::Room* const rooms = &board().k;
    for (int i = 0; i < 2 + 2 * kNumStages; ++i) {
      ptx::mbarrier_init(ptx::shared_address(&rooms[i].full), kGroup / 32);
      ptx::mbarrier_init(ptx::shared_address(&rooms[i].empty), 4 * kConsumers);
    }
    ptx::mbarrier_init_fence();
  }
  __syncthreads();
  if (group == 0) {
    ptx::setmaxnreg_dec<kProducerRegisters>();
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    if (warp == 0) produce(params, maps);
    else help(params);
  } else {
    ptx::setmaxnreg_inc<kConsumerRegisters>();
    consume(params, group);
  }
}
