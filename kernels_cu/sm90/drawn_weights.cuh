#pragma once
#include <sm90/forward_epilogue.cuh>

// The drawer warpgroup, which draws the weights that dropout keeps. It runs ahead of the consumers, so that they need
// not draw between their products. Each of its threads draws for the consumer threads with the same index in their
// warpgroups.
namespace cuflash::sm90 {

template <class Config>
struct DrawnWeights : ForwardEpilogue<Config> {
  using Base = ForwardEpilogue<Config>;
  using typename Base::DropoutArgument, typename Base::KeptRing, typename Base::Listed, typename Base::WorkTileInfo;
  using Base::kBlockKv, Base::kHasDrawers, Base::kKeepsSteps, Base::kNumConsumers, Base::shared, Base::wait_tile_info;

  // Return the ring of kept weights. Valid only if the kernel has drawers.
  static CUFLASH_DEVICE KeptRing& kept_ring() { return reinterpret_cast<KeptRing&>(shared()); }
  static CUFLASH_DEVICE const tile::PipelineSlot& kept_slot(unsigned count) {
    return kept_ring().kept[count % kKeptStages];
  }
  static CUFLASH_DEVICE int kept_phase(unsigned count) { return count / kKeptStages % 2; }

  // Run the drawer warpgroup: draw the kept weights of all steps, tile after tile. `Tile` is the register tile in which
  // consumers hold scores.
  template <class Tile>
  static CUFLASH_DEVICE void draw_steps(const attention::Params& params, DropoutArgument dropout) {
    if constexpr (kHasDrawers) {
      using namespace attention;
      static_assert(sizeof(KeptFragments<Tile>) == 4 * KeptRing::kNumWords, "consumer threads hold as many words");
      const int thread = threadIdx.x % kWarpgroupThreads, own_row = Tile::warp_row() - Tile::warp_row() % 64;
      const Draws draws(dropout);
      unsigned num_blocks = 0;
      for (unsigned num_tiles_done = 0;; ++num_tiles_done) {
        const WorkTileInfo& tile_info = wait_tile_info(num_tiles_done);
        if (tile_info.is_end) return;
        const WorkTile work = tile_info.work;
        const VisitRange visit_range = tile_info.visit_range;
        const uint32_t head = head_number(params.shape, work.batch_head, work.batch_head.head);
        BlockIterator<kBlockKv, OverKvBlocks, Listed> blocks(params, visit_range);
        KvBlock block;
        for (; blocks.next(block); ++num_blocks) {
          shift_short_block<kBlockKv, kKeepsSteps>(block, visit_range, params.shape.seqlen_kv);
          wait_slot_empty(kept_slot(num_blocks), kept_phase(num_blocks));
#pragma unroll 1
          for (int group = 0; group < kNumConsumers; ++group) {
            const auto kept =
                kept_fragments<false>(Tile(), draws, head, work.first + 64 * group - own_row, block.start);
#pragma unroll
            for (int n = 0; n < KeptRing::kNumWords; ++n)
              kept_ring().kept_words[num_blocks % kKeptStages][n][kWarpgroupThreads * group + thread] = kept.words[n];
          }
          tile::arrive(kept_slot(num_blocks).full);
        }
      }
    }
  }

  // Read which of a thread's weights dropout keeps in a step, and release their slot. Called by consumers.
  template <class Kept>
  static CUFLASH_DEVICE void read_kept(Kept& kept, unsigned num_k_blocks) {
    using Tile = typename Kept::WeightTile;
    tile::wait_full(kept_slot(num_k_blocks), kept_phase(num_k_blocks));
    const int thread = Tile::warp_row() / 64 * kWarpgroupThreads + threadIdx.x % kWarpgroupThreads;
#pragma unroll
    for (int n = 0; n < KeptRing::kNumWords; ++n)
      kept.words[n] = kept_ring().kept_words[num_k_blocks % kKeptStages][n][thread];
    tile::arrive(kept_slot(num_k_blocks).empty);
  }

  // Release the slot of a step that the warpgroup skips.
  static CUFLASH_DEVICE void skip_kept(unsigned num_k_blocks) {
    tile::wait_full(kept_slot(num_k_blocks), kept_phase(num_k_blocks));
    tile::arrive(kept_slot(num_k_blocks).empty);
  }
};

}  // namespace cuflash::sm90
