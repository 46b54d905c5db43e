#pragma once
#include <sm90/hidden_gradient.cuh>
#include <sm90/q_storage.cuh>

// The first warp of the producer warpgroup: it takes tiles of keys, determines the blocks of queries that attend to
// them, writes a message for each step, and starts TMA copies.
namespace cuflash::sm90 {

template <class Config>
struct QProducer : QStorage<Config> {
  using Base = QStorage<Config>;
  using Base::array_smem, Base::do_phase, Base::do_smem, Base::do_stage, Base::dq_count, Base::kBlockKv, Base::kBlockQ,
      Base::kCountsDqTiles, Base::kMakesDq, Base::kMessagesHaveBlocks, Base::kNonemptyWords, Base::kNumHeadWorks,
      Base::kReleasesDo, Base::kTakesTilesInOrder, Base::k_smem, Base::q_smem, Base::query_records, Base::shared, Base::v_smem;
  using typename Base::Element, typename Base::HeadWork, typename Base::Listed, typename Base::PipelineState,
      typename Base::QueryIterator, typename Base::QueryStats, typename Base::SharedStorage, typename Base::SmemArray,
      typename Base::StepMessage;

  // True if producer warps set hidden elements of a stored gradient to 0: those of scores that a band excludes.
  static constexpr bool kClearsHiddenGradient = score::Function::kStoresGradient && !Config::kIsListed;

  // Return the end of the keys in the slots of a tile. If sequences are cut, the keys past a short tile belong to the
  // next sequence.
  static CUFLASH_DEVICE int end_of_keys(const attention::Params& params, const attention::WorkTile& work) {
    if constexpr (Config::kCutsSequences) return min(work.first + kBlockKv, params.shape.seqlen_kv);
    else return work.last;
  }

  // Return the keys of the tile that some query of the head sees. Rows of K at other keys must become 0: they may hold
  // NaN, and the product dS K multiplies them by a dS of 0.
  static CUFLASH_DEVICE attention::Interval visible_keys(const attention::Params& params,
                                                         const attention::WorkTile& work) {
    using namespace attention;
    return {max(work.first, interval(params, work.batch_head, 0).lo),
            min(end_of_keys(params, work), interval(params, work.batch_head, params.shape.seqlen_q - 1).hi)};
  }

  // Return the index of a step's tile of queries.
  static CUFLASH_DEVICE int step_number(const attention::Params& params, const attention::KvBlock& block) {
    if constexpr (Config::kCutsSequences) return block.entry;
    else return attention::query_tile_number<Listed>(params, block.start, kBlockQ);
  }

  // Return whether some query in the slot of a short step, after the step's queries, has no key. If sequences are cut,
  // these queries belong to the following sequences. Called by the first warp.
  static CUFLASH_DEVICE bool has_empty_rows_past(const attention::Params& params,
                                                 const attention::BatchHead& batch_head,
                                                 const attention::KvBlock& block) {
    bool is_empty = false;
#pragma unroll 1
    for (int row = block.stop + ptx::lane(); row < min(block.start + kBlockQ, params.shape.seqlen_q); row += 32) {
      const attention::Interval keys = interval(params, batch_head, row);
      is_empty |= keys.lo >= keys.hi;
    }
    return __any_sync(0xffffffffu, is_empty);
  }

  // Return whether the slot of a step has rows that must be 0: queries without a key, whose Q and dO may be arbitrary,
  // or rows of the matrix past the step. Called by the first warp.
  static CUFLASH_DEVICE bool has_rows_to_zero(const attention::Params& params, const HeadWork& work,
                                              const attention::KvBlock& block) {
    using namespace attention;
    if (block.stop < min(block.start + kBlockQ, params.shape.seqlen_q))
      if (!Config::kCutsSequences || has_empty_rows_past(params, work.tile.batch_head, block)) return true;
    if constexpr (kHasScore)  // a score function may hide all keys from a query
      if (work.records[step_number(params, block)].stats.has_empty_rows) return true;
    if (block.kind == BlockKind::kFull) return false;
    // Under a band, only the first and the last queries can be without a key
    if (!Listed::has_list(params.work) && params.work.lo == nullptr) {
      const BatchHead& batch_head = work.tile.batch_head;
      const Interval first = interval(params, batch_head, block.start),
                     last = interval(params, batch_head, block.stop - 1);
      return first.lo >= first.hi || last.lo >= last.hi;
    }
    return work.records[step_number(params, block)].stats.has_empty_rows;
  }

