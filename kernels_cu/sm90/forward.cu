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
constexpr int kQRooms = kHeadDim <= 128 && kValueDim <= 128 ? 2 : 1;
constexpr int kTasks = 2;  // results of a tile are written after Q of the next one was asked for
constexpr bool kTakesTurns = kConsumers > 1;
constexpr bool kMovesRegisters = kConsumers > 1 || kMinBlocks > 1;
constexpr int kProducerRegisters = kConsumers == 3 ? 32 : kValueDim > 128 && kBlockKv > 64 ? 40 : 56;
constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : kConsumers == 2 ? (504 - kProducerRegisters) / 2 : 200;
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
constexpr bool kLeavesByRoom =
    kQRooms > 1 && kValueDim <= kHeadDim && OPanels::kPanelWidth == QPanels::kPanelWidth;

// What the producer says of a tile, and of a step.
struct Task {
  attention::WorkTile work;
  int is_end;
};
struct Note {
  attention::Step step;
  int is_whole, is_last;
};

// What is brought, in the order of Params and TensorMaps; kResults of a tile without a step are written; kNothing is the
// last that helpers are asked for.
enum Operand { kQ, kK, kV, kResults, kNothing };
struct Job {
  Operand operand;
  int stage;
  int first, last;  // rows
};

struct Board {
  tile::Room q[kQRooms], k[kNumStages], v[kNumStages];
  tile::Room jobs;  // full of one for the helpers, empty once it is done
  Task tasks[kTasks];
  Note notes[kNumStages];
  float softmax_scale_log2;  // consumers' registers are for accumulators
  // The producer's own, whose registers are few: this tile's, and the next one's.
  int round, num_tiles;
  attention::WorkTile work, next_work;
  attention::Reach reach, next_reach;
  int kv_head, has_next;
  tile::InStack at[kResults];  // of operands
  Job job;
};
CUFLASH_DEVICE Board& board() { return *reinterpret_cast<Board*>(ptx::dynamic_shared<unsigned char>() + kBoard); }

// The room of a ring that the count-th tile has, and the parity of its phases.
CUFLASH_DEVICE int stage_of(unsigned count) { return count % kNumStages; }
CUFLASH_DEVICE int parity_of(unsigned count) { return count / kNumStages % 2; }
CUFLASH_DEVICE int q_room_of(unsigned count) { return count % kQRooms; }
CUFLASH_DEVICE int q_parity_of(unsigned count) { return count / kQRooms % 2; }

// ---- the producer ----

// Its first warp says what is to be brought, and has it copied by the tensor memory accelerator, or where that cannot by
// the other warps.
constexpr int kHelpers = kGroup - 32;
constexpr int kTurns = 1, kHasReadQ = 4;  // names of barriers, one for each warpgroup of consumers

CUFLASH_DEVICE bool leads() { return threadIdx.x == 0; }

// By the whole warp: lanes that wait for the first one alone can keep it from going on. What is said anew, all have read.
CUFLASH_DEVICE void await_room(const tile::Room& room, int parity) {
  tile::await_empty(room, parity);
  __syncwarp();
}

// How an operand's room is made up. Of constants, and the same for all where head and value dim are alike.
CUFLASH_DEVICE tile::Panels panels_of(Operand operand, int stage) {
  return {operand == kQ ? q_smem(stage).start : operand == kK ? k_smem(stage).start : v_smem(stage).start,
          operand == kQ ? kBlockQ : kBlockKv, operand == kV ? kValueDim : kHeadDim,
          operand == kV ? VPanels::kPanelWidth : KPanels::kPanelWidth};
}

CUFLASH_DEVICE int head_of(Operand operand) { return operand == kQ ? board().work.place.head : board().kv_head; }

