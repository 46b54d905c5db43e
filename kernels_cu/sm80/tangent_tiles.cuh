#pragma once
#include <attention/config_mma.cuh>
#include <attention/score_gradient_mma.cuh>
#include <attention/tangents.cuh>

// Copies and products of operands that have tangents.
namespace cuflash::sm80 {

// Start copying the rows of a step.
template <class Tile>
CUFLASH_DEVICE void load_rows(Tile to, Element* data, const attention::Matrices& matrices, int num_columns,
                              const attention::KvBlock& block, bool rows_fill_tiles) {
  if (__builtin_expect(rows_fill_tiles && block.stop - block.start == Tile::kRows, true)) {
    const int64_t row_stride = matrices.row_stride;
    tile::FullTileCopy<kThreads, Element, Tile::kRows,
        Tile::kChunks * Tile::kChunk>(to, data + block.start * row_stride, row_stride)
        .start();
  } else {
    tile::load_async<kThreads, false>(to, rows(data, matrices, num_columns, block.start, block.stop));
  }
}

// Compute c = a b^T and, from the tangents that exist, c_dot = a_dot b^T + a b_dot^T; c_dot is not written if there are
// none. Fragments of a and b are read once for both products.
template <bool HasADot, bool HasBDot, class Tile, int Rows, int Columns, int Depth>
CUFLASH_DEVICE void multiply_with_tangents(Tile& c, Tile& c_dot, tile::SwizzledTile<Element, Rows, Depth> a,
                                           tile::SwizzledTile<Element, Rows, Depth> a_dot,
                                           tile::SwizzledTile<Element, Columns, Depth> b,
                                           tile::SwizzledTile<Element, Columns, Depth> b_dot) {
  const auto left = tile::left_k_major(a, c.warp_row()), left_dot = tile::left_k_major(a_dot, c.warp_row());
  const auto right = tile::right_k_major(b, 0), right_dot = tile::right_k_major(b_dot, 0);
#pragma unroll
  for (int step = 0; step < Depth / 16; ++step) {
    uint32_t frag[Tile::kRowTiles][4], dot_frag[Tile::kRowTiles][4];
#pragma unroll
    for (int i = 0; i < Tile::kRowTiles; ++i) {
      tile::load(frag[i], left, i, step);
      if constexpr (HasADot) tile::load(dot_frag[i], left_dot, i, step);
    }
    tile::mma_k_step<Element>(c, frag, right, step, step == 0);
    if constexpr (HasADot) tile::mma_k_step<Element>(c_dot, dot_frag, right, step, step == 0);
    if constexpr (HasBDot) tile::mma_k_step<Element>(c_dot, frag, right_dot, step, step == 0 && !HasADot);
  }
}

// Write the rows of a gradient, staged in free shared memory unless they are float32. Called by all threads.
template <class Gradient, class Tile>
CUFLASH_DEVICE void write_rows(const attention::Matrices& to, const attention::WorkTile& work, int head,
                               int num_columns, Tile staging, Gradient& gradient) {
  if (to.is_accumulator) return attention::write_accumulators(to, work, head, num_columns, gradient);
  tile::store(staging, gradient);
  __syncthreads();  // all rows are staged
  const auto all = attention::matrix<Element>(to, work.batch_head, head, work.last, num_columns);
  tile::store<kThreads>(all.rows(work.first, work.last), staging);
}

}  // namespace cuflash::sm80
