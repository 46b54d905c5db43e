// Draws random scores of blocks: for each cell of a grid, a number in [0, 1) with 24 bits, by Philox from a key and the
// cell's index. cuflash/selectors/baselines.py is the specification.
#include <lists/selection.cuh>
#include <tile/philox.cuh>

extern "C" __global__ void __launch_bounds__(32 * cuflash::Config::kNumWarps)
lists_draw(const __grid_constant__ cuflash::lists::Draw draw) {
  using namespace cuflash;
  const uint64_t cell = static_cast<uint64_t>(blockIdx.x) * lists::kSelectionThreads + ptx::thread_index();
  if (cell >= draw.num_cells) return;
  tile::PhiloxWords words[1] = {{{static_cast<uint32_t>(cell), static_cast<uint32_t>(cell >> 32), 0, 0}}};
  tile::philox4x32(words, {static_cast<uint32_t>(draw.seed), static_cast<uint32_t>(draw.seed >> 32)});
  draw.numbers[cell] = static_cast<float>(words[0].at[0] >> 8) * 0x1p-24f;
}
