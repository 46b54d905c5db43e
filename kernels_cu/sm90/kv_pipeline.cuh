#pragma once
#include <attention/config_mma.cuh>
#include <attention/mask_softmax_mma.cuh>
#include <attention/scales.cuh>
#include <attention/sink.cuh>
#include <sm90/page_copies.cuh>
#include <sm90/tensor_maps.cuh>
#include <tile/pipeline.cuh>

// What passes share on Hopper that keep a tile of queries and walk the keys it visits: one warpgroup of a block brings Q, and
// dO if the kernel says so (kLoadsDo, a constant of its own before this), K and V into shared memory, step after step and
// tile after tile; others multiply them, 64 rows of queries each. Blocks go on to further tiles until none is left.
namespace cuflash {

using config::kMinBlocks;
using config::kNumStages;

constexpr int kWarpgroupThreads = 128;  // threads of a warpgroup
constexpr int kNumConsumers = kBlockQ / 64;
// other blocks of the multiprocessor work meanwhile
constexpr bool kIsSmallTile = config::kIsListed && kNumConsumers == 1;
constexpr int kQStages = kHeadDim <= 128 && kValueDim <= 128 && !kIsSmallTile && !kLoadsDo ? 2 : 1;
constexpr int kNumTileInfos = 4;  // tiles known of: looked up, brought, multiplied, and written
// Whether a block asks for its next tile with a tile's first step, not with its last: what a list says of it comes later.
constexpr bool kFetchesTileEarly = config::kIsListed && kHeadDim <= 128 && kValueDim <= 128;

template <bool IsQuantized>
struct OperandTiles {
  using Q = tile::WgmmaTile<Element, kBlockQ, kHeadDim>;
  using K = tile::WgmmaTile<Element, kBlockKv, kHeadDim>;
  using V = tile::WgmmaTile<Element, kBlockKv, kValueDim>;
};
template <>
struct OperandTiles<true> {  // tensor cores read numbers of 8 bits along what they sum over: V is transposed
  using Q = tile::WgmmaTile<ptx::Float8E4M3, kBlockQ, kHeadDim>;
  using K = tile::WgmmaTile<ptx::Float8E4M3, kBlockKv, kHeadDim>;
  using V = tile::WgmmaTile<ptx::Float8E4M3, kValueDim, kBlockKv>;
};
using SmemQ = OperandTiles<config::kIsQuantized>::Q;
using SmemK = OperandTiles<config::kIsQuantized>::K;
using SmemV = OperandTiles<config::kIsQuantized>::V;
CUFLASH_DEVICE SmemQ q_smem(int slot) { return {slot * SmemQ::kBytes}; }
CUFLASH_DEVICE SmemK k_smem(int stage) { return {kQStages * SmemQ::kBytes + stage * SmemK::kBytes}; }
CUFLASH_DEVICE SmemV v_smem(int stage) { return {k_smem(kNumStages).start + stage * SmemV::kBytes}; }
constexpr int kDoOffset = kQStages * SmemQ::kBytes + kNumStages * (SmemK::kBytes + SmemV::kBytes);
using SmemDo = tile::WgmmaTile<Element, kBlockQ, kValueDim>;
CUFLASH_DEVICE SmemDo do_smem(int slot) { return {kDoOffset + slot * SmemDo::kBytes}; }
constexpr int kStorageOffset = kDoOffset + (kLoadsDo ? kQStages * SmemDo::kBytes : 0);

constexpr int kBoxRows = 16;  // a warp's

// What is known of a tile, and of a step.
enum Operand { kQ, kK, kV, kDo };  // in the order of TensorMaps
struct GroupVisitRange {  // no query of a warpgroup sees a key from `stop` on, and all see full_start <= x < full_stop
  int stop, full_start, full_stop;
};
struct alignas(16) EpilogueTarget {  // where they go
  float* lse;
  int num_rows;
  int uses_tma_store;  // rows are whole chunks, and as many as boxes have or the matrix, as the accelerator writes
  int first;           // row of O
  tile::TmaCoords o_coords;
};
struct WorkTileInfo {
  EpilogueTarget epilogue_target;
  attention::WorkTile work;
  attention::VisitRange visit_range;
  GroupVisitRange group_ranges[kNumConsumers];
  int kv_head, is_end;
  tile::TmaCoords coords[kV + 1 + kLoadsDo];  // of operands
  int is_band;
  attention::Interval band;  // what the first row sees, if it is one; others see what lies as much further on
};
struct StepMessage {
  // Scores are what leaves the product, as no mask hides one and the scale is positive; the warpgroup's queries see no key
  // of the tile's further steps; nobody's do. And what a warpgroup itself knows: the tile follows on another, whose results
  // are to be written; no maxima are to be looked for; O of the tile before is leaving the room of its Q; products with the
  // values of the step before are under way.
  enum Flag { kUnmasked = 1, kLastForWarpgroup = 2, kLastOfTile = 4, kEpiloguePending = 8, kSkipMax = 16,
             kOStoreInFlight = 32, kValuesPending = 64 };
  attention::KvBlock block;
  int unread_start;  // keys before it were the last step's
  int flags[kNumConsumers];
};

struct SharedStorage {
  tile::PipelineSlot q[kQStages], k[kNumStages], v[kNumStages];
  tile::PipelineSlot tile_info_slots[kNumTileInfos];  // tasks
  WorkTileInfo tile_infos[kNumTileInfos];
  StepMessage messages[kNumStages];
  float softmax_scale_log2;  // consumers' registers are for accumulators
  float softmax_scale;       // of a kernel with a score function
};
CUFLASH_DEVICE SharedStorage& shared() {
  return *reinterpret_cast<SharedStorage*>(ptx::dynamic_shared<unsigned char>() + kStorageOffset);
}

// The room of a ring that the count-th tile has, and the parity of its phases.
CUFLASH_DEVICE int stage_of(unsigned count) { return count % kNumStages; }
CUFLASH_DEVICE int phase_of(unsigned count) { return count / kNumStages % 2; }
CUFLASH_DEVICE int q_stage_of(unsigned count) { return count % kQStages; }
CUFLASH_DEVICE int q_phase_of(unsigned count) { return count / kQStages % 2; }

CUFLASH_DEVICE int tile_info_index(unsigned count) { return count % kNumTileInfos; }
CUFLASH_DEVICE int tile_info_phase(unsigned count) { return count / kNumTileInfos % 2; }

// ---- the producers ----

// One warp looks tiles up, one brings Q and K, and one V: by the tensor memory accelerator, or where that cannot by itself.
enum ProducerWarp { kLoadsKeys, kLoadsValues, kSchedulesTiles };

CUFLASH_DEVICE bool elect_one() { return tile::lane() == 0; }

// By the whole warp: threads that wait for the first one alone can keep it from going on.
CUFLASH_DEVICE void wait_slot(const tile::PipelineSlot& slot, int phase) {
  tile::wait_empty(slot, phase);
  __syncwarp();
}
CUFLASH_DEVICE const WorkTileInfo& wait_tile_info(unsigned num_tiles_done) {
  tile::wait_full(shared().tile_info_slots[tile_info_index(num_tiles_done)], tile_info_phase(num_tiles_done));
  return shared().tile_infos[tile_info_index(num_tiles_done)];
}

// How an operand's room is made up.
template <Operand kOperand>
CUFLASH_DEVICE tile::TmaBoxes boxes_of(int stage) {
  if constexpr (kOperand == kQ) return tile::TmaBoxes(q_smem(stage));
  else if constexpr (kOperand == kK) return tile::TmaBoxes(k_smem(stage));
  else if constexpr (kOperand == kV) return tile::TmaBoxes(v_smem(stage));
  else return tile::TmaBoxes(do_smem(stage));
}

// Fill an operand's room, which is empty, with rows first <= x < last. `zero_fills` asks for zeros past them. By a
// warp.
template <Operand kOperand>
CUFLASH_DEVICE void load_operand(const attention::Params& params, const attention::TensorMaps& maps,
                                 const tile::PipelineSlot& slot,
                                 int stage, const WorkTileInfo& tile_info, int first, int last, bool zero_fills) {
  const attention::TensorMapParam& map = (&maps.q)[kOperand];
  const attention::Matrices& matrices = kOperand == kDo ? params.do_ : (&params.q)[kOperand];
  constexpr bool kIsTransposed = config::kIsQuantized && kOperand == kV;  // rows are columns of the map's matrix
  if (config::kIsQuantized || (attention::has_tensor_map(map, matrices) && !zero_fills)) {  // quantised ones have maps
    if (elect_one()) tile::tma_load_boxes<SmemQ::Element>(boxes_of<kOperand>(stage), map, tile_info.coords[kOperand],
                                                          kIsTransposed ? 0 : first, slot.full, 0, kIsTransposed ? first : 0);
    else if (tile::lane() < tile::kArrivalsPerWarp) ptx::mbarrier_arrive(ptx::shared_address(&slot.full));
    return;
  }
  if constexpr (!config::kIsQuantized) {
    constexpr bool kIsOfQueries = kOperand == kQ || kOperand == kDo, kHasValueDim = kOperand == kV || kOperand == kDo;
    const int head = kIsOfQueries ? tile_info.work.batch_head.head : tile_info.kv_head;
    const int num_columns = kHasValueDim ? params.shape.value_dim : params.shape.head_dim;
    const auto all = attention::matrix<Element>(matrices, tile_info.work.batch_head, head, 0, num_columns);
    tile::copy<32>(boxes_of<kOperand>(stage), all.rows(first, last), tile::lane(), [](int) { return true; });
    tile::arrive(slot.full);
  }
}

// Fill a room of keys or values, which is empty, with those of a step, or with zeros past them where that is asked for. By a
// warp.
template <Operand kOperand>
CUFLASH_DEVICE void load_step(const attention::Params& params, const attention::TensorMaps& maps, attention::NoPages,
                              const tile::PipelineSlot& slot, int stage, const WorkTileInfo& tile_info,
                              const attention::KvBlock& block, bool zero_fills) {
  load_operand<kOperand>(params, maps, slot, stage, tile_info, block.start, block.stop, zero_fills);
}
// The same of a sequence that lies in pages. Values that no query of the tile sees, since the sequence ends or their window starts,
// are always zeros, as 0 times what may be anything is not 0; scores of such keys are masked.
template <Operand kOperand>
CUFLASH_DEVICE void load_step(const attention::Params& params, const attention::TensorMaps& maps,
                              const attention::Pages& pages, const tile::PipelineSlot& slot, int stage,
                              const WorkTileInfo& tile_info, const attention::KvBlock& block, bool) {
  const int sequence = tile_info.work.batch_head.batch_index;
  const attention::Interval seen{attention::first_key(tile_info.visit_range),
                                 attention::rows_of_sequence(pages, sequence).length};
  PageCopy copy(boxes_of<kOperand>(stage), pages, sequence, tile_info.kv_head, block.start, seen);
  if (kOperand == kV) copy.copy_cut_boxes((&params.q)[kOperand], params.shape.value_dim);
  else copy.count_faults();
  copy.start((&maps.q)[kOperand], slot);
}

// Queries without a key, of which nobody hears: what the kernel writes of them. By a warp.
CUFLASH_DEVICE void write_empty_rows(const attention::Params& params, const attention::WorkTile& work,
                                     attention::SinkArgument sink);

// The number of a block's next tile, which nobody else has. By a warp.
CUFLASH_DEVICE int advance_tile(const attention::Params& params, bool is_first, int num_tiles) {
  if (is_first) return attention::first_tile_number();
  int number = 0;
  if (elect_one()) number = attention::next_tile_number(params, num_tiles);
  return __shfl_sync(0xffffffffu, number, 0);
}

// The tile of a number; of sequences in pages, without queries that belong to none.
CUFLASH_DEVICE attention::WorkTile tile_at(const attention::Params& params, attention::NoPages, int number) {
  return attention::query_tile_at<Listed>(params, kBlockQ, number);
}
CUFLASH_DEVICE attention::WorkTile tile_at(const attention::Params& params, const attention::Pages& pages, int number) {
  return attention::query_tile_of_sequence<Listed>(params, pages, kBlockQ, number);
}

// What 64 of a tile's queries see.
CUFLASH_DEVICE GroupVisitRange group_visit_range(const attention::Params& params, attention::WorkTile work,
                                                 int first_row) {
  work.first += first_row;
  work.last = min(work.last, work.first + 64);
  if (work.is_empty()) return {};
  const attention::VisitRange visit_range = attention::visit_range_of_queries(params, work);
  return {visit_range.stop, visit_range.full_start, visit_range.full_stop};
}

// Whether a tile's queries see a band, which is that of the first one: each sees one key further than the one before, and starts
// one key further too, or with the first key of all. By a warp.
CUFLASH_DEVICE bool find_band(const attention::Params& params, const attention::WorkTile& work, attention::Interval& band) {
  using namespace attention;
  const Interval first = interval(params, work.batch_head, work.first);
  bool is_band = true, lo_moves = true, lo_stays = true;
#pragma unroll
  for (int i = 0; i < kBlockQ / 32; ++i) {  // all at once: a tile's first keys wait for it
    const int rows = min(32 * i + tile::lane(), work.last - work.first - 1);
    const Interval keys = interval(params, work.batch_head, work.first + rows);
    is_band &= keys.hi == first.hi + rows;
    lo_moves &= keys.lo == first.lo + rows;
    lo_stays &= keys.lo == 0;
  }
  lo_moves = __all_sync(0xffffffffu, lo_moves);
  lo_stays = __all_sync(0xffffffffu, lo_stays);
  band = {lo_moves ? first.lo : clamped_to_int(-(int64_t{1} << 32)), first.hi};
  return __all_sync(0xffffffffu, is_band) && (lo_moves || lo_stays);
}

// Look up the tiles of this block, each once the last steps, or the first, of the one before are brought: who took tiles
// further ahead would keep what others could do sooner.
CUFLASH_DEVICE void schedule_tiles(const attention::Params& params, const attention::TensorMaps& maps,
                                   attention::SinkArgument sink, attention::PagesArgument pages) {
  using namespace attention;
  const int num_tiles = num_query_tiles<Listed>(params, kBlockQ);
  unsigned num_tiles_done = 0;
  for (bool is_first = true;; is_first = false) {
    const tile::PipelineSlot& tile_info_slot = shared().tile_info_slots[tile_info_index(num_tiles_done)];
    wait_slot(tile_info_slot, tile_info_phase(num_tiles_done + kNumTileInfos - 1));  // the first is looked up at once
    const int number = advance_tile(params, is_first, num_tiles);
    const bool is_end = number >= num_tiles;
    WorkTile work{};
    VisitRange visit_range{};
    if (!is_end) {
      work = tile_at(params, pages, number);
      if (work.is_empty()) continue;
      visit_range = visit_range_of_queries(params, work);
      if (config::kIsPaged) align_steps(visit_range, kBlockKv);
      if (config::kIsQuantized && visit_range.start < visit_range.stop) visit_range.start -= visit_range.start % kBlockKv;
      if (!BlockIterator<kBlockKv, OverKvBlocks, Listed>(params, visit_range).has_next()) {
        write_empty_rows(params, work, sink);
        continue;
      }
    }
    WorkTileInfo& tile_info = shared().tile_infos[tile_info_index(num_tiles_done)];
    Interval band{};
    const bool has_band = config::kIsPaged && !is_end && find_band(params, work, band);
    if (!is_end && tile::lane() < kNumConsumers)
      tile_info.group_ranges[tile::lane()] = group_visit_range(params, work, 64 * tile::lane());
    if (elect_one()) {
      tile_info.work = work;
      tile_info.visit_range = visit_range;
      tile_info.is_end = is_end;
      tile_info.kv_head = work.batch_head.head / params.shape.group_size;
      tile_info.coords[kQ] = tma_coords(params.q, work.batch_head, work.batch_head.head);
      tile_info.coords[kK] = tma_coords(params.k, work.batch_head, tile_info.kv_head);
      tile_info.coords[kV] = tma_coords(params.v, work.batch_head, tile_info.kv_head);
      if constexpr (kLoadsDo) tile_info.coords[kDo] = tma_coords(params.do_, work.batch_head, work.batch_head.head);
      if constexpr (!kLoadsDo) {
        const int num_rows = work.last - work.first;
        tile_info.epilogue_target = {&matrix<float>(params.lse, work.batch_head, work.batch_head.head, 0,
                                                    1).at(work.first, 0),
                                     num_rows,
                                     (num_rows % kBoxRows == 0 || work.last == params.shape.seqlen_q) &&
                            params.shape.value_dim % tile::kChunkOf<Element> == 0 && has_tensor_map(maps.o, params.o),
                                     work.first,
                                     tma_coords(params.o, work.batch_head, work.batch_head.head)};
      }
      tile_info.is_band = config::kIsPaged ? has_band : !config::kIsListed && params.work.lo == nullptr;
      tile_info.band = config::kIsPaged ? band : Interval{clamped_to_int(work.first + params.work.lower),
                                                          clamped_to_int(work.first + params.work.upper + 1)};
    }
    tile::arrive(tile_info_slot.full);
    if (is_end) return;
    ++num_tiles_done;
  }
}

// What a step is for a warpgroup. Further places of a list may lie anywhere: which keys are the last is not known there.
CUFLASH_DEVICE int step_flags(const attention::Params& params, const attention::KvBlock& block,
                              const GroupVisitRange& group_range, bool is_shifted,
                              bool is_last_of_tile) {
  using attention::BlockKind;
  attention::KvBlock group_block = block;
  if (block.kind == BlockKind::kInterval && block.start >= group_range.full_start &&
      block.stop <= group_range.full_stop) group_block.kind = BlockKind::kFull;
  const bool is_unmasked = !is_shifted && attention::is_unmasked<kBlockKv>(group_block);
  const bool is_last = is_last_of_tile || (!config::kIsListed && block.stop >= group_range.stop);
  // of P its exponent does
  const bool needs_negation = !kLoadsDo && attention::LazySoftmax<2>::needs_negation(params.shape.softmax_scale);
  return (is_unmasked && !needs_negation) * StepMessage::kUnmasked + is_last * StepMessage::kLastForWarpgroup +
      is_last_of_tile * StepMessage::kLastOfTile;
}

// Whether rows past a step, which may be anything, must be zeros: 0 times that is not 0.
CUFLASH_DEVICE bool ends_inside_block(const attention::KvBlock& block, int length) {
  return block.stop - block.start < kBlockKv && block.stop < length;
}

// Whether steps stay where their block is: a list's, or those that start at multiples of their width, of keys in pages or of 8
// bits.
constexpr bool kKeepsSteps = config::kIsListed || config::kIsPaged || config::kIsQuantized;

// Whether queries follow on a tile's that belong to no sequence: they may be anything, and a warp's rows decide together when
// their maxima rise.
CUFLASH_DEVICE bool ends_before_others(const attention::Params& params, const attention::WorkTile& work) {
  return work.last < min(work.first + kBlockQ, params.shape.seqlen_q);
}

// Put the scales of a step's keys and values, if there are any, beside its message. By a warp.
CUFLASH_DEVICE void write_scales(attention::NoScales, const WorkTileInfo&, int, int, bool) {}
CUFLASH_DEVICE void write_scales(const attention::Scales& scales, const WorkTileInfo& tile_info, int stage, int first_key,
                                 bool is_first);

CUFLASH_DEVICE void load_keys(const attention::Params& params, const attention::TensorMaps& maps,
                              attention::PagesArgument pages, attention::ScalesArgument scales) {
  using namespace attention;
  unsigned num_k_blocks = 0, num_tiles_done = 0;  // tiles brought
  while (true) {
    const WorkTileInfo& tile_info = wait_tile_info(num_tiles_done);
    const int q_stage = q_stage_of(num_tiles_done);
    const tile::PipelineSlot& q = shared().q[q_stage];
    if (tile_info.is_end) {
      wait_slot(q, q_phase_of(num_tiles_done));
      if constexpr (kLoadsDo) tile::arrive(q.full);
      return tile::arrive(q.full);
    }
    BlockIterator<kBlockKv, OverKvBlocks, Listed> blocks(params, tile_info.visit_range);
    KvBlock block;
    for (bool is_first = true; blocks.next(block); is_first = false) {
      const int stage = stage_of(num_k_blocks), start = block.start;
      const tile::PipelineSlot& k = shared().k[stage];
      const bool is_shifted = shift_short_block<kBlockKv,
          kKeepsSteps>(block, tile_info.visit_range, params.shape.seqlen_kv);
      const bool is_last_of_tile = !blocks.has_next();
      const int flags = step_flags(params, block, tile_info.group_ranges[min(tile::lane(), kNumConsumers - 1)],
                                   is_shifted, is_last_of_tile);
      if (kFetchesTileEarly ? is_first : is_last_of_tile) tile::arrive(shared().tile_info_slots[tile_info_index(num_tiles_done + 1)].empty);
      wait_slot(k, phase_of(num_k_blocks));
      StepMessage& message = shared().messages[stage];
      if (tile::lane() < kNumConsumers) message.flags[tile::lane()] = flags;
      if (elect_one()) {
        message.block = block;
        message.unread_start = start;
      }
      write_scales(scales, tile_info, stage, start, is_first);
      __syncwarp();
      load_step<kK>(params, maps, pages, k, stage, tile_info, block, kLoadsDo &&
                    ends_inside_block(block, params.shape.seqlen_kv));
      ++num_k_blocks;
      if (!is_first) continue;
      wait_slot(q, q_phase_of(num_tiles_done));
      load_operand<kQ>(params, maps, q, q_stage, tile_info, tile_info.work.first, tile_info.work.last,
                       config::kIsPaged && ends_before_others(params, tile_info.work));
      if constexpr (kLoadsDo) load_operand<kDo>(params, maps, q, q_stage, tile_info, tile_info.work.first,
                                                tile_info.work.last, false);
    }
    ++num_tiles_done;
  }
}

CUFLASH_DEVICE void load_values(const attention::Params& params, const attention::TensorMaps& maps,
                                attention::PagesArgument pages) {
  using namespace attention;
  unsigned num_v_blocks = 0;
  for (int i = 1; i < kNumTileInfos; ++i) tile::arrive(shared().tile_info_slots[i].empty);  // nobody reads them yet
  for (unsigned num_tiles_done = 0;; ++num_tiles_done) {
    const WorkTileInfo& tile_info = wait_tile_info(num_tiles_done);
    if (tile_info.is_end) return;
    BlockIterator<kBlockKv, OverKvBlocks, Listed> blocks(params, tile_info.visit_range);
    KvBlock block;
    while (blocks.next(block)) {
      const int stage = stage_of(num_v_blocks), length = params.shape.seqlen_kv;
      shift_short_block<kBlockKv, kKeepsSteps>(block, tile_info.visit_range, length);
      const bool zero_fills = ends_inside_block(block, length);
      wait_slot(shared().v[stage], phase_of(num_v_blocks));
      load_step<kV>(params, maps, pages, shared().v[stage], stage, tile_info, block, zero_fills);
      ++num_v_blocks;
    }
    tile::arrive(shared().tile_info_slots[tile_info_index(num_tiles_done)].empty);
  }
}

// ---- the consumers ----

// Wait for a tile. False where none is left.
CUFLASH_DEVICE bool wait_tile(unsigned num_tiles_done) {
  tile::wait_full(shared().q[q_stage_of(num_tiles_done)], q_phase_of(num_tiles_done));
  return !shared().tile_infos[tile_info_index(num_tiles_done)].is_end;
}

// A step's kind, for a warpgroup.
CUFLASH_DEVICE int flags_of_warpgroup(int group, unsigned num_k_blocks) {
  return shared().messages[stage_of(num_k_blocks)].flags[group % kNumConsumers];
}

// Set scores that masks hide in a step, and those of keys that were the last step's, to -inf; those of gradients to
// `masked_score`.
template <class Tile>
CUFLASH_DEVICE void mask_block(const attention::Params& params, Tile& s, const WorkTileInfo& tile_info,
                               const StepMessage& message) {
  const float hidden = kLoadsDo ? attention::masked_score() : ptx::negative_infinity<float>();
  if (!config::kIsListed && tile_info.is_band) return attention::mask_band(s, message.block, hidden, tile_info.band,
                                                                           message.unread_start);
  attention::mask_rows<config::kIsListed>(s, message.block, hidden, [&](int row) {
    auto row_mask = attention::row_mask_of_row(params, tile_info.work, message.block, row);
    row_mask.lo = max(row_mask.lo, message.unread_start);
    return row_mask;
  });
}

// ---- all ----

// By one thread, before all else.
CUFLASH_DEVICE void init_barriers() {
  tile::PipelineSlot* const slots = shared().q;
  for (int i = 0; i < kQStages + 2 * kNumStages; ++i) {
    ptx::mbarrier_init(ptx::shared_address(&slots[i].full),
                       (kLoadsDo && i < kQStages ? 2 : 1) * tile::kArrivalsPerWarp);
    ptx::mbarrier_init(ptx::shared_address(&slots[i].empty), 4 * kNumConsumers * tile::kArrivalsPerWarp);
  }
  for (const tile::PipelineSlot& tile_info_slot : shared().tile_info_slots) {
    ptx::mbarrier_init(ptx::shared_address(&tile_info_slot.full), tile::kArrivalsPerWarp);
    ptx::mbarrier_init(ptx::shared_address(&tile_info_slot.empty), 2 * tile::kArrivalsPerWarp);
  }
  ptx::fence_mbarrier_init();
}

// By the producers.
CUFLASH_DEVICE void produce(const attention::Params& params, const attention::TensorMaps& maps,
                            attention::SinkArgument sink, attention::PagesArgument pages,
                            attention::ScalesArgument scales) {
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  if (warp == kLoadsKeys) load_keys(params, maps, pages, scales);
  else if (warp == kLoadsValues) load_values(params, maps, pages);
  else if (warp == kSchedulesTiles) schedule_tiles(params, maps, sink, pages);
}

}  // namespace cuflash
