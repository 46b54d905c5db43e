// FlashAttention-3's forward pass (arXiv 2407.08608, algorithm 2) on Hopper: one warpgroup of a block brings tiles of Q, K
// and V into shared memory, the others multiply them, 64 rows of queries each. Scores of the next step are multiplied
// while this one's become weights and while the last one's are multiplied by V; and warpgroups take turns at starting
// products, so that one's softmax runs under another's products. Blocks go on to further tiles until none is left.
#include <attention/mma_operands.cuh>
#include <attention/sink.cuh>

namespace cuflash {
constexpr bool kBringsDo = false;
}  // namespace cuflash
#include <attention/key_ring.cuh>
#include <attention/score.cuh>

namespace cuflash {

constexpr bool kTakesTurns = kConsumers > 1;
constexpr bool kAsksAhead = kHeadDim > 64;  // for rooms, under weights; where steps are short it costs more than waiting
// Whether no maxima are looked for in a tile's masked steps and its last one either. Rooms of keys are left later for it, and
// two warpgroups, which take more keys in the same time, would wait for them.
constexpr bool kSparesLooks = kConsumers == 3;
constexpr bool kMovesRegisters = kConsumers > 1 || kMinBlocks > 1;
constexpr int kProducerRegisters =
    kConsumers == 4 ? 24 : kConsumers == 3 ? 32 : kMinBlocks == 3 || (kValueDim > 128 && kBlockKv > 64) ? 40 : 56;
constexpr int kConsumerRegisters =
    kConsumers == 4   ? 112
    : kConsumers == 3 ? 160
    : kConsumers == 2 ? (504 - kProducerRegisters) / 2
    : kMinBlocks == 3 ? 120
                      : 200;
static_assert(kThreads == kGroup * (1 + kConsumers), "a warpgroup has 64 rows");

using Scores = tile::WarpTile<1, kBlockKv / 8, 4 * kConsumers>;
using Output = tile::WarpTile<1, kValueDim / 8, 4 * kConsumers>;
using Weights = tile::Rounded<Element, Scores>;
using Softmax = attention::LazySoftmax<Scores::kRows>;

// O goes through the room that its Q had, where each warp's rows of both have one place.
using OPanels = tile::PanelTile<Element, kBlockQ, kValueDim>;
constexpr bool kLeavesByRoom =
    kQRooms > 1 && kValueDim <= kHeadDim && OPanels::kPanelWidth == QPanels::kPanelWidth;

constexpr int kTurns = 1, kHasReadQ = 4;  // names of barriers, one for each warpgroup of consumers

// Queries without a key: nobody hears of them.
CUFLASH_DEVICE void write_nothing(const attention::Params& params, const attention::WorkTile& work,
                                  attention::SinkArgument sink) {
  using namespace attention;
  const int length = params.shape.seqlen_q, num_columns = params.shape.value_dim;
  const auto lse = matrix<float>(params.lse, work.place, work.place.head, length, 1);
  const auto o = matrix<Element>(params.o, work.place, work.place.head, length, num_columns);
  float row_lse = ptx::negative_infinity<float>();
  Element zero = {};
  if (config::kHasSink) tile::narrow(0 * merge_sink(row_lse, sink_logit<float>(sink, work.place, work.place.head)), zero);
#pragma unroll 1
  for (int row = work.first; row < work.last; ++row) {
    if (leads()) lse.at(row, 0) = row_lse;
#pragma unroll 1
    for (int column = ptx::lane(); column < num_columns; column += 32) o.at(row, column) = zero;
  }
}

// ---- the consumers ----

// Whose turn it is to start products: groups are numbered from 1 on. Asked for again, to save registers.
CUFLASH_DEVICE int own_group() { return threadIdx.x / kGroup; }
CUFLASH_DEVICE void await_turn() {
  if (kTakesTurns) ptx::bar_sync(kTurns + own_group() - 1, 2 * kGroup);
}
CUFLASH_DEVICE void pass_turn() {
  if (kTakesTurns) ptx::bar_arrive(kTurns + own_group() % kConsumers, 2 * kGroup);
}

// lse and O of a tile. O leaves by the room of its Q where the accelerator writes it, a box for each warp's rows.
CUFLASH_DEVICE void write_results(const attention::Params& params, const attention::TensorMaps& maps, unsigned num_tasks,
                                  const Softmax& softmax, Output& o, bool is_last, attention::SinkArgument sink) {
  using namespace attention;
  const Place& place = board().tasks[task_of(num_tasks)].work.place;
  const float logit = sink_logit<float>(sink, place, place.head);
  float row_lse[Output::kRows];
  softmax.finalize(o, board().softmax_scale_log2, row_lse);
  if constexpr (config::kHasSink)
#pragma unroll
    for (int i = 0; i < o.kRows; ++i) o.scale_row(i, merge_sink(row_lse[i], logit));
  const Results to = board().tasks[task_of(num_tasks)].results;
  if (kLeavesByRoom && to.leaves_by_room) {
    // All of the warpgroup's products have read Q: with the next tile's first ones a turn was waited for, if there are both.
    if (!kTakesTurns || is_last) ptx::bar_sync(kHasReadQ + own_group(), kGroup);
    const OPanels room{q_smem(q_room_of(num_tasks)).start};
    tile::Rounded<Element, Output> rounded;
    rounded = o;
    tile::store(room, rounded, o.warp_row());
    ptx::fence_proxy_async();
    __syncwarp();
#pragma unroll
    for (int panel = 0; panel < OPanels::kPanels && o.warp_row() < to.num_rows; ++panel)
      ptx::tma_store_5d(&maps.o.map, room.panel(panel).address(o.warp_row(), 0), panel * OPanels::kPanelWidth,
                        to.first + o.warp_row(), to.o_at.x, to.o_at.y, to.o_at.z);
    ptx::bulk_commit();
  } else {
    const WorkTile& work = board().tasks[task_of(num_tasks)].work;
    const auto all = matrix<Element>(params.o, work.place, work.place.head, 0, params.shape.value_dim);
    tile::store(all.rows(work.first, work.last), o);
  }
#pragma unroll
  for (int i = 0; i < o.kRows; ++i) {
    const int row = o.first_row() + o.row(i);
    if (o.first_column() == 0 && row < to.num_rows) to.lse[row * params.lse.row_stride] = row_lse[i];
  }
}

// Leave the room of a tile's Q, one of two, once O has left it.
CUFLASH_DEVICE void leave_queries(unsigned num_tasks) {
  ptx::bulk_wait_read<0>();
  tile::arrive(board().q[q_room_of(num_tasks)].empty);
}

// Numbers count what a warpgroup has read: tiles of queries, and of keys.

using QOperand = tile::RowsAlongSum<QPanels>;
using KOperand = tile::RowsAlongSum<KPanels>;
using VOperand = tile::RowsAcrossSum<VPanels>;
CUFLASH_DEVICE QOperand q_operand(int group, unsigned num_tasks) {
  return QOperand(q_smem(q_room_of(num_tasks)), 64 * (group % kConsumers));
}

// Of a tile's first step; says the step's kind.
CUFLASH_DEVICE int start_first_scores(Scores& s, int group, unsigned num_tasks, unsigned num_keys, bool has_turn) {
  tile::await_full(board().k[stage_of(num_keys)], parity_of(num_keys));
  const int kind = kind_for(group, num_keys);
  if (has_turn) await_turn();
  tile::start_product_nt(s, q_operand(group, num_tasks), KOperand(k_smem(stage_of(num_keys))));
  if (has_turn) pass_turn();
  tile::wait_for<0>(s);
  return kind;
}

// Pass over the rest of a tile, of which the warpgroup's queries see nothing: take turns and pass them, and leave what is not
// read; but for the last step's values, if it `keeps_values`.
CUFLASH_DEVICE void pass_over(int group, unsigned& num_keys, bool keeps_values) {
  for (bool is_end = false; !is_end; ++num_keys) {
    const int stage = stage_of(num_keys), parity = parity_of(num_keys);
    tile::await_full(board().k[stage], parity);
    is_end = kind_for(group, num_keys) & Note::kEndsTile;
    tile::arrive(board().k[stage].empty);
    await_turn();
    pass_turn();
    tile::await_full(board().v[stage], parity);
    if (!is_end || !keeps_values) tile::arrive(board().v[stage].empty);
  }
}

// The score function of a step's scores, in their place, before masks hide any.
CUFLASH_DEVICE void score_step(const attention::Params& params, const score::Function& function, Scores& s,
                               unsigned num_tasks, unsigned num_keys) {
  if constexpr (kHasScore) {
    const attention::WorkTile& work = board().tasks[task_of(num_tasks)].work;
    attention::score_of_queries(s, function, params, work, board().notes[stage_of(num_keys)].step, 1);
  }
}

// A step's scores once more, for one warp alone, whose own are lost.
CUFLASH_DEVICE void remake_scores(const attention::Params& params, const score::Function& function, Scores& s,
                                  unsigned num_tasks, unsigned num_keys) {
  constexpr int kInPanel = QPanels::kPanelWidth / 16;
  s.fill(0);
#pragma unroll 1  // rare: less text
  for (int k = 0; k < kHeadDim / 16; ++k) {
    const auto q = tile::left_along(q_smem(q_room_of(num_tasks)).panel(k / kInPanel), s.warp_row());
    const auto keys = tile::right_along(k_smem(stage_of(num_keys)).panel(k / kInPanel), 0);
    uint32_t q_frag[1][4];
    tile::load(q_frag[0], q, 0, k % kInPanel);
    tile::add_step<Element>(s, q_frag, keys, k % kInPanel, false);
  }
  score_step(params, function, s, num_tasks, num_keys);
}

// What is not so as it left the product: hide what masks hide, and turn what falls as scores grow.
CUFLASH_DEVICE void mend_scores(const attention::Params& params, Scores& s, unsigned num_tasks, unsigned num_keys) {
  const Note& note = board().notes[stage_of(num_keys)];
  const double softmax_scale = attention::exponent_scale(params.shape);
  if (Softmax::turns(softmax_scale)) Softmax::turn(s, softmax_scale);
  mask_step(params, s, board().tasks[task_of(num_tasks)], note);
}

// A step's keys are not read any more; nor are, with its last ones, a tile's queries, if they have the one room.
CUFLASH_DEVICE void leave_keys(unsigned num_keys, bool is_last) {
  tile::arrive(board().k[stage_of(num_keys)].empty);
  if (is_last && kQRooms == 1) tile::arrive(board().q[0].empty);
}

// The weights of a step, of which scores are left in their place.
CUFLASH_DEVICE void make_weights(Scores& s, Softmax& softmax, Output& o, bool has_risen,
                                 const float (&by)[Softmax::kRows]) {
  if (has_risen) Softmax::rescale(o, by);
  if (softmax.reasons & Softmax::kIsLarge) softmax.take_off(s);
  softmax.weigh(s, board().softmax_scale_log2);
}

// O has the values of the keys before.
CUFLASH_DEVICE void await_sum(Output& o, unsigned num_keys) {
  tile::wait_for<0>(o);
  tile::arrive(board().v[stage_of(num_keys - 1)].empty);
}

// What is multiplied next: Q and the keys after `num_keys` - 1, and the values of these. Found while weights are made: what
// products wait for comes late under others.
class Operands {
 public:
  Operands() = default;
  CUFLASH_DEVICE Operands(int group, unsigned num_tasks, unsigned num_keys)
      : q_(q_operand(group, num_tasks)), k_(k_smem(stage_of(num_keys))), v_(v_smem(stage_of(num_keys - 1))),
        has_k_(kAsksAhead && tile::is_full(board().k[stage_of(num_keys)], parity_of(num_keys))),
        has_v_(kAsksAhead && tile::is_full(board().v[stage_of(num_keys - 1)], parity_of(num_keys - 1))) {
    q_.matrix.settle();
    k_.matrix.settle();
    v_.matrix.settle();
  }

