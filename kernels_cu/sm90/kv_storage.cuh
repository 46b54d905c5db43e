#pragma once
#include <attention/block_iterator.cuh>
#include <attention/config_mma.cuh>
#include <sm90/staged_array.cuh>
#include <sm90/tensor_maps.cuh>
#include <tile/pipeline.cuh>
#include <tile/wgmma_tile.cuh>

// The shared memory of the kernels that keep a tile of queries and walk blocks of keys (sm90/kv_pipeline.cuh): tiles of
// Q, K, V and dO, messages, and barriers.
namespace cuflash {

using config::kMinBlocks;
using config::kNumStages;

constexpr int kWarpgroupThreads = 128;  // threads of a warpgroup
constexpr int kNumConsumers = kBlockQ / 64;
constexpr bool kLoadsDo = config::kIsBackward;  // with Q
// other blocks of the multiprocessor work meanwhile
constexpr bool kIsSmallTile = config::kIsListed && kNumConsumers == 1 && !config::kIsQuantized;
constexpr int kQStages = kHeadDim <= 128 && kValueDim <= 128 && !kIsSmallTile && !kLoadsDo && !kStagesArray ? 2 : 1;
constexpr int kNumTileInfos = 4;  // tiles known of: looked up, brought, multiplied, and written
// Whether a warpgroup after the consumers draws which weights are dropped, ahead of them (sm90/drawn_weights.cuh).
constexpr bool kHasDrawers = config::kHasDropout && kThreads == kWarpgroupThreads * (2 + kNumConsumers);
constexpr int kKeptStages = 2;
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

// Which weights of steps are kept, as threads of consumers hold them: a ring of its own.
template <bool HasDrawers>
struct KeptRing {};
template <>
struct KeptRing<true> {
  static constexpr int kNumWords = (kBlockKv / 16 + 3) / 4;  // of a thread
  uint32_t kept_words[kKeptStages][kNumWords][kNumConsumers * kWarpgroupThreads];
  tile::PipelineSlot kept[kKeptStages];
};

struct SharedStorage : KeptRing<kHasDrawers> {
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

// The step's elements of a captured array and their slots, behind all else.
using SmemArray = StagedArray<kBlockQ, kBlockKv>;
CUFLASH_DEVICE SmemArray array_smem(int stage) {
  constexpr int kEnd = kStorageOffset + static_cast<int>(sizeof(SharedStorage));
  return {(kEnd + kArrayAlignment - 1) / kArrayAlignment * kArrayAlignment + stage * SmemArray::kBytes};
}
CUFLASH_DEVICE tile::PipelineSlot& array_slot(int stage) {
  return array_smem(kNumStages).template pointer<tile::PipelineSlot>(0)[stage];
}

// The room of a ring that the count-th tile has, and the parity of its phases.
CUFLASH_DEVICE int stage_of(unsigned count) { return count % kNumStages; }
CUFLASH_DEVICE int phase_of(unsigned count) { return count / kNumStages % 2; }
CUFLASH_DEVICE int q_stage_of(unsigned count) { return count % kQStages; }
CUFLASH_DEVICE int q_phase_of(unsigned count) { return count / kQStages % 2; }

CUFLASH_DEVICE int tile_info_index(unsigned count) { return count % kNumTileInfos; }
CUFLASH_DEVICE int tile_info_phase(unsigned count) { return count / kNumTileInfos % 2; }

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

}  // namespace cuflash
