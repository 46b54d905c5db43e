#pragma once
#include <attention/score_gradient_mma.cuh>
#include <sm90/constants.cuh>
#include <tile/accumulator_layout.cuh>
#include <tile/epilogue.cuh>

// The epilogue of gradients that two warpgroups hold: each warpgroup has 64 rows, or all rows and half of the columns.
namespace cuflash::sm90 {

template <class Config>
struct GradientEpilogue : Constants<Config> {
  using Base = Constants<Config>;
  using typename Base::Element;
  using Base::kBlockQ, Base::kHeadDim;

  // Register tile of the dQ of a tile of queries.
  using WarpDq = tile::WarpTile<1, kHeadDim * kBlockQ / 1024, kBlockQ / 16, 128 / kBlockQ>;
  using DqSumLayout = tile::AccumulatorLayout<WarpDq, 4, 8>;

  // Store the rows of a gradient from registers.
  template <class Gradient>
  static CUFLASH_DEVICE void write_gradient(const attention::Matrices& to, const attention::WorkTile& work, int head,
                                            int num_columns, Gradient& gradient) {
    if (to.is_accumulator) return attention::write_accumulators(to, work, head, num_columns, gradient);
    const auto all = attention::matrix<Element>(to, work.batch_head, head, work.last, num_columns);
    tile::store(all.rows(work.first, work.last), gradient);
  }

  // Set the rows of a gradient to 0. Called by a warp.
  static CUFLASH_DEVICE void clear_rows(const attention::Matrices& to, const attention::WorkTile& work, int head,
                                        int num_columns) {
    using namespace attention;
    if (to.is_accumulator)
      tile::clear(matrix<float>(to, work.batch_head, head, 0, num_columns).rows(work.first, work.last));
    else tile::clear(matrix<Element>(to, work.batch_head, head, 0, num_columns).rows(work.first, work.last));
  }
};

}  // namespace cuflash::sm90