  // Start both products, once their weights are there. Says the kind of the keys' step.
  CUFLASH_DEVICE int start_products(Scores& s, Output& o, const Weights& p, int group, unsigned num_keys) const {
    if (!has_k_) tile::await_full(board().k[stage_of(num_keys)], parity_of(num_keys));
    if (!has_v_) tile::await_full(board().v[stage_of(num_keys - 1)], parity_of(num_keys - 1));
    const int kind = kind_for(group, num_keys);
    await_turn();
    tile::start_product_nt(s, q_, k_);
    tile::start_sum_nn(o, p, v_);
    pass_turn();
    return kind;
  }

 private:
  QOperand q_;
  KOperand k_;
  VOperand v_;
  bool has_k_, has_v_;
};

// Plain steps have code of their own that is in one piece: where it jumps, it waits for instructions.
CUFLASH_DEVICE bool is_plain(int kind) {
  constexpr int kAsPlain = Note::kUnseen | Note::kAsTheyAre;
  return (kind & (kAsPlain | Note::kLast)) == kAsPlain;
}

// Scores of a step that is not plain, or was, and they are lost: `is_lost`. Whether they are weights then; else they are as
// masks leave them.
CUFLASH_DEVICE bool weigh_other_step(const attention::Params& params, const score::Function& function, Scores& s,
                                     Softmax& softmax, unsigned num_tasks, unsigned num_keys, int kind, bool is_lost) {
  bool is_done = false;
  if constexpr (kSparesLooks) {
#pragma unroll 1
    for (int again = is_lost; again < 2 && !is_done; ++again) {
      if (again) remake_scores(params, function, s, num_tasks, num_keys);
      if (!(kind & Note::kAsTheyAre)) mend_scores(params, s, num_tasks, num_keys);
      if (!(kind & Note::kUnseen) || again) break;
      is_done = softmax.weigh_unseen(s, board().softmax_scale_log2);
    }
    leave_keys(num_keys, kind & Note::kLast);
  } else {
    if (is_lost) remake_scores(params, function, s, num_tasks, num_keys);
    if (!(kind & Note::kAsTheyAre)) mend_scores(params, s, num_tasks, num_keys);
    leave_keys(num_keys, kind & Note::kLast);
  }
  return is_done;
}

// Whether the next step is to look for maxima: it is after one that did not, and lost its scores.
CUFLASH_DEVICE int next_kind(int kind, bool is_done, const Softmax& softmax) {
  const bool is_lost = (kSparesLooks ? kind & Note::kUnseen : is_plain(kind)) && !is_done;
  return ptx::opaque(is_lost | softmax.reasons) ? 0 : Note::kUnseen;
}

// O gets the last values.
CUFLASH_DEVICE void add_last_values(Output& o, const Weights& p, unsigned num_keys) {
  tile::await_full(board().v[stage_of(num_keys - 1)], parity_of(num_keys - 1));
  tile::start_sum_nn(o, p, tile::RowsAcrossSum<VPanels>(v_smem(stage_of(num_keys - 1))));
  tile::wait_for<0>(o);
  tile::arrive(board().v[stage_of(num_keys - 1)].empty);
}

// Tile after tile.
CUFLASH_DEVICE void consume_in_one_room(const attention::Params& params, const attention::TensorMaps& maps, int group,
                                        attention::SinkArgument sink, const score::Function& function) {
  unsigned num_keys = 0;
  for (unsigned num_tasks = 0; await_tile(num_tasks); ++num_tasks) {
    Softmax softmax;
    Output o;
    Scores s;
    Weights p;
    o.fill(0);
    int kind = start_first_scores(s, group, num_tasks, num_keys, false);
    for (bool is_first = true;; is_first = false) {
      const bool is_last = kind & Note::kLast, was_plain = is_plain(kind);
      score_step(params, function, s, num_tasks, num_keys);
      bool is_done = was_plain && softmax.weigh_unseen(s, board().softmax_scale_log2);
      if (is_done) {
        leave_keys(num_keys, false);
        await_sum(o, num_keys);
        p = s;
      } else {
        float by[Softmax::kRows];
        is_done = weigh_other_step(params, function, s, softmax, num_tasks, num_keys, kind, was_plain);
        const bool has_risen = !is_done && softmax.raise(s, board().softmax_scale_log2, by);
        tile::wait_for<0>(o);
        if (!is_first) tile::arrive(board().v[stage_of(num_keys - 1)].empty);
        if (!is_done) make_weights(s, softmax, o, has_risen, by);
        p = s;
      }
      ++num_keys;
      if (is_last) break;
      kind = next_kind(kind, is_done, softmax) | Operands(group, num_tasks, num_keys).start_products(s, o, p, group, num_keys);
      tile::wait_for<1>(s);
    }
    add_last_values(o, p, num_keys);
    if (!(kind & Note::kEndsTile)) pass_over(group, num_keys, false);
    write_results(params, maps, num_tasks, softmax, o, true, sink);
  }
}

// With room for Q of two tiles, scores of the next tile's first step are made under the last step of this one, and its
// results are written once the next tile has its first weights; if the warpgroup has a part in all of this one's steps.
CUFLASH_DEVICE void consume_in_two_rooms(const attention::Params& params, const attention::TensorMaps& maps, int group,
                                         attention::SinkArgument sink, const score::Function& function) {
  unsigned num_keys = 0, num_tasks = 0;
  while (await_tile(num_tasks)) {
    Softmax softmax, finished;
    Output o;
    Scores s;
    Weights p;
    o.fill(0);
    int kind = start_first_scores(s, group, num_tasks, num_keys, num_keys > 0);
    while (true) {
      Operands next;
      const bool is_last = kind & Note::kLast, is_first = kind & Note::kFollows, was_plain = is_plain(kind);
      score_step(params, function, s, num_tasks, num_keys);
      bool is_done = was_plain && softmax.weigh_unseen(s, board().softmax_scale_log2);
      if (is_done) {
        leave_keys(num_keys, false);
        await_sum(o, num_keys);
        if (kind & Note::kOLeaves) leave_queries(num_tasks - 1);
        ++num_keys;
        next = Operands(group, num_tasks, num_keys);
        p = s;
      } else {
        float by[Softmax::kRows];
        is_done = weigh_other_step(params, function, s, softmax, num_tasks, num_keys, kind, was_plain);
        const bool has_risen = !is_done && softmax.raise(s, board().softmax_scale_log2, by);
        tile::wait_for<0>(o);
        if (num_keys > 0) tile::arrive(board().v[stage_of(num_keys - 1)].empty);
        if (is_first) {
          write_results(params, maps, num_tasks - 1, finished, o, false, sink);
          o.fill(0);
        }
        if (!is_done) make_weights(s, softmax, o, has_risen && !is_first, by);
        p = s;
        if (kind & Note::kOLeaves || is_first && is_last) leave_queries(num_tasks - 1);
        ++num_keys;
        if (is_last) {
          ++num_tasks;
          if (!(kind & Note::kEndsTile) || !await_tile(num_tasks)) break;
          finished = softmax;
          softmax = Softmax();
        }
        next = Operands(group, num_tasks, num_keys);
      }
      // Before scores are waited for.
      kind = next_kind(kind, is_done, softmax) | is_last * Note::kFollows | (is_first && !is_last) * Note::kOLeaves |
             next.start_products(s, o, p, group, num_keys);
      tile::wait_for<1>(s);
    }
    add_last_values(o, p, num_keys);
    if (!(kind & Note::kEndsTile)) pass_over(group, num_keys, true);
    write_results(params, maps, num_tasks - 1, softmax, o, true, sink);
    leave_queries(num_tasks - 1);
    if (kind & Note::kEndsTile) return;
  }
}

CUFLASH_DEVICE void consume(const attention::Params& params, const attention::TensorMaps& maps, int group,
                            attention::SinkArgument sink, const score::Function& function) {
  if (group == kConsumers) pass_turn();
  if constexpr (kQRooms == 1) consume_in_one_room(params, maps, group, sink, function);
  else consume_in_two_rooms(params, maps, group, sink, function);
  if (group == 1) await_turn();  // nobody is left to take the last one
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, cuflash::config::kMinBlocks)
sm90_forward(const __grid_constant__ cuflash::attention::Params params,
             const __grid_constant__ cuflash::attention::TensorMaps maps CUFLASH_FEATURES) {
  using namespace cuflash;
  using namespace cuflash::attention;
  const int group = __shfl_sync(0xffffffffu, threadIdx.x / kGroup, 0);  // one for the warp: branches do not part it
  if (threadIdx.x == 0) {
    make_barriers();
    board().softmax_scale_log2 = Softmax::scale_log2(attention::exponent_scale(params.shape));
  }
  __syncthreads();
  if (group == 0) {
    if constexpr (kMovesRegisters) ptx::setmaxnreg_dec<kProducerRegisters>();
    produce(params, maps, sink);
  } else {
    if constexpr (kMovesRegisters) ptx::setmaxnreg_inc<kConsumerRegisters>();
    consume(params, maps, group, sink, score_function);
  }
}