// Of queries without a key: no consumer hears of them.
CUFLASH_DEVICE void write_nothing(const attention::Params& params, const attention::WorkTile& work) {
  using namespace attention;
  const int length = params.shape.seqlen_q, num_columns = params.shape.value_dim;
  const auto lse = matrix<float>(params.lse, work.place, work.place.head, length, 1);
  const auto o = matrix<Element>(params.o, work.place, work.place.head, length, num_columns);
#pragma unroll 1
  for (int row = work.first; row < work.last; ++row) {
    if (threadIdx.x == 32) lse.at(row, 0) = ptx::negative_infinity<float>();
#pragma unroll 1
    for (int column = threadIdx.x - 32; column < num_columns; column += kHelpers) o.at(row, column) = {};
  }
}

CUFLASH_DEVICE void help(const attention::Params& params) {
  for (unsigned num_jobs = 0;; ++num_jobs) {
    tile::await_full(board().jobs, num_jobs % 2);
    const Job& job = board().job;
    if (job.operand == kNothing) return;
    if (job.operand == kResults) {
      write_nothing(params, board().work);
      tile::arrive(board().jobs.empty);
      continue;
    }
    const int num_columns = job.operand == kV ? params.shape.value_dim : params.shape.head_dim;
    const auto all = attention::matrix<Element>((&params.q)[job.operand], board().work.place, head_of(job.operand), 0,
                                                num_columns);
    tile::copy<kHelpers>(panels_of(job.operand, job.stage), all.rows(job.first, job.last), threadIdx.x - 32,
                         [](int) { return true; });
    tile::arrive(board().jobs.empty);
  }
}

// Have the helpers do a job, and wait until it is done. By the whole warp, both.
CUFLASH_DEVICE void hand_over(const Job& job) {
  if (!leads()) return;
  board().job = job;
  ptx::mbarrier_arrive(ptx::shared_address(&board().jobs.full));
}
CUFLASH_DEVICE void await_job(unsigned& num_jobs) { await_room(board().jobs, ++num_jobs % 2); }

// Fill an operand's room, which is empty, with rows first <= x < last. `clears` asks for zeros past them.
template <Operand kOperand>
CUFLASH_DEVICE void fill(const attention::Params& params, const attention::TensorMaps& maps, const tile::Room& room,
                         int stage, int first, int last, bool clears, unsigned& num_jobs) {
  const attention::Mapped& map = (&maps.q)[kOperand];
  const attention::Matrices& matrices = (&params.q)[kOperand];
  if (attention::is_mapped(map, matrices) && !clears) {
    if (leads()) tile::start_copies(panels_of(kOperand, stage), map, board().at[kOperand], first, room.full);
    return;
  }
  hand_over({kOperand, stage, first, last});
  await_job(num_jobs);
  if (leads()) ptx::mbarrier_arrive(ptx::shared_address(&room.full));
}

// Look for the next tile that is not empty, while this one's steps are worked on.
CUFLASH_DEVICE void look_ahead(const attention::Params& params) {
  using namespace attention;
  Board& own = board();
  if (!leads()) return;
  do {
    const int number = number_in_round(own.round++);
    own.has_next = number < own.num_tiles;
    if (!own.has_next) return;
    own.next_work = query_tile_at<Listed>(params, kBlockQ, number);
  } while (own.next_work.is_empty());
  own.next_reach = reach_of_queries(params, own.next_work);
}

// Go on to it. False where none is left.
CUFLASH_DEVICE bool go_on(const attention::Params& params) {
  Board& own = board();
  __syncwarp();
  if (leads() && own.has_next) {
    own.work = own.next_work;
    own.reach = own.next_reach;
    own.kv_head = own.work.place.head / params.shape.group_size;
    for (int x = kQ; x <= kV; ++x)
      own.at[x] = in_stack((&params.q)[x], own.work.place, head_of(static_cast<Operand>(x)));
  }
  __syncwarp();
  return own.has_next;
}

