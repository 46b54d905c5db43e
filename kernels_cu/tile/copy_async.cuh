#pragma once
#include <ptx/cp_async.cuh>
#include <tile/copy.cuh>
#include <tile/swizzled_tile.cuh>

// Copies between global memory and swizzled tiles in shared memory, in chunks of 16 bytes. Copies to shared memory use
// cp.async.
namespace cuflash::tile {

// 16 bytes of elements.
template <class T>
struct alignas(16) Chunk {
  T at[kChunkOf<T>];
};

// A chunk that is only copied. If it had elements, the compiler would store them one by one.
struct alignas(16) Bits128 {
  uint64_t at[2];
};

// Return whether rows consist of chunks that a single instruction can copy.
template <class T>
CUFLASH_DEVICE bool has_aligned_chunks(const Matrix<T>& matrix) {
  return matrix.column_stride == 1 && matrix.row_stride % kChunkOf<T> == 0 &&
         reinterpret_cast<uint64_t>(matrix.data) % alignof(Chunk<T>) == 0;
}

// The partition of the chunks of a tile's rows among threads.
template <int Threads, class Tile>
struct ChunkPartition {
  static constexpr int kThreadsPerRow = Tile::kChunks % 8 == 0 ? 8 : 4;
  static constexpr int kRowsPerPass = Threads / kThreadsPerRow;

  static CUFLASH_DEVICE int first_row() { return threadIdx.x / kThreadsPerRow; }
  static CUFLASH_DEVICE int first_chunk() { return threadIdx.x % kThreadsPerRow; }
};

// Return whether the rows of a matrix have the tile's number of columns, in chunks that a single instruction can copy.
template <class Tile, class T>
CUFLASH_DEVICE bool has_full_rows(const Matrix<T>& matrix) {
  return has_aligned_chunks(matrix) && matrix.num_columns == Tile::kChunks * Tile::kChunk;
}

// The copy of a full tile with full rows (see `has_full_rows`): a thread's chunks and their addresses. If several
// copies are constructed before the first one starts, their address computations overlap.
template <int Threads, class T, int Rows, int Columns>
class FullTileCopy {
 public:
  using Tile = SwizzledTile<T, Rows, Columns>;

  CUFLASH_DEVICE FullTileCopy(Tile to, const T* data, int64_t row_stride)
      : to_(to.address(Partition::first_row(), Partition::first_chunk())),
        data_(data + Partition::first_row() * row_stride + Partition::first_chunk() * Tile::kChunk),
        row_stride_(row_stride) {}

  // Start copying the tile, as `load_async` does. Called by all Threads.
  CUFLASH_DEVICE void start() const {
    const T* data = data_;
#pragma unroll
    for (int row = 0; row < Rows; row += Partition::kRowsPerPass, data += Partition::kRowsPerPass * row_stride_) {
      if (Rows % Partition::kRowsPerPass != 0 && Partition::first_row() + row >= Rows) break;
#pragma unroll
      for (int chunk = 0; chunk < Tile::kChunks; chunk += Partition::kThreadsPerRow)
        ptx::cp_async_cg_16(address(row, chunk), data + chunk * Tile::kChunk, 16);
    }
  }

 private:
  using Partition = ChunkPartition<Threads, Tile>;

  CUFLASH_DEVICE uint32_t address(int row, int chunk) const { return Tile::advanced(to_, row, chunk); }

