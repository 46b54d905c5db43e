// The last kernel of a backward pass that sums dQ in float32: it scales dQ and rounds it to the dtype of Q. A thread
// block converts one tile of queries; its warps read the sums in the accumulator layout of the warps that added them.
#include <attention/epilogue_mma.cuh>

namespace cuflash::sm80 {

constexpr int kSharedBytes = QTile::kBytes;

}  // namespace cuflash::sm80

extern "C" __global__ void __launch_bounds__(cuflash::kThreads)
sm80_convert_dq(const __grid_constant__ cuflash::attention::Params params) {
  using namespace cuflash;
  using namespace cuflash::sm80;
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
