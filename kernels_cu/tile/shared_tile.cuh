#pragma once
#include <ptx/types.cuh>

namespace cuflash::tile {

// 16 bytes of numbers: what one load moves at most.
template <class T>
struct alignas(16) Vector {
  static constexpr int kLength = 16 / sizeof(T);
  T at[kLength];
};

// A matrix in shared memory, row after row, each row longer than it is wide. By one vector: eight rows that follow each
// other then start 16 bytes apart modulo the 128 bytes of the banks, so that reading a column of vectors meets no bank
// twice. By two where tensor cores multiply: half a warp then reads four numbers of four rows, in either direction, from
// all banks.
template <class T, int Rows, int Columns>
struct SharedTile {
  static constexpr int kVector = Vector<T>::kLength;
  static constexpr int kPitch = Columns + (config::kMmaRows > 0 ? 2 : 1) * kVector;
  static constexpr int kElements = Rows * kPitch;
  static_assert(Columns % kVector == 0, "rows must be whole vectors");

  T* data;

  CUFLASH_DEVICE T& at(int row, int column) const { return data[row * kPitch + column]; }
  CUFLASH_DEVICE Vector<T>& vector(int row, int column) const {
    return *reinterpret_cast<Vector<T>*>(data + row * kPitch + column);
  }
};

}  // namespace cuflash::tile
