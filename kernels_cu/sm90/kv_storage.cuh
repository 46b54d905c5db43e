#pragma once
#include <attention/members.cuh>
#include <sm90/constants.cuh>
#include <sm90/staged_array.cuh>
#include <sm90/tensor_maps.cuh>
#include <tile/pipeline.cuh>
#include <tile/wgmma_tile.cuh>

// The shared memory of the kernels that keep a tile of queries and visit blocks of keys (sm90/kv_pipeline.cuh): tiles
// of Q, K, V and dO, messages, and barriers.
namespace cuflash::sm90 {

constexpr int kNumTileInfos = 4;  // one tile is being scheduled, one loaded, one multiplied, one written
constexpr int kKeptStages = 2;

constexpr int kBoxRows = 16;  // number of rows of a warp, which TMA stores at once

enum Operand { kQ, kK, kV, kDo };  // in the order of TensorMaps
struct GroupVisitRange {  // no query of a warpgroup sees keys from `stop` on; all see full_start <= x < full_stop
  int stop, full_start, full_stop;
};
struct alignas(16) EpilogueTarget {  // location to which the epilogue writes O and lse
  float* lse;
  int num_rows;
  // whether TMA can store O: rows are whole 16-byte chunks, and the last box of rows is full or ends with the matrix
  int uses_tma_store;
  int first;  // first row of O
  tile::TmaCoords o_coords;
};

// Return whether this is the first lane of its warp, which acts for the whole warp.
CUFLASH_DEVICE bool is_first_lane() { return tile::lane() == 0; }

// Wait until a slot is empty. All threads of the warp wait: if the first one waited alone, the others could keep it
// from advancing.
CUFLASH_DEVICE void wait_slot_empty(const tile::PipelineSlot& slot, int phase) {
  tile::wait_empty(slot, phase);
  __syncwarp();
}

template <class Config>
struct KvStorage : Constants<Config> {
  using Base = Constants<Config>;
  using typename Base::Element;
  using Base::kBlockKv, Base::kBlockQ, Base::kHasTangents, Base::kHeadDim, Base::kNumStages, Base::kThreads,
      Base::kValueDim;

  static constexpr int kNumConsumers = kBlockQ / 64;
  // Whether queries each choose their blocks: a tile then has the rows of neighboring queries (attention/members.cuh).
  static constexpr bool kPacksQueries = Config::kPacksQueries;
  using Walk = tile::Conditional<kPacksQueries, attention::OverUnions, attention::OverKvBlocks>;
  static_assert(!kPacksQueries || (kNumConsumers == 1 && Config::kIsListed && !kHasScore && !Config::kHasDropout),
                "flags of a warp assume that its rows need only masks");
  // True if a tile's steps visit the last keys first. Scores that depend on the distance usually fall as it grows: under
  // a causal mask, the last keys then have the row maxima, which would otherwise rise in each step.
  static constexpr bool kVisitsLastFirst = score::Function::kNeedsDistancesAlone && !Config::kIsListed;
  using KvIterator = attention::BlockIterator<kBlockKv, Walk, typename Base::Listed, kVisitsLastFirst>;
  static constexpr bool kLoadsDo = Config::kIsBackward;  // dO is loaded with Q
  // Without tangents of scores, the weights of a forward pass are multiplied by the tangent of V alone.
  static constexpr bool kLoadsV =
      kLoadsDo || !kHasTangents || Config::kHasQDot || Config::kHasKDot || !Config::kHasVDot;
  // Lse is final: masked scores are marked, and the exponent of P includes the sign of the scale.
  static constexpr bool kMarksMasked = kLoadsDo || kHasTangents;
  // Operands that share a slot with Q, K or V, each copied with a separate arrival.
  static constexpr int kQOperands = 1 + kLoadsDo + Config::kHasQDot + Config::kHasDoDot,
                       kKOperands = 1 + Config::kHasKDot, kVOperands = kLoadsV + Config::kHasVDot;
  // Several thread blocks with such tiles share a multiprocessor.
  static constexpr bool kIsSmallTile = Config::kIsListed && kNumConsumers == 1 && !Config::kIsQuantized;
  static constexpr int kQStages =
      kHeadDim <= 128 && kValueDim <= 128 && !kIsSmallTile && !kMarksMasked && !kStagesArray ? 2 : 1;
  // A warpgroup after the consumers draws the random numbers of dropout, ahead of them (sm90/drawn_weights.cuh).
  static constexpr bool kHasDrawers = Config::kHasDropout && kThreads == kWarpgroupThreads * (2 + kNumConsumers);
  // Whether the next tile is scheduled during the first step of a tile, not the last one, since loads from a list have
  // a high latency.
  static constexpr bool kFetchesTileEarly = Config::kIsListed && kHeadDim <= 128 && kValueDim <= 128;

