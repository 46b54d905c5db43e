#pragma once
#include <attention/block_iterator.cuh>
#include <attention/score_function.cuh>
#include <sm90/dq_semaphore.cuh>
#include <sm90/epilogue_gradient.cuh>
#include <sm90/query_stats.cuh>
#include <sm90/staged_array.cuh>
#include <sm90/tensor_maps.cuh>
#include <tile/pipeline.cuh>

// What backward passes on Hopper share: a block keeps a tile of keys and walks the queries that visit it, over the query
// heads that share it; then it goes on to a tile that no block has, whose first queries are brought meanwhile. One
// warpgroup brings Q, dO and what is known of each query; two multiply, or one, where dQ has a kernel of its own.
namespace cuflash {

using config::kNumStages;

constexpr int kWarpgroupThreads = 128;  // threads of a warpgroup
constexpr bool kMakesDq = config::kDqAtomicWidth > 0;
constexpr int kNumConsumers = kMakesDq ? 2 : 1;
constexpr int kRegistersPerThread = kMakesDq ? 168 : 128;  // that a block starts with, and moves
constexpr int kProducerRegisters = kMakesDq || kHeadDim > 64 || kValueDim > 64 ? 24 : 40;
constexpr int kConsumerRegisters = kMakesDq ? 240 : 256 - kProducerRegisters;
static_assert(kProducerRegisters + kNumConsumers * kConsumerRegisters <= kRegistersPerThread * (1 + kNumConsumers),
              "else groups wait for ever");
static_assert(kThreads == kWarpgroupThreads * (1 + kNumConsumers), "a producer, and consumers");
static_assert(kNumStages >= 2, "Q of a step is read while scores of the next are made");

// Names of barriers; a warpgroup of consumers has one of each kind that says Ds or Dq.
constexpr int kConsumersSync = 1, kDsEmpty = 2, kDqEmpty = 4, kDqFull = 6;

// Up to 128 columns a warpgroup has rows of dK and dV, and only dS goes through shared memory; beyond, it has columns of
// them, and of P and dS as much goes there as both need.
constexpr bool kIsWide = kHeadDim > 128 || kValueDim > 128;
// Threads that say and copy what is brought: the last warp of theirs adds dQ up, where that goes through shared memory.
constexpr int kProducerThreads = kIsWide ? kWarpgroupThreads : kWarpgroupThreads - 32,
    kCopyThreads = kProducerThreads - 32;
// Blocks finish dQ: where tiles of keys see all in order (sm90/dq_semaphore.cuh); or, of a list, whoever comes last.
constexpr bool kFinishesDqInOrder = config::kFusesDqEpilogue && !config::kIsListed;
static_assert(!kIsWide || kMakesDq, "who makes dQ not has all of dK and dV in registers");
static_assert(!config::kFusesDqEpilogue || (kMakesDq && !kIsWide), "dQ goes through its room");
// Up to 128 columns P's minimum with 1 is left out where no lse is large.
constexpr bool kSkipsClamp = !kIsWide;
constexpr int kNumScoreTiles = kIsWide ? 3 : kMakesDq ? 1 : 0;  // P of even and of odd steps and dS; or dS

using SmemK = tile::WgmmaTile<Element, kBlockKv, kHeadDim, kIsWide && kHeadDim % 128 != 0 ? 32 : tile::panel_width(kHeadDim)>;
using SmemV = tile::WgmmaTile<Element, kBlockKv, kValueDim>;
using SmemQ = tile::WgmmaTile<Element, kBlockQ, kHeadDim>;
using SmemDo = tile::WgmmaTile<Element, kBlockQ, kValueDim>;
constexpr int kScoreBytes = 2 * kBlockQ * kBlockKv;
// of a block's shared memory; what of it is no tile
constexpr int kMaxSharedBytes = 227 << 10, kStorageBytes = 5 << 10;
constexpr int kTileBytes = SmemK::kBytes + SmemV::kBytes + kNumStages * SmemQ::kBytes + kNumScoreTiles * kScoreBytes;
// Stages of dO: one where no more find room.
constexpr int kDoStages = !kIsWide || kTileBytes + kNumStages * SmemDo::kBytes + kStorageBytes <= kMaxSharedBytes
    ? kNumStages : 1;
static_assert(kDoStages == kNumStages || kNumStages == 2, "of two stages, the one says whose turn the other's phase is");
// Consumers are told where each step stands: a score function, or dropout, depends on it.
constexpr bool kTellsPlaces = kHasScore || config::kHasDropout;
// Consumers say of dO by itself that they have left it, not only with Q: where it has fewer stages; and at 128 columns, where
// what ptxas makes of all that follows is 5 % faster with it.
constexpr bool kReleasesDo = kDoStages < kNumStages || (!kIsWide && kBlockQ == 64);

constexpr SmemK k_smem{0};
constexpr SmemV v_smem{SmemK::kBytes};
constexpr int kQOffset = v_smem.start + SmemV::kBytes;  // stages of Q, then of dO
constexpr int kDoOffset = kQOffset + kNumStages * SmemQ::kBytes;
constexpr int kScoreOffset = kDoOffset + kDoStages * SmemDo::kBytes;
constexpr int kDqOffset = kScoreOffset + kNumScoreTiles * kScoreBytes;  // a part of dQ for each warpgroup
constexpr int kDqPartBytes = 4 * kBlockQ * kHeadDim / kNumConsumers;
constexpr bool kHasDqWriter = kMakesDq && !kIsWide;  // by way of that room
constexpr int kStorageOffset = kDqOffset + (kHasDqWriter ? kNumConsumers * kDqPartBytes : 0);
CUFLASH_DEVICE SmemQ q_smem(int stage) { return {kQOffset + stage * SmemQ::kBytes}; }
CUFLASH_DEVICE SmemDo do_smem(int stage) { return {kDoOffset + stage * SmemDo::kBytes}; }
CUFLASH_DEVICE int dq_offset(int part) { return kDqOffset + part * kDqPartBytes; }

// What the producer says of a step; in one word what all ask for.
struct StepMessage {
  // Some key of the tile is hidden from some query; K and V are loaded with a tile's first step; no tile is left; some
  // query's lse is large, which is known with its queries. Then the operands that copy warps load, and the phases of the
  // slots of K and V.
  enum Flag {
    kMasked = 1, kLoadsK = 2, kLoadsV = 4, kEndOfWork = 8, kLargeLse = 16,
    kThreadsCopyK = 32, kThreadsCopyV = 64, kThreadsCopyQ = 128, kThreadsCopyDo = 256, kPhaseOfK = 512,
        kPhaseOfV = 1024,
    // as attention::DqSchedule says; the last where DqSemaphoreOp does
    kFinalizesDq = 2048, kStoresDq = 4096, kUsesDqSemaphore = 8192
  };
  int flags;
  int work;  // which
  float* dq_sum;
  attention::DqSemaphoreOp dq;  // where something is waited for, or told
  int* arrivals;                // of its queries, where who comes first stores
  attention::KvBlock block;     // where something is masked or copied, or dQ is finished
  uint32_t nonempty[kNonemptyWords];   // of queries that are copied
  tile::TmaCoords k_coords, v_coords;  // where they are brought

