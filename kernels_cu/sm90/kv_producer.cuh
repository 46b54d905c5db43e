#pragma once
#include <attention/mask_softmax_mma.cuh>
#include <attention/scales.cuh>
#include <sm90/kv_tile_scheduler.cuh>
#include <sm90/page_copies.cuh>

// The producer warps of the pipeline over keys (sm90/kv_pipeline.cuh): one loads Q, dO and K, and another loads V, by
// TMA if TMA can copy the rows. The first one also writes the message of each step.
namespace cuflash::sm90 {

template <class Config>
struct KvProducer : KvTileScheduler<Config> {
  using Base = KvTileScheduler<Config>;
  using typename Base::ChosenArgument, typename Base::Element, typename Base::KvIterator,
      typename Base::OperandElement, typename Base::PagesArgument, typename Base::SmemArray,
      typename Base::StepMessage, typename Base::TangentsArgument, typename Base::WorkTileInfo;
  using Base::array_slot, Base::array_smem, Base::do_dot_smem, Base::do_smem, Base::kBlockKv, Base::kBlockQ, Base::kFetchesTileEarly,
      Base::kLoadsDo, Base::kLoadsV, Base::kMarksMasked, Base::kNumConsumers, Base::kNumFlags, Base::kPacksQueries,
      Base::kQOperands, Base::kVisitsLastFirst, Base::k_dot_smem, Base::k_smem, Base::phase_of, Base::q_dot_smem, Base::q_phase_of,
      Base::q_smem, Base::q_stage_of, Base::shared, Base::stage_of, Base::tile_info_index, Base::v_dot_smem, Base::v_smem,
      Base::wait_tile_info;

  // Return the boxes that TMA copies into the slot of an operand.
  template <Operand kOperand>
  static CUFLASH_DEVICE tile::TmaBoxes boxes_of(int stage) {
    if constexpr (kOperand == kQ) return tile::TmaBoxes(q_smem(stage));
    else if constexpr (kOperand == kK) return tile::TmaBoxes(k_smem(stage));
    else if constexpr (kOperand == kV) return tile::TmaBoxes(v_smem(stage));
    else return tile::TmaBoxes(do_smem(stage));
  }

  // Start to copy rows first <= x < last of an operand, or of its tangent, into an empty slot; `boxes` and `coords` are
  // functions, so that the machine code of each operand is that of its own function.
  // `zero_fills`: rows past them must become 0. Called by a warp.
  template <Operand kOperand, class Boxes, class Coords>
  static CUFLASH_DEVICE void load_rows(const attention::Params& params, Boxes boxes, const TensorMapParam& map,
                                       const attention::Matrices& matrices, Coords coords,
                                       const tile::PipelineSlot& slot, const WorkTileInfo& tile_info, int first,
                                       int last, bool zero_fills) {
    // the rows of V are columns of the tensor map's matrix
    constexpr bool kIsTransposed = Config::kIsQuantized && kOperand == kV;
    // FP8 operands always have a tensor map
    if (Config::kIsQuantized || (has_tensor_map(map, matrices) && !zero_fills)) {
      if (is_first_lane())
        tile::tma_load_boxes<OperandElement>(boxes(), map, coords(), kIsTransposed ? 0 : first, slot.full, 0,
                                             kIsTransposed ? first : 0);
      else if (tile::lane() < tile::kArrivalsPerWarp) ptx::mbarrier_arrive(ptx::shared_address(&slot.full));
      return;
    }
    if constexpr (!Config::kIsQuantized) {
      constexpr bool kIsOfQueries = kOperand == kQ || kOperand == kDo, kHasValueDim = kOperand == kV || kOperand == kDo;
      const int head = kIsOfQueries ? tile_info.work.batch_head.head : tile_info.kv_head;
      const int num_columns = kHasValueDim ? params.shape.value_dim : params.shape.head_dim;
      const auto all = attention::matrix<Element>(matrices, tile_info.work.batch_head, head, 0, num_columns);
      tile::copy<32>(boxes(), all.rows(first, last), tile::lane(), [](int) { return true; });
      tile::arrive(slot.full);
    }
  }
  template <Operand kOperand>
  static CUFLASH_DEVICE void load_operand(const attention::Params& params, const TensorMaps& maps,
                                          const tile::PipelineSlot& slot, int stage, const WorkTileInfo& tile_info,
                                          int first, int last, bool zero_fills) {
    const attention::Matrices& matrices = kOperand == kDo ? params.do_ : (&params.q)[kOperand];
    load_rows<kOperand>(params, [&] { return boxes_of<kOperand>(stage); }, (&maps.q)[kOperand], matrices,
                        [&]() -> const tile::TmaCoords& { return tile_info.coords[kOperand]; }, slot, tile_info, first,
                        last, zero_fills);
  }

