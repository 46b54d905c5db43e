#pragma once
#include <attention/block_iterator.cuh>
#include <sm90/dq_semaphore.cuh>
#include <sm90/q_tiles.cuh>
#include <sm90/staged_array.cuh>
#include <sm90/tensor_maps.cuh>
#include <tile/pipeline.cuh>

// The messages and barriers of the pipeline over queries (sm90/q_pipeline.cuh), in shared memory after its tiles.
namespace cuflash::sm90 {

// The coordinates of a head's matrix in the tensor map of the staged array.
struct NoArrayCoords {};
struct ArrayCoords {
  tile::TmaCoords array_coords;
};

// How a step's dQ is finished: the dQ writer adds it to sums (kNot), or consumers finish it, alone (kAlone) or with the
// sums of other tiles (kWithSums).
enum class DqFinish : int { kNot, kAlone, kWithSums };

template <class Config>
struct QStorage : QTiles<Config> {
  using Base = QTiles<Config>;
  using typename Base::Listed, typename Base::QueryStats;
  using Base::kBlockKv, Base::kBlockQ, Base::kDoStages, Base::kIsWide, Base::kNonemptyWords, Base::kNumStages,
      Base::kStorageOffset, Base::kThreads;

  // The producer's message about a step. The flags are in one word, which all other warps read.
  struct StepMessage {
    // kMasked: some key of the tile is hidden from some query. kLoadsK, kLoadsV: K or V is loaded with this step, which
    // is the first one of a head or of a tile. kEndOfWork: no tile is left. kLargeLse: lse of some query is large;
    // consumers add this flag from the QueryStats. kThreadsCopy*: the operands that copy warps load. kPhaseOfK,
    // kPhaseOfV: the phases of the slots of K and V. kFinalizesDq, kStoresDq: the tile finishes or stores dQ of the
    // step, according to its DqSchedule. kUsesDqSemaphore: `dq` is set.
    enum Flag {
      kMasked = 1,
      kLoadsK = 2,
      kLoadsV = 4,
      kEndOfWork = 8,
      kLargeLse = 16,
      kThreadsCopyK = 32,
      kThreadsCopyV = 64,
      kThreadsCopyQ = 128,
      kThreadsCopyDo = 256,
      kPhaseOfK = 512,
      kPhaseOfV = 1024,
      kFinalizesDq = 2048,
      kStoresDq = 4096,
      kUsesDqSemaphore = 8192,
      kThreadsCopyArray = 16384
    };
    int flags;
    int work;  // index of the step's HeadWork
    float* dq_sum;
    DqSemaphoreOp dq;  // set if the step waits for other tiles or signals them
    int* arrivals;  // counter of the step's queries, if tiles of keys are counted
    attention::KvBlock block;  // set if the step is masked, copied by threads or finishes dQ, or if kMessagesHaveBlocks
    uint32_t nonempty[kNonemptyWords];  // set if threads copy queries
    tile::TmaCoords k_coords, v_coords;  // set if K or V is loaded

    CUFLASH_DEVICE bool is(Flag which) const { return flags & which; }
  };
  static CUFLASH_DEVICE int k_phase(int flags) { return (flags & StepMessage::kPhaseOfK) != 0; }
  static CUFLASH_DEVICE int v_phase(int flags) { return (flags & StepMessage::kPhaseOfV) != 0; }

  // The statistics of a step's queries and, if the step is masked, its row masks. A row of the masks belongs to a query
  // and has a bit for each key or, if the rows of scores are keys (not kIsWide), belongs to a key and has a bit for
  // each query.
  static constexpr int kKeyWords = (kBlockKv + 31) / 32, kQueryWords = kBlockQ / 32;
  struct alignas(16) StageQueries {
    QueryStats stats;
    uint32_t row_masks[kIsWide ? kBlockQ : kBlockKv][kIsWide ? kKeyWords : kQueryWords];
  };

  // The stage of a step in the rings of slots, and the parity of its phase.
  struct PipelineState {
    int stage = 0, phase = 0;

    CUFLASH_DEVICE PipelineState next() const {
      const bool is_last = stage == kNumStages - 1;
      return {is_last ? 0 : stage + 1, phase ^ is_last};
    }
  };

  // Return the stage and phase of a step in the ring of dO, which may have a single stage.
  static CUFLASH_DEVICE int do_stage(const PipelineState& state) { return kDoStages == 1 ? 0 : state.stage; }
  static CUFLASH_DEVICE int do_phase(const PipelineState& state) { return kDoStages == 1 ? state.stage : state.phase; }

