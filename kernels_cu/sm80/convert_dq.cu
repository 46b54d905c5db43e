// The end of a backward pass whose blocks added to dQ in float32: dQ is scaled, and rounded to the dtype of Q. A block
// works on one tile of queries, and its warps hold it as those did that added.
#include <attention/epilogue_mma.cuh>

extern "C" __global__ void __launch_bounds__(cuflash::kThreads)
sm80_convert_dq(const __grid_constant__ cuflash::attention::Params params) {
  using namespace cuflash;
  using namespace cuflash::attention;
  const Shape& shape = params.shape;
  const WorkTile work = query_tile_reversed<Listed>(params, kBlockQ);
  if (work.is_empty()) return;
  const int64_t tile = query_tile_number(params, work.first, kBlockQ);
  const DqSumLayout sum(matrix<float>(params.dq_sum, work.batch_head, work.batch_head.head, 0, 0).data +
                        tile * params.dq_sum.row_stride);
  WarpDq dq;
  sum.load(dq);
  dq.scale(shape.softmax_scale);
  write_gradient(params.dq, work, work.batch_head.head, shape.head_dim, QTile{0}, dq);
}
