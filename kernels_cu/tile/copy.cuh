#pragma once
#include <tile/element.cuh>
#include <tile/register_tile.cuh>
#include <tile/shared_tile.cuh>

namespace cuflash::tile {

// A matrix in global memory, and how much of it there is. Strides in elements.
template <class T>
struct Matrix {
  T* data;
  int64_t row_stride, column_stride;
  int num_rows, num_columns;

  CUFLASH_DEVICE Matrix rows(int first, int last) const {
    return {data + first * row_stride, row_stride, column_stride, last - first, num_columns};
  }
  CUFLASH_DEVICE Matrix columns(int first, int last) const {
    return {data + first * column_stride, row_stride, column_stride, num_rows, last - first};
  }
  CUFLASH_DEVICE T& at(int row, int column) const { return data[row * row_stride + column * column_stride]; }
};

// Rows that are kept, for `load`.
struct EveryRow {
  CUFLASH_DEVICE bool operator()(int) const { return true; }
};

// Copy a matrix to shared memory, widened; zeros past its ends and in rows that are not kept. Called by all threads.
template <class T, int Rows, int Columns, class Element, class Kept = EveryRow>
CUFLASH_DEVICE void load(SharedTile<T, Rows, Columns> to, Matrix<Element> from, Kept is_kept = {}) {
#pragma unroll 4
  for (int place = threadIdx.x; place < Rows * Columns; place += kThreads) {
    const int row = place / Columns, column = place % Columns;
    T x = 0;
    if (row < from.num_rows && column < from.num_columns && is_kept(row)) x = widen(from.at(row, column));
    to.at(row, column) = x;
  }
}

// The same in vectors, for matrices of numbers whose rows are whole vectors that start at multiples of 16 bytes.
template <class T, int Rows, int Columns, class Kept = EveryRow>
CUFLASH_DEVICE void load(SharedTile<T, Rows, Columns> to, Matrix<T> from, Kept is_kept = {}) {
  constexpr int kVector = Vector<T>::kLength;
  const bool is_aligned = from.column_stride == 1 && from.row_stride % kVector == 0 &&
                          from.num_columns % kVector == 0 && reinterpret_cast<uint64_t>(from.data) % 16 == 0;
  if (!is_aligned) return load<T, Rows, Columns, T>(to, from, is_kept);
#pragma unroll 8
  for (int place = threadIdx.x; place < Rows * Columns / kVector; place += kThreads) {
    const int row = place / (Columns / kVector), column = place % (Columns / kVector) * kVector;
    Vector<T> x{};
    if (row < from.num_rows && column < from.num_columns && is_kept(row))
      x = *reinterpret_cast<const Vector<T>*>(&from.at(row, column));
    to.vector(row, column) = x;
  }
}

// Copy registers to shared memory. Called by all threads.
template <class T, int Rows, int Columns, int Run>
CUFLASH_DEVICE void store(SharedTile<T, Rows, Columns> to, const RegisterTile<T, Rows, Columns, Run>& from) {
  using Tile = RegisterTile<T, Rows, Columns, Run>;
#pragma unroll
  for (int i = 0; i < Tile::kRows; ++i)
#pragma unroll
    for (int j = 0; j < Tile::kColumns; ++j) to.at(Tile::row(i), Tile::column(j)) = from.at[i][j];
}

// Copy registers to global memory, narrowed, as far as the matrix goes. Called by all threads.
template <class T, int Rows, int Columns, int Run, class Element>
CUFLASH_DEVICE void store(Matrix<Element> to, const RegisterTile<T, Rows, Columns, Run>& from) {
  using Tile = RegisterTile<T, Rows, Columns, Run>;
#pragma unroll
  for (int i = 0; i < Tile::kRows; ++i)
#pragma unroll
    for (int j = 0; j < Tile::kColumns; ++j)
      if (Tile::row(i) < to.num_rows && Tile::column(j) < to.num_columns)
        narrow(from.at[i][j], to.at(Tile::row(i), Tile::column(j)));
}

}  // namespace cuflash::tile
