#pragma once
#include <attention/params.cuh>
#include <tile/copy.cuh>

// Which tile of which matrix a block works on. Only here do kernels ask for their block's number.
namespace cuflash::attention {

// A batch entry and a head: the matrices of one softmax.
struct Place {
  int batch[kBatchAxes];
  int entry;  // the batch entry as masks count it
  int head;   // of the queries
};

// first <= x < last, of queries, keys or columns.
struct Range {
  int first, last;

  CUFLASH_DEVICE bool is_empty() const { return first >= last; }
};

// A length in tiles that stay within blocks of `block`: the last block, and the last tile of a block, may be short, and
// a tile may have nothing.
struct Tiling {
  int length, block, height;

  CUFLASH_DEVICE int tiles_in_block() const { return (block + height - 1) / height; }
  CUFLASH_DEVICE int num_tiles() const { return (length + block - 1) / block * tiles_in_block(); }
  CUFLASH_DEVICE Range tile(int number) const {
    const int start = number / tiles_in_block() * block;
    const int first = start + number % tiles_in_block() * height;
    return {first, min(min(first + height, start + block), length)};
  }
};

CUFLASH_DEVICE Tiling query_tiling(const Params& params, int height) {
  return {params.shape.seqlen_q, params.work.row_pointers != nullptr ? params.work.block_q : height, height};
}

CUFLASH_DEVICE Tiling key_tiling(const Params& params, int height) {
  return {params.shape.seqlen_kv, params.work.row_pointers != nullptr ? params.work.block_kv : height, height};
}

// Rows first <= x < last of the place's matrices, and which part of their work where several blocks share it.
struct WorkTile : Range {
  Place place;
  int part;
};

// The last tiles come first: under a causal mask those of the queries are the longest.
CUFLASH_DEVICE WorkTile work_tile(const Shape& shape, int num_heads, Tiling tiling, int num_parts) {
  const int number = blockIdx.x / num_parts, num_tiles = tiling.num_tiles();
  int matrix = number / num_tiles;
  WorkTile work{tiling.tile(num_tiles - 1 - number % num_tiles)};
  work.part = blockIdx.x % num_parts;
  work.place.head = matrix % num_heads;
  matrix /= num_heads;
  work.place.entry = shape.first_batch + matrix;
  for (int axis = kBatchAxes - 1; axis >= 0; --axis) {
    work.place.batch[axis] = matrix % shape.batch[axis];
    matrix /= shape.batch[axis];
  }
  return work;
}

CUFLASH_DEVICE WorkTile query_tile(const Params& params, int height, int num_parts = 1) {
  return work_tile(params.shape, params.shape.num_heads, query_tiling(params, height), num_parts);
}

// A tile of keys; `place.head` is the first query head of the key/value head's group.
CUFLASH_DEVICE WorkTile key_tile(const Params& params, int height, int num_parts = 1) {
  const int num_kv_heads = params.shape.num_heads / params.shape.group_size;
  WorkTile work = work_tile(params.shape, num_kv_heads, key_tiling(params, height), num_parts);
  work.place.head *= params.shape.group_size;
  return work;
}

// The matrix of a batch entry and head.
template <class T>
CUFLASH_DEVICE tile::Matrix<T> matrix(const Matrices& matrices, const Place& place, int head, int num_rows,
                                      int num_columns) {
  int64_t start = head * matrices.head_stride;
  for (int axis = 0; axis < kBatchAxes; ++axis) start += place.batch[axis] * matrices.batch_strides[axis];
  return {static_cast<T*>(matrices.data) + start, matrices.row_stride, matrices.column_stride, num_rows, num_columns};
}

}  // namespace cuflash::attention
