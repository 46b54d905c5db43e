#pragma once
#include <sm80/decode.cuh>

// A pipeline stage of a decode kernel (sm80/decode.cuh) with keys and values in the dtype of Q.
namespace cuflash::sm80 {

template <bool MayBeUnaligned>
struct PlainStageIf {
  struct Arrays {};
  using KTile = cuflash::KTile;
  using VTile = cuflash::VTile;
  using Stored = Element;
  using WarpV = tile::SwizzledTile<Element, kKeysOfWarp, kValueDim>;
  static constexpr bool kMayBeUnaligned = MayBeUnaligned;
  static constexpr int kThreadsPerRow = 8, kBytes = KTile::kBytes + VTile::kBytes;

  int start;

  static CUFLASH_DEVICE QTile queries() { return q_smem; }
  CUFLASH_DEVICE KTile keys() const { return {start}; }
  CUFLASH_DEVICE VTile values() const { return {start + KTile::kBytes}; }
  CUFLASH_DEVICE void start_scales(const Arrays&, int, const attention::BatchHead&, int, int, int) const {}
  CUFLASH_DEVICE void multiply(Scores& s, QTile queries) const { tile::gemm_nt(s, queries, keys()); }
  CUFLASH_DEVICE void add(Output& o, const Scores& weights) const {
    tile::gemm_add_nn(o, weights, WarpV{values().start + key_group() * WarpV::kBytes});
  }
  static CUFLASH_DEVICE void store_row(float* to, const Output& o, int i) { tile::store_row(to, o, i); }
};

}  // namespace cuflash::sm80
