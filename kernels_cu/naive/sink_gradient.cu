// The gradient of a sink. A thread block sums over the queries of one head, and recomputes delta = rowsum(dO o O) -
// dlse of each query.
#include <attention/config_simt.cuh>
#include <attention/sink_delta.cuh>
#include <ptx/shared.cuh>

extern "C" __global__ void __launch_bounds__(32 * cuflash::Config::kNumWarps)
naive_sink_gradient(const __grid_constant__ cuflash::attention::Params params CUFLASH_FEATURES) {
  using namespace cuflash;
  using namespace cuflash::attention;
  const Shape& shape = params.shape;
  sum_sink_gradient<Accumulator, 32 * Config::kNumWarps>(
      params, sink, ptx::dynamic_shared<Accumulator>(), [&](const BatchHead& batch_head, int query) {
        const auto o = matrix<Element>(params.o, batch_head, batch_head.head, shape.seqlen_q, shape.value_dim);
        const auto d_o = matrix<Element>(params.do_, batch_head, batch_head.head, shape.seqlen_q, shape.value_dim);
        Accumulator delta = 0;
        for (int column = 0; column < shape.value_dim; ++column)
          delta += tile::to_accumulator(d_o.at(query, column)) * tile::to_accumulator(o.at(query, column));
        if (params.dlse.data != nullptr)
          delta -= matrix<Accumulator>(params.dlse, batch_head, batch_head.head, shape.seqlen_q, 1).at(query, 0);
        return delta_beside_sink(params, sink, batch_head, query, delta);
      });
}