  uint32_t to_;
  const T* data_;
  int64_t row_stride_;
};

// Start copying a matrix to shared memory. Elements past the matrix's ends, and in rows before `first_valid_row`,
// become 0. The data have arrived after cp_async_wait and a barrier. Called by all Threads. MayBeFull = false omits the
// test for full tiles and its code.
template <int Threads, bool MayBeFull = true, class T, int Rows, int Columns>
CUFLASH_DEVICE void load_async(SwizzledTile<T, Rows, Columns> to, Matrix<T> from, int first_valid_row = 0) {
  constexpr int kChunk = kChunkOf<T>;
  using Tile = SwizzledTile<T, Rows, Columns>;
  using Partition = ChunkPartition<Threads, Tile>;
  const int first_row = Partition::first_row(), first_chunk = Partition::first_chunk();
  if (MayBeFull && has_full_rows<Tile>(from) && from.num_rows >= Rows && first_valid_row <= 0) {
    FullTileCopy<Threads, T, Rows, Columns>(to, from.data, from.row_stride).start();
  } else if (has_aligned_chunks(from)) {
    const int first = first_chunk * kChunk;
    const T* data = from.data + first_row * from.row_stride + first;
#pragma unroll 1  // registers are needed for accumulators
    for (int row = first_row; row < Rows; row += Partition::kRowsPerPass) {
#pragma unroll
      for (int c = 0; c < Tile::kChunks; c += Partition::kThreadsPerRow) {
        const bool is_row_valid = first_valid_row <= row && row < from.num_rows;
        const int remaining = is_row_valid ? from.num_columns - first - c * kChunk : 0;
        const T* const chunk = remaining > 0 ? data + c * kChunk : from.data;
        ptx::cp_async_cg_16(to.address(row, first_chunk + c), chunk, min(max(remaining, 0), kChunk) * sizeof(T));
      }
      data += Partition::kRowsPerPass * from.row_stride;
    }
  } else {
#pragma unroll 1
    for (int row = first_row; row < Rows; row += Partition::kRowsPerPass)
#pragma unroll 1
      for (int chunk = first_chunk; chunk < Tile::kChunks; chunk += Partition::kThreadsPerRow) {
        Chunk<T> x{};
#pragma unroll
        for (int e = 0; e < kChunk; ++e) {
          const int column = chunk * kChunk + e;
          if (first_valid_row <= row && row < from.num_rows && column < from.num_columns)
            x.at[e] = from.at(row, column);
        }
        *to.template pointer<Chunk<T>>(to.offset(row, chunk)) = x;
      }
  }
}

// Rows of several matrices, numbered continuously from matrix to matrix.
template <class T>
struct StackedRows {
  Matrix<T> first;
  int64_t stride;  // stride between consecutive matrices
  int num_rows;  // total number of rows of all matrices

  CUFLASH_DEVICE T* row(int i) const {
    return first.data + i / first.num_rows * stride + i % first.num_rows * first.row_stride;
  }
  CUFLASH_DEVICE T& at(int i, int column) const { return row(i)[column * first.column_stride]; }
};

// Return the first of the matrices that contain the rows.
template <class T>
CUFLASH_DEVICE Matrix<T> first_of(const StackedRows<T>& rows) {
  return rows.first;
}
template <class T>
CUFLASH_DEVICE bool has_aligned_chunks(const StackedRows<T>& rows) {
  return has_aligned_chunks(rows.first) && rows.stride % kChunkOf<T> == 0;
}

// Rows of the matrices that a list selects by number.
template <class T>
struct GatheredRows : StackedRows<T> {
  const int32_t* matrices;  // numbers of the matrices

  CUFLASH_DEVICE T* row(int i) const {
    const Matrix<T>& first = this->first;
    return first.data + matrices[i / first.num_rows] * this->stride + i % first.num_rows * first.row_stride;
  }
};

// Start copying stacked or gathered rows to shared memory; elements past their ends become 0. Called by all Threads.
template <int Threads, class T, int Rows, int Columns, template <class> class RowsOf>
CUFLASH_DEVICE void load_async(SwizzledTile<T, Rows, Columns> to, RowsOf<T> from) {
  constexpr int kChunk = kChunkOf<T>;
  using Tile = SwizzledTile<T, Rows, Columns>;
  using Partition = ChunkPartition<Threads, Tile>;
  const bool is_aligned = has_aligned_chunks(from);
#pragma unroll 1  // registers are needed for accumulators
  for (int row = Partition::first_row(); row < Rows; row += Partition::kRowsPerPass) {
    const bool in_bounds = row < from.num_rows;
    const T* const data = from.row(in_bounds ? row : 0);
#pragma unroll 1
    for (int chunk = Partition::first_chunk(); chunk < Tile::kChunks; chunk += Partition::kThreadsPerRow) {
      const int column = chunk * kChunk, remaining = in_bounds ? from.first.num_columns - column : 0;
      if (is_aligned) {
        const T* const source = remaining > 0 ? data + column : data;
        ptx::cp_async_cg_16(to.address(row, chunk), source, min(max(remaining, 0), kChunk) * sizeof(T));
      } else {
        Chunk<T> x{};
#pragma unroll
        for (int e = 0; e < kChunk; ++e)
          if (e < remaining) x.at[e] = data[(column + e) * from.first.column_stride];
        *to.template pointer<Chunk<T>>(to.offset(row, chunk)) = x;
      }
    }
  }
}

// Start copying gathered rows that have the tile's number of columns, in chunks that a single instruction can copy;
// rows past the last one become 0. The loads of the addresses of a thread's rows overlap. Called by all Threads.
template <int Threads, class T, int Rows, int Columns>
CUFLASH_DEVICE void load_full_rows_async(SwizzledTile<T, Rows, Columns> to, const GatheredRows<T>& from) {
  using Tile = SwizzledTile<T, Rows, Columns>;
  using Partition = ChunkPartition<Threads, Tile>;
  constexpr int kPasses = (Rows + Partition::kRowsPerPass - 1) / Partition::kRowsPerPass;
  const int first_row = Partition::first_row(), first_chunk = Partition::first_chunk();
  const T* data[kPasses];
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass)
    data[pass] = from.row(min(first_row + pass * Partition::kRowsPerPass, from.num_rows - 1)) +
                 first_chunk * Tile::kChunk;
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int row = first_row + pass * Partition::kRowsPerPass;
    if (Rows % Partition::kRowsPerPass != 0 && row >= Rows) break;
#pragma unroll
    for (int chunk = 0; chunk < Tile::kChunks; chunk += Partition::kThreadsPerRow)
      ptx::cp_async_cg_16(to.address(row, first_chunk + chunk), data[pass] + chunk * Tile::kChunk,
                          row < from.num_rows ? 16 : 0);
  }
}

