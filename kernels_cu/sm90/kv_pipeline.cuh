#pragma once
#include <sm90/kv_producer.cuh>

// The pipeline of Hopper's kernels that keep a tile of queries and visit blocks of keys. The producer warpgroup has a
// warp that schedules tiles (sm90/kv_tile_scheduler.cuh) and two that load Q, K and V and, in a backward pass, dO
// (sm90/kv_producer.cuh). The consumer warpgroups multiply, 64 rows of queries each. Blocks take further tiles until
// none is left. This file has the masks and barriers of consumers and the roles of warps.
namespace cuflash::sm90 {

// Indices of the producer warps: the first one loads Q, dO and K, the second one V, and the third one schedules tiles.
// The fourth one loads the staged array, or stores the scales of FP8 operands.
enum ProducerWarp { kLoadsKeys, kLoadsValues, kSchedulesTiles };

template <class Config>
struct KvPipeline : KvProducer<Config> {
  using Base = KvProducer<Config>;
  using typename Base::ChosenArgument, typename Base::KeptRing, typename Base::NoKeptRing, typename Base::PagesArgument,
      typename Base::ScalesArgument, typename Base::SinkArgument, typename Base::StepMessage,
      typename Base::TangentsArgument, typename Base::WorkTileInfo;
  using Base::array_slot, Base::kKOperands, Base::kMarksMasked, Base::kNumConsumers, Base::kNumStages,
      Base::kPacksQueries, Base::kQOperands, Base::kQStages, Base::kVOperands, Base::load_array, Base::load_keys,
      Base::load_values, Base::q_phase_of, Base::q_stage_of, Base::schedule_tiles, Base::shared, Base::stage_of,
      Base::tile_info_index, Base::write_scales;

  // Wait for the Q of a tile. Return false if no tile is left.
  static CUFLASH_DEVICE bool wait_tile(unsigned num_tiles_done) {
    tile::wait_full(shared().q[q_stage_of(num_tiles_done)], q_phase_of(num_tiles_done));
    return !shared().tile_infos[tile_info_index(num_tiles_done)].is_end;
  }

  // Return the flags of a step for a warpgroup or, if queries choose their blocks, for the warp.
  static CUFLASH_DEVICE int flags_of_warpgroup(int group, unsigned num_k_blocks) {
    return shared().messages[stage_of(num_k_blocks)].flags[kPacksQueries ? threadIdx.x / 32 % 4 : group % kNumConsumers];
  }

  // Set the masked scores of a step, and those of keys that the previous step had, to -inf, or to `masked_score` if
  // lse is final.
  template <class Tile>
  static CUFLASH_DEVICE void mask_block(const attention::Params& params, Tile& s, const WorkTileInfo& tile_info,
                                        const StepMessage& message, ChosenArgument chosen) {
    const float hidden = kMarksMasked ? attention::masked_score() : ptx::negative_infinity<float>();
    if constexpr (kPacksQueries)
      return attention::mask_rows<false>(s, message.block, hidden, [&](int row) {
        return attention::row_mask_of_neighbour(params, chosen, tile_info.work, message.block, message.members, row);
      });
    if (!Config::kIsListed && tile_info.is_band)
      return attention::mask_band(s, message.block, hidden, tile_info.band, message.unread_start);
    attention::mask_rows<Config::kIsListed>(s, message.block, hidden, [&](int row) {
      auto row_mask = attention::row_mask_of_row(params, tile_info.work, message.block, row);
      row_mask.lo = max(row_mask.lo, message.unread_start);
      return row_mask;
    });
  }

  // Initialize the barriers of the ring of kept weights, if the kernel has one.
  static CUFLASH_DEVICE void init_kept_barriers(const NoKeptRing&) {}
  static CUFLASH_DEVICE void init_kept_barriers(const KeptRing& ring) {
    for (const tile::PipelineSlot& slot : ring.kept) {
      ptx::mbarrier_init(ptx::shared_address(&slot.full), 4 * tile::kArrivalsPerWarp);
      ptx::mbarrier_init(ptx::shared_address(&slot.empty), 4 * kNumConsumers * tile::kArrivalsPerWarp);
    }
  }

  // Initialize the barriers of all slots. Called by one thread, before the roles start.
  static CUFLASH_DEVICE void init_barriers() {
    tile::PipelineSlot* const slots = shared().q;
    for (int i = 0; i < kQStages + 2 * kNumStages; ++i) {
      const bool is_q = i < kQStages, is_k = !is_q && i < kQStages + kNumStages;
      const int num_operands = is_q ? kQOperands : is_k ? kKOperands + Config::kIsQuantized : kVOperands;
      ptx::mbarrier_init(ptx::shared_address(&slots[i].full), num_operands * tile::kArrivalsPerWarp);
      ptx::mbarrier_init(ptx::shared_address(&slots[i].empty), 4 * kNumConsumers * tile::kArrivalsPerWarp);
    }
    init_kept_barriers(shared());
    for (const tile::PipelineSlot& tile_info_slot : shared().tile_info_slots) {
      ptx::mbarrier_init(ptx::shared_address(&tile_info_slot.full), tile::kArrivalsPerWarp);
      ptx::mbarrier_init(ptx::shared_address(&tile_info_slot.empty),
                         (2 + kStagesArray + Config::kIsQuantized) * tile::kArrivalsPerWarp);
    }
    if constexpr (kStagesArray)
      for (int i = 0; i < kNumStages * kNumConsumers; ++i) {
        const tile::PipelineSlot& slot = array_slot(i / kNumConsumers, i % kNumConsumers);
        ptx::mbarrier_init(ptx::shared_address(&slot.full), tile::kArrivalsPerWarp);
        ptx::mbarrier_init(ptx::shared_address(&slot.empty), 4 * tile::kArrivalsPerWarp);
      }
    ptx::fence_mbarrier_init();
  }

  // Run the role of a producer warp. `Hooks` has the functions that differ between kernels:
  //   write_empty_rows(params, work, sink, chosen)
  //       writes the results of a tile whose queries see no key
  //   read_scales(scales, tile_info, key, is_first), store_scales(scales_of_step, stage, is_first)
  //       for FP8 operands: return the scales of a step, and store them next to its message
  template <class Hooks>
  static CUFLASH_DEVICE void produce(const attention::Params& params, const TensorMaps& maps, SinkArgument sink,
                                     PagesArgument pages, ScalesArgument scales, const score::Function& score,
                                     StagedMapArgument staged_map, ChosenArgument chosen, TangentsArgument dots = {}) {
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    if (warp == kLoadsKeys) load_keys(params, maps, pages, chosen, dots);
    else if (warp == kLoadsValues) load_values(params, maps, pages, dots);
    else if (warp == kSchedulesTiles) Base::template schedule_tiles<Hooks>(params, maps, sink, pages, chosen, dots);
    else if constexpr (kStagesArray) load_array(params, score, staged_map);
    else Base::template write_scales<Hooks>(params, scales);
  }
};

}  // namespace cuflash::sm90
