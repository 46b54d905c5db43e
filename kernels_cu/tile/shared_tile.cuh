#pragma once
#include <ptx/types.cuh>

// Padded matrices in shared memory, for multiply-adds and for tensor cores that multiply doubles.
namespace cuflash::tile {

// 16 bytes of numbers, the most that one load moves.
template <class T>
struct alignas(16) Vector {
  static constexpr int kLength = 16 / sizeof(T);
  T at[kLength];
};

// Padding of a row in shared memory. With one vector, eight consecutive rows start 16 bytes apart modulo the 128 bytes
// of the banks, so that reads of a column of vectors have no bank conflict. Tensor cores need two vectors: half a warp
// then reads four numbers of each of four rows, in either direction, from different banks.
template <class T>
constexpr int kPadding = (Config::kMmaRows > 0 ? 2 : 1) * Vector<T>::kLength;

// A matrix in shared memory, stored row by row. A matrix that is read only along its rows, in vectors, needs no
// padding.
template <class T, int Rows, int Columns, int Pitch = Columns + kPadding<T>>
struct SharedTile {
  static constexpr int kVector = Vector<T>::kLength;
  static constexpr int kPitch = Pitch;
  static constexpr int kElements = Rows * kPitch;
  static_assert(Columns % kVector == 0 && Pitch % kVector == 0, "rows must be whole vectors");

  T* data;

  CUFLASH_DEVICE T& at(int row, int column) const { return data[row * kPitch + column]; }
  CUFLASH_DEVICE Vector<T>& vector(int row, int column) const {
    return *reinterpret_cast<Vector<T>*>(data + row * kPitch + column);
  }
  template <int Width>
  CUFLASH_DEVICE SharedTile<T, Rows, Width, Pitch> columns(int first) const {
    return {data + first};
  }
};

}  // namespace cuflash::tile
