// Attention of a few new tokens to a KV cache in e4m3, with a scale for each row (sm80/decode.cuh). The scale of a key
// multiplies its scores, and the scale of a value multiplies its weights. Scores are multiplied in the dtype of Q;
// weights and values are multiplied in bfloat16, whose range includes that of the scales.
#include <attention/cache_scales.cuh>
#include <sm80/decode.cuh>
#include <tile/e4m3.cuh>

namespace cuflash::sm80 {

struct ScaledStage {
  using Arrays = attention::CacheScales;
  using KTile = tile::E4M3Tile<kBlockKv, kHeadDim>;
  using VTile = tile::E4M3Tile<kBlockKv, kValueDim>;
  using Stored = ptx::Float8E4M3;
  using Queries = tile::InterleavedRows<(kNumWarps <= 4 && kHeadDim <= 128), Element, kBlockQ, kHeadDim>;
  using WarpV = tile::E4M3Tile<kKeysOfWarp, kValueDim>;
  static constexpr bool kMayBeUnaligned = false;
  static constexpr int kThreadsPerRow = KTile::kChunks % 8 == 0 && VTile::kChunks % 8 == 0 ? 8 : 4;
  static constexpr int kScales = KTile::kBytes + VTile::kBytes, kBytes = kScales + 2 * 4 * kBlockKv;

  int start;

  static CUFLASH_DEVICE Queries queries() { return {q_smem, Scores::warp_row()}; }
  CUFLASH_DEVICE KTile keys() const { return {start}; }
  CUFLASH_DEVICE VTile values() const { return {start + KTile::kBytes}; }
  CUFLASH_DEVICE float* scales(bool of_values) const {
    return reinterpret_cast<float*>(ptx::dynamic_shared<unsigned char>() + start + kScales) + of_values * kBlockKv;
  }
  // Start copying the scales of 16 rows: one half of the warp copies those of the keys, the other half those of the
  // values.
  CUFLASH_DEVICE void start_scales(const Arrays& arrays, int to, const attention::BatchHead& place, int row,
                                   int first_row, int last_row) const {
    const int lane = ptx::lane(), own_row = lane % 16;
    const auto& from = lane < 16 ? arrays.k_scale : arrays.v_scale;
    const bool is_there = own_row >= first_row && own_row < last_row;
    ptx::cp_async_ca_4(ptx::shared_address(scales(lane >= 16) + to + own_row),
                       &attention::matrix<float>(from, place, place.head, 0, 0).at(row + (is_there ? own_row : 0), 0),
                       is_there ? 4 : 0);
  }
  CUFLASH_DEVICE void multiply(Scores& s, const Queries& queries) const {
    tile::gemm_nt(s, queries, keys());
    scale_columns(s, scales(false));
  }
  CUFLASH_DEVICE void add(Output& o, Scores& weights) const {
    scale_columns(weights, scales(true));
    tile::gemm_add_nn(o, weights, WarpV{values().start + key_group() * WarpV::kBytes});
  }
  static CUFLASH_DEVICE void scale_columns(Scores& s, const float* of_keys) {
#pragma unroll
    for (int j = 0; j < Scores::kColumns; ++j) {
      const float scale = of_keys[s.first_column() + s.column(j)];
#pragma unroll
      for (int i = 0; i < Scores::kRows; ++i) s.at(i, j) *= scale;
    }
  }
  static CUFLASH_DEVICE void store_row(float* to, const Output& o, int i) { tile::store_interleaved_row(to, o, i); }
};
constexpr int kSharedBytes = kBytesOfDecode<ScaledStage>;

}  // namespace cuflash::sm80

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, cuflash::Config::kMinBlocks)
sm80_decode_e4m3(const __grid_constant__ cuflash::attention::Decode params,
                 const __grid_constant__ cuflash::attention::CacheScales scales CUFLASH_FEATURES) {
  using namespace cuflash;
  using namespace cuflash::sm80;
  using namespace cuflash::attention;
  decode_cache<ScaledStage>(params, scales, chosen_pages, sink, score_function);
}
