#pragma once
#include <attention/score_function.cuh>
#include <sm90/query_stats.cuh>
#include <tile/wgmma_tile.cuh>

// Constants and shared-memory tiles of the backward kernels that keep a tile of keys and visit blocks of queries
// (sm90/q_pipeline.cuh).
namespace cuflash::sm90 {

// Indices of named barriers. Each of the last three names stands for two barriers: the next index is that of the second
// consumer warpgroup.
constexpr int kConsumersSync = 1, kDsEmpty = 2, kDqEmpty = 4, kDqFull = 6;

template <class Config>
struct QTiles : QueryTileStats<Config> {
  using Base = QueryTileStats<Config>;
  using typename Base::Element;
  using Base::kBlockKv, Base::kBlockQ, Base::kHeadDim, Base::kNumStages, Base::kThreads, Base::kValueDim;

  static constexpr bool kMakesDq = Config::kDqAtomicWidth > 0;
  static constexpr int kNumConsumers = kMakesDq ? 2 : 1;
  // Numbers of registers per thread: at launch, and of each role after warpgroups have redistributed them.
  static constexpr int kRegistersPerThread = kMakesDq ? 168 : 128;
  static constexpr int kProducerRegisters =
      kMakesDq || kHeadDim > 64 || kValueDim > 64 ? (Config::kPacksQueries ? 24 : 24) : 40;
  static constexpr int kConsumerRegisters = kMakesDq ? 240 : 256 - kProducerRegisters;
  static_assert(kProducerRegisters + kNumConsumers * kConsumerRegisters <= kRegistersPerThread * (1 + kNumConsumers),
                "warpgroups cannot take more registers than the block has");
  static_assert(kThreads == kWarpgroupThreads * (1 + kNumConsumers), "one producer warpgroup, and the consumers");
  static_assert(kNumStages >= 2, "Q of a step is still read while scores of the next step are multiplied");

  // Whether a kernel has more than 128 columns. Up to 128 columns, a warpgroup holds rows of dK and dV, and only dS
  // passes through shared memory. Beyond, it holds columns of dK and dV, and P and dS pass through shared memory, since
  // both warpgroups need all of them.
  static constexpr bool kIsWide = kHeadDim > 128 || kValueDim > 128;
  // Numbers of threads of the producer warpgroup that write messages and load. If dQ is staged in shared memory, its
  // last warp is the dQ writer instead.
  static constexpr int kProducerThreads = kIsWide ? kWarpgroupThreads : kWarpgroupThreads - 32,
                       kCopyThreads = kProducerThreads - 32;
  // Whether a tile of keys waits for other tiles of its head, which must therefore be taken before it.
  static constexpr bool kTakesTilesInOrder = Config::kFinishesDqInOrder || Config::kAddsDqInOrder;
  static_assert(Config::kFinishesDqInOrder + Config::kLastFinishesDq + Config::kAddsDqInOrder <= 1,
                "tiles of keys share dQ in one way");
  static_assert(!Config::kIsListed || !kTakesTilesInOrder, "of a list, the tiles that visit queries are not numbered");
  static_assert(!kIsWide || kMakesDq, "without in-kernel dQ, all of dK and dV must fit in registers");
  static_assert(!(Config::kFinishesDqInOrder || Config::kLastFinishesDq || Config::kAddsDqInOrder) ||
                    (kMakesDq && !kIsWide),
                "dQ is staged where tiles wait for each other");
  // Whether P is clamped to 1 only if some lse is large.
  static constexpr bool kSkipsClamp = !kIsWide;
  // Number of score tiles in shared memory: for wide tiles, P of even steps, P of odd steps, and dS; otherwise dS, if
  // dQ is computed.
  static constexpr int kNumScoreTiles = kIsWide ? 3 : kMakesDq ? 1 : 0;

  using SmemK =
      tile::WgmmaTile<Element, kBlockKv, kHeadDim, kIsWide && kHeadDim % 128 != 0 ? 32 : tile::panel_width(kHeadDim)>;
  using SmemV = tile::WgmmaTile<Element, kBlockKv, kValueDim>;
  using SmemQ = tile::WgmmaTile<Element, kBlockQ, kHeadDim>;
  using SmemDo = tile::WgmmaTile<Element, kBlockQ, kValueDim>;
  static constexpr int kScoreBytes = 2 * kBlockQ * kBlockKv;
  // bytes of shared memory per block; upper limit of the bytes that are not tiles
  static constexpr int kMaxSharedBytes = 227 << 10, kStorageBytes = 5 << 10;
  static constexpr int kTileBytes =
      SmemK::kBytes + SmemV::kBytes + kNumStages * SmemQ::kBytes + kNumScoreTiles * kScoreBytes;
  // Number of stages of dO: that of Q if they fit, else one.
  static constexpr int kDoStages =
      !kIsWide || kTileBytes + kNumStages * SmemDo::kBytes + kStorageBytes <= kMaxSharedBytes ? kNumStages : 1;
  static_assert(kDoStages == kNumStages || kNumStages == 2, "with one stage of dO, the stage of Q is the phase of dO");
  // Whether messages always have the block of the step: score functions and dropout depend on it.
  static constexpr bool kMessagesHaveBlocks = kHasScore || Config::kHasDropout;
  // Whether dO is released separately from Q: if it has fewer stages, and always at 128 columns, since ptxas then
  // orders the instructions after the release such that the kernel is 5 % faster.
  static constexpr bool kReleasesDo = kDoStages < kNumStages || (!kIsWide && kBlockQ == 64);

  static constexpr SmemK k_smem{0};
  static constexpr SmemV v_smem{SmemK::kBytes};
  static constexpr int kQOffset = v_smem.start + SmemV::kBytes;  // stages of Q, followed by those of dO
  static constexpr int kDoOffset = kQOffset + kNumStages * SmemQ::kBytes;
  static constexpr int kScoreOffset = kDoOffset + kDoStages * SmemDo::kBytes;
  // staging buffer of dQ, with a part for each warpgroup
  static constexpr int kDqOffset = kScoreOffset + kNumScoreTiles * kScoreBytes;
  static constexpr int kDqPartBytes = 4 * kBlockQ * kHeadDim / kNumConsumers;
  static constexpr bool kHasDqWriter = kMakesDq && !kIsWide;  // the writer uses the staging buffer of dQ
  static constexpr int kStorageOffset = kDqOffset + (kHasDqWriter ? kNumConsumers * kDqPartBytes : 0);
  static CUFLASH_DEVICE SmemQ q_smem(int stage) { return {kQOffset + stage * SmemQ::kBytes}; }
  static CUFLASH_DEVICE SmemDo do_smem(int stage) { return {kDoOffset + stage * SmemDo::kBytes}; }
  static CUFLASH_DEVICE int dq_offset(int part) { return kDqOffset + part * kDqPartBytes; }
};

}  // namespace cuflash::sm90
