// The first kernel of FlashAttention-2's backward pass (arXiv 2307.08691, algorithm 2): it computes delta = rowsum(dO o
// O) - dlse, which is 0 in rows without a key, and sets the sums of dQ to 0.
#include <attention/delta.cuh>

extern "C" __global__ void __launch_bounds__(cuflash::kThreads)
sm80_backward_statistics(const __grid_constant__ cuflash::attention::Params params) {
  using namespace cuflash;
  using namespace cuflash::attention;
  reset_tile_counter(params);
  const WorkTile work = query_tile_reversed<Listed>(params, kBlockQ);
  if (work.is_empty()) return;
  const auto delta = matrix<float>(params.delta, work.batch_head, work.batch_head.head, params.shape.seqlen_q, 1);
  for_each_delta(params, work, [&](int row, float sum) { delta.at(row, 0) = sum; });
  clear_dq_sum(params, work, query_tile_number(params, work.first, kBlockQ));
}
