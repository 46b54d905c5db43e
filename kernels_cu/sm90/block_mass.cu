// The softmax mass of every block of a grid (attention/mass_walk.cuh), by the tensor cores of Hopper: two warpgroups multiply
// chunks that all threads have copied, and wait for their products.
#include <attention/mass_walk.cuh>
#include <ptx/tma.cuh>
#include <tile/wgmma_tile.cuh>

namespace cuflash {

struct WgmmaProduct {
  using Q = tile::WgmmaTile<Element, kBlockQ, kHeadDim>;
  using K = tile::WgmmaTile<Element, kBlockKv, kHeadDim>;
  static_assert(Q::kBytes == QTile::kBytes && K::kBytes == KTile::kBytes, "slots have room for them");

  template <class Tile>
  static CUFLASH_DEVICE void load(Tile to, const tile::Matrix<Element>& from) {
#pragma unroll
    for (int panel = 0; panel < Tile::kNumPanels; ++panel) {
      const int first = panel * Tile::kPanelWidth;
      tile::load_async<kThreads>(to.panel(panel), from.columns(first, min(first + Tile::kPanelWidth, from.num_columns)));
    }
  }
  static CUFLASH_DEVICE void load_q(int start, const tile::Matrix<Element>& q) { load(Q{start}, q); }
  static CUFLASH_DEVICE void load_k(int start, const tile::Matrix<Element>& k) { load(K{start}, k); }
  static CUFLASH_DEVICE void make_visible() { ptx::fence_proxy_async(); }
  static CUFLASH_DEVICE void add(Scores& s, int q, int k) {
    tile::start_gemm_add_nt(s, tile::KMajor<Q>(Q{q}, threadIdx.x / 128 * 64), tile::KMajor<K>(K{k}));
    tile::wait_wgmma<0>(s);
  }
};

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, cuflash::config::kMinBlocks)
sm90_block_mass(const __grid_constant__ cuflash::attention::Params params,
                const __grid_constant__ cuflash::attention::MassGrid grid CUFLASH_FEATURES) {
  using namespace cuflash;
  add_all_tiles<WgmmaProduct>(params, grid, score_function);
}
