// Computes running sums of the counts of block rows, in the first thread block, and of block columns, in the second
// one. The results are the indices at which their entries start.
#include <lists/params.cuh>
#include <lists/running_sums.cuh>

extern "C" __global__ void __launch_bounds__(32 * cuflash::Config::kNumWarps)
lists_pointers(const __grid_constant__ cuflash::lists::Params params) {
  using namespace cuflash::lists;
  int32_t* pointers = blockIdx.x == 0 ? params.row_pointers : params.column_pointers;
  sum_up<kThreads>(pointers, blockIdx.x == 0 ? params.num_rows() : params.num_columns(), 0);
}
