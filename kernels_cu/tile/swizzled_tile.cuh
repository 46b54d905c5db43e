#pragma once
#include <ptx/shared.cuh>

// Swizzled matrices in shared memory, for tensor cores.
namespace cuflash::tile {

template <class T>
constexpr int kChunkOf = 16 / sizeof(T);  // elements in a 16-byte chunk, which is a row of a matrix that ldmatrix moves

// A matrix in shared memory, stored row by row. The chunks of a row are permuted, so that the same chunk of eight
// consecutive rows is in different banks: ldmatrix and copies have no bank conflicts. Neither do reads of two chunks of
// floats from four rows that are consecutive or two apart.
template <class T, int Rows, int Columns>
struct SwizzledTile {
  static constexpr int kRows = Rows;
  static constexpr int kChunk = kChunkOf<T>;
  static constexpr int kChunks = Columns / kChunk;
  static constexpr int kBytes = Rows * Columns * static_cast<int>(sizeof(T));
  static_assert(kChunks % 2 == 0, "ldmatrix takes two chunks of a row");

  // Number of chunks that are permuted among each other. Rows that together fill the banks share a permutation.
  static constexpr int kSwizzledChunks = kChunks % 8 == 0 ? 8 : kChunks % 4 == 0 ? 4 : 2;

  int start;  // bytes from the start of shared memory, which is a multiple of 128

  // Return the number with which chunk indices of a row are combined by exclusive or. It is itself an exclusive or over
  // the bits of the row's index.
  static CUFLASH_DEVICE int swizzle(int row) {
    return sizeof(T) == 4 && kSwizzledChunks == 8 ? row % 2 * 2 ^ row / 2 % 2 * 7 ^ row / 4 % 2 * 4
        : row / (8 / kSwizzledChunks) % kSwizzledChunks;
  }
  // Return the offset of a chunk from the start of the matrix, in bytes.
  static CUFLASH_DEVICE int offset(int row, int chunk) { return (row * kChunks + (chunk ^ swizzle(row))) * 16; }
  // Return the offset or address of the chunk that is `chunks` later in its row, and `rows` rows below. `rows` must be
  // a multiple of 8, or consist of bits that are 0 in the row's index; `chunks` must be a multiple of 2 unless it is
  // counted from chunk 0. After loops are unrolled, all results are computed from one register.
  template <class Offset>
  static CUFLASH_DEVICE Offset advanced(Offset from, int rows, int chunks) {
    return (from ^ static_cast<Offset>((chunks % kSwizzledChunks ^ swizzle(rows)) * 16)) +
        (rows * kChunks + chunks / kSwizzledChunks * kSwizzledChunks) * 16;
  }
  // Return the address of a chunk, for instructions that take 32-bit addresses. The second function returns a pointer
  // to the data at an offset, for all other code.
  CUFLASH_DEVICE uint32_t address(int row, int chunk) const {
    return ptx::shared_address(ptx::dynamic_shared<unsigned char>()) + start + offset(row, chunk);
  }
  template <class As>
  CUFLASH_DEVICE As* pointer(int offset) const {
    return reinterpret_cast<As*>(ptx::dynamic_shared<unsigned char>() + start + offset);
  }
};

}  // namespace cuflash::tile