  // Start the copies of an operand, or assign them to the copy warps (`threads_copy`). The slot's barrier expects
  // `extra_bytes` more, for other copies.
  static CUFLASH_DEVICE void load_operand(const tile::TmaBoxes& to, const TensorMapParam& map,
                                          const tile::TmaCoords& at, int first, const tile::PipelineSlot& slot,
                                          bool threads_copy, int extra_bytes = 0) {
    if (threads_copy) ptx::mbarrier_arrive_expect_tx(ptx::shared_address(&slot.full), extra_bytes);
    else tile::tma_load_boxes(to, map, at, first, slot.full, extra_bytes);
  }

  // Write gradients of 0 for keys that no query sees; consumers do not process such tiles. Called by a warp.
  static CUFLASH_DEVICE void write_empty_rows(const attention::Params& params, const attention::Matrices& to,
                                              const attention::WorkTile& work, int num_columns) {
    using namespace attention;
    const int head = work.batch_head.head / params.shape.group_size;
    if (to.is_accumulator)
      tile::clear(matrix<float>(to, work.batch_head, head, work.last, num_columns).rows(work.first, work.last));
    else tile::clear(matrix<Element>(to, work.batch_head, head, work.last, num_columns).rows(work.first, work.last));
  }

  // Set the elements of a stored gradient to 0 that the steps of a tile would clear; the tile has no step. `work` has
  // the last of the heads that share its keys. Called by a warp.
  template <class Score>
  static CUFLASH_DEVICE void clear_hidden_gradient_of_tile(const attention::Params& params, const Score& score,
                                                           attention::WorkTile work) {
    if constexpr (kClearsHiddenGradient) {
      if (params.work.lo != nullptr) return;
#pragma unroll 1
      for (int head = 0; head < params.shape.group_size; ++head, --work.batch_head.head)
        clear_hidden_gradient<32, kBlockQ, kBlockKv>(params, score, work, 0, 1, ptx::lane());
    }
  }

  // Advance to the block's next tile, and store it. Return false if no tile is left. Called by the first warp.
  static CUFLASH_DEVICE bool advance_tile(const attention::Params& params, int work_slot) {
    SharedStorage& smem = shared();
    __syncwarp();
    if (threadIdx.x == 0) {  // this comparison takes fewer registers than elect.sync
      const int num_tiles =
          Config::kCutsSequences ? num_key_parts(params) : attention::num_key_tiles<Listed>(params, kBlockKv);
      int number;
      if constexpr (kTakesTilesInOrder) number = attention::next_tile_number_in_order(params, num_tiles);
      else number = smem.has_tile ? attention::next_tile_number(params, num_tiles) : attention::first_tile_number();
      smem.has_tile = number < num_tiles;
      if (smem.has_tile)
        smem.works[ptx::opaque(work_slot)].tile =
            Config::kCutsSequences ? key_part_at<kBlockKv>(params, number)
            : Config::kFinishesDqInOrder   ? attention::fused_dq_key_tile_at<Listed>(params, kBlockKv, number)
                                   : attention::key_tile_at<Listed>(params, kBlockKv, number, Config::kAddsDqInOrder);
    }
    __syncwarp();
    return smem.has_tile;
  }

  // If sequences are cut, store the range of queries that attend to a tile of keys, and the index of their first tile.
  // Called by the first warp.
  template <class Range>
  static CUFLASH_DEVICE void store_part_range(const attention::Params& params, const attention::WorkTile& work,
                                              attention::VisitRange visit_range, Range& to) {
    const auto queries = SequenceParts<kBlockQ>::of_queries(params, work.batch_head);
    visit_range.first_entry = queries.find(visit_range.start);
    if (ptx::elect_one()) to = {visit_range, queries};
  }

