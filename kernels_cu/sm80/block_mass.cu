// The sum of softmax weights in every block of a grid (attention/mass_walk.cuh), on the tensor cores of Ampere.
#include <attention/mass_walk.cuh>

namespace cuflash::sm80 {

constexpr int kSharedBytes = kWalkBytes;

}  // namespace cuflash::sm80

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, cuflash::Config::kMinBlocks)
sm80_block_mass(const __grid_constant__ cuflash::attention::Params params,
                const __grid_constant__ cuflash::attention::MassGrid grid CUFLASH_FEATURES) {
  using namespace cuflash;
  auto& state = *reinterpret_cast<TileState*>(ptx::dynamic_shared<unsigned char>() + kStateOffset);
  add_all_tiles(params, grid, state.tile, [&](const RowMasses& row_masses) {
    walk_keys(params, grid, row_masses, state, score_function);
  });
}