// Start copying a column of floats to a column of the same length. Called by all Threads.
template <int Threads>
CUFLASH_DEVICE void load_async(Matrix<float> to, Matrix<float> from) {
  for (int row = threadIdx.x; row < to.num_rows; row += Threads)
    ptx::cp_async_ca_4(ptx::shared_address(&to.at(row, 0)), &from.at(row, 0), 4);
}

// Copy a tile from shared to global memory chunk by chunk, within the bounds of `to`. Called by all Threads.
template <int Threads, class RowsOfT, class T, int Rows, int Columns>
CUFLASH_DEVICE void store_chunks(const RowsOfT& to, int num_columns, bool is_aligned,
                                 SwizzledTile<T, Rows, Columns> from) {
  constexpr int kChunk = kChunkOf<T>;
  using Tile = SwizzledTile<T, Rows, Columns>;
  using Partition = ChunkPartition<Threads, Tile>;
#pragma unroll 1
  for (int row = Partition::first_row(); row < min(Rows, to.num_rows); row += Partition::kRowsPerPass)
#pragma unroll 1
    for (int chunk = Partition::first_chunk(); chunk < Tile::kChunks; chunk += Partition::kThreadsPerRow) {
      const int column = chunk * kChunk, start = from.offset(row, chunk);
      if (is_aligned && column + kChunk <= num_columns) {
        reinterpret_cast<Bits128&>(to.at(row, column)) = *from.template pointer<Bits128>(start);
      } else {
        for (int e = 0; e < min(kChunk, num_columns - column); ++e)
          to.at(row, column + e) = from.template pointer<T>(start)[e];
      }
    }
}

// Copy a tile from shared to global memory, within the bounds of the matrix. Called by all Threads, after the barrier
// that follows the tile's stores.
template <int Threads, class T, int Rows, int Columns>
CUFLASH_DEVICE void store(Matrix<T> to, SwizzledTile<T, Rows, Columns> from) {
  constexpr int kChunk = kChunkOf<T>;
  using Tile = SwizzledTile<T, Rows, Columns>;
  using Partition = ChunkPartition<Threads, Tile>;
  const int first_row = Partition::first_row(), first_chunk = Partition::first_chunk();
  const bool is_aligned = has_aligned_chunks(to);
  if (is_aligned && to.num_rows >= Rows && to.num_columns == Columns) {
    T* data = to.data + first_row * to.row_stride + first_chunk * kChunk;
#pragma unroll
    for (int row = 0; row < Rows; row += Partition::kRowsPerPass) {
      if (Rows % Partition::kRowsPerPass != 0 && first_row + row >= Rows) break;
#pragma unroll
      for (int c = 0; c < Tile::kChunks; c += Partition::kThreadsPerRow)
        *reinterpret_cast<Bits128*>(data + c * kChunk) =
            *from.template pointer<Bits128>(from.offset(first_row + row, first_chunk + c));
      data += Partition::kRowsPerPass * to.row_stride;
    }
    return;
  }
  store_chunks<Threads>(to, to.num_columns, is_aligned, from);
}

// Copy a tile from shared to global memory, as `store` does, to stacked rows. Called by all Threads.
template <int Threads, class T, int Rows, int Columns>
CUFLASH_DEVICE void store(StackedRows<T> to, SwizzledTile<T, Rows, Columns> from) {
  store_chunks<Threads>(to, to.first.num_columns, has_aligned_chunks(to), from);
}

}  // namespace cuflash::tile
