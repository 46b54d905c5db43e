#pragma once
#include <attention/config_mma.cuh>
#include <attention/score_function.cuh>
#include <tile/wgmma_tile.cuh>

// Constants and shared-memory tiles of the backward kernels that keep a tile of keys and walk blocks of queries
// (sm90/q_pipeline.cuh).
namespace cuflash {

using config::kNumStages;

constexpr int kWarpgroupThreads = 128;  // threads of a warpgroup
constexpr bool kMakesDq = config::kDqAtomicWidth > 0;
constexpr int kNumConsumers = kMakesDq ? 2 : 1;
constexpr int kRegistersPerThread = kMakesDq ? 168 : 128;  // that a block starts with, and moves
constexpr int kProducerRegisters = kMakesDq || kHeadDim > 64 || kValueDim > 64 ? 24 : 40;
constexpr int kConsumerRegisters = kMakesDq ? 240 : 256 - kProducerRegisters;
static_assert(kProducerRegisters + kNumConsumers * kConsumerRegisters <= kRegistersPerThread * (1 + kNumConsumers),
              "else groups wait for ever");
static_assert(kThreads == kWarpgroupThreads * (1 + kNumConsumers), "a producer, and consumers");
static_assert(kNumStages >= 2, "Q of a step is read while scores of the next are made");

// Names of barriers; a warpgroup of consumers has one of each kind that says Ds or Dq.
constexpr int kConsumersSync = 1, kDsEmpty = 2, kDqEmpty = 4, kDqFull = 6;

// Up to 128 columns a warpgroup has rows of dK and dV, and only dS goes through shared memory; beyond, it has columns of
// them, and of P and dS as much goes there as both need.
constexpr bool kIsWide = kHeadDim > 128 || kValueDim > 128;
// Threads that say and copy what is brought: the last warp of theirs adds dQ up, where that goes through shared memory.
constexpr int kProducerThreads = kIsWide ? kWarpgroupThreads : kWarpgroupThreads - 32,
    kCopyThreads = kProducerThreads - 32;
// Blocks finish dQ: where tiles of keys see all in order (sm90/dq_semaphore.cuh); or, of a list, whoever comes last.
constexpr bool kFinishesDqInOrder = config::kFusesDqEpilogue && !config::kIsListed && !config::kCountsDqArrivals;
static_assert(!kIsWide || kMakesDq, "who makes dQ not has all of dK and dV in registers");
static_assert(!config::kFusesDqEpilogue || (kMakesDq && !kIsWide), "dQ goes through its room");
// Up to 128 columns P's minimum with 1 is left out where no lse is large.
constexpr bool kSkipsClamp = !kIsWide;
constexpr int kNumScoreTiles = kIsWide ? 3 : kMakesDq ? 1 : 0;  // P of even and of odd steps and dS; or dS

using SmemK = tile::WgmmaTile<Element, kBlockKv, kHeadDim, kIsWide && kHeadDim % 128 != 0 ? 32 : tile::panel_width(kHeadDim)>;
using SmemV = tile::WgmmaTile<Element, kBlockKv, kValueDim>;
using SmemQ = tile::WgmmaTile<Element, kBlockQ, kHeadDim>;
using SmemDo = tile::WgmmaTile<Element, kBlockQ, kValueDim>;
constexpr int kScoreBytes = 2 * kBlockQ * kBlockKv;
// of a block's shared memory; what of it is no tile
constexpr int kMaxSharedBytes = 227 << 10, kStorageBytes = 5 << 10;
constexpr int kTileBytes = SmemK::kBytes + SmemV::kBytes + kNumStages * SmemQ::kBytes + kNumScoreTiles * kScoreBytes;
// Stages of dO: one where no more find room.
constexpr int kDoStages = !kIsWide || kTileBytes + kNumStages * SmemDo::kBytes + kStorageBytes <= kMaxSharedBytes
    ? kNumStages : 1;
static_assert(kDoStages == kNumStages || kNumStages == 2, "of two stages, the one says whose turn the other's phase is");
// Consumers are told where each step stands: a score function, or dropout, depends on it.
constexpr bool kTellsPlaces = kHasScore || config::kHasDropout;
// Consumers say of dO by itself that they have left it, not only with Q: where it has fewer stages; and at 128 columns, where
// what ptxas makes of all that follows is 5 % faster with it.
constexpr bool kReleasesDo = kDoStages < kNumStages || (!kIsWide && kBlockQ == 64);

constexpr SmemK k_smem{0};
constexpr SmemV v_smem{SmemK::kBytes};
constexpr int kQOffset = v_smem.start + SmemV::kBytes;  // stages of Q, then of dO
constexpr int kDoOffset = kQOffset + kNumStages * SmemQ::kBytes;
constexpr int kScoreOffset = kDoOffset + kDoStages * SmemDo::kBytes;
constexpr int kDqOffset = kScoreOffset + kNumScoreTiles * kScoreBytes;  // a part of dQ for each warpgroup
constexpr int kDqPartBytes = 4 * kBlockQ * kHeadDim / kNumConsumers;
constexpr bool kHasDqWriter = kMakesDq && !kIsWide;  // by way of that room
constexpr int kStorageOffset = kDqOffset + (kHasDqWriter ? kNumConsumers * kDqPartBytes : 0);
CUFLASH_DEVICE SmemQ q_smem(int stage) { return {kQOffset + stage * SmemQ::kBytes}; }
CUFLASH_DEVICE SmemDo do_smem(int stage) { return {kDoOffset + stage * SmemDo::kBytes}; }
CUFLASH_DEVICE int dq_offset(int part) { return kDqOffset + part * kDqPartBytes; }

}  // namespace cuflash
