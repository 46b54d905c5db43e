#pragma once
#include <attention/config_mma.cuh>
#include <attention/decode_work.cuh>
#include <ptx/barrier.cuh>
#include <ptx/cp_async.cuh>
#include <tile/accumulator_layout.cuh>

// Constants, register tiles and shared memory of decode kernels (sm80/decode.cuh).
namespace cuflash::sm80 {

using attention::Decode;
using attention::Part;
using attention::Sequence;
constexpr int kNumStages = Config::kNumStages;

constexpr int kRowGroups = kBlockQ / 16, kKeyGroups = kNumWarps / kRowGroups, kKeysOfWarp = kBlockKv / kKeyGroups;
using Scores = tile::WarpTile<1, kKeysOfWarp / 8, kRowGroups, kKeyGroups>;
using Output = tile::WarpTile<1, kValueDim / 8, kRowGroups>;
using Softmax = attention::LazySoftmax<Scores::kRows>;  // only for its scale: warps merge their maxima at the end
static_assert(kRowGroups * kKeyGroups == kNumWarps && kKeysOfWarp % 16 == 0 && kBlockKv % 16 == 0,
              "warps share evenly");

constexpr QTile q_smem{0};
template <class Stage>
CUFLASH_DEVICE Stage stage_smem(int number) {
  static_assert(Stage::kBytes % 128 == 0, "chunks of a row are told apart by their addresses");
  return {QTile::kBytes + number * Stage::kBytes};
}
CUFLASH_DEVICE int key_group() { return threadIdx.x / 32 / kRowGroups; }
// Wait for the warps that read the same keys.
CUFLASH_DEVICE void sync_key_group() {
  if constexpr (kRowGroups == 1) __syncwarp();
  else ptx::bar_sync(1 + key_group(), 32 * kRowGroups);
}

// The merge buffer, in floats: maxima, sums and o of the warps that divide the keys, and of a part that is a whole
// sequence. It overwrites queries, keys and values once all warps have read them. Rows of o are 8 floats apart so that
// a warp's stores use different banks.
constexpr bool kMergesRows = kRowGroups == 1;  // otherwise, warps add their tiles in pairs
constexpr int kStatsFloats = 2 * kKeyGroups * kBlockQ, kRowFloats = kValueDim + 8;
constexpr int kFloatsOfWarp = Output::kColumnTiles * 4 * 32;
constexpr int kFloatsOfWarps = kMergesRows ? kKeyGroups * 16 * kRowFloats : kKeyGroups / 2 * kRowGroups * kFloatsOfWarp;
constexpr int kOnlyStats = kStatsFloats + kFloatsOfWarps;  // where a part that is a sequence starts
constexpr int kOnlyO = kMergesRows ? kOnlyStats + 2 * kBlockQ : 0;
constexpr int kMergeFloats = kMergesRows ? kOnlyO + kBlockQ * kValueDim : kOnlyStats + 2 * kBlockQ;
constexpr int kPartsAtOnce = kValueDim <= 128 ? 16 : 8;  // number of parts that a warp loads at once

template <class Stage>
constexpr int kBytesOfDecode = QTile::kBytes + kNumStages * Stage::kBytes;

// Return the shared memory for the list of chosen blocks, after the stages. Only kernels with such lists have it.
template <class Stage>
CUFLASH_DEVICE uint32_t* room_of_list() {
  return reinterpret_cast<uint32_t*>(ptx::dynamic_shared<unsigned char>() + kBytesOfDecode<Stage>);
}

CUFLASH_DEVICE float* merge_room() { return ptx::dynamic_shared<float>(); }

}  // namespace cuflash::sm80
