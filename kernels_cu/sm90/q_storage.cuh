#pragma once
#include <attention/block_iterator.cuh>
#include <sm90/dq_semaphore.cuh>
#include <sm90/q_tiles.cuh>
#include <sm90/query_stats.cuh>
#include <sm90/tensor_maps.cuh>
#include <tile/pipeline.cuh>

// The messages and barriers of the pipeline over queries (sm90/q_pipeline.cuh), which lie in shared memory beside its
// tiles.
namespace cuflash {

// What the producer says of a step; in one word what all ask for.
struct StepMessage {
  // Some key of the tile is hidden from some query; K and V are loaded with a tile's first step; no tile is left; some
  // query's lse is large, which is known with its queries. Then the operands that copy warps load, and the phases of the
  // slots of K and V.
  enum Flag {
    kMasked = 1, kLoadsK = 2, kLoadsV = 4, kEndOfWork = 8, kLargeLse = 16,
    kThreadsCopyK = 32, kThreadsCopyV = 64, kThreadsCopyQ = 128, kThreadsCopyDo = 256, kPhaseOfK = 512,
        kPhaseOfV = 1024,
    // as attention::DqSchedule says; the last where DqSemaphoreOp does
    kFinalizesDq = 2048, kStoresDq = 4096, kUsesDqSemaphore = 8192
  };
  int flags;
  int work;  // which
  float* dq_sum;
  attention::DqSemaphoreOp dq;  // where something is waited for, or told
  int* arrivals;                // of its queries, where who comes first stores
  attention::KvBlock block;     // where something is masked or copied, or dQ is finished
  uint32_t nonempty[kNonemptyWords];   // of queries that are copied
  tile::TmaCoords k_coords, v_coords;  // where they are brought

  CUFLASH_DEVICE bool is(Flag which) const { return flags & which; }
};
CUFLASH_DEVICE int k_phase(int flags) { return (flags & StepMessage::kPhaseOfK) != 0; }
CUFLASH_DEVICE int v_phase(int flags) { return (flags & StepMessage::kPhaseOfV) != 0; }

// What is known of the queries of a step, and which keys of the tile each sees, unless consumers need not ask: a bit a key
// in the row of a query, or, where rows of scores are keys, a bit a query in the row of a key.
constexpr int kKeyWords = (kBlockKv + 31) / 32, kQueryWords = kBlockQ / 32;
struct alignas(16) StageQueries {
  QueryStats stats;
  uint32_t row_masks[kIsWide ? kBlockQ : kBlockKv][kIsWide ? kKeyWords : kQueryWords];
};

// The stage that a step has in the rings, and the parity of its phase.
struct PipelineState {
  int stage = 0, phase = 0;

  CUFLASH_DEVICE PipelineState next() const {
    const bool is_last = stage == kNumStages - 1;
    return {is_last ? 0 : stage + 1, phase ^ is_last};
  }
};

// The same of dO, of which there may be one.
CUFLASH_DEVICE int do_stage(const PipelineState& state) { return kDoStages == 1 ? 0 : state.stage; }
CUFLASH_DEVICE int do_phase(const PipelineState& state) { return kDoStages == 1 ? state.stage : state.phase; }

// A tile of keys and a head of queries: where lies what its steps ask for.
struct HeadWork {
  attention::WorkTile tile;
  QueryStats* stats;  // tile after tile
  float* dq_sum;
  tile::TmaCoords q_coords, do_coords;
  int flags;  // of all of its steps
  attention::DqSchedule dq;
};

// What consumers do with dQ of a step: have it added to the sums, or finish it, alone or with the sums of others.
enum class DqFinish : int { kNot, kAlone, kWithSums };

// The number of steps that copy warps and producer may have between them, and one more that the producer works on.
constexpr int kNumHeadWorks = kNumStages + 1;

struct SharedStorage {
  StageQueries queries[kNumStages];
  tile::PipelineSlot k, v, q[kNumStages], d_o[kDoStages];
  uint64_t message_ready[kNumStages];  // copy warps may read the message
  StepMessage messages[kNumStages];
  HeadWork works[kNumHeadWorks];  // of heads that have steps, in turn
  float softmax_scale_log2;  // with a score function, which scales products itself, the scale
  // The producer's own, whose registers are few: whether it has a tile, the parities of the next K and V as a note says them,
  // and how far a head reaches.
  int has_tile, kv_phases;
  attention::VisitRange visit_range;
  DqFinish dq_finish;  // of a step, where the last to come finishes dQ
  uint64_t dq_sum_loaded;  // sums of dQ are in its room
};
CUFLASH_DEVICE SharedStorage& shared() {
  return *reinterpret_cast<SharedStorage*>(ptx::dynamic_shared<unsigned char>() + kStorageOffset);
}

}  // namespace cuflash
