#pragma once
#include <tile/wgmma_tile.cuh>

// Products of operands that have tangents.
namespace cuflash::sm90 {

// Start the products c = a b^T and, from the tangents that exist, c_dot = a_dot b^T + a b_dot^T; c_dot is not written if
// there are none. The warpgroup has the rows of a from `first_row` on.
template <bool HasADot, bool HasBDot, class Scores, class A, class B>
CUFLASH_DEVICE void start_with_tangents(Scores& c, Scores& c_dot, A a, A a_dot, B b, B b_dot, int first_row) {
  using Left = tile::KMajor<A>;
  using Right = tile::KMajor<B>;
  const Left left(a, first_row);
  const Right right(b);
  tile::start_gemm_nt(c, left, right);
  if constexpr (HasADot) tile::start_gemm_nt(c_dot, Left(a_dot, first_row), right);
  if constexpr (HasADot && HasBDot) tile::start_gemm_add_nt(c_dot, left, Right(b_dot));
  else if constexpr (HasBDot) tile::start_gemm_nt(c_dot, left, Right(b_dot));
}

// Wait for the products of scores and dP and of their tangents.
template <class Scores>
CUFLASH_DEVICE void wait_products(Scores& s, Scores& s_dot, Scores& dp, Scores& dp_dot) {
  tile::wait_wgmma<0>(s);
  ptx::fence_registers(tile::accumulators(s_dot));
  ptx::fence_registers(tile::accumulators(dp));
  ptx::fence_registers(tile::accumulators(dp_dot));
}

}  // namespace cuflash::sm90