  CUFLASH_DEVICE bool is(Flag which) const { return flags & which; }
};
CUFLASH_DEVICE int k_phase(int flags) { return (flags & StepMessage::kPhaseOfK) != 0; }
CUFLASH_DEVICE int v_phase(int flags) { return (flags & StepMessage::kPhaseOfV) != 0; }

// What is known of the queries of a step, and which keys of the tile each sees, unless consumers need not ask: a bit a key
// in the row of a query, or, where rows of scores are keys, a bit a query in the row of a key.
constexpr int kKeyWords = (kBlockKv + 31) / 32, kQueryWords = kBlockQ / 32;
struct alignas(16) StageQueries {
  QueryStats stats;
  uint32_t row_masks[kIsWide ? kBlockQ : kBlockKv][kIsWide ? kKeyWords : kQueryWords];
};

// The stage that a step has in the rings, and the parity of its phase.
struct PipelineState {
  int stage = 0, phase = 0;

  CUFLASH_DEVICE PipelineState next() const {
    const bool is_last = stage == kNumStages - 1;
    return {is_last ? 0 : stage + 1, phase ^ is_last};
  }
};

// The same of dO, of which there may be one.
CUFLASH_DEVICE int do_stage(const PipelineState& state) { return kDoStages == 1 ? 0 : state.stage; }
CUFLASH_DEVICE int do_phase(const PipelineState& state) { return kDoStages == 1 ? state.stage : state.phase; }

// A tile of keys and a head of queries: where lies what its steps ask for.
struct HeadWork {
  attention::WorkTile tile;
  QueryStats* stats;  // tile after tile
  float* dq_sum;
  tile::TmaCoords q_coords, do_coords;
  int flags;  // of all of its steps
  attention::DqSchedule dq;
};

// What consumers do with dQ of a step: have it added to the sums, or finish it, alone or with the sums of others.
enum class DqFinish : int { kNot, kAlone, kWithSums };

// The number of steps that copy warps and producer may have between them, and one more that the producer works on.
constexpr int kNumHeadWorks = kNumStages + 1;

struct SharedStorage {
  StageQueries queries[kNumStages];
  tile::PipelineSlot k, v, q[kNumStages], d_o[kDoStages];
  uint64_t message_ready[kNumStages];  // copy warps may read the message
  StepMessage messages[kNumStages];
  HeadWork works[kNumHeadWorks];  // of heads that have steps, in turn
  float softmax_scale_log2;  // with a score function, which scales products itself, the scale
  // The producer's own, whose registers are few: whether it has a tile, the parities of the next K and V as a note says them,
  // and how far a head reaches.
  int has_tile, kv_phases;
  attention::VisitRange visit_range;
  DqFinish dq_finish;  // of a step, where the last to come finishes dQ
  uint64_t dq_sum_loaded;  // sums of dQ are in its room
};
CUFLASH_DEVICE SharedStorage& shared() {
  return *reinterpret_cast<SharedStorage*>(ptx::dynamic_shared<unsigned char>() + kStorageOffset);
}

// The step's elements of a captured array, behind all else; they come and go with the step's Q.
using SmemArray = StagedArray<kBlockQ, kBlockKv>;
CUFLASH_DEVICE SmemArray array_smem(int stage) {
  return {kStorageOffset + (static_cast<int>(sizeof(SharedStorage)) + 15) / 16 * 16 + stage * SmemArray::kBytes};
}

// ---- the consumers ----

// Wait for a step, and say its kind. Early: what a consumer asks shared memory for once products have started comes late.
CUFLASH_DEVICE int wait_step(const PipelineState& state) {
  SharedStorage& smem = shared();
  tile::wait_full(smem.q[state.stage], state.phase);
  int flags = smem.messages[state.stage].flags;
  if constexpr (kSkipsClamp) flags |= smem.queries[state.stage].stats.has_large_lse ? StepMessage::kLargeLse : 0;
  // What a score function gives of queries that it hides from all keys does not matter.
  if constexpr (kHasScore) flags |= smem.queries[state.stage].stats.has_empty_rows ? StepMessage::kLargeLse : 0;
  return flags;
}
CUFLASH_DEVICE bool starts_next_tile(int flags) { return flags & (StepMessage::kLoadsV | StepMessage::kEndOfWork); }

// K of another head, where a step brings it, once the last one's products are waited for.
CUFLASH_DEVICE void wait_next_head_k(int flags) {
  if ((flags & (StepMessage::kLoadsK | StepMessage::kLoadsV)) != StepMessage::kLoadsK) return;
  SharedStorage& smem = shared();
  tile::arrive(smem.k.empty);
  tile::wait_full(smem.k, k_phase(flags));
}

// K and V of a tile whose first step has come; and where they are read.
CUFLASH_DEVICE void wait_kv(int flags) {
  SharedStorage& smem = shared();
  tile::wait_full(smem.k, k_phase(flags));
  tile::wait_full(smem.v, v_phase(flags));
}
CUFLASH_DEVICE void release_kv() { tile::arrive(shared().k.empty); }  // V with K

// ---- the producer ----

// Its first warp says what is to be brought and has it copied by the tensor memory accelerator; others find out about a
// step's queries, and copy what the accelerator cannot; the last one may have parts of dQ added.

CUFLASH_DEVICE bool elect_one() { return ptx::elect_one_lane(); }

// The keys of the tile that some query of the head may see. What stands at others must not reach dQ, where it would meet
// a dS of 0.
CUFLASH_DEVICE attention::Interval visible_keys(const attention::Params& params, const attention::WorkTile& work) {
  using namespace attention;
  return {max(work.first, interval(params, work.batch_head, 0).lo),
          min(work.last, interval(params, work.batch_head, params.shape.seqlen_q - 1).hi)};
}

// Whether the room of a step has rows that must be 0: queries without a key, whatever they bring, and rows of the matrix
// past the step. Called by the first warp.
CUFLASH_DEVICE bool has_rows_to_zero(const attention::Params& params, const HeadWork& work,
                                     const attention::KvBlock& block) {
  using namespace attention;
  if (block.stop < min(block.start + kBlockQ, params.shape.seqlen_q)) return true;
  if constexpr (kHasScore)  // it may hide a query from all keys
    if (work.stats[query_tile_number<Listed>(params, block.start, kBlockQ)].has_empty_rows) return true;
  if (block.kind == BlockKind::kFull) return false;
  if (!Listed::has_list(params.work) && params.work.lo == nullptr) {  // of a band, which ends at both ends
    const BatchHead& batch_head = work.tile.batch_head;
    const Interval first = interval(params, batch_head, block.start),
        last = interval(params, batch_head, block.stop - 1);
    return first.lo >= first.hi || last.lo >= last.hi;
  }
  return work.stats[query_tile_number<Listed>(params, block.start, kBlockQ)].has_empty_rows;
}

// Start the copies of an operand, or count on those of a copy warp; other copies bring so many bytes with it.
CUFLASH_DEVICE void load_operand(const tile::TmaBoxes& to, const attention::TensorMapParam& map,
                                 const tile::TmaCoords& at, int first,
                                 const tile::PipelineSlot& slot, bool threads_copy, int extra_bytes = 0) {
  if (threads_copy) ptx::mbarrier_arrive_expect_tx(ptx::shared_address(&slot.full), extra_bytes);
  else tile::tma_load_boxes(to, map, at, first, slot.full, extra_bytes);
}

// Keys that no query sees: consumers do not hear of them. By a warp.
CUFLASH_DEVICE void write_empty_rows(const attention::Params& params, const attention::Matrices& to,
                                     const attention::WorkTile& work, int num_columns) {
  using namespace attention;
  const int head = work.batch_head.head / params.shape.group_size;
  if (to.is_accumulator) tile::clear(matrix<float>(to, work.batch_head, head, work.last, num_columns).rows(work.first,
                                                                                                           work.last));
  else tile::clear(matrix<Element>(to, work.batch_head, head, work.last, num_columns).rows(work.first, work.last));
}

// Go on to a tile, which is noted; false where none is left. Called by the first warp.
CUFLASH_DEVICE bool advance_tile(const attention::Params& params, int work_slot) {
  SharedStorage& smem = shared();
  __syncwarp();
  if (threadIdx.x == 0) {  // an election takes registers, which are few
    const int num_tiles = attention::num_key_tiles<Listed>(params, kBlockKv);
    int number;
    if constexpr (kFinishesDqInOrder) number = attention::next_tile_number_in_order(params, num_tiles);
    else number = smem.has_tile ? attention::next_tile_number(params, num_tiles) : attention::first_tile_number();
    smem.has_tile = number < num_tiles;
    if (smem.has_tile)
      smem.works[ptx::opaque(work_slot)].tile = kFinishesDqInOrder
                                              ? attention::fused_dq_key_tile_at<Listed>(params, kBlockKv, number)
                                              : attention::key_tile_at<Listed>(params, kBlockKv, number);
  }
  __syncwarp();
  return smem.has_tile;
}

// The queries that a tile of keys reaches. Where lengths say it, eight threads search together for each end. Called by the
// first warp.
CUFLASH_DEVICE void find_visit_range(const attention::Params& params, const attention::WorkTile& work) {
  using namespace attention;
  const int end = ptx::thread_index() / 8, number = ptx::thread_index() % 8;  // start, stop, full_start, full_stop
  const int key = end == 0 || end == 3 ? work.first : work.last - 1;
  int first = 0, last = params.shape.seqlen_q;
  if (params.work.lo == nullptr) {
    first = end % 2 == 0 ? rows_ending_by(params, work.batch_head, key)
        : rows_starting_by(params, work.batch_head, key);
  } else {
    while (__any_sync(0xffffffffu, first < last)) {
      const int width = (last - first + 8) / 9, row = first + (number + 1) * width - 1;
      const Interval keys = interval(params, work.batch_head, min(row, params.shape.seqlen_q - 1));
      const bool is_before = row < last && (end % 2 == 0 ? keys.hi : keys.lo) <= key;
      const int num_before = __popc(__ballot_sync(0xffffffffu, is_before) >> 8 * end & 0xff);
      if (num_before < 8) last = min(last, first + (num_before + 1) * width - 1);  // else nobody looked there
      first += num_before * width;
    }
  }
  const auto found = [&](int which) { return __shfl_sync(0xffffffffu, first, 8 * which); };
  VisitRange visit_range{found(0), found(1), found(2), found(3)};
  if (!elect_one()) return;
  find_list_entries(params, work, visit_range);
  shared().visit_range = aligned_to_tiles(params, visit_range, kBlockQ);
}

// Have a tile's steps brought. Called by the first warp.
CUFLASH_DEVICE void produce(const attention::Params& params, const attention::TensorMaps& maps, PipelineState& state,
                            int& work_slot,
                            bool& has_sent_step) {
  using namespace attention;
  SharedStorage& smem = shared();
  const Shape& shape = params.shape;
  bool has_k = false;
  for (int head = 0; head < shape.group_size; head = ptx::opaque(head + 1)) {  // asked at its end: registers are few
    __syncwarp();
    if (head > 0) {
      const int next_work_slot = has_sent_step ? (work_slot + 1) % kNumHeadWorks : work_slot;
      if (elect_one()) {
        smem.works[next_work_slot].tile = smem.works[work_slot].tile;
        ++smem.works[next_work_slot].tile.batch_head.head;
      }
      work_slot = next_work_slot;
    }
    has_sent_step = false;
    __syncwarp();
    HeadWork& head_work = smem.works[work_slot];
    const WorkTile& work = head_work.tile;
    find_visit_range(params, work);
    if (elect_one()) {
      const BatchHead& batch_head = work.batch_head;
      head_work.stats = query_stats(params, batch_head);
      ptx::compiler_barrier();  // registers are few
      if constexpr (kMakesDq) head_work.dq_sum = matrix<float>(params.dq_sum, batch_head, batch_head.head, 0, 0).data;
      head_work.q_coords = tma_coords(params.q, batch_head, batch_head.head);
      head_work.do_coords = tma_coords(params.do_, batch_head, batch_head.head);
      head_work.flags = (work.last - work.first == kBlockKv ? 0 : StepMessage::kMasked) |
                       (has_tensor_map(maps.q, params.q) ? 0 : StepMessage::kThreadsCopyQ) |
                       (has_tensor_map(maps.do_, params.do_) ? 0 : StepMessage::kThreadsCopyDo);
      if constexpr (kFinishesDqInOrder) {
        head_work.dq = dq_schedule<kBlockQ, kBlockKv>(params, work);
        head_work.flags |= (head_work.dq.finishes ? StepMessage::kFinalizesDq : 0) |
            (head_work.dq.stores ? StepMessage::kStoresDq : 0);
      }
    }
    __syncwarp();
    BlockIterator<kBlockQ, OverQBlocks, Listed> blocks(params, smem.visit_range);
    KvBlock block;
    for (bool loads_k = !has_k || params.work.interval_head_stride != 0; blocks.next(block); loads_k = false) {
      const bool zero_fills = has_rows_to_zero(params, head_work, block);
      StepMessage& message = smem.messages[state.stage];
      tile::wait_empty(smem.q[state.stage], state.phase);  // by the whole warp: none misses a phase
      __syncwarp();
      if (elect_one()) {
        if constexpr (kFinishesDqInOrder) {  // before all else, as registers are few
          constexpr int kSemaphoreFlags = StepMessage::kStoresDq | StepMessage::kUsesDqSemaphore;
          DqSchedule& dq = head_work.dq;
          if (block.stop >= dq.next) {
            head_work.flags = (head_work.flags & ~kSemaphoreFlags) | StepMessage::kUsesDqSemaphore |
                (dq.stores ? StepMessage::kStoresDq : 0);
            message.dq = dq.at(block.stop, shape.seqlen_q);
          } else if (head_work.flags & StepMessage::kUsesDqSemaphore) {
            head_work.flags &= ~StepMessage::kUsesDqSemaphore;
          }
        }
        const bool is_full_block = block.kind == BlockKind::kFull && block.stop - block.start == kBlockQ;
        int flags = head_work.flags | smem.kv_phases | (is_full_block ? 0 : StepMessage::kMasked);
        if (zero_fills) flags |= StepMessage::kThreadsCopyQ | StepMessage::kThreadsCopyDo;
        if (loads_k) {
          const Interval keys = visible_keys(params, work);
          const bool threads_copy_k = keys.lo > work.first || keys.hi < min(work.first + kBlockKv, shape.seqlen_kv) ||
                                !has_tensor_map(maps.k, params.k);
          flags |= StepMessage::kLoadsK | (threads_copy_k ? StepMessage::kThreadsCopyK : 0);
          if (!has_k) flags |= StepMessage::kLoadsV |
              (has_tensor_map(maps.v, params.v) ? 0 : StepMessage::kThreadsCopyV);
          message.k_coords = tma_coords(params.k, work.batch_head, work.batch_head.head / shape.group_size);
          message.v_coords = tma_coords(params.v, work.batch_head, work.batch_head.head / shape.group_size);
        }
        message.flags = flags;
        message.work = work_slot;
        const int number = query_tile_number<Listed>(params, block.start, kBlockQ);
        if constexpr (kMakesDq) message.dq_sum = head_work.dq_sum + number * params.dq_sum.row_stride;
        QueryStats& stats = head_work.stats[number];
        if constexpr (kFirstArrivalStoresDq && kMakesDq) message.arrivals = &stats.arrivals.count;
        if (kLastArrivalFinishesDq || kTellsPlaces || flags & (StepMessage::kMasked | StepMessage::kThreadsCopyQ | StepMessage::kThreadsCopyDo | StepMessage::kFinalizesDq)) message.block = block;
        if (flags & (StepMessage::kThreadsCopyQ | StepMessage::kThreadsCopyDo)) {
#pragma unroll 1
          for (int x = 0; x < kNonemptyWords; ++x) message.nonempty[x] = stats.nonempty[x];
        }
        load_operand(tile::TmaBoxes(q_smem(state.stage)), maps.q, head_work.q_coords, block.start, smem.q[state.stage],
                     flags & StepMessage::kThreadsCopyQ,
                     sizeof stats);
        ptx::bulk_load(ptx::shared_address(&smem.queries[state.stage].stats), &stats, sizeof stats,
                       ptx::shared_address(&smem.q[state.stage].full));
        ptx::mbarrier_arrive(ptx::shared_address(&smem.message_ready[state.stage]));
        if (loads_k) {  // copy warps load them once their slots are empty, and find them in the level-2 cache
          if (!message.is(StepMessage::kThreadsCopyK)) tile::tma_prefetch_boxes(tile::TmaBoxes(k_smem), maps.k,
                                                                                message.k_coords, work.first);
          if (!has_k && !message.is(StepMessage::kThreadsCopyV)) tile::tma_prefetch_boxes(tile::TmaBoxes(v_smem), maps.v, message.v_coords, work.first);
          smem.kv_phases ^= StepMessage::kPhaseOfK | (has_k ? 0 : StepMessage::kPhaseOfV);
        }
      }
      has_k = true;
      const tile::PipelineSlot& d_o = smem.d_o[do_stage(state)];
      if constexpr (kReleasesDo) tile::wait_empty(d_o, do_phase(state));  // else Q's stage says it
      __syncwarp();
      if (elect_one())
        load_operand(tile::TmaBoxes(do_smem(do_stage(state))), maps.do_, head_work.do_coords, block.start, d_o,
                     message.is(StepMessage::kThreadsCopyDo));
      state = state.next();
      has_sent_step = true;
    }
  }
  if (has_k) return;
  write_empty_rows(params, params.dk, smem.works[work_slot].tile, shape.head_dim);
  write_empty_rows(params, params.dv, smem.works[work_slot].tile, shape.value_dim);
}

CUFLASH_DEVICE void produce(const attention::Params& params, const attention::TensorMaps& maps) {
  SharedStorage& smem = shared();
  PipelineState state;
  int work_slot = 0;  // of the works
  bool has_sent_step = false;
  while (advance_tile(params, work_slot)) {
    if (!smem.works[work_slot].tile.is_empty()) produce(params, maps, state, work_slot, has_sent_step);
    if (has_sent_step) work_slot = (work_slot + 1) % kNumHeadWorks;
    has_sent_step = false;
  }
  tile::wait_empty(smem.q[state.stage], state.phase);
  __syncwarp();
  if (elect_one()) {
    smem.messages[state.stage].flags = StepMessage::kEndOfWork;
    smem.queries[state.stage].stats.has_large_lse = 0;  // asked of every step
    if constexpr (kHasScore) smem.queries[state.stage].stats.has_empty_rows = 0;
    ptx::mbarrier_arrive(ptx::shared_address(&smem.q[state.stage].full));
    ptx::mbarrier_arrive(ptx::shared_address(&smem.message_ready[state.stage]));
  }
}

static_assert(kIsWide || kBlockQ % kCopyThreads == 0, "whole copy warps have rows");

// Bits lo <= x < hi of a word.
CUFLASH_DEVICE uint32_t bit_range(int lo, int hi) { return ptx::bits_at_or_above(lo) & ~ptx::bits_at_or_above(hi); }

// Which of the 32 keys from `first` on a query sees; there are none from `last` on.
CUFLASH_DEVICE uint32_t row_mask_bits(const attention::RowMask& row_mask, int first, int last) {
  uint32_t bits = bit_range(row_mask.lo - first, min(row_mask.hi, last) - first);
  if (config::kIsListed && row_mask.bits != nullptr) {
    uint32_t listed = 0;
#pragma unroll 1
    for (int key = 0; key < 32 && first + key < last; key += 8)
      listed |= static_cast<uint32_t>(row_mask.bits[(first + key - row_mask.first_bit_key) / 8]) << key;
    bits &= listed;
  }
  return bits;
}

// Under a band the queries that see a key of the tile are one interval, which starts and ends one later for the next key.
CUFLASH_DEVICE void compute_band_masks(const attention::Params& params, const attention::WorkTile& work,
                                       const attention::KvBlock& block,
                                       StageQueries& queries, int thread) {
  using namespace attention;
  const bool try_wait_full = block.kind == BlockKind::kFull;
  const int start = work.first - block.start;
  const int first = try_wait_full ? -kBlockKv : clamped_to_int(start - params.work.upper);
  const int last = try_wait_full ? kBlockQ : clamped_to_int(start - params.work.lower + 1);
#pragma unroll 1
  for (int key = thread; key < kBlockKv; key += kCopyThreads) {
    const int lo = first + key, hi = key < work.last - work.first ? min(last + key, block.stop - block.start) : 0;
#pragma unroll
    for (int x = 0; x < kQueryWords; ++x) queries.row_masks[key][x] = bit_range(lo - 32 * x, hi - 32 * x);
  }
}

CUFLASH_DEVICE void compute_row_masks(const attention::Params& params, const HeadWork& work, const StepMessage& message,
                                      StageQueries& queries,
                                      int thread) {
  using namespace attention;
  if constexpr (!kIsWide)
    if (params.work.lo == nullptr && message.block.kind != BlockKind::kBits)
      return compute_band_masks(params, work.tile, message.block, queries, thread);
#pragma unroll 1
  for (int first = 0; first < kBlockQ; first += kCopyThreads) {  // as often for all: they exchange bits
    const int row = first + thread, query = message.block.start + row;
    if (kIsWide && row >= kBlockQ) break;
    const RowMask row_mask = message.block.row_mask(params, work.tile.batch_head, min(query, message.block.stop - 1));
#pragma unroll 1
    for (int x = 0; x < kKeyWords; ++x) {
      const uint32_t bits = query < message.block.stop
          ? row_mask_bits(row_mask, work.tile.first + 32 * x, work.tile.last) : 0;
      if constexpr (kIsWide) queries.row_masks[row][x] = bits;
      else queries.row_masks[32 * x + thread % 32][row / 32] = tile::transpose_bits_in_warp(bits);
    }
  }
}

// Copy rows of a step that the accelerator cannot: zeros where a query sees no key.
template <class TmaBoxes>
CUFLASH_DEVICE void copy_queries(const attention::Params& params, const attention::Matrices& from,
                                 const StepMessage& message,
                                 int num_columns, TmaBoxes to, int thread) {
  using namespace attention;
  const BatchHead& batch_head = shared().works[message.work].tile.batch_head;
  const auto all = matrix<Element>(from, batch_head, batch_head.head, params.shape.seqlen_q, num_columns);
  // else asked anew for each row: registers are few
  const int last = kIsWide ? message.block.stop : message.block.start + kBlockQ;
  tile::copy<kCopyThreads>(tile::TmaBoxes(to), all.rows(message.block.start, last), thread, [&](int row) {
    return (kIsWide || row < message.block.stop - message.block.start) &&
        QueryStats::is_nonempty(message.nonempty, row);
  });
}

// Fill the room of a step's elements of the staged array, and arrive for its Q. By all copy warps.
template <class Score>
CUFLASH_DEVICE void load_array(const Score& score, const attention::WorkTile& work, const attention::KvBlock& block,
                               int stage, int thread) {
  const auto of_tile = score.of_tile(work.batch_head.batch_index, work.batch_head.head);
  const StagedPart<const typename Score::StagedElement> part{
      score.staged_array(of_tile), {block.start, block.stop}, {work.first, work.last}};
  part.template start_copy<kCopyThreads, 1>(array_smem(stage), thread);
  ptx::cp_async_wait_all();
  tile::arrive(shared().q[stage].full);
}

template <class Score>
CUFLASH_DEVICE void prepare_steps(const attention::Params& params, const attention::TensorMaps& maps,
                                  const Score& score) {
  using namespace attention;
  SharedStorage& smem = shared();
  const Shape& shape = params.shape;
  // asked for again, as is what follows: registers are few
  const auto thread = [] { return ptx::thread_index() - 32; };
  for (int number = 0;; number = number == 2 * kNumStages - 1 ? 0 : number + 1) {
    const PipelineState state{number % kNumStages, number / kNumStages};  // of one register
    ptx::mbarrier_wait(ptx::shared_address(&smem.message_ready[state.stage]), state.phase);
    const StepMessage& message = smem.messages[state.stage];
    if (message.is(StepMessage::kEndOfWork)) return tile::arrive(smem.q[state.stage].full);
    const auto work = [&]() -> const HeadWork& { return smem.works[message.work]; };
    if (message.is(StepMessage::kMasked)) compute_row_masks(params, work(), message, smem.queries[state.stage],
                                                            thread());
    if (message.is(StepMessage::kThreadsCopyQ)) copy_queries(params, params.q, message, shape.head_dim,
                                                             q_smem(state.stage), thread());
    if constexpr (kStagesArray) load_array(score, work().tile, message.block, state.stage, thread());
    else tile::arrive(smem.q[state.stage].full);
    if (message.is(StepMessage::kLoadsK)) {
      const WorkTile& tile = work().tile;
      const auto kv_head = [&] { return tile.batch_head.head / shape.group_size; };
      // else a copy warp could arrive for this K while another one copies the last
      tile::wait_empty(smem.k, k_phase(message.flags));
      __syncwarp();
      if (thread() == 0) {
        load_operand(tile::TmaBoxes(k_smem), maps.k, message.k_coords, tile.first, smem.k,
                     message.is(StepMessage::kThreadsCopyK));
        if (message.is(StepMessage::kLoadsV))
          load_operand(tile::TmaBoxes(v_smem), maps.v, message.v_coords, tile.first, smem.v,
                       message.is(StepMessage::kThreadsCopyV));
      }
      if (message.is(StepMessage::kThreadsCopyK)) {
        const Interval keys = visible_keys(params, tile);
        ptx::compiler_barrier();  // registers are few
        const auto all = matrix<Element>(params.k, tile.batch_head, kv_head(), shape.seqlen_kv, shape.head_dim);
        tile::copy<kCopyThreads>(tile::TmaBoxes(k_smem), all.rows(tile.first, keys.hi), thread(),
                       [&](int row) { return tile.first + row >= keys.lo; });
      }
      tile::arrive(smem.k.full);
      if (message.is(StepMessage::kThreadsCopyV)) {
        const auto all = matrix<Element>(params.v, tile.batch_head, kv_head(), shape.seqlen_kv, shape.value_dim);
        const auto is_row_valid = [](int) { return true; };
        tile::copy<kCopyThreads>(tile::TmaBoxes(v_smem), all.rows(tile.first, tile.last), thread(), is_row_valid);
      }
      if (message.is(StepMessage::kLoadsV)) tile::arrive(smem.v.full);
    }
    if constexpr (kDoStages < kNumStages)  // else Q's stage says it
      tile::wait_empty(smem.d_o[do_stage(state)], do_phase(state));
    if (message.is(StepMessage::kThreadsCopyDo))
      copy_queries(params, params.do_, message, shape.value_dim, do_smem(do_stage(state)), thread());
    tile::arrive(smem.d_o[do_stage(state)].full);
  }
}

// A part of dQ's room may be written anew, once at most kPending additions are not read.
template <int kPending>
CUFLASH_DEVICE void release_dq(int part, bool is_end) {
  ptx::bulk_wait_read<kPending>();
  __syncwarp();
  if (!is_end) ptx::bar_arrive(kDqEmpty + part, kWarpgroupThreads + 32);
  __syncwarp();  // the simulator's lanes too go on together, so that it sees who arrives too early
}

CUFLASH_DEVICE uint32_t dq_address(int part) {
  return ptx::shared_address(ptx::dynamic_shared<unsigned char>() + dq_offset(part));
}

// Have the sums of a step's queries brought to dQ's room, for consumers to add theirs. Called by a warp, none of whose copies
// reads there.
CUFLASH_DEVICE void load_dq_sum(const float* sum, int phase) {
  SharedStorage& smem = shared();
  if (elect_one()) {
    ptx::mbarrier_arrive_expect_tx(ptx::shared_address(&smem.dq_sum_loaded), kNumConsumers * kDqPartBytes);
    ptx::bulk_load(dq_address(0), sum, kNumConsumers * kDqPartBytes, ptx::shared_address(&smem.dq_sum_loaded));
  }
  __syncwarp();
  ptx::mbarrier_wait(ptx::shared_address(&smem.dq_sum_loaded), phase);
  __syncwarp();
}

// Have a part of dQ, which its consumers have put into its room, stored as sums, or added to them. Called by a warp.
CUFLASH_DEVICE void store_dq_sum(float* sum, int part, bool stores) {
  ptx::fence_proxy_async();  // of what others wrote: they are waited for
  float* const part_sum = sum + part * kDqPartBytes / 4;
  if (stores) ptx::bulk_store(part_sum, dq_address(part), kDqPartBytes);
  else ptx::bulk_add(part_sum, dq_address(part), kDqPartBytes);
  ptx::bulk_commit();
}

// Whether a step is the first to visit its queries; if not, once the first one has stored their sums. Called by a warp.
CUFLASH_DEVICE bool arrives_first(int* arrivals) {
  using attention::kDqIsStored;
  const int num_before = tile::warp_fetch_increment(arrivals);
  if (num_before != 0 && !(num_before & kDqIsStored)) tile::wait_for_bits(arrivals, kDqIsStored);
  return num_before == 0;
}

// Step after step, have what the consumers make of dQ added to the sums, once all of a warpgroup has put it into its room,
// which is left once it is read; or have them add the sums. Called by a warp.
CUFLASH_DEVICE void dq_writer() {
  SharedStorage& smem = shared();
  int phase = 0;
  for (PipelineState state;; state = state.next()) {
    tile::wait_full(smem.q[state.stage], state.phase);
    const StepMessage& message = smem.messages[state.stage];
    const int flags = message.flags;
    const bool is_end = flags & StepMessage::kEndOfWork, finishes = kFinishesDqInOrder &&
        flags & StepMessage::kFinalizesDq;
    float* const sum = message.dq_sum;
    int* const arrivals = message.arrivals;
    attention::DqSemaphoreOp dq{};
    if (kFinishesDqInOrder && flags & StepMessage::kUsesDqSemaphore) dq = message.dq;
    tile::arrive(smem.q[state.stage].empty);
    if (dq.awaited_bits_or_count != 0) attention::wait_dq_semaphore(dq, finishes);
    if (finishes) {  // the tile before has told that all of its own copies are made
      load_dq_sum(sum, phase);
      phase ^= 1;
#pragma unroll
      for (int part = 0; part < kNumConsumers; ++part) ptx::bar_arrive(kDqEmpty + part, kWarpgroupThreads + 32);
#pragma unroll
      for (int part = 0; part < kNumConsumers; ++part) ptx::bar_sync(kDqFull + part, kWarpgroupThreads + 32);
      continue;
    }
    release_dq<1>(0, is_end);
    release_dq<0>(1, is_end);
    if (is_end) return;
    // asked now: nothing of an earlier step is to be done
    const bool is_first = kFirstArrivalStoresDq && arrives_first(arrivals);
#pragma unroll
    for (int part = 0; part < kNumConsumers; ++part) {
      ptx::bar_sync(kDqFull + part, kWarpgroupThreads + 32);
      store_dq_sum(sum, part, is_first || (kFinishesDqInOrder && flags & StepMessage::kStoresDq));
    }
    if (dq.stored != 0 || dq.is_done) attention::signal_dq_semaphore(dq);
    if (is_first) {
      tile::wait_bulk_copies();
      tile::signal(arrivals, attention::kDqIsStored);
    }
  }
}

// The same of a list where the last tile of keys to come to queries finishes their dQ. Whoever comes waits for nobody until
// what it did before is told. Called by a warp.
CUFLASH_DEVICE void dq_writer_fused() {
  SharedStorage& smem = shared();
  int phase = 0, count = 0;
  int* unsignalled = nullptr;  // of the step before, whose additions others are to hear of once they are made
  const auto signal_previous = [&] {
    if (unsignalled == nullptr) return;
    tile::wait_bulk_copies();
    tile::signal(unsignalled, attention::kArrivalIsDone);
    unsignalled = nullptr;
  };
  const auto arrive_early = [&](const PipelineState& state) {  // early: the answer is long in coming
    tile::wait_full(smem.q[state.stage], state.phase);
    if (!smem.messages[state.stage].is(StepMessage::kEndOfWork)) count =
        tile::start_fetch_increment(smem.messages[state.stage].arrivals);
  };
  PipelineState state;
  arrive_early(state);
  while (!smem.messages[state.stage].is(StepMessage::kEndOfWork)) {
    const StepMessage& message = smem.messages[state.stage];
    count = tile::broadcast_lane_0(count);
    const auto arrival = attention::DqArrival::of(count, smem.queries[state.stage].stats.arrivals.expected);
    const bool is_last = arrival.is_last, is_first = arrival.before == 0;
    if (count / attention::kArrivalIsDone < arrival.num_awaited) {
      signal_previous();
      attention::wait_for_arrivals(arrival, message.arrivals);
    }
    if (!is_first) ptx::fence_proxy_async_global();
    if (elect_one()) smem.dq_finish = !is_last ? DqFinish::kNot : is_first ? DqFinish::kAlone : DqFinish::kWithSums;
    __syncwarp();
    if (is_last && !is_first) {
      ptx::bulk_wait_read<0>();
      __syncwarp();
      load_dq_sum(message.dq_sum, phase);
      phase ^= 1;
    }
    release_dq<1>(0, false);
    release_dq<0>(1, false);
    signal_previous();
    const PipelineState next_state = state.next();
    arrive_early(next_state);
#pragma unroll
    for (int part = 0; part < kNumConsumers; ++part) {
      ptx::bar_sync(kDqFull + part, kWarpgroupThreads + 32);
      if (!is_last) store_dq_sum(message.dq_sum, part, is_first);
    }
    unsignalled = is_last ? nullptr : message.arrivals;
    tile::arrive(smem.q[state.stage].empty);
    state = next_state;
  }
  signal_previous();
}

// ---- all ----

// What a block does: `consume` is called by both warpgroups of consumers, with the number of the warpgroup among them.
template <class Consume>
CUFLASH_DEVICE void run_roles(const attention::Params& params, const attention::TensorMaps& maps, Consume consume,
                              const score::Function& score) {
  // one for the warp: branches do not part it
  const int group = __shfl_sync(0xffffffffu, threadIdx.x / kWarpgroupThreads, 0);
  if (threadIdx.x == 0) {
    shared().softmax_scale_log2 = params.shape.softmax_scale * (kHasScore ? 1 : attention::kLog2E);
    shared().has_tile = shared().kv_phases = 0;
    tile::PipelineSlot* const slots = &shared().k;
    for (int i = 0; i < 2 + kNumStages + kDoStages; ++i) {
      const bool has_messages = &slots[i] >= shared().q && &slots[i] < shared().q + kNumStages;  // which all read
      ptx::mbarrier_init(ptx::shared_address(&slots[i].full), 1 + kCopyThreads / 32 * tile::kArrivalsPerWarp);
      ptx::mbarrier_init(ptx::shared_address(&slots[i].empty),
                         (4 * kNumConsumers + (kHasDqWriter && has_messages)) * tile::kArrivalsPerWarp);
    }
    for (uint64_t& message_ready : shared().message_ready) ptx::mbarrier_init(ptx::shared_address(&message_ready), 1);
    ptx::mbarrier_init(ptx::shared_address(&shared().dq_sum_loaded), 1);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  if (group == 0) {
    ptx::setmaxnreg_dec<kProducerRegisters>();
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    if (warp == 0) produce(params, maps);
    else if (32 * warp < kProducerThreads) prepare_steps(params, maps, score);
    else if constexpr (kLastArrivalFinishesDq) dq_writer_fused();
    else if constexpr (kHasDqWriter) dq_writer();
  } else {
    ptx::setmaxnreg_inc<kConsumerRegisters>();
    consume(group % kNumConsumers);
  }
}

}  // namespace cuflash