  // Compute the range of queries that attend to a tile of keys. If the mask has an interval for each query, eight
  // threads search together for each end of the range. Called by the first warp.
  static CUFLASH_DEVICE void find_visit_range(const attention::Params& params, const attention::WorkTile& work) {
    using namespace attention;
    // `end` is 0 for start, 1 for stop, 2 for full_start, and 3 for full_stop
    const int end = ptx::thread_index() / 8, number = ptx::thread_index() % 8;
    const int key = end == 0 || end == 3 ? work.first : work.last - 1;
    int first = 0, last = params.shape.seqlen_q;
    if (params.work.lo == nullptr) {
      first =
          end % 2 == 0 ? rows_ending_by(params, work.batch_head, key) : rows_starting_by(params, work.batch_head, key);
    } else {
      while (__any_sync(0xffffffffu, first < last)) {
        const int width = (last - first + 8) / 9, row = first + (number + 1) * width - 1;
        const Interval keys = interval(params, work.batch_head, min(row, params.shape.seqlen_q - 1));
        const bool is_before = row < last && (end % 2 == 0 ? keys.hi : keys.lo) <= key;
        const int num_before = __popc(__ballot_sync(0xffffffffu, is_before) >> 8 * end & 0xff);
        // otherwise no thread has tested a row before `last`
        if (num_before < 8) last = min(last, first + (num_before + 1) * width - 1);
        first += num_before * width;
      }
    }
    const auto found = [&](int which) { return __shfl_sync(0xffffffffu, first, 8 * which); };
    VisitRange visit_range{found(0), found(1), found(2), found(3)};
    if constexpr (Config::kCutsSequences) return store_part_range(params, work, visit_range, shared().visit_range);
    if (!ptx::elect_one()) return;
    // No query sees keys past the last query's range. Without this test, rounding their empty range to tile boundaries
    // would include the last query tile.
    if (visit_range.start >= params.shape.seqlen_q) visit_range.stop = visit_range.start = 0;
    find_list_entries(params, work, visit_range);
    static_cast<VisitRange&>(shared().visit_range) = aligned_to_tiles(params, visit_range, kBlockQ);
  }

  // Locate the staged array of a head. Return kThreadsCopyArray if TMA cannot copy its elements. Called by one thread.
  template <class Work, class Score, class Map>
  static CUFLASH_DEVICE int find_array(Work& work, const Score& score, const Map& map) {
    if constexpr (kStagesArray) {
      if (!has_staged_map(map, score)) return StepMessage::kThreadsCopyArray;
      work.array_coords = staged_coords(score, work.tile.batch_head);
    }
    return 0;
  }

  // Start copying the elements of the staged array for a step. The barrier of Q must expect their bytes. Called by one
  // thread.
  template <class Work, class Map>
  static CUFLASH_DEVICE void load_array_boxes(const Work& work, const Map& map, int query, int key, int stage,
                                              int flags) {
    if constexpr (kStagesArray)
      if (!(flags & StepMessage::kThreadsCopyArray))
        tile::start_tma_boxes(tile::TmaBoxes(array_smem(stage)), map.array, work.array_coords, query,
                              ptx::shared_address(&shared().q[stage].full), key);
  }

  // Advance the tile to the next head, and return the slot of the new HeadWork. The HeadWork of the previous head keeps
  // its slot if a step was sent for it. Called by the first warp.
  static CUFLASH_DEVICE int advance_head(int work_slot, bool has_sent_step) {
    SharedStorage& smem = shared();
    const int next_work_slot = has_sent_step ? (work_slot + 1) % kNumHeadWorks : work_slot;
    if (ptx::elect_one()) {
      smem.works[next_work_slot].tile = smem.works[work_slot].tile;
      ++smem.works[next_work_slot].tile.batch_head.head;
    }
    return next_work_slot;
  }

  // Store the values that the steps of a head share. Called by one thread.
  static CUFLASH_DEVICE void store_head_work(const attention::Params& params, const TensorMaps& maps,
                                             const QueryState& query_state, HeadWork& head_work,
                                             const score::Function& score,
                                             StagedMapArgument staged_map) {
    using namespace attention;
    const WorkTile& work = head_work.tile;
    const BatchHead& batch_head = work.batch_head;
    head_work.records = query_records(query_state, batch_head);
    ptx::compiler_barrier();  // keeps values from being computed earlier, to save registers
    if constexpr (kMakesDq) head_work.dq_sum = matrix<float>(params.dq_sum, batch_head, batch_head.head, 0, 0).data;
    head_work.q_coords = tma_coords(params.q, batch_head, batch_head.head);
    head_work.do_coords = tma_coords(params.do_, batch_head, batch_head.head);
    head_work.flags = (work.last - work.first == kBlockKv ? 0 : StepMessage::kMasked) |
                      (has_tensor_map(maps.q, params.q) ? 0 : StepMessage::kThreadsCopyQ) |
                      (has_tensor_map(maps.do_, params.do_) ? 0 : StepMessage::kThreadsCopyDo);
    if constexpr (kStagesArray) head_work.flags |= find_array(head_work, score, staged_map);
    if constexpr (Config::kFinishesDqInOrder) {
      head_work.dq = dq_schedule<kBlockQ, kBlockKv>(params, query_state, work);
      head_work.flags |=
          (head_work.dq.finishes ? StepMessage::kFinalizesDq : 0) | (head_work.dq.stores ? StepMessage::kStoresDq : 0);
    }
  }

