#pragma once
#include <attention/work_tile.cuh>
#include <tile/rooms.cuh>

// What a launch hands to kernels that let the tensor memory accelerator copy tiles, beside Params. cuflash/records.py has
// the same record as a NumPy dtype.
namespace cuflash::attention {

using tile::Mapped;

// Stacks [batch, batch, heads, rows, columns], an axis of extent 1 where its stride is 0; columns come first.
struct TensorMaps {
  Mapped q, k, v, do_, o;
};

CUFLASH_DEVICE bool is_mapped(const Mapped& map, const Matrices& matrices) {
  return map.is_there && reinterpret_cast<uint64_t>(matrices.data) % 16 == 0;
}

CUFLASH_DEVICE tile::InStack in_stack(const Matrices& matrices, const Place& place, int head) {
  const auto& strides = matrices.batch_strides;
  const int inner = strides[2] == 0 ? 0 : place.batch[2], outer = strides[1] == 0 ? 0 : place.batch[1];
  return {matrices.head_stride == 0 ? 0 : head, inner, outer};
}

}  // namespace cuflash::attention
