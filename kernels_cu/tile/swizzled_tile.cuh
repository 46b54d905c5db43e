#pragma once
#include <ptx/shared.cuh>

namespace cuflash::tile {

template <class T>
constexpr int kChunkOf = 16 / sizeof(T);  // elements in 16 bytes: a row of a matrix that ldmatrix moves

// A matrix in shared memory, row after row. Within a row its chunks are permuted, so that one chunk of eight rows that
// follow each other meets no bank twice: neither ldmatrix nor a copy waits. Nor do reads of two chunks of floats in four
// rows, which follow each other or are every other one.
template <class T, int Rows, int Columns>
struct SwizzledTile {
  static constexpr int kRows = Rows;
  static constexpr int kChunk = kChunkOf<T>;
  static constexpr int kChunks = Columns / kChunk;
  static constexpr int kBytes = Rows * Columns * static_cast<int>(sizeof(T));
  static_assert(kChunks % 2 == 0, "ldmatrix takes two chunks of a row");

  // Chunks that change places with each other; as many rows as they need to fill the banks do so alike.
  static constexpr int kSwizzledChunks = kChunks % 8 == 0 ? 8 : kChunks % 4 == 0 ? 4 : 2;

  int start;  // bytes from the start of shared memory, which is a multiple of 128

  // Where a row has its first chunk; of a sum of powers of two the exclusive or of what they have.
  static CUFLASH_DEVICE int swizzle(int row) {
    return sizeof(T) == 4 && kSwizzledChunks == 8 ? row % 2 * 2 ^ row / 2 % 2 * 7 ^ row / 4 % 2 * 4
        : row / (8 / kSwizzledChunks) % kSwizzledChunks;
  }
  static CUFLASH_DEVICE int offset(int row, int chunk) { return (row * kChunks + (chunk ^ swizzle(row))) * 16; }
  // The offset or address of a chunk further on in its row, and `rows` rows below; rows must be a multiple of 8, or bits
  // that the row has not, and chunks a multiple of 2 unless counted from chunk 0. Of one register, once loops are
  // unrolled.
  template <class Offset>
  static CUFLASH_DEVICE Offset advanced(Offset from, int rows, int chunks) {
    return (from ^ static_cast<Offset>((chunks % kSwizzledChunks ^ swizzle(rows)) * 16)) +
        (rows * kChunks + chunks / kSwizzledChunks * kSwizzledChunks) * 16;
  }
  // For instructions that take a 32-bit address, and for all others.
  CUFLASH_DEVICE uint32_t address(int row, int chunk) const {
    return ptx::shared_address(ptx::dynamic_shared<unsigned char>()) + start + offset(row, chunk);
  }
  template <class As>
  CUFLASH_DEVICE As* pointer(int offset) const {
    return reinterpret_cast<As*>(ptx::dynamic_shared<unsigned char>() + start + offset);
  }
};

}  // namespace cuflash::tile
