// Chooses blocks of each row of a grid, one warp per row.
#include <lists/row_choice.cuh>

extern "C" __global__ void __launch_bounds__(32 * cuflash::Config::kNumWarps)
lists_choose(const __grid_constant__ cuflash::lists::Choice choice) {
  using namespace cuflash;
  using namespace cuflash::lists;
  const int warp = ptx::thread_index() / 32, number = blockIdx.x * Config::kNumWarps + warp;
  if (number >= choice.num_rows) return;
  Row<WarpOfRow> row(choice, number, {});
  choose_of_row(row, ptx::dynamic_shared<uint32_t>() + warp * choice.num_kv_blocks);
}
