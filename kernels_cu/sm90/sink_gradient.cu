// The gradient of a sink, from delta in the QueryStats of each tile of queries. A thread block sums over the queries of
// one head.
#include <attention/sink_delta.cuh>
#include <ptx/shared.cuh>
#include <sm90/query_stats.cuh>

static_assert(!cuflash::Config::kCutsSequences, "tiles of statistics start at multiples of kBlockQ");

namespace cuflash::sm90 {

struct SinkGradient : QueryTileStats<Config> {
  // The body of the kernel.
  static CUFLASH_DEVICE void run(const attention::Params& params, const QueryState& query_state, SinkArgument sink) {
    sum_sink_gradient<float, kThreads>(
        params, sink, ptx::dynamic_shared<float>(), [&](const BatchHead& batch_head, int query) {
          const int row = (Config::kIsListed ? query % params.work.block_q : query) % kBlockQ;
          const QueryStats& stats =
              query_records(query_state, batch_head)[query_tile_number<Listed>(params, query, kBlockQ)].stats;
          return delta_beside_sink(params, sink, batch_head, query, stats.delta[row]);
        });
  }
};

}  // namespace cuflash::sm90

extern "C" __global__ void __launch_bounds__(cuflash::sm90::SinkGradient::kThreads)
sm90_sink_gradient(const __grid_constant__ cuflash::attention::Params params,
                   const __grid_constant__ cuflash::sm90::QueryState query_state CUFLASH_FEATURES) {
  using namespace cuflash;
  using namespace cuflash::sm90;
  SinkGradient::run(params, query_state, sink);
}
