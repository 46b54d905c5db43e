// The kernel that runs before a backward pass with a single walk over the scores: it computes delta = rowsum(dO o O) -
// dlse of every query, and sets dQ to 0.
#include <attention/config_simt.cuh>
#include <attention/score_gradient.cuh>

extern "C" __global__ void __launch_bounds__(cuflash::tile::kThreads, 2)
simt_backward_statistics(const __grid_constant__ cuflash::attention::Params params) {
  using namespace cuflash;
  using namespace cuflash::attention;
  const WorkTile work = query_tile(params, kBlockQ);
  if (work.is_empty()) return;
  tile::RegisterTile<Accumulator, kBlockQ, kHeadDim> dq;
  Accumulator lse_2[dq.kRows], delta[dq.kRows];
  row_statistics<Element, kBlockQ, kValueDim>(params, work, lse_2, delta);
  dq.fill(0);
  store_gradient<Element>(params.dq, work, work.batch_head.head, params.shape.seqlen_q, params.shape.head_dim, dq);
}
