#pragma once
#include <attention/tangents.cuh>
#include <attention/tile_scheduler.cuh>
#include <tile/pipeline.cuh>

// The tensor maps: an argument of kernels that let TMA copy tiles. cuflash/planning/_params.py has the same record as a
// NumPy dtype.
namespace cuflash::sm90 {

using namespace attention;

using tile::TensorMapParam;

// Tensor maps of stacks [batch, batch, heads, rows, columns], in which an axis of stride 0 has extent 1. Columns are
// the first dimension of a map.
struct TensorMaps {
  TensorMapParam q, k, v, do_, o;
};

// Tangents of Q, K, V and dO, for kernels that load them: the arrays, and their tensor maps under the arrays' names.
struct TangentOperands {
  const Tangents& arrays;
  const TensorMaps& maps;
};
struct NoTangentOperands {};

// Return whether TMA can copy these matrices.
CUFLASH_DEVICE bool has_tensor_map(const TensorMapParam& map, const Matrices& matrices) {
  return map.is_valid && reinterpret_cast<uint64_t>(matrices.data) % 16 == 0;
}

// Return the coordinates of a head's matrix in the tensor map of its stack.
CUFLASH_DEVICE tile::TmaCoords tma_coords(const Matrices& matrices, const BatchHead& batch_head, int head) {
  const auto& strides = matrices.batch_strides;
  const int inner = strides[2] == 0 ? 0 : batch_head.batch[2], outer = strides[1] == 0 ? 0 : batch_head.batch[1];
  return {matrices.head_stride == 0 ? 0 : head, inner, outer};
}

}  // namespace cuflash::sm90
