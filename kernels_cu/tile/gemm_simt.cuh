#pragma once
#include <ptx/mma.cuh>
#include <tile/register_tile.cuh>
#include <tile/shared_tile.cuh>

// Products of tiles by multiply-adds or on tensor cores. Called by all threads; the operands must be complete in shared
// memory.
namespace cuflash::tile {

constexpr int kMmaUnroll = 4;  // default number of unrolled steps of a product on tensor cores

// c += a b on tensor cores over first <= k < last, where element (row, k) of a is a[row * RowStride + k * AStride] and
// element (k, column) of b is b[k * BStride + column * ColumnStride]. Every warp multiplies eight of each kRowLanes
// rows of a by all columns of b, four values of k at a time.
template <int Unroll, int RowStride, int AStride, int BStride, int ColumnStride, class T, int Rows, int Columns,
          int Run>
CUFLASH_DEVICE void gemm_add_mma(RegisterTile<T, Rows, Columns, Run>& c, const T* a, const T* b, int first,
                                 int last) {
  using Tile = RegisterTile<T, Rows, Columns, Run>;
  static_assert(Run == 2, "a thread holds two neighbouring columns of a product");
  constexpr int kUnroll = Unroll;
  // number of row fragments that one instruction multiplies
  constexpr int kFragmentsPerMma = kMmaRows == 16 && Tile::kRows % 2 == 0 ? 2 : 1;
  a += column_lane() * AStride;
  b += column_lane() * BStride + row_lane() % 8 * ColumnStride;
#pragma unroll kUnroll
  for (int k = first / 4 * 4; k < last; k += 4) {
    const bool in_bounds = first <= k + column_lane() && k + column_lane() < last;
    T a_frag[Tile::kRows];
#pragma unroll
    for (int i = 0; i < Tile::kRows; ++i) a_frag[i] = in_bounds ? a[Tile::row(i) * RowStride + k * AStride] : T(0);
#pragma unroll
    for (int j = 0; j < Tile::kColumns; j += 2) {
      const T b_frag = in_bounds ? b[k * BStride + j * kColumnLanes * ColumnStride] : T(0);
#pragma unroll
      for (int i = 0; i < Tile::kRows; i += kFragmentsPerMma) {
        T(&d)[Tile::kColumns] = c.at[i];
        if constexpr (kFragmentsPerMma == 2) {
          T(&below)[Tile::kColumns] = c.at[i + 1];
          ptx::mma_m16n8k4(d[j], d[j + 1], below[j], below[j + 1], a_frag[i], a_frag[i + 1], b_frag);
        } else {
          ptx::mma_m8n8k4(d[j], d[j + 1], a_frag[i], b_frag);
        }
      }
    }
  }
}

// Default number of unrolled steps of a product's loop: the most that leave enough registers for accumulators.
template <class T, class Tile>
constexpr int kDefaultUnroll = sizeof(T) > 4 || Tile::kRows > 4 || Tile::kColumns > 16 ? 1 : 2;

// c += a b^T: a thread multiplies its rows of a by its rows of b, loading one vector of each at a time.
template <int Unroll = 0, class T, int Rows, int Columns, int Depth, int PitchA, int PitchB>
CUFLASH_DEVICE void gemm_add_nt(RegisterTile<T, Rows, Columns>& c, SharedTile<T, Rows, Depth, PitchA> a,
                                SharedTile<T, Columns, Depth, PitchB> b) {
  if constexpr (kMmaRows > 0)
    return gemm_add_mma<Unroll ? Unroll : kMmaUnroll, PitchA, 1, 1, PitchB>(c, a.data, b.data, 0, Depth);
  using Tile = RegisterTile<T, Rows, Columns>;
  constexpr int kVector = Vector<T>::kLength, kUnroll = Unroll ? Unroll : kDefaultUnroll<T, Tile>;
#pragma unroll kUnroll
  for (int k = 0; k < Depth; k += kVector) {
    Vector<T> a_frag[Tile::kRows], b_frag[Tile::kColumns];
#pragma unroll
    for (int i = 0; i < Tile::kRows; ++i) a_frag[i] = a.vector(Tile::row(i), k);
#pragma unroll
    for (int j = 0; j < Tile::kColumns; ++j) b_frag[j] = b.vector(Tile::column(j), k);
#pragma unroll
    for (int e = 0; e < kVector; ++e)
#pragma unroll
      for (int i = 0; i < Tile::kRows; ++i)
#pragma unroll
        for (int j = 0; j < Tile::kColumns; ++j) c.at[i][j] += a_frag[i].at[e] * b_frag[j].at[e];
  }
}

// c += a b: a thread multiplies its rows of a by its runs of columns of b.
template <int Unroll = 0, class T, int Rows, int Columns, int Depth, int PitchA, int PitchB>
CUFLASH_DEVICE void gemm_add_nn(RegisterTile<T, Rows, Columns, Vector<T>::kLength>& c,
                                SharedTile<T, Rows, Depth, PitchA> a, SharedTile<T, Depth, Columns, PitchB> b) {
  if constexpr (kMmaRows > 0)
    return gemm_add_mma<Unroll ? Unroll : kMmaUnroll, PitchA, 1, PitchB, 1>(c, a.data, b.data, 0, Depth);
  using Tile = RegisterTile<T, Rows, Columns, Vector<T>::kLength>;
  constexpr int kVector = Vector<T>::kLength, kUnroll = Unroll ? Unroll : kDefaultUnroll<T, Tile>;
#pragma unroll kUnroll
  for (int k = 0; k < Depth; k += kVector) {
    Vector<T> a_frag[Tile::kRows];
#pragma unroll
    for (int i = 0; i < Tile::kRows; ++i) a_frag[i] = a.vector(Tile::row(i), k);
#pragma unroll
    for (int e = 0; e < kVector; ++e)
#pragma unroll
      for (int j = 0; j < Tile::kColumns; j += kVector) {
        const Vector<T> b_frag = b.vector(k + e, Tile::column(j));
#pragma unroll
        for (int i = 0; i < Tile::kRows; ++i)
#pragma unroll
          for (int f = 0; f < kVector; ++f) c.at[i][j + f] += a_frag[i].at[e] * b_frag.at[f];
      }
  }
}

// c += a^T b over the rows first <= k < last of both: a thread multiplies its columns of a by its runs of columns of b.
template <class T, int Rows, int Columns, int Depth, int PitchA, int PitchB>
CUFLASH_DEVICE void gemm_add_tn(RegisterTile<T, Rows, Columns, Vector<T>::kLength>& c,
                                SharedTile<T, Depth, Rows, PitchA> a, SharedTile<T, Depth, Columns, PitchB> b,
                                int first = 0, int last = Depth) {
  if constexpr (kMmaRows > 0) return gemm_add_mma<kMmaUnroll, 1, PitchA, PitchB, 1>(c, a.data, b.data, first, last);
  using Tile = RegisterTile<T, Rows, Columns, Vector<T>::kLength>;
  constexpr int kVector = Vector<T>::kLength;
#pragma unroll 1
  for (int k = first; k < last; ++k) {
    T a_frag[Tile::kRows];
#pragma unroll
    for (int i = 0; i < Tile::kRows; ++i) a_frag[i] = a.at(k, Tile::row(i));
#pragma unroll
    for (int j = 0; j < Tile::kColumns; j += kVector) {
      const Vector<T> b_frag = b.vector(k, Tile::column(j));
#pragma unroll
      for (int i = 0; i < Tile::kRows; ++i)
#pragma unroll
        for (int f = 0; f < kVector; ++f) c.at[i][j + f] += a_frag[i] * b_frag.at[f];
    }
  }
}

}  // namespace cuflash::tile
