// Backward pass of standard attention: dq = dS k softmax_scale. A thread block computes one tile of dq, from all keys.
#include <naive/products.cuh>

namespace cuflash::naive {

constexpr int kSharedBytes = kBytesOf<PTile, KTile> + kBlockKv * static_cast<int>(sizeof(int));

}  // namespace cuflash::naive

// Four blocks per multiprocessor: without this bound, ptxas 13.0 tries to fit more blocks, and spills registers in some
// specifications.
extern "C" __global__ void __launch_bounds__(cuflash::tile::kThreads, 4)
naive_gradient_queries(const __grid_constant__ cuflash::attention::Params params,
                       const __grid_constant__ cuflash::naive::ScoreMatrices matrices) {
  using namespace cuflash;
  using namespace cuflash::naive;
  using namespace cuflash::attention;
  const Shape& shape = params.shape;
  const int num_parts = num_column_tiles(shape.head_dim, kHeadDim);
  const WorkTile work = query_tile(params, kBlockQ, num_parts);
  if (work.is_empty()) return;
  const BatchHead& batch_head = work.batch_head;
  const Range columns = column_tile(shape.head_dim, kHeadDim, split_index(num_parts));
  const auto ds = matrix<Accumulator>(matrices.score_gradients, batch_head, batch_head.head, shape.seqlen_q,
                                      shape.seqlen_kv)
                      .rows(work.first, work.last);
  const auto k = matrix<Element>(params.k, batch_head, batch_head.head / shape.group_size, shape.seqlen_kv,
                                 shape.head_dim)
                     .columns(columns.first, columns.last);

  tile::RegisterTile<Accumulator, kBlockQ, kHeadDim, kRun> dq;
  dq.fill(0);
  add_weighted_rows<kHeadDim>(dq, params, work, ds, k);
  dq.scale(shape.softmax_scale);
  store_gradient_columns<Element>(params.dq, work, batch_head.head, shape.seqlen_q, shape.head_dim, columns.first, dq);
}
