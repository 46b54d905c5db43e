// The softmax mass of every block of a grid (attention/mass_sums.cuh), on the tensor cores of Hopper. The last warp of
// a thread block loads rows of q and k into shared memory, by TMA if TMA can copy them. The other warps multiply them,
// 64 rows of queries per warpgroup, and sum weights. Warpgroups wait only for data and not for each other, so that one
// multiplies while another computes exponentials.
#include <attention/mass_sums.cuh>
#include <sm90/tensor_maps.cuh>

namespace cuflash::sm90 {

struct BlockMass {
  static constexpr int kNumGroups = kBlockQ / 64, kProducerWarp = kNumWarps - 1;
  static_assert(kProducerWarp == 4 * kNumGroups, "the producer is one warp after the warpgroups");

  using SmemQ = tile::WgmmaTile<Element, kBlockQ, kHeadDim>;
  using SmemK = tile::WgmmaTile<Element, kBlockKv, kHeadDim>;
  // Q stays in the first slot, unless it is split into chunks like K.
  static constexpr int kNumQSlots = kSplitsHeadDim ? kNumStages : 1;
  static constexpr int kStorageOffset = kNumQSlots * SmemQ::kBytes + kNumStages * SmemK::kBytes;
  static CUFLASH_DEVICE SmemQ q_smem(int stage) { return {kSplitsHeadDim ? stage * SmemQ::kBytes : 0}; }
  static CUFLASH_DEVICE SmemK k_smem(int stage) { return {kNumQSlots * SmemQ::kBytes + stage * SmemK::kBytes}; }

  // The message next to a chunk of K: the chunk's block of keys, and whether the chunk is the last one of its step. A
  // message without a block ends the loop.
  struct StepMessage {
    attention::KvBlock block;
    int has_block, is_last_of_block;
  };
  struct SharedStorage {
    tile::PipelineSlot chunks[kNumStages];
    uint64_t q_full;
    StepMessage messages[kNumStages];
    MassTile tile;
  };
  static constexpr int kSharedBytes = kStorageOffset + static_cast<int>(sizeof(SharedStorage));
  static CUFLASH_DEVICE SharedStorage& shared() {
    return *reinterpret_cast<SharedStorage*>(ptx::dynamic_shared<unsigned char>() + kStorageOffset);
  }
  static CUFLASH_DEVICE int stage_of(unsigned count) { return count % kNumStages; }
  static CUFLASH_DEVICE int phase_of(unsigned count) { return count / kNumStages % 2; }

  // Numbers of chunks of K, and of tiles, that a warp has processed.
  struct Counts {
    unsigned chunks = 0, tiles = 0;
  };

  // ---- the producer ----

  // Fill an empty slot with the part of a matrix that starts at a row and a column. Called by a warp.
  template <class Tile>
  static CUFLASH_DEVICE void load(Tile to, const TensorMapParam& map, const attention::Matrices& matrices,
                                  const tile::Matrix<Element>& rows, const tile::TmaCoords& coords, int first,
                                  int column, const uint64_t& full) {
    const tile::TmaBoxes boxes(to);
    if (has_tensor_map(map, matrices)) {
      if (tile::lane() == 0) tile::tma_load_boxes<Element>(boxes, map, coords, first, full, 0, column);
      else if (tile::lane() < tile::kArrivalsPerWarp) ptx::mbarrier_arrive(ptx::shared_address(&full));
      return;
    }
    const auto columns = rows.columns(column, min(column + kHeadDim, rows.num_columns));
    tile::copy<32>(boxes, columns, tile::lane(), [](int) { return true; });
    tile::arrive(full);
  }

  // Load a tile's queries, and its keys step by step.
  static CUFLASH_DEVICE void load_tile(const attention::Params& params, const TensorMaps& maps,
                                       const attention::MassGrid& grid, Counts& counts) {
    using namespace attention;
    SharedStorage& smem = shared();
    const WorkTile& work = smem.tile.work;
    const auto q = queries_of(params, work), k = keys_of(params, work);
    const auto q_coords = tma_coords(params.q, work.batch_head, work.batch_head.head);
    const int kv_head = divmod(work.batch_head.head, params.shape.group_size).quotient;
    const auto k_coords = tma_coords(params.k, work.batch_head, kv_head);
    const auto write_message = [&](const StepMessage& message) {
      const int stage = stage_of(counts.chunks);
      tile::wait_empty(smem.chunks[stage], phase_of(counts.chunks));
      __syncwarp();
      if (tile::lane() == 0) smem.messages[stage] = message;
      __syncwarp();
      return stage;
    };
    BlockIterator<kBlockKv, OverKvBlocks, Listed> blocks(params, smem.tile.visit_range);
    KvBlock block;
    for (bool is_first = true; blocks.next(block); is_first = false)
      for (int column = 0; column < q.num_columns; column += kHeadDim, ++counts.chunks) {
        const int stage = write_message({block, true, column + kHeadDim >= q.num_columns});
        const uint64_t& full = smem.chunks[stage].full;
        load(k_smem(stage), maps.k, params.k, k.rows(block.start, block.stop), k_coords, block.start, column, full);
        if (kSplitsHeadDim)
          load(q_smem(stage), maps.q, params.q, q, q_coords, work.first, grid.column_of_q(params.shape, column), full);
        else if (is_first) load(q_smem(0), maps.q, params.q, q, q_coords, work.first, 0, smem.q_full);
      }
    const int stage = write_message({});
    for (int i = 0; i < 1 + kSplitsHeadDim; ++i) tile::arrive(smem.chunks[stage].full);
    ++counts.chunks;
  }

  // ---- the consumers ----

