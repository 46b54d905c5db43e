// Standard attention, first of three kernels: S = q k^T softmax_scale log2(e), a whole matrix in global memory, with
// -inf where the mask excludes an element. The factor log2(e) allows exp2 later. A thread block computes one tile of S,
// whatever the mask.
#include <attention/mask_simt.cuh>
#include <attention/score.cuh>
#include <attention/softmax_simt.cuh>
#include <naive/products.cuh>

namespace cuflash::naive {

constexpr int kSharedBytes = kBytesOf<QTile, KTile>;

}  // namespace cuflash::naive

// Four blocks per multiprocessor: without this bound, ptxas 13.0 tries to fit more blocks, and spills registers in some
// specifications.
extern "C" __global__ void __launch_bounds__(cuflash::tile::kThreads, 4)
naive_scores(const __grid_constant__ cuflash::attention::Params params,
             const __grid_constant__ cuflash::naive::ScoreMatrices matrices CUFLASH_FEATURES) {
  using namespace cuflash;
  using namespace cuflash::naive;
  using namespace cuflash::attention;
  const Shape& shape = params.shape;
  const Tiling key_tiles = key_tiling(params, kBlockKv);
  const WorkTile work = query_tile(params, kBlockQ, key_tiles.num_tiles());
  const Range keys = key_tiles.tile(split_index(key_tiles.num_tiles()));
  if (work.is_empty() || keys.is_empty()) return;
  const BatchHead& batch_head = work.batch_head;
  const auto q = matrix<Element>(params.q, batch_head, batch_head.head, shape.seqlen_q, shape.head_dim)
                     .rows(work.first, work.last);
  const auto k = matrix<Element>(params.k, batch_head, batch_head.head / shape.group_size, shape.seqlen_kv,
                                 shape.head_dim)
                     .rows(keys.first, keys.last);

  tile::RegisterTile<Accumulator, kBlockQ, kBlockKv> s;
  s.fill(0);
  add_product_of_rows<kHeadDim>(s, q, k);
  // With a score function, the matrix stores q k^T, from which the backward pass computes P and slopes.
  constexpr bool kScales = !kHasScore, kApplies = kHasScore && !score::Function::kIsDerived;
  if constexpr (kScales) s.scale(shape.softmax_scale * kLog2E);
  if constexpr (kApplies)
    score_of_queries(s, score_function, params.shape.softmax_scale, work, {keys.first, keys.last}, kLog2E);
  KvBlock block;
  if (find_block(params, batch_head, rows_of(work), keys, block)) {
    mask_scores(s, params, work, block);
  } else {
    s.fill(ptx::negative_infinity<Accumulator>());
  }
  tile::store(matrix<Accumulator>(matrices.scores, batch_head, batch_head.head, shape.seqlen_q, shape.seqlen_kv)
                  .rows(work.first, work.last).columns(keys.first, keys.last), s);
}