  using OperandElement = tile::Conditional<Config::kIsQuantized, ptx::Float8E4M3, Element>;
  using SmemQ = tile::WgmmaTile<OperandElement, kBlockQ, kHeadDim>;
  using SmemK = tile::WgmmaTile<OperandElement, kBlockKv, kHeadDim>;
  // with FP8, V is transposed, since tensor cores read FP8 operands along the summed dimension
  using SmemV = tile::Conditional<Config::kIsQuantized, tile::WgmmaTile<OperandElement, kValueDim, kBlockKv>,
                                  tile::WgmmaTile<OperandElement, kBlockKv, kValueDim>>;
  static CUFLASH_DEVICE SmemQ q_smem(int slot) { return {slot * SmemQ::kBytes}; }
  static CUFLASH_DEVICE SmemK k_smem(int stage) { return {kQStages * SmemQ::kBytes + stage * SmemK::kBytes}; }
  static CUFLASH_DEVICE SmemV v_smem(int stage) { return {k_smem(kNumStages).start + stage * SmemV::kBytes}; }
  static constexpr int kDoOffset = kQStages * SmemQ::kBytes + kNumStages * (SmemK::kBytes + SmemV::kBytes);
  using SmemDo = tile::WgmmaTile<Element, kBlockQ, kValueDim>;
  static CUFLASH_DEVICE SmemDo do_smem(int slot) { return {kDoOffset + slot * SmemDo::kBytes}; }
  static constexpr int kDotsOffset = kDoOffset + (kLoadsDo ? kQStages * SmemDo::kBytes : 0);
  static CUFLASH_DEVICE SmemQ q_dot_smem(int slot) { return {kDotsOffset + slot * SmemQ::kBytes}; }
  static CUFLASH_DEVICE SmemDo do_dot_smem(int slot) {
    return {q_dot_smem(Config::kHasQDot * kQStages).start + slot * SmemDo::kBytes};
  }
  static CUFLASH_DEVICE SmemK k_dot_smem(int stage) {
    return {do_dot_smem(Config::kHasDoDot * kQStages).start + stage * SmemK::kBytes};
  }
  static CUFLASH_DEVICE SmemV v_dot_smem(int stage) {
    return {k_dot_smem(Config::kHasKDot * kNumStages).start + stage * SmemV::kBytes};
  }
  static constexpr int kStorageOffset =
      kDotsOffset + kQStages * (Config::kHasQDot * SmemQ::kBytes + Config::kHasDoDot * SmemDo::kBytes) +
      kNumStages * (Config::kHasKDot * SmemK::kBytes + Config::kHasVDot * SmemV::kBytes);
  // Message of the scheduler warp about a tile.
  struct WorkTileInfo {
    EpilogueTarget epilogue_target;
    attention::WorkTile work;
    attention::VisitRange visit_range;
    GroupVisitRange group_ranges[kNumConsumers];
    int kv_head, is_end;
    tile::TmaCoords coords[kV + 1 + kLoadsDo];  // coordinates of the operands
    int is_band;
    // if is_band: the interval of the first row; the interval of each later row is one key later
    attention::Interval band;
  };
  // The producer's message about a step.
  struct NoMemberWord {};
  struct MemberWord {
    uint64_t members;  // a bit for each query of the tile, set if the query chose the block
  };
  // Flags are per warpgroup or, if queries choose their blocks, per warp.
  static constexpr int kNumFlags = kPacksQueries ? 4 : kNumConsumers;
  struct StepMessage : tile::Conditional<kPacksQueries, MemberWord, NoMemberWord> {
    // Set by the producer. kUnmasked: every score of this KV block is visible, and the scale is positive.
    // kLastForWarpgroup: the warpgroup's queries see no key of the tile's later blocks. kLastOfTile: the tile has no
    // later block. kNoMember: no query of the warp chose the block.
    // Added by a consumer. kEpiloguePending: results of the previous tile have not been written yet. kSkipMax: the step
    // does not compute maxima. kOStoreInFlight: TMA is still reading O of the previous tile from the slot of its Q.
    // kValuesPending: products with V of the previous step are in flight. kOperandsArrived: K of the next step and V of
    // this step have arrived.
    enum Flag {
      kUnmasked = 1,
      kLastForWarpgroup = 2,
      kLastOfTile = 4,
      kEpiloguePending = 8,
      kSkipMax = 16,
      kOStoreInFlight = 32,
      kValuesPending = 64,
      kOperandsArrived = 128,
      kNoMember = 256
    };
    attention::KvBlock block;
    int unread_start;  // keys before this one belong to another step
    int flags[kNumFlags];
  };