  // Multiply the scores of a step again, for one warp whose scores have been overwritten.
  static CUFLASH_DEVICE void recompute_scores(Scores& s, int stage) {
    constexpr int kInPanel = SmemQ::kPanelWidth / 16;
    s.fill(0);
#pragma unroll 1  // executed rarely, so the code is kept short
    for (int k = 0; k < kHeadDim / 16; ++k) {
      const auto q = tile::left_k_major(q_smem(0).panel(k / kInPanel), s.warp_row());
      const auto keys = tile::right_k_major(k_smem(stage).panel(k / kInPanel), 0);
      uint32_t q_frag[1][4];
      tile::load(q_frag[0], q, 0, k % kInPanel);
      tile::mma_k_step<Element>(s, q_frag, keys, k % kInPanel, false);
    }
  }

  // Multiply the chunks of a step. Return the stage of the last chunk, which is not released.
  static CUFLASH_DEVICE int multiply(Scores& s, int group, Counts& counts) {
    SharedStorage& smem = shared();
    int stage = stage_of(counts.chunks);
    const auto q = [&] { return tile::KMajor<SmemQ>(q_smem(stage), 64 * group); };
    tile::start_gemm_nt(s, q(), tile::KMajor<SmemK>(k_smem(stage)));
    while (kSplitsHeadDim && !smem.messages[stage].is_last_of_block) {
      const int last_stage = stage;
      stage = stage_of(++counts.chunks);
      tile::wait_full(smem.chunks[stage], phase_of(counts.chunks));
      tile::start_gemm_add_nt(s, q(), tile::KMajor<SmemK>(k_smem(stage)));
      ptx::wgmma_wait<1>();
      tile::arrive(smem.chunks[last_stage].empty);
    }
    ++counts.chunks;
    tile::wait_wgmma<0>(s);
    return stage;
  }

  // Process the keys of a tile. Unmasked steps skip the maximum if all rows have a maximum and none has risen by much.
  template <class Score>
  static CUFLASH_DEVICE void walk_keys(const attention::Params& params, const attention::MassGrid& grid,
                                       const RowMasses& row_masses, const Score& score, Counts& counts) {
    using namespace attention;
    SharedStorage& smem = shared();
    const int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
    const float scale_log2 = Softmax::scale_log2(exponent_scale(params.shape));
    const bool keeps_scores = kSplitsHeadDim || kHasScore || Softmax::needs_negation(params.shape.softmax_scale);
    KeySums sums(row_masses, grid, scale_log2);
    bool scores_were_lost = false;
    for (bool is_first = true;; is_first = false) {
      const int first_stage = stage_of(counts.chunks);
      tile::wait_full(smem.chunks[first_stage], phase_of(counts.chunks));
      if (!smem.messages[first_stage].has_block) {
        tile::arrive(smem.chunks[first_stage].empty);
        ++counts.chunks;
        counts.tiles += !is_first;
        break;
      }
      if (!kSplitsHeadDim && is_first) ptx::mbarrier_wait(ptx::shared_address(&smem.q_full), counts.tiles % 2);
      Scores s;
      const int stage = multiply(s, group, counts);
      const KvBlock block = smem.messages[stage].block;
      sums.open(block);
      bool is_added = false;
      if (!keeps_scores && is_unmasked<kBlockKv>(block) && sums.holds(block) && !scores_were_lost &&
          sums.softmax.max_reasons == 0) {
        is_added = sums.try_add_with_stale_max(s);
        scores_were_lost = !is_added;
        if (!is_added) recompute_scores(s, stage);
      } else {
        scores_were_lost = false;
      }
      tile::arrive(smem.chunks[stage].empty);
      if (is_added) continue;
      finish_scores(s, score, params, smem.tile.work, block);
      sums.add(s, block);
    }
    sums.finish();
    save_shifts(params, grid, sums.softmax, scale_log2, smem.tile);
  }

  // Initialize the barriers. Called by one thread, before the roles start.
  static CUFLASH_DEVICE void init_barriers() {
    for (const tile::PipelineSlot& slot : shared().chunks) {
      ptx::mbarrier_init(ptx::shared_address(&slot.full), (1 + kSplitsHeadDim) * tile::kArrivalsPerWarp);
      ptx::mbarrier_init(ptx::shared_address(&slot.empty), 4 * kNumGroups * tile::kArrivalsPerWarp);
    }
    ptx::mbarrier_init(ptx::shared_address(&shared().q_full), tile::kArrivalsPerWarp);
    ptx::fence_mbarrier_init();
  }

  // The body of the kernel.
  static CUFLASH_DEVICE void run(const attention::Params& params, const TensorMaps& maps,
                                 const attention::MassGrid& grid, const score::Function& score_function) {
    if (threadIdx.x == 0) init_barriers();
    __syncthreads();
    Counts counts;
    const bool is_producer = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0) == kProducerWarp;
    add_all_tiles(params, grid, shared().tile, [&](const RowMasses& row_masses) {
      if (is_producer) load_tile(params, maps, grid, counts);
      else walk_keys(params, grid, row_masses, score_function, counts);
    });
  }
};

constexpr int kSharedBytes = BlockMass::kSharedBytes;

}  // namespace cuflash::sm90

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, cuflash::Config::kMinBlocks)
sm90_block_mass(const __grid_constant__ cuflash::attention::Params params,
                const __grid_constant__ cuflash::sm90::TensorMaps maps,
                const __grid_constant__ cuflash::attention::MassGrid grid CUFLASH_FEATURES) {
  using namespace cuflash;
  sm90::BlockMass::run(params, maps, grid, score_function);
}
