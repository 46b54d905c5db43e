#pragma once
#include <attention/members.cuh>
#include <sm90/q_producer.cuh>

// The first producer warp of sm90_backward if queries choose their key blocks. A work tile has a part of the queries
// that chose a tile of keys. A step has a few of these queries, with all heads that share their lists. TMA gathers them
// with one box per query and panel of columns; different lanes start these copies. Steps go from the last query to the
// first one. Under a causal mask, blocks that process different keys at the same time then read about the same queries,
// which thus stay in the L2 cache.
namespace cuflash::sm90 {

template <class Config>
struct GatheredQueries : QProducer<Config> {
  using Base = QProducer<Config>;
  using typename Base::ChosenArgument, typename Base::Element, typename Base::HeadWork, typename Base::Listed,
      typename Base::PipelineState, typename Base::SharedStorage, typename Base::StepMessage;
  using Base::do_smem, Base::kBlockKv, Base::kBlockQ, Base::kMaxGathered, Base::kNumHeadWorks, Base::kNumStages,
      Base::k_smem, Base::q_smem, Base::shared, Base::v_smem, Base::write_empty_rows;

  // The query of a lane in a step, and whether it sees all keys of the tile. Lanes past the step have a query past the
  // last one; TMA reads it as zeros.
  struct OwnQuery {
    int query;
    bool sees_all;
  };
  static CUFLASH_DEVICE OwnQuery own_query(const attention::Params& params, const attention::ChosenLists& chosen,
                                           const attention::WorkTile& work, const attention::KvBlock& block) {
    const int place = block.start + ptx::lane();
    if (place >= block.stop) return {params.shape.seqlen_q, true};
    const int query = chosen.queries[place];
    const attention::Interval keys = attention::interval(params, work.batch_head, query);
    return {query, keys.lo <= work.first && keys.hi >= work.last};
  }

  // Return the step before the one that starts at `stop`.
  static CUFLASH_DEVICE attention::KvBlock step_before(const attention::ChosenLists& chosen, int first, int stop) {
    return {max(first, stop - chosen.queries_per_tile), stop, attention::BlockKind::kInterval, -1};
  }

  // Set the rows of the slots of Q and dO that no box contains to 0.
  static CUFLASH_DEVICE void clear_rows_past_boxes(const attention::ChosenLists& chosen) {
    const int num_rows = chosen.queries_per_tile * chosen.heads_per_tile;
    for (int stage = 0; stage < kNumStages; ++stage) {
      tile::clear_rows_from(tile::TmaBoxes(q_smem(stage)), num_rows);
      tile::clear_rows_from(tile::TmaBoxes(do_smem(stage)), num_rows);
    }
    ptx::fence_proxy_async();
    __syncwarp();
  }

  // Start copying the queries of a step, one per lane, or assign them to the copy warps. Called by the whole warp.
  static CUFLASH_DEVICE void gather(const attention::ChosenLists& chosen, const tile::TmaBoxes& to,
                                    const TensorMapParam& map, const tile::TmaCoords& coords, int query,
                                    const tile::PipelineSlot& slot, bool threads_copy) {
    const int box_bytes = static_cast<int>(sizeof(Element)) * chosen.heads_per_tile * to.width;
    const uint32_t barrier = ptx::shared_address(&slot.full);
    if (ptx::elect_one())
      ptx::mbarrier_arrive_expect_tx(
          barrier, threads_copy ? 0 : chosen.queries_per_tile * (to.columns / to.width) * box_bytes);
    __syncwarp();  // the barrier expects the bytes before they arrive
    if (threads_copy || ptx::lane() >= chosen.queries_per_tile) return;
    uint32_t box = ptx::shared_address(ptx::dynamic_shared<unsigned char>()) + to.start + ptx::lane() * box_bytes;
    for (int column = 0; column < to.columns; column += to.width) {
      ptx::tma_load_5d(box, &map.map, barrier, column, coords.x, query, coords.y, coords.z);
      box += static_cast<int>(sizeof(Element)) * to.rows * to.width;
    }
  }

  // Store the values that the steps of a part share. Called by one thread.
  static CUFLASH_DEVICE void store_part_work(const attention::Params& params, const TensorMaps& maps,
                                             int work_slot, const attention::WorkTile& work, int part) {
    HeadWork& head_work = shared().works[work_slot];
    head_work.tile = work;
    shared().parts[work_slot] = {matrix<float>(params.lse, work.batch_head, work.batch_head.head, 0, 1).data,
                                 matrix<float>(params.delta, work.batch_head, work.batch_head.head, 0, 1).data, part};
    head_work.q_coords = tma_coords(params.q, work.batch_head, work.batch_head.head);
    head_work.do_coords = tma_coords(params.do_, work.batch_head, work.batch_head.head);
    head_work.flags = (work.last - work.first == kBlockKv ? 0 : StepMessage::kMasked) |
                      (has_tensor_map(maps.q, params.q) ? 0 : StepMessage::kThreadsCopyQ) |
                      (has_tensor_map(maps.do_, params.do_) ? 0 : StepMessage::kThreadsCopyDo);
  }