  // Advance the schedule of dQ by a step. Store in the step's message the tiles for which it waits and the bits that it
  // signals. Called by one thread.
  static CUFLASH_DEVICE void advance_dq_schedule(HeadWork& head_work, StepMessage& message,
                                                 const attention::KvBlock& block, int seqlen_q) {
    constexpr int kSemaphoreFlags = StepMessage::kStoresDq | StepMessage::kUsesDqSemaphore;
    DqSchedule& dq = head_work.dq;
    if (block.stop >= dq.next) {
      head_work.flags = (head_work.flags & ~kSemaphoreFlags) | StepMessage::kUsesDqSemaphore |
                        (dq.stores ? StepMessage::kStoresDq : 0);
      message.dq = dq.at(block.stop, seqlen_q);
    } else if (head_work.flags & StepMessage::kUsesDqSemaphore) {
      head_work.flags &= ~StepMessage::kUsesDqSemaphore;
    }
  }

  // Start copying Q of a step, its statistics and the elements of the staged array. Called by one thread.
  static CUFLASH_DEVICE void load_queries(const TensorMaps& maps, const HeadWork& head_work, int first_query, int stage,
                                          int flags, const QueryStats& stats, StagedMapArgument staged_map) {
    SharedStorage& smem = shared();
    load_operand(tile::TmaBoxes(q_smem(stage)), maps.q, head_work.q_coords, first_query, smem.q[stage],
                 flags & StepMessage::kThreadsCopyQ,
                 sizeof stats + (kStagesArray && !(flags & StepMessage::kThreadsCopyArray) ? SmemArray::kBytes : 0));
    if constexpr (kStagesArray)
      load_array_boxes(head_work, staged_map, first_query, head_work.tile.first, stage, flags);
    ptx::bulk_load(ptx::shared_address(&smem.queries[stage].stats), &stats, sizeof stats,
                   ptx::shared_address(&smem.q[stage].full));
  }

