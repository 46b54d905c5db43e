// The gradient of a sink, computed once delta of every query is known. All families that store delta in a vector use
// this kernel. A thread block sums over the queries of one head.
#include <attention/config_simt.cuh>
#include <attention/sink_delta.cuh>
#include <ptx/shared.cuh>

extern "C" __global__ void __launch_bounds__(32 * cuflash::Config::kNumWarps)
simt_sink_gradient(const __grid_constant__ cuflash::attention::Params params CUFLASH_FEATURES) {
  using namespace cuflash;
  using namespace cuflash::attention;
  const int length = params.shape.seqlen_q;
  sum_sink_gradient<Accumulator, 32 * Config::kNumWarps>(
      params, sink, ptx::dynamic_shared<Accumulator>(), [&](const BatchHead& batch_head, int query) {
        const auto delta = matrix<Accumulator>(params.delta, batch_head, batch_head.head, length, 1);
        return delta_beside_sink(params, sink, batch_head, query, delta.at(query, 0));
      });
}
