// Computes running sums of the counts of chunks, one thread block per list head: each chunk receives the count of the
// chunks before it, and each key block the index at which its queries start. Blocks with more queries than a part also
// receive indices of parts.
#include <attention/params.cuh>
#include <lists/columns.cuh>
#include <lists/running_sums.cuh>

extern "C" __global__ void __launch_bounds__(32 * cuflash::Config::kNumWarps)
lists_columns_scan(const __grid_constant__ cuflash::attention::Params params CUFLASH_FEATURES) {
  using namespace cuflash;
  using namespace cuflash::lists;
  constexpr int kThreads = 32 * Config::kNumWarps, kAtOnce = 8;  // number of chunks loaded before any store
  const int64_t list_head = blockIdx.x;
  if (list_head >= chosen.num_list_heads) return;
  int32_t* const counts = chosen.chunk_counts + list_head * chosen.num_chunks * chosen.num_blocks;
  int32_t* const pointers = chosen.column_pointers + list_head * (chosen.num_blocks + 1);
  for (int block = ptx::thread_index(); block < chosen.num_blocks; block += kThreads) {
    int before = 0;
    for (int first = 0; first < chosen.num_chunks; first += kAtOnce) {
      int own[kAtOnce];
      const auto count_of = [&](int chunk) -> int32_t& {
        return counts[static_cast<int64_t>(first + chunk) * chosen.num_blocks + block];
      };
#pragma unroll
      for (int chunk = 0; chunk < kAtOnce; ++chunk) own[chunk] = first + chunk < chosen.num_chunks ? count_of(chunk) : 0;
#pragma unroll
      for (int chunk = 0; chunk < kAtOnce; ++chunk) {
        if (first + chunk < chosen.num_chunks) count_of(chunk) = before;
        before += own[chunk];
      }
    }
    pointers[block + 1] = before;
  }
  __syncthreads();  // all counts are written
  sum_up<kThreads>(pointers, chosen.num_blocks, blockIdx.x * chosen.max_members);
  if (chosen.num_parts == 1) return;
  int32_t* const parts = chosen.part_pointers + list_head * (chosen.num_blocks + 1);
  __syncthreads();  // all pointers are written
  for (int block = ptx::thread_index(); block < chosen.num_blocks; block += kThreads) {
    const int length = pointers[block + 1] - pointers[block], per_part = chosen.queries_per_part;
    parts[block + 1] = length <= per_part ? 0 : (length + per_part - 1) / per_part;
  }
  __syncthreads();  // all numbers of parts are written
  sum_up<kThreads>(parts, chosen.num_blocks, 0);
}
