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
constexpr bool kTakesTurns = kConsumers > 1;
constexpr bool kAsksAhead = kHeadDim > 64;  // for rooms, under weights; where steps are short it costs more than waiting
constexpr bool kMovesRegisters = kConsumers > 1 || kMinBlocks > 1;
constexpr int kProducerRegisters = kConsumers == 3 ? 32 : kMinBlocks == 3 || (kValueDim > 128 && kBlockKv > 64) ? 40 : 56;
constexpr int kConsumerRegisters =
    kConsumers == 3 ? 160 : kConsumers == 2 ? (504 - kProducerRegisters) / 2 : kMinBlocks == 3 ? 120 : 200;
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
struct Task {
  attention::WorkTile work;
  attention::Reach reach;
  int kv_head, is_end;
  tile::InStack at[kV + 1], o_at;  // of operands, and of O
  float* lse;
  int leaves_by_room;  // rows are whole chunks, and as many as boxes have or the matrix, as the accelerator writes
  int is_of_band;
  attention::Interval band;  // what the first row sees, if it is one; others see what lies as much further on
};
struct Note {
  // No mask hides a score; no step of the tile follows; or the first alone, and scores grow with what leaves the product.
  enum Kind { kWhole = 1, kLast = 2, kPlain = 4 };
  attention::Step step;
  int start;  // keys before it were the last step's
  int kind;
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

// A key as an int, or one further out than any.
CUFLASH_DEVICE int bounded(int64_t key) {
  constexpr int64_t kFar = 1 << 30;
  return static_cast<int>(max(min(key, kFar), -kFar));
}

// The number of a block's next tile: nobody else's, where blocks go on as they end, or its own in this round. By a warp.
CUFLASH_DEVICE int next_tile(const attention::Params& params, int round, int num_tiles) {
  if (params.next_tile.data == nullptr) return attention::number_in_round(round);
  if (round == 0) return attention::first_number();
  int number = 0;
  if (leads()) number = attention::next_number(params, num_tiles);
  return __shfl_sync(0xffffffffu, number, 0);
}

// Look up the tiles of this block, ahead of those who bring them.
CUFLASH_DEVICE void look_up(const attention::Params& params) {
  using namespace attention;
  const int num_tiles = num_query_tiles<Listed>(params, kBlockQ);
  unsigned num_tasks = 0;
  for (int round = 0;; ++round) {
    const int number = next_tile(params, round, num_tiles);
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
    const tile::Room& told = board().told[task_of(num_tasks)];
    await_room(told, task_parity_of(num_tasks));
    if (leads()) {
      Task& task = board().tasks[task_of(num_tasks)];
      task.work = work;
      task.reach = reach;
      task.is_end = is_end;
      task.kv_head = work.place.head / params.shape.group_size;
      task.at[kQ] = in_stack(params.q, work.place, work.place.head);
      task.at[kK] = in_stack(params.k, work.place, task.kv_head);
      task.at[kV] = in_stack(params.v, work.place, task.kv_head);
      task.o_at = in_stack(params.o, work.place, work.place.head);
      task.lse = &matrix<float>(params.lse, work.place, work.place.head, 0, 1).at(work.first, 0);
      task.leaves_by_room = ((work.last - work.first) % kBoxRows == 0 || work.last == params.shape.seqlen_q) &&
                            params.shape.value_dim % tile::kChunkOf<Element> == 0;
      task.is_of_band = !config::kIsListed && params.work.lo == nullptr;
      task.band = {bounded(work.first + params.work.lower), bounded(work.first + params.work.upper + 1)};
      ptx::mbarrier_arrive(ptx::shared_address(&told.full));
    }
    if (is_end) return;
    ++num_tasks;
  }
}

// A last step that is short, and is not the matrix's end, where the accelerator writes zeros: it starts earlier instead, if
// the tile reaches as far. What lies past it may be anything, and 0 times that is not 0.
CUFLASH_DEVICE bool widen(attention::Step& step, const attention::Reach& reach, int length) {
  const bool is_wider = !config::kIsListed && step.stop - step.start < kBlockKv && step.stop < length &&
                        step.stop - kBlockKv >= reach.start;
  if (is_wider) step.start = step.stop - kBlockKv;
  return is_wider;
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
      const bool is_wider = widen(step, task.reach, params.shape.seqlen_kv), is_last = !steps.has_next();
      await_room(k, parity_of(num_keys));
      const bool hides_none = !is_wider && is_whole<kBlockKv>(step);
      const bool is_plain = hides_none && !is_last && !Softmax::turns(params.shape.softmax_scale);
      if (leads())
        board().notes[stage] = {step, start, hides_none * Note::kWhole + is_last * Note::kLast + is_plain * Note::kPlain};
      fill<kK>(params, maps, k, stage, task, step.start, step.stop, false);
      ++num_keys;
      if (!is_first) continue;
      await_room(q, q_parity_of(num_tasks));
      if (num_tasks >= 2) tile::arrive(board().told[task_of(num_tasks - 2)].empty);  // its results are written
      fill<kQ>(params, maps, q, q_stage, task, task.work.first, task.work.last, false);
    }
    ++num_tasks;
  }
}

