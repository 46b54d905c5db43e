// FlashAttention-3's forward pass (arXiv 2407.08608, algorithm 2) on Hopper: one warpgroup of a block brings tiles of Q, K
// and V into shared memory, the others multiply them, 64 rows of queries each. Scores of the next step are multiplied
// while this one's become weights and while the last one's are multiplied by V; and warpgroups take turns at starting
// products, so that one's softmax runs under another's products. Blocks go on to further tiles until none is left.
#include <attention/mma_operands.cuh>
#include <attention/tensor_maps.cuh>
#include <ptx/barrier.cuh>
#include <ptx/warpgroup.cuh>
#include <tile/rooms.cuh>

namespace cuflash {

using config::kMinBlocks;
using config::kNumStages;

constexpr int kGroup = 128;  // threads of a warpgroup
constexpr int kConsumers = kBlockQ / 64;
constexpr bool kIsSmall = config::kIsListed && kConsumers == 1;  // other blocks of the multiprocessor work meanwhile
constexpr int kQRooms = kHeadDim <= 128 && kValueDim <= 128 && !kIsSmall ? 2 : 1;
constexpr int kTasks = 4;  // tiles known of: looked up, brought, multiplied, and written
// Whether a block asks for its next tile with a tile's first step, not with its last: what a list says of it comes later.
constexpr bool kAsksEarly = config::kIsListed && kHeadDim <= 128 && kValueDim <= 128;
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

using QPanels = tile::PanelTile<Element, kBlockQ, kHeadDim>;
using KPanels = tile::PanelTile<Element, kBlockKv, kHeadDim>;
using VPanels = tile::PanelTile<Element, kBlockKv, kValueDim>;
CUFLASH_DEVICE QPanels q_smem(int room) { return {room * QPanels::kBytes}; }
CUFLASH_DEVICE KPanels k_smem(int stage) { return {kQRooms * QPanels::kBytes + stage * KPanels::kBytes}; }
CUFLASH_DEVICE VPanels v_smem(int stage) { return {k_smem(kNumStages).start + stage * VPanels::kBytes}; }
constexpr int kBoard = kQRooms * QPanels::kBytes + kNumStages * (KPanels::kBytes + VPanels::kBytes);

// O goes through the room that its Q had, where each warp's rows of both have one place.
using OPanels = tile::PanelTile<Element, kBlockQ, kValueDim>;
constexpr int kBoxRows = 16;  // a warp's
constexpr bool kLeavesByRoom =
    kQRooms > 1 && kValueDim <= kHeadDim && OPanels::kPanelWidth == QPanels::kPanelWidth;

// What is known of a tile, and of a step.
enum Operand { kQ, kK, kV };  // in the order of Params and TensorMaps
struct Span {  // no query of a warpgroup sees a key from `stop` on, and all see full_start <= x < full_stop
  int stop, full_start, full_stop;
};
struct alignas(16) Results {  // where they go
  float* lse;
  int num_rows;
  int leaves_by_room;  // rows are whole chunks, and as many as boxes have or the matrix, as the accelerator writes
  int first;           // row of O
  tile::InStack o_at;
};
struct Task {
  Results results;
  attention::WorkTile work;
  attention::Reach reach;
  Span spans[kConsumers];
  int kv_head, is_end;
  tile::InStack at[kV + 1];  // of operands
  int is_of_band;
  attention::Interval band;  // what the first row sees, if it is one; others see what lies as much further on
};
struct Note {
  // Scores are what leaves the product, as no mask hides one and the scale is positive; the warpgroup's queries see no key
  // of the tile's further steps; nobody's do. And what a warpgroup itself knows: the tile follows on another, whose results
  // are to be written; no maxima are to be looked for; O of the tile before is leaving the room of its Q.
  enum Kind { kAsTheyAre = 1, kLast = 2, kEndsTile = 4, kFollows = 8, kUnseen = 16, kOLeaves = 32 };
  attention::Step step;
  int start;  // keys before it were the last step's
  int kinds[kConsumers];
};

struct Board {
  tile::Room q[kQRooms], k[kNumStages], v[kNumStages];
  tile::Room told[kTasks];  // tasks
  Task tasks[kTasks];
  Note notes[kNumStages];
  float softmax_scale_log2;  // consumers' registers are for accumulators
};
CUFLASH_DEVICE Board& board() { return *reinterpret_cast<Board*>(ptx::dynamic_shared<unsigned char>() + kBoard); }

// The room of a ring that the count-th tile has, and the parity of its phases.
CUFLASH_DEVICE int stage_of(unsigned count) { return count % kNumStages; }
CUFLASH_DEVICE int parity_of(unsigned count) { return count / kNumStages % 2; }
CUFLASH_DEVICE int q_room_of(unsigned count) { return count % kQRooms; }
CUFLASH_DEVICE int q_parity_of(unsigned count) { return count / kQRooms % 2; }

CUFLASH_DEVICE int task_of(unsigned count) { return count % kTasks; }
CUFLASH_DEVICE int task_parity_of(unsigned count) { return count / kTasks % 2; }

// ---- the producers ----

// One warp looks tiles up, one brings Q and K, and one V: by the tensor memory accelerator, or where that cannot by itself.
enum Producer { kBringsKeys, kBringsValues, kLooksUp };
constexpr int kTurns = 1, kHasReadQ = 4;  // names of barriers, one for each warpgroup of consumers

CUFLASH_DEVICE bool leads() { return ptx::lane() == 0; }

// By the whole warp: lanes that wait for the first one alone can keep it from going on.
CUFLASH_DEVICE void await_room(const tile::Room& room, int parity) {
  tile::await_empty(room, parity);
  __syncwarp();
}
CUFLASH_DEVICE const Task& await_task(unsigned num_tasks) {
  tile::await_full(board().told[task_of(num_tasks)], task_parity_of(num_tasks));
  return board().tasks[task_of(num_tasks)];
}

// How an operand's room is made up.
template <Operand kOperand>
CUFLASH_DEVICE tile::Panels panels_of(int stage) {
  if constexpr (kOperand == kQ) return tile::Panels(q_smem(stage));
  else if constexpr (kOperand == kK) return tile::Panels(k_smem(stage));
  else return tile::Panels(v_smem(stage));
}

// Fill an operand's room, which is empty, with rows first <= x < last. `clears` asks for zeros past them. By a warp.
template <Operand kOperand>
CUFLASH_DEVICE void fill(const attention::Params& params, const attention::TensorMaps& maps, const tile::Room& room,
                         int stage, const Task& task, int first, int last, bool clears) {
  const attention::Mapped& map = (&maps.q)[kOperand];
  const attention::Matrices& matrices = (&params.q)[kOperand];
  if (attention::is_mapped(map, matrices) && !clears) {
    if (leads()) tile::start_copies(panels_of<kOperand>(stage), map, task.at[kOperand], first, room.full);
    else if (ptx::lane() < tile::kArrivals) ptx::mbarrier_arrive(ptx::shared_address(&room.full));
    return;
  }
  const int head = kOperand == kQ ? task.work.place.head : task.kv_head;
  const int num_columns = kOperand == kV ? params.shape.value_dim : params.shape.head_dim;
  const auto all = attention::matrix<Element>(matrices, task.work.place, head, 0, num_columns);
  tile::copy<32>(panels_of<kOperand>(stage), all.rows(first, last), ptx::lane(), [](int) { return true; });
  tile::arrive(room.full);
}

// Queries without a key: nobody hears of them.
CUFLASH_DEVICE void write_nothing(const attention::Params& params, const attention::WorkTile& work) {
  using namespace attention;
  const int length = params.shape.seqlen_q, num_columns = params.shape.value_dim;
  const auto lse = matrix<float>(params.lse, work.place, work.place.head, length, 1);
  const auto o = matrix<Element>(params.o, work.place, work.place.head, length, num_columns);
#pragma unroll 1
  for (int row = work.first; row < work.last; ++row) {
    if (leads()) lse.at(row, 0) = ptx::negative_infinity<float>();
#pragma unroll 1
    for (int column = ptx::lane(); column < num_columns; column += 32) o.at(row, column) = {};
  }
}

// The number of a block's next tile, which nobody else has. By a warp.
CUFLASH_DEVICE int next_tile(const attention::Params& params, bool is_first, int num_tiles) {
  if (is_first) return attention::first_number();
  int number = 0;
  if (leads()) number = attention::next_number(params, num_tiles);
  return __shfl_sync(0xffffffffu, number, 0);
}

// What 64 of a tile's queries see.
CUFLASH_DEVICE Span span_of(const attention::Params& params, attention::WorkTile work, int first_row) {
  work.first += first_row;
  work.last = min(work.last, work.first + 64);
  if (work.is_empty()) return {};
  const attention::Reach reach = attention::reach_of_queries(params, work);
  return {reach.stop, reach.full_start, reach.full_stop};
}

// Look up the tiles of this block, each once the last steps, or the first, of the one before are brought: who took tiles
// further ahead would keep what others could do sooner.
CUFLASH_DEVICE void look_up(const attention::Params& params, const attention::TensorMaps& maps) {
  using namespace attention;
  const int num_tiles = num_query_tiles<Listed>(params, kBlockQ);
  unsigned num_tasks = 0;
  for (bool is_first = true;; is_first = false) {
    const tile::Room& told = board().told[task_of(num_tasks)];
    await_room(told, task_parity_of(num_tasks + kTasks - 1));  // the first is looked up at once
    const int number = next_tile(params, is_first, num_tiles);
    const bool is_end = number >= num_tiles;
    WorkTile work{};
    Reach reach{};
    if (!is_end) {
      work = query_tile_at<Listed>(params, kBlockQ, number);
      if (work.is_empty()) continue;
      reach = reach_of_queries(params, work);
      if (!Steps<kBlockKv, OverKeys, Listed>(params, reach).has_next()) {
        write_nothing(params, work);
        continue;
      }
    }
    Task& task = board().tasks[task_of(num_tasks)];
    if (!is_end && ptx::lane() < kConsumers) task.spans[ptx::lane()] = span_of(params, work, 64 * ptx::lane());
    if (leads()) {
      task.work = work;
      task.reach = reach;
      task.is_end = is_end;
      task.kv_head = work.place.head / params.shape.group_size;
      task.at[kQ] = in_stack(params.q, work.place, work.place.head);
      task.at[kK] = in_stack(params.k, work.place, task.kv_head);
      task.at[kV] = in_stack(params.v, work.place, task.kv_head);
      const int num_rows = work.last - work.first;
      task.results = {&matrix<float>(params.lse, work.place, work.place.head, 0, 1).at(work.first, 0),
                      num_rows,
                      (num_rows % kBoxRows == 0 || work.last == params.shape.seqlen_q) &&
                          params.shape.value_dim % tile::kChunkOf<Element> == 0 && is_mapped(maps.o, params.o),
                      work.first,
                      in_stack(params.o, work.place, work.place.head)};
      task.is_of_band = !config::kIsListed && params.work.lo == nullptr;
      task.band = {bounded(work.first + params.work.lower), bounded(work.first + params.work.upper + 1)};
    }
    tile::arrive(told.full);
    if (is_end) return;
    ++num_tasks;
  }
}

// What a step is for a warpgroup. Further places of a list may lie anywhere: which keys are the last is not known there.
CUFLASH_DEVICE int kind_of(const attention::Params& params, const attention::Step& step, const Span& span, bool is_wider,
                           bool ends_tile) {
  using attention::Kind;
  attention::Step own = step;
  if (step.kind == Kind::kInterval && step.start >= span.full_start && step.stop <= span.full_stop) own.kind = Kind::kFull;
  const bool is_whole = !is_wider && attention::is_whole<kBlockKv>(own);
  const bool is_last = ends_tile || (!config::kIsListed && step.stop >= span.stop);
  return (is_whole && !Softmax::turns(params.shape.softmax_scale)) * Note::kAsTheyAre + is_last * Note::kLast +
         ends_tile * Note::kEndsTile;
}

CUFLASH_DEVICE void bring_keys(const attention::Params& params, const attention::TensorMaps& maps) {
  using namespace attention;
  unsigned num_keys = 0, num_tasks = 0;  // tiles brought
  while (true) {
    const Task& task = await_task(num_tasks);
    const int q_stage = q_room_of(num_tasks);
    const tile::Room& q = board().q[q_stage];
    if (task.is_end) {
      await_room(q, q_parity_of(num_tasks));
      return tile::arrive(q.full);
    }
    Steps<kBlockKv, OverKeys, Listed> steps(params, task.reach);
    Step step;
    for (bool is_first = true; steps.next(step); is_first = false) {
      const int stage = stage_of(num_keys), start = step.start;
      const tile::Room& k = board().k[stage];
      const bool is_wider = widen<kBlockKv, config::kIsListed>(step, task.reach, params.shape.seqlen_kv), ends_tile = !steps.has_next();
      const int kind = kind_of(params, step, task.spans[min(ptx::lane(), kConsumers - 1)], is_wider, ends_tile);
      if (kAsksEarly ? is_first : ends_tile) tile::arrive(board().told[task_of(num_tasks + 1)].empty);
      await_room(k, parity_of(num_keys));
      Note& note = board().notes[stage];
      if (ptx::lane() < kConsumers) note.kinds[ptx::lane()] = kind;
      if (leads()) {
        note.step = step;
        note.start = start;
      }
      __syncwarp();
      fill<kK>(params, maps, k, stage, task, step.start, step.stop, false);
      ++num_keys;
      if (!is_first) continue;
      await_room(q, q_parity_of(num_tasks));
      fill<kQ>(params, maps, q, q_stage, task, task.work.first, task.work.last, false);
    }
    ++num_tasks;
  }
}

CUFLASH_DEVICE void bring_values(const attention::Params& params, const attention::TensorMaps& maps) {
  using namespace attention;
  unsigned num_values = 0;
  for (int i = 1; i < kTasks; ++i) tile::arrive(board().told[i].empty);  // nobody reads them yet
  for (unsigned num_tasks = 0;; ++num_tasks) {
    const Task& task = await_task(num_tasks);
    if (task.is_end) return;
    Steps<kBlockKv, OverKeys, Listed> steps(params, task.reach);
    Step step;
    while (steps.next(step)) {
      const int stage = stage_of(num_values), length = params.shape.seqlen_kv;
      widen<kBlockKv, config::kIsListed>(step, task.reach, length);
      const bool clears = step.stop - step.start < kBlockKv && step.stop < length;
      await_room(board().v[stage], parity_of(num_values));
      fill<kV>(params, maps, board().v[stage], stage, task, step.start, step.stop, clears);
      ++num_values;
    }
    tile::arrive(board().told[task_of(num_tasks)].empty);
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
                                  const Softmax& softmax, Output& o, bool is_last) {
  using namespace attention;
  float row_lse[Output::kRows];
  softmax.finalize(o, board().softmax_scale_log2, row_lse);
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

// Wait for a tile. False where none is left.
CUFLASH_DEVICE bool await_tile(unsigned num_tasks) {
  tile::await_full(board().q[q_room_of(num_tasks)], q_parity_of(num_tasks));
  return !board().tasks[task_of(num_tasks)].is_end;
}

// Numbers count what a warpgroup has read: tiles of queries, and of keys.

using QOperand = tile::RowsAlongSum<QPanels>;
using KOperand = tile::RowsAlongSum<KPanels>;
using VOperand = tile::RowsAcrossSum<VPanels>;
CUFLASH_DEVICE QOperand q_operand(int group, unsigned num_tasks) {
  return QOperand(q_smem(q_room_of(num_tasks)), 64 * (group % kConsumers));
}

// A step's kind, for a warpgroup.
CUFLASH_DEVICE int kind_for(int group, unsigned num_keys) {
  return board().notes[stage_of(num_keys)].kinds[group % kConsumers];
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

// A step's scores once more, for one warp alone, whose own are lost.
CUFLASH_DEVICE void remake_scores(Scores& s, unsigned num_tasks, unsigned num_keys) {
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
}

// What is not so as it left the product: hide what masks hide, and turn what falls as scores grow.
CUFLASH_DEVICE void mend_scores(const attention::Params& params, Scores& s, unsigned num_tasks, unsigned num_keys) {
  const Note& note = board().notes[stage_of(num_keys)];
  const double softmax_scale = params.shape.softmax_scale;
  if (Softmax::turns(softmax_scale)) Softmax::turn(s, softmax_scale);
  const Task& task = board().tasks[task_of(num_tasks)];
  if (!config::kIsListed && task.is_of_band) return attention::mask_band(s, note.step, task.band, note.start);
  attention::mask_rows<config::kIsListed>(s, note.step, [&](int row) {
    auto seen = attention::seen_by_row(params, task.work, note.step, row);
    seen.lo = max(seen.lo, note.start);
    return seen;
  });
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
CUFLASH_DEVICE bool weigh_other_step(const attention::Params& params, Scores& s, Softmax& softmax, unsigned num_tasks,
                                     unsigned num_keys, int kind, bool is_lost) {
  bool is_done = false;
  if constexpr (kSparesLooks) {
#pragma unroll 1
    for (int again = is_lost; again < 2 && !is_done; ++again) {
      if (again) remake_scores(s, num_tasks, num_keys);
      if (!(kind & Note::kAsTheyAre)) mend_scores(params, s, num_tasks, num_keys);
      if (!(kind & Note::kUnseen) || again) break;
      is_done = softmax.weigh_unseen(s, board().softmax_scale_log2);
    }
    leave_keys(num_keys, kind & Note::kLast);
  } else {
    if (is_lost) remake_scores(s, num_tasks, num_keys);
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
CUFLASH_DEVICE void consume_in_one_room(const attention::Params& params, const attention::TensorMaps& maps, int group) {
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
      bool is_done = was_plain && softmax.weigh_unseen(s, board().softmax_scale_log2);
      if (is_done) {
        leave_keys(num_keys, false);
        await_sum(o, num_keys);
        p = s;
      } else {
        float by[Softmax::kRows];
        is_done = weigh_other_step(params, s, softmax, num_tasks, num_keys, kind, was_plain);
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
    write_results(params, maps, num_tasks, softmax, o, true);
  }
}

// With room for Q of two tiles, scores of the next tile's first step are made under the last step of this one, and its
// results are written once the next tile has its first weights; if the warpgroup has a part in all of this one's steps.
CUFLASH_DEVICE void consume_in_two_rooms(const attention::Params& params, const attention::TensorMaps& maps, int group) {
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
        is_done = weigh_other_step(params, s, softmax, num_tasks, num_keys, kind, was_plain);
        const bool has_risen = !is_done && softmax.raise(s, board().softmax_scale_log2, by);
        tile::wait_for<0>(o);
        if (num_keys > 0) tile::arrive(board().v[stage_of(num_keys - 1)].empty);
        if (is_first) {
          write_results(params, maps, num_tasks - 1, finished, o, false);
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
    write_results(params, maps, num_tasks - 1, softmax, o, true);
    leave_queries(num_tasks - 1);
    if (kind & Note::kEndsTile) return;
  }
}

CUFLASH_DEVICE void consume(const attention::Params& params, const attention::TensorMaps& maps, int group) {
  if (group == kConsumers) pass_turn();
  if constexpr (kQRooms == 1) consume_in_one_room(params, maps, group);
  else consume_in_two_rooms(params, maps, group);
  if (group == 1) await_turn();  // nobody is left to take the last one
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, cuflash::config::kMinBlocks)
sm90_forward(const __grid_constant__ cuflash::attention::Params params,
             const __grid_constant__ cuflash::attention::TensorMaps maps) {
  using namespace cuflash;
  const int group = __shfl_sync(0xffffffffu, threadIdx.x / kGroup, 0);  // one for the warp: branches do not part it
  if (threadIdx.x == 0) {
    tile::Room* const rooms = board().q;
    for (int i = 0; i < kQRooms + 2 * kNumStages; ++i) {
      ptx::mbarrier_init(ptx::shared_address(&rooms[i].full), tile::kArrivals);
      ptx::mbarrier_init(ptx::shared_address(&rooms[i].empty), 4 * kConsumers * tile::kArrivals);
    }
    for (const tile::Room& told : board().told) {
      ptx::mbarrier_init(ptx::shared_address(&told.full), tile::kArrivals);
      ptx::mbarrier_init(ptx::shared_address(&told.empty), 2 * tile::kArrivals);
    }
    ptx::mbarrier_init_fence();
    board().softmax_scale_log2 = Softmax::scale_log2(params.shape.softmax_scale);
  }
  __syncthreads();
  if (group == 0) {
    if constexpr (kMovesRegisters) ptx::setmaxnreg_dec<kProducerRegisters>();
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    if (warp == kBringsKeys) bring_keys(params, maps);
    else if (warp == kBringsValues) bring_values(params, maps);
    else if (warp == kLooksUp) look_up(params, maps);
  } else {
    if constexpr (kMovesRegisters) ptx::setmaxnreg_inc<kConsumerRegisters>();
    consume(params, maps, group);
  }
}
