// The last kernel of a backward pass that sums dQ in float32: it scales dQ and rounds it to the dtype of Q. A thread
// block converts one tile of queries; its warps read the sums in the accumulator layout of the warps that added them.
#include <attention/members_gradient.cuh>

namespace cuflash::sm80 {

constexpr int kSharedBytes = QTile::kBytes;

// Return the tile that a thread block converts.
CUFLASH_DEVICE attention::WorkTile tile_to_convert(const attention::Params& params, attention::NoChosenLists) {
  return attention::query_tile_reversed<Listed>(params, kBlockQ);
}
CUFLASH_DEVICE attention::WorkTile tile_to_convert(const attention::Params& params,
                                                   const attention::ChosenLists& chosen) {
  return attention::tile_of_block<Listed>(params, chosen, kBlockQ);
}

// Load the sums of a tile.
CUFLASH_DEVICE void load_sums(const attention::Params& params, attention::NoChosenLists,
                              const attention::WorkTile& work, WarpDq& dq) {
  using namespace attention;
  const int64_t tile = query_tile_number(params, work.first, kBlockQ);
  const DqSumLayout sum(matrix<float>(params.dq_sum, work.batch_head, work.batch_head.head, 0, 0).data +
                        tile * params.dq_sum.row_stride);
  sum.load(dq);
}
CUFLASH_DEVICE void load_sums(const attention::Params& params, const attention::ChosenLists& chosen,
                              const attention::WorkTile& work, WarpDq& dq) {
  DqSumRows::load(attention::rows_of_tile<float>(chosen, dq_sum_rows(params), work, kHeadDim), dq);
}

}  // namespace cuflash::sm80

extern "C" __global__ void __launch_bounds__(cuflash::kThreads)
sm80_convert_dq(const __grid_constant__ cuflash::attention::Params params CUFLASH_FEATURES) {
  using namespace cuflash;
  using namespace cuflash::sm80;
  using namespace cuflash::attention;
  const Shape& shape = params.shape;
  const WorkTile work = tile_to_convert(params, chosen);
  if (work.is_empty()) return;
  WarpDq dq;
  load_sums(params, chosen, work, dq);
  dq.scale(shape.softmax_scale);
  write_gradient_of_queries(chosen, params.dq, work, shape.head_dim, QTile{0}, dq);
}
