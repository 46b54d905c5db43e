// Attention of a few new tokens to a KV cache that has the dtype of Q (sm80/decode.cuh).
#include <sm80/decode.cuh>

namespace cuflash::sm80 {

struct PlainStage {
  struct Arrays {};
  using KTile = cuflash::KTile;
  using VTile = cuflash::VTile;
  using Stored = Element;
  using WarpV = tile::SwizzledTile<Element, kKeysOfWarp, kValueDim>;
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
  static CUFLASH_DEVICE int column(const Output& o, int j) { return o.first_column() + o.column(j); }
  static CUFLASH_DEVICE void store_row(float* to, const Output& o, int i) { tile::store_row(to, o, i); }
};
constexpr int kSharedBytes = kBytesOfDecode<PlainStage>;

}  // namespace cuflash::sm80

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, cuflash::Config::kMinBlocks)
sm80_decode(const __grid_constant__ cuflash::attention::Decode params CUFLASH_FEATURES) {
  using namespace cuflash;
  using namespace cuflash::sm80;
  using namespace cuflash::attention;
  decode<PlainStage>(params, {}, sink, score_function);
}