CUFLASH_DEVICE void produce(const attention::Params& params, const attention::TensorMaps& maps) {
  using namespace attention;
  unsigned num_keys = 0, num_values = 0, num_tasks = 0;  // tiles brought
  unsigned num_jobs = 0;                                 // done by helpers
  const auto bring_keys = [&](const Step& step, bool is_last) {
    const int stage = stage_of(num_keys);
    tile::Room& room = board().k[stage];
    await_room(room, parity_of(num_keys));
    if (leads()) board().notes[stage] = {step, is_whole<kBlockKv>(step), is_last};
    fill<kK>(params, maps, room, stage, step.start, step.stop, false, num_jobs);
    ++num_keys;
  };
  const auto bring_values = [&](int first, int last) {
    const int stage = stage_of(num_values);
    tile::Room& room = board().v[stage];
    await_room(room, parity_of(num_values));
    // What the accelerator reads past a step may be anything, and 0 times that is not 0.
    fill<kV>(params, maps, room, stage, first, last, last - first < kBlockKv && last < params.shape.seqlen_kv,
             num_jobs);
    ++num_values;
  };
  const auto bring_queries = [&](const WorkTile& work) {
    const int stage = q_room_of(num_tasks);
    tile::Room& room = board().q[stage];
    await_room(room, q_parity_of(num_tasks));
    if (leads()) board().tasks[num_tasks % kTasks] = {work, 0};
    fill<kQ>(params, maps, room, stage, work.first, work.last, false, num_jobs);
    ++num_tasks;
  };

  if (leads()) {
    board().round = 0;
    board().num_tiles = num_query_tiles<Listed>(params, kBlockQ);
  }
  look_ahead(params);
  while (go_on(params)) {
    Steps<kBlockKv, OverKeys, Listed> steps(params, board().reach);
    Step step;
    bool has_step = steps.next(step);
    if (!has_step) {
      hand_over({kResults});
      __syncwarp();  // all have read whether there is a tile
      look_ahead(params);
      await_job(num_jobs);  // the work may change
      continue;
    }
    // K of a step comes before V of the last one, or Q: the order in which they are read.
    int first = 0, last = 0;
    for (int count = 0;; ++count) {
      if (has_step) bring_keys(step, !steps.has_next());
      if (count == 0) bring_queries(board().work);
      else bring_values(first, last);
      if (count == 1) look_ahead(params);  // two steps are on their way, or all
      if (!has_step) break;
      first = step.start;
      last = step.stop;
      has_step = steps.next(step);
    }
  }
  tile::Room& room = board().q[q_room_of(num_tasks)];
  await_room(room, q_parity_of(num_tasks));
  if (leads()) {
    board().tasks[num_tasks % kTasks].is_end = true;
    ptx::mbarrier_arrive(ptx::shared_address(&room.full));
  }
  hand_over({kNothing});
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

// lse and O of a tile, whose room of Q is left then if there are two.
CUFLASH_DEVICE void write_results(const attention::Params& params, unsigned num_tasks, const Softmax& softmax, Output& o,
                                  bool is_last) {
  using namespace attention;
  const WorkTile& work = board().tasks[num_tasks % kTasks].work;
  const Place& place = work.place;
  const int length = params.shape.seqlen_q;
  const auto lse = matrix<float>(params.lse, place, place.head, length, 1).rows(work.first, work.last);
  const int first_row = o.first_row(), first_column = o.first_column();
  float row_lse[Output::kRows];
  softmax.finalize(o, board().softmax_scale_log2, row_lse);
#pragma unroll
  for (int i = 0; i < o.kRows; ++i)
    if (first_column == 0 && first_row + o.row(i) < lse.num_rows) lse.at(first_row + o.row(i), 0) = row_lse[i];
  const auto rows = matrix<Element>(params.o, place, place.head, length, params.shape.value_dim).rows(work.first, work.last);
  if (kLeavesByRoom && tile::has_chunks(rows) && rows.num_columns == kValueDim) {
    // All of the warpgroup's products have read Q: with the next tile's first ones a turn was waited for, if there are both.
    if (!kTakesTurns || is_last) ptx::bar_sync(kHasReadQ + own_group(), kGroup);
    const OPanels room{q_smem(q_room_of(num_tasks)).start};
    tile::Rounded<Element, Output> rounded;
    rounded = o;
    tile::store(room, rounded, o.warp_row());
    __syncwarp();
    tile::copy_chunks(rows, room, o.warp_row());
    ptx::fence_proxy_async();
  } else {
    tile::store(rows, o);
  }
  if (kQRooms > 1) tile::arrive(board().q[q_room_of(num_tasks)].empty);
}

// Wait for a tile. False where none is left.
CUFLASH_DEVICE bool await_tile(unsigned num_tasks) {
  tile::await_full(board().q[q_room_of(num_tasks)], q_parity_of(num_tasks));
  return !board().tasks[num_tasks % kTasks].is_end;
}

// Numbers count what a warpgroup has read: tiles of queries, and of keys.
CUFLASH_DEVICE void start_scores(Scores& s, int group, unsigned num_tasks, unsigned num_keys) {
  const tile::RowsAlongSum<QPanels> q(q_smem(q_room_of(num_tasks)), 64 * (group % kConsumers));
  tile::start_product_nt(s, q, tile::RowsAlongSum<KPanels>(k_smem(stage_of(num_keys))));
}

CUFLASH_DEVICE void start_first_scores(Scores& s, int group, unsigned num_tasks, unsigned num_keys) {
  tile::await_full(board().k[stage_of(num_keys)], parity_of(num_keys));
  start_scores(s, group, num_tasks, num_keys);
  tile::wait_for<0>(s);
}

// See to the maxima of a step's scores. Whether O is to be rescaled.
CUFLASH_DEVICE bool raise_maxima(const attention::Params& params, Scores& s, Softmax& softmax, float (&by)[Softmax::kRows],
                                 unsigned num_tasks, unsigned num_keys) {
  const Note& note = board().notes[stage_of(num_keys)];
  const double softmax_scale = params.shape.softmax_scale;
  if (Softmax::turns(softmax_scale)) Softmax::turn(s, softmax_scale);
  if (!note.is_whole)
    attention::mask_scores<config::kIsListed>(s, params, board().tasks[num_tasks % kTasks].work, note.step);
  const bool is_last = note.is_last;
  tile::arrive(board().k[stage_of(num_keys)].empty);
  if (is_last && kQRooms == 1) tile::arrive(board().q[0].empty);
  return softmax.raise(s, board().softmax_scale_log2, by);
}

// The weights of a step, of which scores are left in their place.
CUFLASH_DEVICE void make_weights(Weights& p, Scores& s, Softmax& softmax, Output& o, bool has_risen,
                                 const float (&by)[Softmax::kRows]) {
  if (has_risen) Softmax::rescale(o, by);
  softmax.weigh(s, board().softmax_scale_log2);
  p = s;
}

// Scores of the keys after `num_keys` - 1, whose weights are there, under which O gets their values.
CUFLASH_DEVICE void start_products(Scores& s, Output& o, const Weights& p, int group, unsigned num_tasks,
                                   unsigned num_keys) {
  tile::await_full(board().k[stage_of(num_keys)], parity_of(num_keys));
  tile::await_full(board().v[stage_of(num_keys - 1)], parity_of(num_keys - 1));
  await_turn();
  start_scores(s, group, num_tasks, num_keys);
  tile::start_sum_nn(o, p, tile::RowsAcrossSum<VPanels>(v_smem(stage_of(num_keys - 1))));
  pass_turn();
  tile::wait_for<1>(s);
}

// O gets the last values.
CUFLASH_DEVICE void add_last_values(Output& o, const Weights& p, unsigned num_keys) {
  tile::await_full(board().v[stage_of(num_keys - 1)], parity_of(num_keys - 1));
  tile::start_sum_nn(o, p, tile::RowsAcrossSum<VPanels>(v_smem(stage_of(num_keys - 1))));
  tile::wait_for<0>(o);
  tile::arrive(board().v[stage_of(num_keys - 1)].empty);
}

// Tile after tile.
CUFLASH_DEVICE void consume_in_one_room(const attention::Params& params, int group) {
  unsigned num_keys = 0;
  for (unsigned num_tasks = 0; await_tile(num_tasks); ++num_tasks) {
    Softmax softmax;
    Output o;
    Scores s;
    Weights p;
    o.fill(0);
    start_first_scores(s, group, num_tasks, num_keys);
    for (bool is_first = true;; is_first = false) {
      const bool is_last = board().notes[stage_of(num_keys)].is_last;
      float by[Softmax::kRows];
      const bool has_risen = raise_maxima(params, s, softmax, by, num_tasks, num_keys);
      tile::wait_for<0>(o);
      if (!is_first) tile::arrive(board().v[stage_of(num_keys - 1)].empty);
      make_weights(p, s, softmax, o, has_risen, by);
      ++num_keys;
      if (is_last) break;
      start_products(s, o, p, group, num_tasks, num_keys);
    }
    add_last_values(o, p, num_keys);
    write_results(params, num_tasks, softmax, o, true);
  }
}

// With room for Q of two tiles, scores of the next tile's first step are made under the last step of this one, and its
// results are written once the next tile has its first weights.
CUFLASH_DEVICE void consume_in_two_rooms(const attention::Params& params, int group) {
  unsigned num_keys = 0, num_tasks = 0;
  if (!await_tile(0)) return;
  Softmax softmax, finished;
  Output o;
  Scores s;
  Weights p;
  o.fill(0);
  start_first_scores(s, group, 0, 0);
  bool is_first = false;  // of another tile than the first
  while (true) {
    const bool is_last = board().notes[stage_of(num_keys)].is_last;
    float by[Softmax::kRows];
    const bool has_risen = raise_maxima(params, s, softmax, by, num_tasks, num_keys);
    tile::wait_for<0>(o);
    if (num_keys > 0) tile::arrive(board().v[stage_of(num_keys - 1)].empty);
    if (is_first) {
      write_results(params, num_tasks - 1, finished, o, false);
      o.fill(0);
    }
    make_weights(p, s, softmax, o, has_risen && !is_first, by);
    ++num_keys;
    is_first = is_last;
    if (is_last) {
      if (!await_tile(++num_tasks)) break;
      finished = softmax;
      softmax = Softmax();
    }
    start_products(s, o, p, group, num_tasks, num_keys);
  }
  add_last_values(o, p, num_keys);
  write_results(params, num_tasks - 1, softmax, o, true);
}

CUFLASH_DEVICE void consume(const attention::Params& params, int group) {
  if (group == kConsumers) pass_turn();
  if constexpr (kQRooms == 1) consume_in_one_room(params, group);
  else consume_in_two_rooms(params, group);
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
      ptx::mbarrier_init(ptx::shared_address(&rooms[i].full), 1);
      ptx::mbarrier_init(ptx::shared_address(&rooms[i].empty), 4 * kConsumers * tile::kArrivals);
    }
    ptx::mbarrier_init(ptx::shared_address(&board().jobs.full), 1);
    ptx::mbarrier_init(ptx::shared_address(&board().jobs.empty), kHelpers / 32 * tile::kArrivals);
    ptx::mbarrier_init_fence();
    board().softmax_scale_log2 = Softmax::scale_log2(params.shape.softmax_scale);
  }
  __syncthreads();
  if (group == 0) {
    if constexpr (kMovesRegisters) ptx::setmaxnreg_dec<kProducerRegisters>();
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    if (warp == 0) produce(params, maps);
    else help(params);
  } else {
    if constexpr (kMovesRegisters) ptx::setmaxnreg_inc<kConsumerRegisters>();
    consume(params, group);
  }
}
