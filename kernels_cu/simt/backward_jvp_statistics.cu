// The first kernel of the pass that computes the tangents of gradients, for all families: delta and its tangent of every
// query, which the kernels for rows and columns read.
#include <attention/config_simt.cuh>
#include <attention/gradient_tangents.cuh>

extern "C" __global__ void __launch_bounds__(cuflash::tile::kThreads, cuflash::Config::kMinBlocks)
simt_backward_jvp_statistics(const __grid_constant__ cuflash::attention::Params params CUFLASH_FEATURES) {
  using namespace cuflash;
  using namespace cuflash::attention;
  reset_tile_counter(params);
  const WorkTile work = query_tile(params, kBlockQ);
  if (work.is_empty()) return;
  static_assert(kBlockQ == tile::kRowLanes, "a row's threads have no other row");
  store_query_tangents<Accumulator>(params, tangents, sink, work, tile::row_lane(), tile::column_lane(),
                                    tile::kColumnLanes, [](Accumulator x) { return tile::row_sum(x); });
}