  // Store the location of a tile's K and V, and prefetch them into the L2 cache if TMA can copy them. Return the flags
  // of the tile's first step. Called by one thread.
  static CUFLASH_DEVICE int load_kv(const attention::Params& params, const TensorMaps& maps,
                                    const attention::WorkTile& work, StepMessage& message) {
    const int kv_head = work.batch_head.head / params.shape.group_size;
    message.k_coords = tma_coords(params.k, work.batch_head, kv_head);
    message.v_coords = tma_coords(params.v, work.batch_head, kv_head);
    int flags = StepMessage::kLoadsK | StepMessage::kLoadsV;
    if (!has_tensor_map(maps.k, params.k)) flags |= StepMessage::kThreadsCopyK;
    else tile::tma_prefetch_boxes(tile::TmaBoxes(k_smem), maps.k, message.k_coords, work.first);
    if (!has_tensor_map(maps.v, params.v)) flags |= StepMessage::kThreadsCopyV;
    else tile::tma_prefetch_boxes(tile::TmaBoxes(v_smem), maps.v, message.v_coords, work.first);
    return flags;
  }

  // Load the steps of a part: write the message of each step, and start its copies. Return whether the part has a step.
  // Called by the first warp.
  static CUFLASH_DEVICE bool load_part(const attention::Params& params, const TensorMaps& maps,
                                       const attention::ChosenLists& chosen, const attention::WorkTile& work, int part,
                                       PipelineState& state, int work_slot) {
    using namespace attention;
    SharedStorage& smem = shared();
    const Column column(params, chosen, work, part, kBlockKv);
    const int first = column.first(chosen), last = column.last(chosen);
    if (first >= last) {
      if (part > 0) return false;
      write_empty_rows(params, params.dk, work, params.shape.head_dim);
      write_empty_rows(params, params.dv, work, params.shape.value_dim);
      return false;
    }
    HeadWork& head_work = smem.works[work_slot];
    if (ptx::elect_one()) store_part_work(params, maps, work_slot, work, part);
    __syncwarp();
    KvBlock block = step_before(chosen, first, last);
    OwnQuery own = own_query(params, chosen, work, block);
    for (bool loads_kv = true; block.stop > first; loads_kv = false) {
      const KvBlock next_block = step_before(chosen, first, block.start);
      const OwnQuery next_own = own_query(params, chosen, work, next_block);  // loaded while this step waits
      const bool is_masked = !__all_sync(0xffffffffu, own.sees_all);
      StepMessage& message = smem.messages[state.stage];
      // all threads of the warp wait, so that none of them misses a phase
      tile::wait_empty(smem.q[state.stage], state.phase);
      __syncwarp();
      if (ptx::lane() < kMaxGathered) smem.queries_of_steps[state.stage][ptx::lane()] = own.query;
      __syncwarp();
      if (ptx::elect_one()) {
        message.flags = head_work.flags | smem.kv_phases | (is_masked ? StepMessage::kMasked : 0) |
                        (loads_kv ? load_kv(params, maps, work, message) : 0);
        message.work = work_slot;
        message.block = block;
        ptx::mbarrier_arrive(ptx::shared_address(&smem.message_ready[state.stage]));
        if (loads_kv) smem.kv_phases ^= StepMessage::kPhaseOfK | StepMessage::kPhaseOfV;
      }
      gather(chosen, tile::TmaBoxes(q_smem(state.stage)), maps.q, head_work.q_coords, own.query, smem.q[state.stage],
             head_work.flags & StepMessage::kThreadsCopyQ);
      tile::wait_empty(smem.d_o[state.stage], state.phase);
      __syncwarp();
      gather(chosen, tile::TmaBoxes(do_smem(state.stage)), maps.do_, head_work.do_coords, own.query,
             smem.d_o[state.stage], head_work.flags & StepMessage::kThreadsCopyDo);
      state = state.next();
      block = next_block;
      own = next_own;
    }
    return true;
  }

  // Run the first producer warp. The second function does so if queries choose their blocks: part after part, then a
  // message that ends the work.
  static CUFLASH_DEVICE void produce_steps(const attention::Params& params, const TensorMaps& maps,
                                           const QueryState& query_state, const score::Function& score,
                                           StagedMapArgument staged_map, attention::NoChosenLists) {
    Base::produce(params, maps, query_state, score, staged_map);
  }

  // The first parts of all tiles of keys have the lowest numbers, since most tiles have few parts.
  static CUFLASH_DEVICE void produce_steps(const attention::Params& params, const TensorMaps& maps,
                                           const QueryState&, const score::Function&, StagedMapArgument,
                                           const attention::ChosenLists& chosen) {
    using namespace attention;
    SharedStorage& smem = shared();
    PipelineState state;
    int work_slot = 0;
    const int num_tiles = num_key_tiles<Listed>(params, kBlockKv), num_parts = num_tiles * chosen.num_parts;
    clear_rows_past_boxes(chosen);
    for (int number = first_tile_number(); number < num_parts;) {
      const DivMod part_and_tile = divmod(number, num_tiles);
      const WorkTile work = key_tile_at<Listed>(params, kBlockKv, part_and_tile.remainder);
      if (!work.is_empty() && load_part(params, maps, chosen, work, part_and_tile.quotient, state, work_slot))
        work_slot = (work_slot + 1) % kNumHeadWorks;
      if (ptx::lane() == 0) number = next_tile_number(params, num_parts);
      number = __shfl_sync(0xffffffffu, number, 0);
    }
    tile::wait_empty(smem.q[state.stage], state.phase);
    __syncwarp();
    if (ptx::elect_one()) {
      smem.messages[state.stage].flags = StepMessage::kEndOfWork;
      ptx::mbarrier_arrive(ptx::shared_address(&smem.q[state.stage].full));
      ptx::mbarrier_arrive(ptx::shared_address(&smem.message_ready[state.stage]));
    }
  }
};

}  // namespace cuflash::sm90
