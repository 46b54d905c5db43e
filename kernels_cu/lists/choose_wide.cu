// Chooses blocks of each row of one or two grids. A thread block works on one row, since a row with many blocks would
// occupy a single warp for a long time; lists_choose serves grids with many rows.
#include <lists/row_choice.cuh>

extern "C" __global__ void __launch_bounds__(32 * cuflash::Config::kNumWarps, cuflash::Config::kMinBlocks)
lists_choose_wide(const __grid_constant__ cuflash::lists::Choices choices) {
  using namespace cuflash;
  using namespace cuflash::lists;
  const int number = blockIdx.x, num_first = choices.first.num_rows;
  const bool is_first = number < num_first;
  unsigned char* const storage = ptx::dynamic_shared<unsigned char>();
  Row<BlockOfRow> row(is_first ? choices.first : choices.second, is_first ? number : number - num_first, {storage});
  choose_of_row(row, reinterpret_cast<uint32_t*>(storage + BlockOfRow::kBytes));
}
