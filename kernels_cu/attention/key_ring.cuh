#pragma once
#include <attention/fragments.cuh>
#include <attention/mma_operands.cuh>
#include <attention/sink.cuh>
#include <attention/tensor_maps.cuh>
#include <tile/rooms.cuh>

// What passes share on Hopper that keep a tile of queries and walk the keys it visits: one warpgroup of a block brings Q, and
// dO if the kernel says so (kBringsDo, a constant of its own before this), K and V into shared memory, step after step and
// tile after tile; others multiply them, 64 rows of queries each. Blocks go on to further tiles until none is left.
namespace cuflash {

using config::kMinBlocks;
using config::kNumStages;

constexpr int kGroup = 128;  // threads of a warpgroup
constexpr int kConsumers = kBlockQ / 64;
constexpr bool kIsSmall = config::kIsListed && kConsumers == 1;  // other blocks of the multiprocessor work meanwhile
constexpr int kQRooms = kHeadDim <= 128 && kValueDim <= 128 && !kIsSmall && !kBringsDo ? 2 : 1;
constexpr int kTasks = 4;  // tiles known of: looked up, brought, multiplied, and written
// Whether a block asks for its next tile with a tile's first step, not with its last: what a list says of it comes later.
constexpr bool kAsksEarly = config::kIsListed && kHeadDim <= 128 && kValueDim <= 128;

using QPanels = tile::PanelTile<Element, kBlockQ, kHeadDim>;
using KPanels = tile::PanelTile<Element, kBlockKv, kHeadDim>;
using VPanels = tile::PanelTile<Element, kBlockKv, kValueDim>;
CUFLASH_DEVICE QPanels q_smem(int room) { return {room * QPanels::kBytes}; }
CUFLASH_DEVICE KPanels k_smem(int stage) { return {kQRooms * QPanels::kBytes + stage * KPanels::kBytes}; }
CUFLASH_DEVICE VPanels v_smem(int stage) { return {k_smem(kNumStages).start + stage * VPanels::kBytes}; }
constexpr int kAfterValues = kQRooms * QPanels::kBytes + kNumStages * (KPanels::kBytes + VPanels::kBytes);
using DoPanels = tile::PanelTile<Element, kBlockQ, kValueDim>;
CUFLASH_DEVICE DoPanels do_smem(int room) { return {kAfterValues + room * DoPanels::kBytes}; }
constexpr int kBoard = kAfterValues + (kBringsDo ? kQRooms * DoPanels::kBytes : 0);

constexpr int kBoxRows = 16;  // a warp's

// What is known of a tile, and of a step.
enum Operand { kQ, kK, kV, kDo };  // in the order of TensorMaps
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
  tile::InStack at[kV + 1 + kBringsDo];  // of operands
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

CUFLASH_DEVICE bool leads() { return tile::number_in_warp() == 0; }

// By the whole warp: threads that wait for the first one alone can keep it from going on.
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
  else if constexpr (kOperand == kV) return tile::Panels(v_smem(stage));
  else return tile::Panels(do_smem(stage));
}

// Fill an operand's room, which is empty, with rows first <= x < last. `clears` asks for zeros past them. By a warp.
template <Operand kOperand>
CUFLASH_DEVICE void fill(const attention::Params& params, const attention::TensorMaps& maps, const tile::Room& room,
                         int stage, const Task& task, int first, int last, bool clears) {
  const attention::Mapped& map = (&maps.q)[kOperand];
  const attention::Matrices& matrices = kOperand == kDo ? params.do_ : (&params.q)[kOperand];
  if (attention::is_mapped(map, matrices) && !clears) {
    if (leads()) tile::start_copies(panels_of<kOperand>(stage), map, task.at[kOperand], first, room.full);
    else if (tile::number_in_warp() < tile::kArrivals) ptx::mbarrier_arrive(ptx::shared_address(&room.full));
    return;
  }
  constexpr bool kIsOfQueries = kOperand == kQ || kOperand == kDo, kHasValueDim = kOperand == kV || kOperand == kDo;
  const int head = kIsOfQueries ? task.work.place.head : task.kv_head;
  const int num_columns = kHasValueDim ? params.shape.value_dim : params.shape.head_dim;
  const auto all = attention::matrix<Element>(matrices, task.work.place, head, 0, num_columns);
  tile::copy<32>(panels_of<kOperand>(stage), all.rows(first, last), tile::number_in_warp(), [](int) { return true; });
  tile::arrive(room.full);
}

// Queries without a key, of which nobody hears: what the kernel writes of them. By a warp.
CUFLASH_DEVICE void write_nothing(const attention::Params& params, const attention::WorkTile& work,
                                  attention::SinkArgument sink);

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
CUFLASH_DEVICE void look_up(const attention::Params& params, const attention::TensorMaps& maps,
                            attention::SinkArgument sink) {
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
        write_nothing(params, work, sink);
        continue;
      }
    }
    Task& task = board().tasks[task_of(num_tasks)];
    if (!is_end && tile::number_in_warp() < kConsumers)
      task.spans[tile::number_in_warp()] = span_of(params, work, 64 * tile::number_in_warp());
    if (leads()) {
      task.work = work;
      task.reach = reach;
      task.is_end = is_end;
      task.kv_head = work.place.head / params.shape.group_size;
      task.at[kQ] = in_stack(params.q, work.place, work.place.head);
      task.at[kK] = in_stack(params.k, work.place, task.kv_head);
      task.at[kV] = in_stack(params.v, work.place, task.kv_head);
      if constexpr (kBringsDo) task.at[kDo] = in_stack(params.do_, work.place, work.place.head);
      if constexpr (!kBringsDo) {
        const int num_rows = work.last - work.first;
        task.results = {&matrix<float>(params.lse, work.place, work.place.head, 0, 1).at(work.first, 0),
                        num_rows,
                        (num_rows % kBoxRows == 0 || work.last == params.shape.seqlen_q) &&
                            params.shape.value_dim % tile::kChunkOf<Element> == 0 && is_mapped(maps.o, params.o),
                        work.first,
                        in_stack(params.o, work.place, work.place.head)};
      }
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
  const bool turns = !kBringsDo && attention::LazySoftmax<2>::turns(params.shape.softmax_scale);  // of P its exponent does
  return (is_whole && !turns) * Note::kAsTheyAre + is_last * Note::kLast + ends_tile * Note::kEndsTile;
}