CUFLASH_DEVICE void bring_values(const attention::Params& params, const attention::TensorMaps& maps) {
  using namespace attention;
  unsigned num_values = 0;
  for (unsigned num_tasks = 0;; ++num_tasks) {
    const Task& task = await_task(num_tasks);
    if (task.is_end) return;
    Steps<kBlockKv, OverKeys, Listed> steps(params, task.reach);
    Step step;
    while (steps.next(step)) {
      const int stage = stage_of(num_values), length = params.shape.seqlen_kv;
      widen(step, task.reach, length);
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
  const Task& task = board().tasks[task_of(num_tasks)];
  const WorkTile& work = task.work;
  float row_lse[Output::kRows];
  softmax.finalize(o, board().softmax_scale_log2, row_lse);
#pragma unroll
  for (int i = 0; i < o.kRows; ++i) {
    const int row = o.first_row() + o.row(i);
    if (o.first_column() == 0 && row < work.last - work.first) task.lse[row * params.lse.row_stride] = row_lse[i];
  }
  if (kLeavesByRoom && task.leaves_by_room && is_mapped(maps.o, params.o)) {
    // All of the warpgroup's products have read Q: with the next tile's first ones a turn was waited for, if there are both.
    if (!kTakesTurns || is_last) ptx::bar_sync(kHasReadQ + own_group(), kGroup);
    const OPanels room{q_smem(q_room_of(num_tasks)).start};
    tile::Rounded<Element, Output> rounded;
    rounded = o;
    tile::store(room, rounded, o.warp_row());
    ptx::fence_proxy_async();
    __syncwarp();
#pragma unroll
    for (int panel = 0; panel < OPanels::kPanels && o.warp_row() < work.last - work.first; ++panel)
      ptx::tma_store_5d(&maps.o.map, room.panel(panel).address(o.warp_row(), 0), panel * OPanels::kPanelWidth,
                        work.first + o.warp_row(), task.o_at.x, task.o_at.y, task.o_at.z);
    ptx::bulk_commit();
  } else {
    const auto all = matrix<Element>(params.o, work.place, work.place.head, 0, params.shape.value_dim);
    tile::store(all.rows(work.first, work.last), o);
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

// Of a tile's first step; says the step's kind.
CUFLASH_DEVICE int start_first_scores(Scores& s, int group, unsigned num_tasks, unsigned num_keys) {
  tile::await_full(board().k[stage_of(num_keys)], parity_of(num_keys));
  const int kind = board().notes[stage_of(num_keys)].kind;
  tile::start_product_nt(s, q_operand(group, num_tasks), KOperand(k_smem(stage_of(num_keys))));
  tile::wait_for<0>(s);
  return kind;
}

// The same of any step for one warp alone, whose own scores are lost.
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

// See to the maxima of a step's scores. Whether O is to be rescaled.
CUFLASH_DEVICE bool raise_maxima(const attention::Params& params, Scores& s, Softmax& softmax, float (&by)[Softmax::kRows],
                                 unsigned num_tasks, unsigned num_keys, int kind) {
  const Note& note = board().notes[stage_of(num_keys)];
  const double softmax_scale = params.shape.softmax_scale;
  if (Softmax::turns(softmax_scale)) Softmax::turn(s, softmax_scale);
  if (!(kind & Note::kWhole))
    attention::mask_rows<config::kIsListed>(s, note.step, [&](int row) {
      const Task& task = board().tasks[task_of(num_tasks)];
      auto seen = task.is_of_band ? attention::Seen{task.band.lo + row, task.band.hi + row, nullptr, 0}
                                  : attention::seen_by_row(params, task.work, note.step, row);
      seen.lo = max(seen.lo, note.start);
      return seen;
    });
  tile::arrive(board().k[stage_of(num_keys)].empty);
  if ((kind & Note::kLast) != 0 && kQRooms == 1) tile::arrive(board().q[0].empty);
  return softmax.raise(s, board().softmax_scale_log2, by);
}

// The weights of a step, of which scores are left in their place.
CUFLASH_DEVICE void make_weights(Weights& p, Scores& s, Softmax& softmax, Output& o, bool has_risen,
                                 const float (&by)[Softmax::kRows]) {
  if (has_risen) Softmax::rescale(o, by);
  if (softmax.is_large) softmax.take_off(s);
  softmax.weigh(s, board().softmax_scale_log2);
  p = s;
}

// O has the values of the keys before.
CUFLASH_DEVICE void await_sum(Output& o, unsigned num_keys) {
  tile::wait_for<0>(o);
  if (num_keys > 0) tile::arrive(board().v[stage_of(num_keys - 1)].empty);
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
  CUFLASH_DEVICE int start_products(Scores& s, Output& o, const Weights& p, unsigned num_keys) const {
    if (!has_k_) tile::await_full(board().k[stage_of(num_keys)], parity_of(num_keys));
    if (!has_v_) tile::await_full(board().v[stage_of(num_keys - 1)], parity_of(num_keys - 1));
    const int kind = board().notes[stage_of(num_keys)].kind;
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

// Most steps are plain: they leave maxima as they are, and look at none. False, and scores are lost, where weights come out too
// large; those of the next step are looked at too then.
CUFLASH_DEVICE bool weigh_plain_step(Scores& s, Output& o, Softmax& softmax, unsigned num_keys) {
  if (!softmax.weigh_unseen(s, board().softmax_scale_log2)) return false;
  tile::arrive(board().k[stage_of(num_keys)].empty);
  tile::wait_for<0>(o);
  tile::arrive(board().v[stage_of(num_keys - 1)].empty);
  return true;
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
    int kind = start_first_scores(s, group, num_tasks, num_keys);
    bool is_plain = false;
    for (bool is_first = true;; is_first = false) {
      const bool is_last = kind & Note::kLast, is_done = is_plain && weigh_plain_step(s, o, softmax, num_keys);
      if (is_done) {
        p = s;
      } else {
        float by[Softmax::kRows];
        if (is_plain) remake_scores(s, num_tasks, num_keys);
        const bool has_risen = raise_maxima(params, s, softmax, by, num_tasks, num_keys, kind);
        tile::wait_for<0>(o);
        if (!is_first) tile::arrive(board().v[stage_of(num_keys - 1)].empty);
        make_weights(p, s, softmax, o, has_risen, by);
      }
      ++num_keys;
      if (is_last) break;
      kind = Operands(group, num_tasks, num_keys).start_products(s, o, p, num_keys);
      is_plain = !ptx::opaque((~kind & Note::kPlain) | (is_plain && !is_done) | softmax.must_look);
      tile::wait_for<1>(s);
    }
    add_last_values(o, p, num_keys);
    write_results(params, maps, num_tasks, softmax, o, true);
  }
}

// With room for Q of two tiles, scores of the next tile's first step are made under the last step of this one, and its
// results are written once the next tile has its first weights.
CUFLASH_DEVICE void consume_in_two_rooms(const attention::Params& params, const attention::TensorMaps& maps, int group) {
  unsigned num_keys = 0, num_tasks = 0;
  if (!await_tile(0)) return;
  Softmax softmax, finished;
  Output o;
  Scores s;
  Weights p;
  o.fill(0);
  int kind = start_first_scores(s, group, 0, 0);
  bool is_first = false;  // of another tile than the first
  bool is_plain = false;
  while (true) {
    Operands next;
    // Plain steps have code of their own that is in one piece: where it jumps, it waits for instructions.
    const bool is_done = is_plain && weigh_plain_step(s, o, softmax, num_keys);
    if (is_done) {
      ++num_keys;
      next = Operands(group, num_tasks, num_keys);
      p = s;
    } else {
      const bool is_last = kind & Note::kLast;
      float by[Softmax::kRows];
      if (is_plain) remake_scores(s, num_tasks, num_keys);
      const bool has_risen = raise_maxima(params, s, softmax, by, num_tasks, num_keys, kind);
      await_sum(o, num_keys);
      if (is_first) {
        write_results(params, maps, num_tasks - 1, finished, o, false);
        o.fill(0);
      }
      make_weights(p, s, softmax, o, has_risen && !is_first, by);
      if (is_first) leave_queries(num_tasks - 1);
      ++num_keys;
      is_first = is_last;
      if (is_last) {
        if (!await_tile(++num_tasks)) break;
        finished = softmax;
        softmax = Softmax();
      }
      next = Operands(group, num_tasks, num_keys);
    }
    kind = next.start_products(s, o, p, num_keys);
    // Before scores are waited for.
    is_plain = !ptx::opaque((~kind & Note::kPlain) | (is_plain && !is_done) | softmax.must_look);
    tile::wait_for<1>(s);
  }
  add_last_values(o, p, num_keys);
  write_results(params, maps, num_tasks - 1, softmax, o, true);
  leave_queries(num_tasks - 1);
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
      ptx::mbarrier_init(ptx::shared_address(&told.full), 1);
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
    else if (warp == kLooksUp) look_up(params);
  } else {
    if constexpr (kMovesRegisters) ptx::setmaxnreg_inc<kConsumerRegisters>();
    consume(params, maps, group);
  }
}
