#pragma once
#include <ptx/atomic.cuh>
#include <ptx/thread.cuh>
#include <tile/element.cuh>
#include <tile/register_tile.cuh>
#include <tile/shared_tile.cuh>

// Matrices in global memory, and copies between them, shared memory and registers by plain loads and stores.
namespace cuflash::tile {

// A matrix in global memory: address, strides in elements, and numbers of rows and columns.
template <class T>
struct Matrix {
  using Value = T;

  T* data;
  int64_t row_stride, column_stride;
  int num_rows, num_columns;

  CUFLASH_DEVICE Matrix rows(int first, int last) const {
    return {data + first * row_stride, row_stride, column_stride, last - first, num_columns};
  }
  CUFLASH_DEVICE Matrix columns(int first, int last) const {
    return {data + first * column_stride, row_stride, column_stride, num_rows, last - first};
  }
  CUFLASH_DEVICE T* row(int number) const { return data + number * row_stride; }
  CUFLASH_DEVICE T& at(int row, int column) const { return data[row * row_stride + column * column_stride]; }
};

// Return the matrix that contains the rows.
template <class T>
CUFLASH_DEVICE Matrix<T> first_of(const Matrix<T>& rows) {
  return rows;
}

// Set all rows of one or several matrices to zero. Called by a warp.
template <class Rows>
CUFLASH_DEVICE void clear(const Rows& rows) {
#pragma unroll 1
  for (int row = 0; row < rows.num_rows; ++row)
#pragma unroll 1
    for (int column = ptx::lane(); column < first_of(rows).num_columns; column += 32) rows.at(row, column) = {};
}

// Return whether the rows consist of whole vectors and start at multiples of 16 bytes.
template <class T>
CUFLASH_DEVICE bool has_aligned_vectors(const Matrix<T>& matrix) {
  constexpr int kVector = Vector<T>::kLength;
  return matrix.column_stride == 1 && matrix.row_stride % kVector == 0 && matrix.num_columns % kVector == 0 &&
         reinterpret_cast<uint64_t>(matrix.data) % 16 == 0;
}

// The default of `load`: no row is replaced by zeros.
struct AllRowsValid {
  CUFLASH_DEVICE bool operator()(int) const { return true; }
};

// How `load` and `add` divide their work: eight threads copy a row, and their vectors have no bank conflicts in a
// shared tile.
constexpr int kLoadColumns = 8, kLoadRows = kThreads / kLoadColumns;
CUFLASH_DEVICE int load_row() { return threadIdx.x / kLoadColumns; }
CUFLASH_DEVICE int load_column() { return threadIdx.x % kLoadColumns; }

// Copy a matrix to shared memory and widen its elements. Elements past the matrix's ends and in rows that are not valid
// become zeros. Called by all threads.
template <class T, int Rows, int Columns, int Pitch, class Element, class IsRowValid = AllRowsValid>
CUFLASH_DEVICE void load(SharedTile<T, Rows, Columns, Pitch> to, Matrix<Element> from, IsRowValid is_row_valid = {}) {
  for (int row = load_row(); row < Rows; row += kLoadRows) {
    const bool in_bounds = row < from.num_rows && is_row_valid(row);
    const Element* element = &from.at(row, load_column());
#pragma unroll 4
    for (int column = load_column(); column < Columns; column += kLoadColumns) {
      to.at(row, column) = in_bounds && column < from.num_columns ? to_accumulator(*element) : T(0);
      element += kLoadColumns * from.column_stride;
    }
  }
}

// Copy a matrix to shared memory as the function above does, in vectors if its rows consist of whole vectors.
template <class T, int Rows, int Columns, int Pitch, class IsRowValid = AllRowsValid>
CUFLASH_DEVICE void load(SharedTile<T, Rows, Columns, Pitch> to, Matrix<T> from, IsRowValid is_row_valid = {}) {
  constexpr int kVector = Vector<T>::kLength, kWidth = kLoadColumns * kVector;
  constexpr int kVectors = (Columns + kWidth - 1) / kWidth;
  constexpr int kUnroll = kVectors < 4 ? 4 / kVectors : 1;  // number of loads in flight: four, or a whole row
  if (!has_aligned_vectors(from)) return load<T, Rows, Columns, Pitch, T>(to, from, is_row_valid);
#pragma unroll kUnroll
  for (int row = load_row(); row < Rows; row += kLoadRows) {
    const bool in_bounds = row < from.num_rows && is_row_valid(row);
    const T* const data = &from.at(row, 0);
#pragma unroll
    for (int column = load_column() * kVector; column < Columns; column += kWidth) {
      Vector<T> x{};
      if (in_bounds && column < from.num_columns) x = *reinterpret_cast<const Vector<T>*>(data + column);
      to.vector(row, column) = x;
    }
  }
}

// Copy registers to shared memory, with vector stores if a run is a whole vector. Called by all threads.
template <class T, int Rows, int Columns, int Pitch, int Run>
CUFLASH_DEVICE void store(SharedTile<T, Rows, Columns, Pitch> to, const RegisterTile<T, Rows, Columns, Run>& from) {
  using Tile = RegisterTile<T, Rows, Columns, Run>;
#pragma unroll
  for (int i = 0; i < Tile::kRows; ++i)
#pragma unroll
    for (int j = 0; j < Tile::kColumns; j += Run) {
      if constexpr (Run == Vector<T>::kLength) {
        Vector<T> x;
#pragma unroll
        for (int e = 0; e < Run; ++e) x.at[e] = from.at[i][j + e];
        to.vector(Tile::row(i), Tile::column(j)) = x;
      } else {
#pragma unroll
        for (int e = 0; e < Run; ++e) to.at(Tile::row(i), Tile::column(j + e)) = from.at[i][j + e];
      }
    }
}

// Narrow the elements in registers and copy them to global memory, within the bounds of the matrix. Called by all
// threads.
template <class T, int Rows, int Columns, int Run, class Element>
CUFLASH_DEVICE void store(Matrix<Element> to, const RegisterTile<T, Rows, Columns, Run>& from) {
  using Tile = RegisterTile<T, Rows, Columns, Run>;
#pragma unroll
  for (int i = 0; i < Tile::kRows; ++i) {
    if (Tile::row(i) >= to.num_rows) continue;
    // the address is incremented, since a multiplication for each row would be more code
    Element* run = &to.at(Tile::row(i), Tile::column(0));
#pragma unroll
    for (int j = 0; j < Tile::kColumns; j += Run, run += kColumnLanes * Run * to.column_stride)
#pragma unroll
      for (int e = 0; e < Run; ++e)
        if (Tile::column(j + e) < to.num_columns) to_element(from.at[i][j + e], run[e * to.column_stride]);
  }
}

// Copy registers to global memory as `store` does, with vector stores if runs and the matrix's rows consist of whole
// vectors.
template <class T, int Rows, int Columns, int Run, class Element>
CUFLASH_DEVICE void store_vectorized(Matrix<Element> to, const RegisterTile<T, Rows, Columns, Run>& from) {
  using Tile = RegisterTile<T, Rows, Columns, Run>;
  if constexpr (Run == Vector<Element>::kLength) {
    if (!has_aligned_vectors(to)) return store(to, from);
#pragma unroll
    for (int i = 0; i < Tile::kRows; ++i) {
      if (Tile::row(i) >= to.num_rows) continue;
      Element* const data = &to.at(Tile::row(i), 0);
#pragma unroll
      for (int j = 0; j < Tile::kColumns; j += Run) {
        Vector<Element> x;
#pragma unroll
        for (int e = 0; e < Run; ++e) to_element(from.at[i][j + e], x.at[e]);
        if (Tile::column(j) < to.num_columns) *reinterpret_cast<Vector<Element>*>(data + Tile::column(j)) = x;
      }
    }
  } else {
    store(to, from);
  }
}

// Add shared memory to global memory atomically, within the bounds of the matrix. Called by all threads.
template <class T, int Rows, int Columns, int Pitch>
CUFLASH_DEVICE void add(Matrix<T> to, SharedTile<T, Rows, Columns, Pitch> from) {
  const int64_t stride = kLoadColumns * to.column_stride;
  for (int row = load_row(); row < to.num_rows; row += kLoadRows) {
    T* data = &to.at(row, load_column());
#pragma unroll
    for (int column = load_column(); column < Columns; column += kLoadColumns, data += stride)
      if (column < to.num_columns) ptx::red_add(data, from.at(row, column));
  }
}

}  // namespace cuflash::tile