  // A tile of keys with a query head: addresses and flags that all of its steps share.
  struct HeadWork : tile::Conditional<kStagesArray, ArrayCoords, NoArrayCoords> {
    attention::WorkTile tile;
    typename Base::QueryRecord* records;  // one record of the head for each tile of queries
    float* dq_sum;
    tile::TmaCoords q_coords, do_coords;
    int flags;  // flags that all steps share
    DqSchedule dq;
  };

  // The range of queries that attend to a tile of keys, and the iterator over its steps. If sequences are cut, steps
  // are tiles of sequences.
  using QueryRange = tile::Conditional<Config::kCutsSequences, PartRange<kBlockQ>, attention::VisitRange>;
  using QueryIterator = tile::Conditional<Config::kCutsSequences, PartIterator<kBlockQ>,
                                          attention::BlockIterator<kBlockQ, attention::OverQBlocks, Listed>>;

  // The number of steps in flight between producer and copy warps, plus one that the producer is preparing.
  static constexpr int kNumHeadWorks = kNumStages + 1;

  // If queries choose their blocks: additional values that the producer stores about work tiles and steps.
  static constexpr bool kPacksQueries = Config::kPacksQueries;
  static constexpr int kMaxGathered = 8;  // maximum number of queries in a step
  struct NoGatheredWork {};
  struct GatheredWork {
    struct Part {
      const float *lse, *delta;  // pointers to the first query of the first head
      int number;  // index of the work tile's part, of all parts of the queries that chose these keys
    };
    Part parts[kNumHeadWorks];
    int queries_of_steps[kNumStages][kMaxGathered];
    int is_last_part;  // whether this block adds the sums of all parts
  };

  struct SharedStorage : tile::Conditional<kPacksQueries, GatheredWork, NoGatheredWork> {
    StageQueries queries[kNumStages];
    tile::PipelineSlot k, v, q[kNumStages], d_o[kDoStages];
    uint64_t message_ready[kNumStages];  // tells copy warps that the message has been written
    StepMessage messages[kNumStages];
    HeadWork works[kNumHeadWorks];  // a ring of the HeadWorks for which steps were sent
    float softmax_scale_log2;  // the scale alone in kernels with a score function
    // The producer's state, in shared memory to save registers: whether it has a tile, the phases of the next K and V
    // as flags of a message, and the visit range of a head.
    int has_tile, kv_phases;
    QueryRange visit_range;
    DqFinish dq_finish;  // for the current step, if the last tile that arrives finishes dQ
    uint64_t dq_sum_loaded;  // signals that sums of dQ have arrived in the staging buffer
  };
  static constexpr int kStorageEnd = kStorageOffset + static_cast<int>(sizeof(SharedStorage));
  static CUFLASH_DEVICE SharedStorage& shared() {
    return *reinterpret_cast<SharedStorage*>(ptx::dynamic_shared<unsigned char>() + kStorageOffset);
  }

  // The step's elements of a captured array, at the end of shared memory. They are loaded and released together with
  // the step's Q.
  using SmemArray = StagedArray<kStagesArray ? kBlockQ : 64, kStagesArray ? kBlockKv : 64>;
  static CUFLASH_DEVICE SmemArray array_smem(int stage) {
    return {aligned_for_array(kStorageEnd) + stage * SmemArray::kBytes};
  }

  // The bins in which a consumer warp sums the gradient of a short table, at the end of shared memory: kNumBins for
  // each lane. Kernels with bins do not stage an array.
  static_assert(!kStagesArray || score::Function::kNumBins == 0, "bins and the staged array would overlap");
  static CUFLASH_DEVICE score::Function::Number* bins_of_warp() {
    const int warp = (ptx::thread_index() - kWarpgroupThreads) / 32;
    return reinterpret_cast<score::Function::Number*>(ptx::dynamic_shared<unsigned char>() + kStorageEnd) +
           warp * 32 * score::Function::kNumBins;
  }

  static constexpr int kSharedBytes = kStagesArray
                                          ? aligned_for_array(kStorageEnd) + kNumStages * SmemArray::kBytes
                                          : kStorageEnd + (kThreads - kWarpgroupThreads) * score::Function::kNumBins *
                                                              static_cast<int>(sizeof(score::Function::Number));
};

}  // namespace cuflash::sm90