  // Start to copy rows of the tangent of an operand into the slot of that operand, if there is one. Called by a warp.
  template <Operand kOperand>
  static CUFLASH_DEVICE void load_dot(const attention::Params&, NoTangentOperands, const tile::PipelineSlot&, int,
                                      const WorkTileInfo&, int, int, bool) {}
  template <Operand kOperand>
  static CUFLASH_DEVICE void load_dot(const attention::Params& params, const TangentOperands& dots,
                                      const tile::PipelineSlot& slot, int stage, const WorkTileInfo& tile_info,
                                      int first, int last, bool zero_fills) {
    constexpr bool kExists = kOperand == kQ   ? Config::kHasQDot
                             : kOperand == kK ? Config::kHasKDot
                             : kOperand == kV ? Config::kHasVDot
                                              : Config::kHasDoDot;
    if constexpr (kExists) {
      const attention::Matrices& matrices = kOperand == kDo ? dots.arrays.do_dot : (&dots.arrays.q_dot)[kOperand];
      const auto boxes = [&] {
        return kOperand == kQ   ? tile::TmaBoxes(q_dot_smem(stage))
               : kOperand == kK ? tile::TmaBoxes(k_dot_smem(stage))
               : kOperand == kV ? tile::TmaBoxes(v_dot_smem(stage))
                                : tile::TmaBoxes(do_dot_smem(stage));
      };
      const attention::BatchHead& batch_head = tile_info.work.batch_head;
      const auto coords = [&] {
        const bool is_of_queries = kOperand == kQ || kOperand == kDo;
        return tma_coords(matrices, batch_head, is_of_queries ? batch_head.head : tile_info.kv_head);
      };
      load_rows<kOperand>(params, boxes, (&dots.maps.q)[kOperand], matrices, coords, slot, tile_info, first, last,
                          zero_fills);
    }
  }