// Whether rows past a step, which may be anything, must be zeros: 0 times that is not 0.
CUFLASH_DEVICE bool ends_early(const attention::Step& step, int length) {
  return step.stop - step.start < kBlockKv && step.stop < length;
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
      if constexpr (kBringsDo) tile::arrive(q.full);
      return tile::arrive(q.full);
    }
    Steps<kBlockKv, OverKeys, Listed> steps(params, task.reach);
    Step step;
    for (bool is_first = true; steps.next(step); is_first = false) {
      const int stage = stage_of(num_keys), start = step.start;
      const tile::Room& k = board().k[stage];
      const bool is_wider = widen<kBlockKv, config::kIsListed>(step, task.reach, params.shape.seqlen_kv);
      const bool ends_tile = !steps.has_next();
      const int kind = kind_of(params, step, task.spans[min(tile::number_in_warp(), kConsumers - 1)], is_wider, ends_tile);
      if (kAsksEarly ? is_first : ends_tile) tile::arrive(board().told[task_of(num_tasks + 1)].empty);
      await_room(k, parity_of(num_keys));
      Note& note = board().notes[stage];
      if (tile::number_in_warp() < kConsumers) note.kinds[tile::number_in_warp()] = kind;
      if (leads()) {
        note.step = step;
        note.start = start;
      }
      __syncwarp();
      fill<kK>(params, maps, k, stage, task, step.start, step.stop, kBringsDo && ends_early(step, params.shape.seqlen_kv));
      ++num_keys;
      if (!is_first) continue;
      await_room(q, q_parity_of(num_tasks));
      fill<kQ>(params, maps, q, q_stage, task, task.work.first, task.work.last, false);
      if constexpr (kBringsDo) fill<kDo>(params, maps, q, q_stage, task, task.work.first, task.work.last, false);
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
      const bool clears = ends_early(step, length);
      await_room(board().v[stage], parity_of(num_values));
      fill<kV>(params, maps, board().v[stage], stage, task, step.start, step.stop, clears);
      ++num_values;
    }
    tile::arrive(board().told[task_of(num_tasks)].empty);
  }
}

// ---- the consumers ----

// Wait for a tile. False where none is left.
CUFLASH_DEVICE bool await_tile(unsigned num_tasks) {
  tile::await_full(board().q[q_room_of(num_tasks)], q_parity_of(num_tasks));
  return !board().tasks[task_of(num_tasks)].is_end;
}

// A step's kind, for a warpgroup.
CUFLASH_DEVICE int kind_for(int group, unsigned num_keys) {
  return board().notes[stage_of(num_keys)].kinds[group % kConsumers];
}

// Set scores that masks hide in a step, and those of keys that were the last step's, to -inf; those of gradients to
// `masked_score`.
template <class Tile>
CUFLASH_DEVICE void mask_step(const attention::Params& params, Tile& s, const Task& task, const Note& note) {
  const float hidden = kBringsDo ? attention::masked_score() : ptx::negative_infinity<float>();
  if (!config::kIsListed && task.is_of_band) return attention::mask_band(s, note.step, hidden, task.band, note.start);
  attention::mask_rows<config::kIsListed>(s, note.step, hidden, [&](int row) {
    auto seen = attention::seen_by_row(params, task.work, note.step, row);
    seen.lo = max(seen.lo, note.start);
    return seen;
  });
}

// ---- all ----

// By one thread, before all else.
CUFLASH_DEVICE void make_barriers() {
  tile::Room* const rooms = board().q;
  for (int i = 0; i < kQRooms + 2 * kNumStages; ++i) {
    ptx::mbarrier_init(ptx::shared_address(&rooms[i].full), (kBringsDo && i < kQRooms ? 2 : 1) * tile::kArrivals);
    ptx::mbarrier_init(ptx::shared_address(&rooms[i].empty), 4 * kConsumers * tile::kArrivals);
  }
  for (const tile::Room& told : board().told) {
    ptx::mbarrier_init(ptx::shared_address(&told.full), tile::kArrivals);
    ptx::mbarrier_init(ptx::shared_address(&told.empty), 2 * tile::kArrivals);
  }
  ptx::mbarrier_init_fence();
}

// By the producers.
CUFLASH_DEVICE void produce(const attention::Params& params, const attention::TensorMaps& maps,
                            attention::SinkArgument sink) {
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  if (warp == kBringsKeys) bring_keys(params, maps);
  else if (warp == kBringsValues) bring_values(params, maps);
  else if (warp == kLooksUp) look_up(params, maps, sink);
}

}  // namespace cuflash
