// The last kernel of a backward pass on Hopper that sums dQ in float32: it scales dQ and rounds it to the dtype of Q. A
// thread block converts one tile of queries; its warps read the sums in the accumulator layout of the warpgroups that
// added them.
#include <sm90/query_stats.cuh>

namespace cuflash::sm90 {

struct ConvertDq : QueryTileStats<Config> {
  // The body of the kernel.
  static CUFLASH_DEVICE void run(const attention::Params& params, const QueryState& query_state) {
    const Shape& shape = params.shape;
    const WorkTile work = own_query_tile(params);
    if (work.is_empty()) return;
    const int64_t tile = own_query_number<DynamicListed>(params, work);
    const DqSumLayout sum(matrix<float>(params.dq_sum, work.batch_head, work.batch_head.head, 0, 0).data +
                          tile * params.dq_sum.row_stride);
    WarpDq dq;
    // tiles of keys that add in order store the sums, unless no tile visits the queries
    bool has_sums = true;
    if constexpr (Config::kAddsDqInOrder)
      has_sums = dq_count(query_records(query_state, work.batch_head)[tile])->count != 0;
    if (has_sums) sum.load(dq);
    else dq.fill(0);
    dq.scale(shape.softmax_scale);
    write_gradient(params.dq, work, work.batch_head.head, shape.head_dim, dq);
  }
};

}  // namespace cuflash::sm90

extern "C" __global__ void __launch_bounds__(cuflash::sm90::ConvertDq::kThreads)
sm90_convert_dq(const __grid_constant__ cuflash::attention::Params params,
                const __grid_constant__ cuflash::sm90::QueryState query_state) {
  using namespace cuflash;
  using namespace cuflash::sm90;
  ConvertDq::run(params, query_state);
}