  // Start copying Q or dO of a tile into an empty slot. Called by a warp.
  template <Operand kOperand>
  static CUFLASH_DEVICE void load_queries(const attention::Params& params, const TensorMaps& maps,
                                          attention::NoChosenLists, const tile::PipelineSlot& slot, int stage,
                                          const WorkTileInfo& tile_info, bool zero_fills) {
    load_operand<kOperand>(params, maps, slot, stage, tile_info, tile_info.work.first, tile_info.work.last, zero_fills);
  }
  // Start copying Q or dO of neighboring queries. A box of the tensor map has the heads of a query that share its list
  // and, in a forward pass, all queries of a tile. The backward kernel that gathers queries uses the same map. The
  // slot's rows past the boxes stay as they are.
  template <Operand kOperand>
  static CUFLASH_DEVICE void load_queries(const attention::Params& params, const TensorMaps& maps,
                                          const attention::ChosenLists& chosen, const tile::PipelineSlot& slot,
                                          int stage, const WorkTileInfo& tile_info, bool) {
    const TensorMapParam& map = (&maps.q)[kOperand];
    const attention::Matrices& matrices = kOperand == kDo ? params.do_ : params.q;
    const tile::TmaBoxes to = boxes_of<kOperand>(stage);
    if (has_tensor_map(map, matrices)) {
      const uint32_t barrier = ptx::shared_address(&slot.full);
      const tile::TmaCoords& coords = tile_info.coords[kOperand];
      const int row_bytes = static_cast<int>(sizeof(Element)) * to.columns, heads = chosen.heads_per_tile;
      if (is_first_lane())
        ptx::mbarrier_arrive_expect_tx(barrier, row_bytes * chosen.queries_per_tile * heads);
      else if (tile::lane() < tile::kArrivalsPerWarp) ptx::mbarrier_arrive(barrier);
      __syncwarp();  // the barrier expects the bytes before they arrive
      const int num_boxes = kLoadsDo ? chosen.queries_per_tile : 1;
#pragma unroll 1
      for (int x = tile::lane(); x < num_boxes; x += 32) {
        tile::TmaBoxes box = to;
        box.start += 2 * x * heads * to.width;
        tile::start_tma_boxes<Element>(box, map, {tile_info.work.first + x, coords.y, coords.z}, coords.x, barrier);
      }
      return;
    }
    const int num_columns = kOperand == kDo ? params.shape.value_dim : params.shape.head_dim;
    tile::copy<32>(to, attention::rows_of_tile<Element>(chosen, matrices, tile_info.work, num_columns), tile::lane(),
                   [](int) { return true; });
    tile::arrive(slot.full);
  }

  // Set the rows of the slots of Q and dO that no box contains to 0. Their scores are then finite, and never stored.
  // Called by a warp, before it loads the first tile.
  static CUFLASH_DEVICE void clear_rows_past_boxes(attention::NoChosenLists) {}
  static CUFLASH_DEVICE void clear_rows_past_boxes(const attention::ChosenLists& chosen) {
    const int num_rows = chosen.queries_per_tile * chosen.heads_per_tile;
    tile::clear_rows_from(boxes_of<kQ>(0), num_rows);
    if constexpr (kLoadsDo) tile::clear_rows_from(boxes_of<kDo>(0), num_rows);
    ptx::fence_proxy_async();
    __syncwarp();
  }

  // Return the flags of a step for the rows of a lane's warp. `members` are the queries that chose the step's block,
  // and `own` the queries of these rows.
  static CUFLASH_DEVICE int flags_of_members(int flags, uint64_t members, uint64_t own) {
    if ((members & own) == 0) return (flags & ~StepMessage::kUnmasked) | StepMessage::kNoMember;
    return (members & own) == own ? flags : flags & ~StepMessage::kUnmasked;
  }

  // Return the queries of a tile that have rows in a lane's warp; none in kernels whose queries choose no blocks.
  static CUFLASH_DEVICE uint64_t queries_of_lane(attention::NoChosenLists, const attention::WorkTile&) { return 0; }
  static CUFLASH_DEVICE uint64_t queries_of_lane(const attention::ChosenLists& chosen,
                                                 const attention::WorkTile& work) {
    const uint64_t of_tile = ~0ull >> (64 - (work.last - work.first));
    return of_tile & attention::queries_of_rows(chosen, 16 * (tile::lane() % kNumFlags), 16);
  }

