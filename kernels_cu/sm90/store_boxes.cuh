#pragma once
#include <sm90/tensor_maps.cuh>
#include <tile/wgmma_tile.cuh>

// The store of O from registers to global memory by TMA, through shared memory.
namespace cuflash::sm90 {

// Round a warp's rows of O to T, stage them in shared memory, and start storing them by TMA, with one box per panel of
// columns. `target` has the position of the tile and its number of rows. Called by whole warps.
template <class T, class SmemO, class Output, class Target>
CUFLASH_DEVICE void store_boxes(const TensorMaps& maps, const Target& target, const SmemO& o_smem, const Output& o) {
  tile::PackedOperand<T, Output> rounded;
  rounded = o;
  tile::store(o_smem, rounded, o.warp_row());
  ptx::fence_proxy_async();
  __syncwarp();
#pragma unroll
  for (int panel = 0; panel < SmemO::kNumPanels && o.warp_row() < target.num_rows; ++panel)
    ptx::tma_store_5d(&maps.o.map, o_smem.panel(panel).address(o.warp_row(), 0), panel * SmemO::kPanelWidth,
                      target.first + o.warp_row(), target.o_coords.x, target.o_coords.y, target.o_coords.z);
  ptx::bulk_commit();
}

}  // namespace cuflash::sm90
