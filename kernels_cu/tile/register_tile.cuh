#pragma once
#include <tile/element.cuh>

// Matrices in the registers of 128 threads, for kernels that use multiply-adds or small tensor-core instructions.
namespace cuflash::tile {

constexpr int kMmaRows = Config::kMmaRows;  // rows of the mma instruction; 0 if products are multiply-adds

// The 128 threads form 16 rows of 8: a warp reads 4 rows of one operand, each broadcast, and 8 rows of the other, one
// vector of each. Tensor cores need 8 rows of 4 threads in every warp, and two adjacent columns of a product per
// thread. Therefore columns form runs of at least two.
constexpr int kThreads = 128;
constexpr int kColumnLanes = kMmaRows > 0 ? 4 : 8;
constexpr int kRowLanes = kThreads / kColumnLanes;
constexpr int kMinRun = kMmaRows > 0 ? 2 : 1;

CUFLASH_DEVICE int row_lane() { return threadIdx.x / kColumnLanes; }
CUFLASH_DEVICE int column_lane() { return threadIdx.x % kColumnLanes; }

template <int Rows>
constexpr int kRowsPerThread = Rows / kRowLanes;

// A matrix in the registers of the block's threads. A thread holds every kRowLanes-th row; of each such row, it holds
// one run of Run columns out of every kColumnLanes * Run.
template <class T, int Rows, int Columns, int Run = kMinRun>
struct RegisterTile {
  static constexpr int kRun = Run;
  static constexpr int kRows = kRowsPerThread<Rows>;
  static constexpr int kColumns = Columns / kColumnLanes;
  static_assert(Rows % kRowLanes == 0, "all threads hold the same number of rows");
  static_assert(Columns % (kColumnLanes * Run) == 0, "all threads hold the same number of runs of columns");

  T at[kRows][kColumns];

  static CUFLASH_DEVICE int row(int i) { return row_lane() + kRowLanes * i; }
  static CUFLASH_DEVICE int column(int j) { return (j / Run * kColumnLanes + column_lane()) * Run + j % Run; }

  CUFLASH_DEVICE void fill(T value) {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int j = 0; j < kColumns; ++j) at[i][j] = value;
  }

  CUFLASH_DEVICE void scale(T factor) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) scale_row(i, factor);
  }

  CUFLASH_DEVICE void scale_row(int i, T factor) {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) at[i][j] *= factor;
  }

  // Divide a row by a number that is at least 1. The result is rounded like that of a division, unless the remainder is
  // subnormal (P. Markstein, IBM J. Res. Dev. 34, 1990, on quotients from reciprocals). True divisions would make up a
  // sixth of a kernel's code.
  CUFLASH_DEVICE void divide_row(int i, T factor) {
    const T reciprocal = 1 / factor;
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      const T quotient = at[i][j] * reciprocal;
      const T rounded = ptx::fma(ptx::fma(-quotient, factor, at[i][j]), reciprocal, quotient);
      at[i][j] = rounded == rounded ? rounded : quotient;  // the remainder of an infinite quotient is NaN
    }
  }
};

// Reductions over a row, which adjacent threads share. Called by whole warps.
template <class T>
CUFLASH_DEVICE T row_sum(T x) {
#pragma unroll
  for (int lane_offset = 1; lane_offset < kColumnLanes; lane_offset *= 2)
    x += __shfl_xor_sync(0xffffffffu, x, lane_offset);
  return x;
}
template <class T>
CUFLASH_DEVICE T row_max(T x) {
#pragma unroll
  for (int lane_offset = 1; lane_offset < kColumnLanes; lane_offset *= 2)
    x = maximum(x, __shfl_xor_sync(0xffffffffu, x, lane_offset));
  return x;
}

// Return whether this thread, of those that share its rows, writes their results.
CUFLASH_DEVICE bool is_row_leader() { return column_lane() == 0; }

}  // namespace cuflash::tile