  // Start copying the rows of K or V of a step into an empty slot. If `zero_fills`, the slot's rows past them must
  // become 0. Called by a warp.
  template <Operand kOperand>
  static CUFLASH_DEVICE void load_step(const attention::Params& params, const TensorMaps& maps, attention::NoPages,
                                       const tile::PipelineSlot& slot, int stage, const WorkTileInfo& tile_info,
                                       const attention::KvBlock& block, bool zero_fills) {
    load_operand<kOperand>(params, maps, slot, stage, tile_info, block.start, block.stop, zero_fills);
  }
  // Start copying the rows of K or V of a step from the pages of a sequence. Values that no query of the tile sees,
  // because they are before the window or past the end of the sequence, become 0, since 0 times NaN is not 0; the
  // scores of such keys are masked.
  template <Operand kOperand>
  static CUFLASH_DEVICE void load_step(const attention::Params& params, const TensorMaps& maps,
                                       const attention::Pages& pages, const tile::PipelineSlot& slot, int stage,
                                       const WorkTileInfo& tile_info, const attention::KvBlock& block, bool) {
    const int sequence = tile_info.work.batch_head.batch_index;
    const attention::Interval seen{attention::first_key(tile_info.visit_range),
                                   attention::rows_of_sequence(pages, sequence).length};
    PageCopy<Element> copy(boxes_of<kOperand>(stage), pages, sequence, tile_info.kv_head, block.start, seen);
    if (kOperand == kV) copy.copy_cut_boxes((&params.q)[kOperand], params.shape.value_dim);
    else copy.count_faults();
    copy.start((&maps.q)[kOperand], slot);
  }

  // Return the flags of a step for a warpgroup. Only in steps from the first keys to the last, a warpgroup may see no
  // key of the following ones. Later entries of a list may be anywhere.
  static CUFLASH_DEVICE int step_flags(const attention::Params& params, const attention::KvBlock& block,
                                       const GroupVisitRange& group_range, bool is_shifted, bool is_last_of_tile) {
    using attention::BlockKind;
    attention::KvBlock group_block = block;
    if (block.kind == BlockKind::kInterval && block.start >= group_range.full_start &&
        block.stop <= group_range.full_stop)
      group_block.kind = BlockKind::kFull;
    const bool is_unmasked = !is_shifted && attention::is_unmasked<kBlockKv>(group_block);
    const bool is_last = is_last_of_tile || (!Config::kIsListed && !kVisitsLastFirst && block.stop >= group_range.stop);
    // where lse is final, the exponent of P includes the sign
    const bool needs_negation = !kMarksMasked && attention::LazySoftmax<2>::needs_negation(params.shape.softmax_scale);
    return (is_unmasked && !needs_negation) * StepMessage::kUnmasked + is_last * StepMessage::kLastForWarpgroup +
           is_last_of_tile * StepMessage::kLastOfTile;
  }

  // Return whether a step ends before its block and before the end of the matrix. The rows after it must then become 0,
  // since they may hold NaN, and 0 times NaN is not 0.
  static CUFLASH_DEVICE bool ends_inside_block(const attention::KvBlock& block, int length) {
    return block.stop - block.start < kBlockKv && block.stop < length;
  }

  // Whether steps are never moved to an earlier start at the end of a range: those of a list, and those of pages and of
  // FP8 operands, which start at multiples of their width.
  static constexpr bool kKeepsSteps = Config::kIsListed || Config::kIsPaged || Config::kIsQuantized;

  // Return whether the slot of a tile has rows after the tile's queries that belong to no sequence. Their Q must be
  // replaced by zeros: it may be NaN, which would affect the other rows of a warp when they decide together whether to
  // rescale.
  static CUFLASH_DEVICE bool ends_before_unused_queries(const attention::Params& params,
                                                        const attention::WorkTile& work) {
    return work.last < min(work.first + kBlockQ, params.shape.seqlen_q);
  }