  // Load the steps of a tile: write the message of each step, and start its copies. Called by the first warp.
  static CUFLASH_DEVICE void load_tile(const attention::Params& params, const TensorMaps& maps,
                                       const QueryState& query_state, PipelineState& state, int& work_slot,
                                       bool& has_sent_step, const score::Function& score,
                                       StagedMapArgument staged_map) {
    using namespace attention;
    SharedStorage& smem = shared();
    const Shape& shape = params.shape;
    bool has_k = false;
    // opaque, so that the bound is loaded again for each head instead of taking registers
    for (int head = 0; head < shape.group_size; head = ptx::opaque(head + 1)) {
      __syncwarp();
      if (head > 0) work_slot = advance_head(work_slot, has_sent_step);
      has_sent_step = false;
      __syncwarp();
      HeadWork& head_work = smem.works[work_slot];
      const WorkTile& work = head_work.tile;
      find_visit_range(params, work);
      if (ptx::elect_one()) store_head_work(params, maps, query_state, head_work, score, staged_map);
      __syncwarp();
      QueryIterator blocks(params, smem.visit_range);
      KvBlock block;
      for (bool loads_k = !has_k || params.work.interval_head_stride != 0; blocks.next(block); loads_k = false) {
        const bool zero_fills = has_rows_to_zero(params, head_work, block);
        StepMessage& message = smem.messages[state.stage];
        // all threads of the warp wait, so that none of them misses a phase
        tile::wait_empty(smem.q[state.stage], state.phase);
        __syncwarp();
        if (ptx::elect_one()) {
          if constexpr (Config::kFinishesDqInOrder)  // computed first, to save registers
            advance_dq_schedule(head_work, message, block, shape.seqlen_q);
          const bool is_full_block = block.kind == BlockKind::kFull && block.stop - block.start == kBlockQ;
          int flags = head_work.flags | smem.kv_phases | (is_full_block ? 0 : StepMessage::kMasked);
          if (zero_fills) flags |= StepMessage::kThreadsCopyQ | StepMessage::kThreadsCopyDo;
          if (loads_k) {
            const Interval keys = visible_keys(params, work);
            const bool threads_copy_k = keys.lo > work.first || keys.hi < min(work.first + kBlockKv, shape.seqlen_kv) ||
                                        !has_tensor_map(maps.k, params.k);
            flags |= StepMessage::kLoadsK | (threads_copy_k ? StepMessage::kThreadsCopyK : 0);
            if (!has_k)
              flags |= StepMessage::kLoadsV | (has_tensor_map(maps.v, params.v) ? 0 : StepMessage::kThreadsCopyV);
            message.k_coords = tma_coords(params.k, work.batch_head, work.batch_head.head / shape.group_size);
            message.v_coords = tma_coords(params.v, work.batch_head, work.batch_head.head / shape.group_size);
          }
          message.flags = flags;
          message.work = work_slot;
          const int number = step_number(params, block);
          if constexpr (kMakesDq) message.dq_sum = head_work.dq_sum + number * params.dq_sum.row_stride;
          auto& record = head_work.records[number];
          const QueryStats& stats = record.stats;
          if constexpr (kCountsDqTiles) message.arrivals = &dq_count(record)->count;
          constexpr int kFlagsWithBlock = StepMessage::kMasked | StepMessage::kThreadsCopyQ |
                                          StepMessage::kThreadsCopyDo | StepMessage::kFinalizesDq;
          if (Config::kLastFinishesDq || kMessagesHaveBlocks || flags & kFlagsWithBlock) message.block = block;
          if (flags & (StepMessage::kThreadsCopyQ | StepMessage::kThreadsCopyDo)) {
#pragma unroll 1
            for (int x = 0; x < kNonemptyWords; ++x) message.nonempty[x] = stats.nonempty[x];
          }
          load_queries(maps, head_work, block.start, state.stage, flags, stats, staged_map);
          ptx::mbarrier_arrive(ptx::shared_address(&smem.message_ready[state.stage]));
          // Copy warps load K and V once their slots are empty; until then, a prefetch moves them into the L2 cache.
          if (loads_k) {
            if (!message.is(StepMessage::kThreadsCopyK))
              tile::tma_prefetch_boxes(tile::TmaBoxes(k_smem), maps.k, message.k_coords, work.first);
            if (!has_k && !message.is(StepMessage::kThreadsCopyV))
              tile::tma_prefetch_boxes(tile::TmaBoxes(v_smem), maps.v, message.v_coords, work.first);
            smem.kv_phases ^= StepMessage::kPhaseOfK | (has_k ? 0 : StepMessage::kPhaseOfV);
          }
        }
        has_k = true;
        const tile::PipelineSlot& d_o = smem.d_o[do_stage(state)];
        if constexpr (kReleasesDo) tile::wait_empty(d_o, do_phase(state));  // otherwise dO is released together with Q
        __syncwarp();
        if (ptx::elect_one())
          load_operand(tile::TmaBoxes(do_smem(do_stage(state))), maps.do_, head_work.do_coords, block.start, d_o,
                       message.is(StepMessage::kThreadsCopyDo));
        state = state.next(), has_sent_step = true;
      }
    }
    if (has_k) return;
    clear_hidden_gradient_of_tile(params, score, smem.works[work_slot].tile);
    write_empty_rows(params, params.dk, smem.works[work_slot].tile, shape.head_dim);
    write_empty_rows(params, params.dv, smem.works[work_slot].tile, shape.value_dim);
  }

  // Run the first producer warp: tile after tile, then a message that ends the work.
  static CUFLASH_DEVICE void produce(const attention::Params& params, const TensorMaps& maps,
                                     const QueryState& query_state, const score::Function& score,
                                     StagedMapArgument staged_map) {
    SharedStorage& smem = shared();
    PipelineState state;
    int work_slot = 0;  // index of the current HeadWork
    bool has_sent_step = false;
    while (advance_tile(params, work_slot)) {
      if (!smem.works[work_slot].tile.is_empty())
        load_tile(params, maps, query_state, state, work_slot, has_sent_step, score, staged_map);
      if (has_sent_step) work_slot = (work_slot + 1) % kNumHeadWorks;
      has_sent_step = false;
    }
    tile::wait_empty(smem.q[state.stage], state.phase);
    __syncwarp();
    if (ptx::elect_one()) {
      smem.messages[state.stage].flags = StepMessage::kEndOfWork;
      smem.queries[state.stage].stats.has_large_lse = 0;  // every consumer reads it in each step
      if constexpr (kHasScore) smem.queries[state.stage].stats.has_empty_rows = 0;
      ptx::mbarrier_arrive(ptx::shared_address(&smem.q[state.stage].full));
      ptx::mbarrier_arrive(ptx::shared_address(&smem.message_ready[state.stage]));
    }
  }
};

}  // namespace cuflash::sm90
