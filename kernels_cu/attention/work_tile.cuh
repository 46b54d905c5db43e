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

// Rows first <= x < last of the place's matrices.
struct WorkTile {
  Place place;
  int first, last;

  CUFLASH_DEVICE bool is_empty() const { return first >= last; }
};

// Tiles of `length` rows that stay within blocks of `block`: the last block, and the last tile of a block, may be short.
// The last tiles come first: under a causal mask those of the queries are the longest.
CUFLASH_DEVICE WorkTile work_tile(const Shape& shape, int num_heads, int length, int block, int height,
                                  uint32_t number) {
  const int tiles_in_block = (block + height - 1) / height;
  const int num_tiles = (length + block - 1) / block * tiles_in_block;
  const int tile = num_tiles - 1 - number % num_tiles;
  int matrix = number / num_tiles;
  WorkTile work;
  work.place.head = matrix % num_heads;
  matrix /= num_heads;
  work.place.entry = shape.first_batch + matrix;
  for (int axis = kBatchAxes - 1; axis >= 0; --axis) {
    work.place.batch[axis] = matrix % shape.batch[axis];
    matrix /= shape.batch[axis];
  }
  const int start = tile / tiles_in_block * block;
  work.first = start + tile % tiles_in_block * height;
  work.last = min(min(work.first + height, start + block), length);
  return work;
}

// Which part of its tile's work a block does, where `num_parts` of them share it.
CUFLASH_DEVICE int work_part(int num_parts) { return blockIdx.x % num_parts; }

CUFLASH_DEVICE WorkTile query_tile(const Params& params, int height, int num_parts = 1) {
  const bool is_listed = params.work.row_pointers != nullptr;
  return work_tile(params.shape, params.shape.num_heads, params.shape.seqlen_q, is_listed ? params.work.block_q : height,
                   height, blockIdx.x / num_parts);
}

// A tile of keys; `place.head` is the first query head of the key/value head's group.
CUFLASH_DEVICE WorkTile key_tile(const Params& params, int height, int num_parts = 1) {
  const bool is_listed = params.work.row_pointers != nullptr;
  WorkTile work = work_tile(params.shape, params.shape.num_heads / params.shape.group_size, params.shape.seqlen_kv,
                            is_listed ? params.work.block_kv : height, height, blockIdx.x / num_parts);
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