  // Load Q, dO and K of all tiles, and write the message of each step. Called by a warp.
  static CUFLASH_DEVICE void load_keys(const attention::Params& params, const TensorMaps& maps, PagesArgument pages,
                                       ChosenArgument chosen, TangentsArgument dots) {
    using namespace attention;
    unsigned num_k_blocks = 0, num_tiles_done = 0;  // numbers of loaded blocks and tiles
    clear_rows_past_boxes(chosen);
    while (true) {
      const WorkTileInfo& tile_info = wait_tile_info(num_tiles_done);
      const int q_stage = q_stage_of(num_tiles_done);
      const tile::PipelineSlot& q = shared().q[q_stage];
      if (tile_info.is_end) {
        wait_slot_empty(q, q_phase_of(num_tiles_done));
        for (int i = 1; i < kQOperands; ++i) tile::arrive(q.full);
        return tile::arrive(q.full);
      }
      KvIterator blocks(params, tile_info.visit_range);
      KvBlock block;
      const uint64_t own = queries_of_lane(chosen, tile_info.work);
      for (bool is_first = true; blocks.next(block); is_first = false) {
        const int stage = stage_of(num_k_blocks), start = block.start;
        const tile::PipelineSlot& k = shared().k[stage];
        const bool is_shifted =
            shift_short_block<kBlockKv, kKeepsSteps>(block, tile_info.visit_range, params.shape.seqlen_kv);
        const bool is_last_of_tile = !blocks.has_next();
        int flags = step_flags(params, block, tile_info.group_ranges[min(tile::lane(), kNumConsumers - 1)], is_shifted,
                               is_last_of_tile);
        uint64_t members = 0;
        if constexpr (kPacksQueries) flags = flags_of_members(flags, members = chosen.word(block.entry), own);
        if (kFetchesTileEarly ? is_first : is_last_of_tile)
          tile::arrive(shared().tile_info_slots[tile_info_index(num_tiles_done + 1)].empty);
        wait_slot_empty(k, phase_of(num_k_blocks));
        StepMessage& message = shared().messages[stage];
        if (tile::lane() < kNumFlags) message.flags[tile::lane()] = flags;
        if (is_first_lane()) {
          message.block = block;
          message.unread_start = start;
          if constexpr (kPacksQueries) message.members = members;
        }
        __syncwarp();
        const bool zero_fills = kLoadsDo && ends_inside_block(block, params.shape.seqlen_kv);
        load_step<kK>(params, maps, pages, k, stage, tile_info, block, zero_fills);
        load_dot<kK>(params, dots, k, stage, tile_info, block.start, block.stop, zero_fills);
        ++num_k_blocks;
        if (!is_first) continue;
        wait_slot_empty(q, q_phase_of(num_tiles_done));
        load_queries<kQ>(params, maps, chosen, q, q_stage, tile_info,
                         Config::kIsPaged && ends_before_unused_queries(params, tile_info.work));
        if constexpr (kLoadsDo) load_queries<kDo>(params, maps, chosen, q, q_stage, tile_info, false);
        load_dot<kQ>(params, dots, q, q_stage, tile_info, tile_info.work.first, tile_info.work.last, false);
        load_dot<kDo>(params, dots, q, q_stage, tile_info, tile_info.work.first, tile_info.work.last, false);
      }
      ++num_tiles_done;
    }
  }

  // Call `visit(tile_info, block, num_blocks, is_first)` for the steps of all tiles, with the number of steps before a
  // step and whether it is the first one of its tile. Called by a warp that reads tile messages, except the warp that
  // copies K.
  template <class Visit>
  static CUFLASH_DEVICE void walk_steps(const attention::Params& params, Visit visit) {
    using namespace attention;
    unsigned num_blocks = 0;
    // at the start, all slots except the first are empty
    for (int i = 1; i < kNumTileInfos; ++i) tile::arrive(shared().tile_info_slots[i].empty);
    for (unsigned num_tiles_done = 0;; ++num_tiles_done) {
      const WorkTileInfo& tile_info = wait_tile_info(num_tiles_done);
      if (tile_info.is_end) return;
      KvIterator blocks(params, tile_info.visit_range);
      bool is_first = true;
      for (KvBlock block; blocks.next(block); ++num_blocks, is_first = false)
        visit(tile_info, block, num_blocks, is_first);
      tile::arrive(shared().tile_info_slots[tile_info_index(num_tiles_done)].empty);
    }
  }

