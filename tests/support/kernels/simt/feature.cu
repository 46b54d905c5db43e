#include <attention/config_simt.cuh>
#include <attention/tile_scheduler.cuh>

// A feature's parameters as NumPy lays them out in tests/kernels/test_features.py.
namespace cuflash::attention {
struct Scaling {
  Matrices bias;        // [*batch, heads, seqlen_q, value_dim]
  const float* slopes;  // one for each head
  double factor;
};
}  // namespace cuflash::attention

// o = factor * slopes[head] * bias: a kernel with parameters of its own after those that all kernels take.
extern "C" __global__ void __launch_bounds__(cuflash::tile::kThreads, 2)
simt_feature(const __grid_constant__ cuflash::attention::Params params,
             const __grid_constant__ cuflash::attention::Scaling scaling) {
  using namespace cuflash;
  using namespace cuflash::attention;
  const WorkTile work = query_tile(params, kBlockQ);
  if (work.is_empty()) return;
  const BatchHead& batch_head = work.batch_head;
  const Shape& shape = params.shape;
  const auto o = matrix<Element>(params.o, batch_head, batch_head.head, shape.seqlen_q, shape.value_dim);
  const auto bias = matrix<float>(scaling.bias, batch_head, batch_head.head, shape.seqlen_q, shape.value_dim);
  const float weight = scaling.factor * scaling.slopes[batch_head.head];
  for (int query = work.first + threadIdx.x; query < work.last; query += tile::kThreads)
    for (int column = 0; column < shape.value_dim; ++column)
      tile::to_element(weight * bias.at(query, column), o.at(query, column));
}