  // One bit for each weight, set if dropout keeps it, in the layout of the consumers' threads, in a separate ring.
  struct NoKeptRing {};
  struct KeptRing {
    static constexpr int kNumWords = (kBlockKv / 16 + 3) / 4;  // number of words per thread
    uint32_t kept_words[kKeptStages][kNumWords][kNumConsumers * kWarpgroupThreads];
    tile::PipelineSlot kept[kKeptStages];
  };

  struct SharedStorage : tile::Conditional<kHasDrawers, KeptRing, NoKeptRing> {
    tile::PipelineSlot q[kQStages], k[kNumStages], v[kNumStages];
    tile::PipelineSlot tile_info_slots[kNumTileInfos];  // the scheduler warp fills these
    WorkTileInfo tile_infos[kNumTileInfos];
    StepMessage messages[kNumStages];
    float softmax_scale_log2;  // in shared memory, to save registers of consumers
    float softmax_scale;  // for kernels with a score function
  };
  static constexpr int kStorageEnd = kStorageOffset + static_cast<int>(sizeof(SharedStorage));
  static CUFLASH_DEVICE SharedStorage& shared() {
    return *reinterpret_cast<SharedStorage*>(ptx::dynamic_shared<unsigned char>() + kStorageOffset);
  }

  // The elements of the staged array for each step, and their slots, after all other shared memory. The queries of each
  // consumer warpgroup have a separate slot, which can be filled again as soon as that warpgroup has read it.
  using SmemArray = StagedArray<64, kStagesArray ? kBlockKv : 64>;
  static CUFLASH_DEVICE SmemArray array_smem(int stage, int consumer) {
    return {aligned_for_array(kStorageEnd) + (stage * kNumConsumers + consumer) * SmemArray::kBytes};
  }
  static CUFLASH_DEVICE tile::PipelineSlot& array_slot(int stage, int consumer) {
    return array_smem(kNumStages, 0).panel(0).template pointer<tile::PipelineSlot>(0)[stage * kNumConsumers + consumer];
  }

  static constexpr int kArraysEnd =
      !kStagesArray
          ? kStorageEnd
          : aligned_for_array(kStorageEnd) +
                kNumStages * kNumConsumers * (SmemArray::kBytes + static_cast<int>(sizeof(tile::PipelineSlot)));

  // Return the stage of the count-th K or V block in its ring, and its phase. The other functions return those of the
  // count-th tile in the rings of Q and of tile messages.
  static CUFLASH_DEVICE int stage_of(unsigned count) { return count % kNumStages; }
  static CUFLASH_DEVICE int phase_of(unsigned count) { return count / kNumStages % 2; }
  static CUFLASH_DEVICE int q_stage_of(unsigned count) { return count % kQStages; }
  static CUFLASH_DEVICE int q_phase_of(unsigned count) { return count / kQStages % 2; }
  static CUFLASH_DEVICE int tile_info_index(unsigned count) { return count % kNumTileInfos; }
  static CUFLASH_DEVICE int tile_info_phase(unsigned count) { return count / kNumTileInfos % 2; }
  // Wait for the message about a tile, and return it.
  static CUFLASH_DEVICE const WorkTileInfo& wait_tile_info(unsigned num_tiles_done) {
    tile::wait_full(shared().tile_info_slots[tile_info_index(num_tiles_done)], tile_info_phase(num_tiles_done));
    return shared().tile_infos[tile_info_index(num_tiles_done)];
  }
};

}  // namespace cuflash::sm90