  // Load V of all steps. Called by a warp.
  static CUFLASH_DEVICE void load_values(const attention::Params& params, const TensorMaps& maps, PagesArgument pages,
                                         TangentsArgument dots) {
    using namespace attention;
    walk_steps(params, [&](const WorkTileInfo& tile_info, KvBlock& block, unsigned num_v_blocks, bool) {
      const int stage = stage_of(num_v_blocks), length = params.shape.seqlen_kv;
      shift_short_block<kBlockKv, kKeepsSteps>(block, tile_info.visit_range, length);
      const bool zero_fills = ends_inside_block(block, length);
      wait_slot_empty(shared().v[stage], phase_of(num_v_blocks));
      if constexpr (kLoadsV) load_step<kV>(params, maps, pages, shared().v[stage], stage, tile_info, block, zero_fills);
      load_dot<kV>(params, dots, shared().v[stage], stage, tile_info, block.start, block.stop, zero_fills);
    });
  }

  // Store the scales of all steps of FP8 operands. The barrier of K counts the arrival of this warp in addition to that
  // of the warp that copies K. If that warp also read the scales, it would delay consumers. Called by a warp.
  template <class Hooks>
  static CUFLASH_DEVICE void write_scales(const attention::Params&, attention::NoScales) {}
  template <class Hooks>
  static CUFLASH_DEVICE void write_scales(const attention::Params& params, const attention::Scales& scales) {
    using attention::KvBlock;
    walk_steps(params, [&](const WorkTileInfo& tile_info, KvBlock& block, unsigned num_k_blocks, bool is_first) {
      const tile::PipelineSlot& k = shared().k[stage_of(num_k_blocks)];
      const auto of_step = Hooks::read_scales(scales, tile_info, block.start, is_first);
      wait_slot_empty(k, phase_of(num_k_blocks));
      Hooks::store_scales(of_step, stage_of(num_k_blocks), is_first);
      tile::arrive(k.full);
    });
  }

  // Copy the elements of the staged array for a step into the slot of a consumer warpgroup: by TMA, or by threads if
  // TMA cannot copy the array or the step does not start at a multiple of 16 bytes. Called by a warp.
  template <class Score>
  static CUFLASH_DEVICE void load_array_step(const Score& score, const StagedMap& map, const attention::WorkTile& work,
                                             const attention::KvBlock& block, int stage, int consumer) {
    const SmemArray to = array_smem(stage, consumer);
    const tile::PipelineSlot& slot = array_slot(stage, consumer);
    const int first = work.first + 64 * consumer;
    if (has_staged_map(map, score) && block.start % tile::kChunkOf<ptx::Half> == 0) {
      if (is_first_lane())
        tile::tma_load_boxes(tile::TmaBoxes(to), map.array, staged_coords(score, work.batch_head), first, slot.full, 0,
                             block.start);
      else if (tile::lane() < tile::kArrivalsPerWarp) ptx::mbarrier_arrive(ptx::shared_address(&slot.full));
      return;
    }
    const int begin = min(first, work.last - 1), end = first < work.last ? min(first + 64, work.last) : begin;
    const auto part = staged_part(score, work.batch_head, {begin, end}, {block.start, block.stop});
    tile::copy<32>(tile::TmaBoxes(to), part, tile::lane(), [](int) { return true; });
    tile::arrive(slot.full);
  }

  // Load the elements of the staged array for all steps. Called by a warp.
  template <class Score>
  static CUFLASH_DEVICE void load_array(const attention::Params&, const Score&, NoStagedMap) {}
  template <class Score>
  static CUFLASH_DEVICE void load_array(const attention::Params& params, const Score& score, const StagedMap& map) {
    using namespace attention;
    walk_steps(params, [&](const WorkTileInfo& tile_info, KvBlock& block, unsigned num_blocks, bool) {
      const int stage = stage_of(num_blocks);
      shift_short_block<kBlockKv, kKeepsSteps>(block, tile_info.visit_range, params.shape.seqlen_kv);
      for (int consumer = 0; consumer < kNumConsumers; ++consumer) {
        wait_slot_empty(array_slot(stage, consumer), phase_of(num_blocks));
        load_array_step(score, map, tile_info.work, block, stage, consumer);
      }
    });
  }
};

}  // namespace cuflash::sm90
