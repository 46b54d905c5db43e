// Sums the masses of compressed keys, which represent overlapping runs of keys, over blocks of keys and over the heads
// of a group. One thread per block of each group writes its sum for each head of the group.
// cuflash/selectors/compressed.py is the specification.
#include <lists/selection.cuh>

extern "C" __global__ void __launch_bounds__(32 * cuflash::Config::kNumWarps)
lists_spread(const __grid_constant__ cuflash::lists::Spread spread) {
  using namespace cuflash;
  using Accumulator = Config::Accumulator;
  const int64_t cell = static_cast<int64_t>(blockIdx.x) * lists::kSelectionThreads + ptx::thread_index();
  const int64_t rows = cell / spread.num_kv_blocks;
  if (rows >= static_cast<int64_t>(spread.num_groups) * spread.num_q_blocks) return;
  const int64_t first_row =
      rows / spread.num_q_blocks * spread.group_size * spread.num_q_blocks + rows % spread.num_q_blocks;
  const int column = static_cast<int>(cell % spread.num_kv_blocks);
  // The block consists of the parts start <= x < stop, and compressed key c of the num_parts parts from c on.
  const int start = column * spread.parts_of_block, stop = start + spread.parts_of_block;
  const int first = start - spread.num_parts + 1 > 0 ? start - spread.num_parts + 1 : 0;
  const int last = stop < spread.num_compressed ? stop : spread.num_compressed;
  Accumulator sum = 0;
  for (int head = 0; head < spread.group_size; ++head) {
    const int64_t row = first_row + static_cast<int64_t>(head) * spread.num_q_blocks;
    const Accumulator* const masses = static_cast<const Accumulator*>(spread.masses) + row * spread.num_compressed;
    for (int c = first; c < last; ++c) {
      const int begin = c > start ? c : start, end = c + spread.num_parts < stop ? c + spread.num_parts : stop;
      sum += static_cast<Accumulator>(end - begin) * masses[c];
    }
  }
  for (int head = 0; head < spread.group_size; ++head) {
    const int64_t row = first_row + static_cast<int64_t>(head) * spread.num_q_blocks;
    static_cast<Accumulator*>(spread.scores)[row * spread.num_kv_blocks + column] = sum;
  }
}
