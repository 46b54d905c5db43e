// Sums the counts of block rows, in the first thread block, and of block columns, in the second: the results are the
// starts of their entries.
#include <lists/params.cuh>
#include <ptx/shared.cuh>

extern "C" __global__ void __launch_bounds__(32 * cuflash::Config::kNumWarps)
lists_pointers(const __grid_constant__ cuflash::lists::Params params) {
  using namespace cuflash;
  using namespace cuflash::lists;
  int32_t* pointers = blockIdx.x == 0 ? params.row_pointers : params.column_pointers;
  const int length = blockIdx.x == 0 ? params.num_rows() : params.num_columns();
  int* sums = ptx::dynamic_shared<int>();
  const int thread = ptx::thread_index(), share = (length + kThreads - 1) / kThreads;
  const int first = min(thread * share, length), last = min(first + share, length);
  int sum = 0;
  for (int at = first; at < last; ++at) sum += pointers[at + 1];
  sums[thread] = sum;
  __syncthreads();
  for (int distance = 1; distance < kThreads; distance *= 2) {
    const int before = thread >= distance ? sums[thread - distance] : 0;
    __syncthreads();  // all warps have read
    sums[thread] += before;
    __syncthreads();  // all warps have written
  }
  int end = sums[thread] - sum;
  for (int at = first; at < last; ++at) {
    end += pointers[at + 1];
    pointers[at + 1] = end;
  }
  if (thread == 0) pointers[0] = 0;
}
