#pragma once
#include <attention/config_mma.cuh>

// Queries without a key in the backward pass of tensor-core kernels.
namespace cuflash {

// Set dO of queries without a key to 0, since their gradients are 0 even if dO is NaN. Called by all threads.
CUFLASH_DEVICE void clear_empty_rows(OTile d_o, const tile::Matrix<float>& lse) {
  for (int row = threadIdx.x; row < lse.num_rows; row += kThreads)
    if (lse.at(row, 0) == ptx::negative_infinity<float>())
      for (int chunk = 0; chunk < OTile::kChunks; ++chunk)
        *d_o.pointer<tile::Chunk<Element>>(OTile::offset(row, chunk)) = {};
  __syncthreads();
}

}  // namespace cuflash
