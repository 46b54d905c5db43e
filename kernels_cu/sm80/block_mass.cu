// The sum of softmax weights in every block of a grid (attention/mass_walk.cuh), on the tensor cores of Ampere.
#include <attention/mass_walk.cuh>

namespace cuflash {

struct MmaProduct {
  static CUFLASH_DEVICE void load_q(int start, const tile::Matrix<Element>& q) { tile::load_async<kThreads>(QTile{start}, q); }
  static CUFLASH_DEVICE void load_k(int start, const tile::Matrix<Element>& k) { tile::load_async<kThreads>(KTile{start}, k); }
  static CUFLASH_DEVICE void make_visible() {}
  static CUFLASH_DEVICE void add(Scores& s, int q, int k) {
    tile::mma_over_k<Element, kHeadDim>(s, tile::left_k_major(QTile{q}, s.warp_row()),
                                        tile::right_k_major(KTile{k}, s.warp_column()), false);
  }
};

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, cuflash::config::kMinBlocks)
sm80_block_mass(const __grid_constant__ cuflash::attention::Params params,
                const __grid_constant__ cuflash::attention::MassGrid grid CUFLASH_FEATURES) {
  using namespace cuflash;
  add_all_tiles<MmaProduct>(params, grid, score_function);
}
