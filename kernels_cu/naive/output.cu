// Standard attention, third of three kernels: o = P v. A thread block computes one tile of o, from all keys.
#include <naive/products.cuh>

namespace cuflash::naive {

constexpr int kSharedBytes = kBytesOf<PTile, VTile> + kBlockKv * static_cast<int>(sizeof(int));

}  // namespace cuflash::naive

// Four blocks per multiprocessor: without this bound, ptxas 13.0 tries to fit more blocks, and spills registers in some
// specifications.
extern "C" __global__ void __launch_bounds__(cuflash::tile::kThreads, 4)
naive_output(const __grid_constant__ cuflash::attention::Params params,
             const __grid_constant__ cuflash::naive::ScoreMatrices matrices) {
  using namespace cuflash;
  using namespace cuflash::naive;
  using namespace cuflash::attention;
  const Shape& shape = params.shape;
  const int num_parts = num_column_tiles(shape.value_dim, kValueDim);
  const WorkTile work = query_tile(params, kBlockQ, num_parts);
  if (work.is_empty()) return;
  const BatchHead& batch_head = work.batch_head;
  const Range columns = column_tile(shape.value_dim, kValueDim, split_index(num_parts));
  const auto p = matrix<Accumulator>(matrices.scores, batch_head, batch_head.head, shape.seqlen_q, shape.seqlen_kv)
                     .rows(work.first, work.last);
  const auto v = matrix<Element>(params.v, batch_head, batch_head.head / shape.group_size, shape.seqlen_kv,
                                 shape.value_dim)
                     .columns(columns.first, columns.last);
  const auto to = matrix<Element>(params.o, batch_head, batch_head.head, shape.seqlen_q, shape.value_dim)
                      .rows(work.first, work.last).columns(columns.first, columns.last);

  tile::RegisterTile<Accumulator, kBlockQ, kValueDim, kRun> o;
  o.fill(0);
  add_weighted_rows<kValueDim>(o, params, work, p, v);
  tile::store(to, o);
}
