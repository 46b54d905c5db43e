#pragma once
#include <ptx/thread.cuh>
#include <tile/global_sum.cuh>

// Bins in shared memory in which the threads of a warp sum the gradient of a short table.
namespace cuflash::tile {

// A warp's sums for the elements of a short row of a matrix in global memory, such as a table of 32 numbers. In shared
// memory, each thread has a separate bin for each element: no two threads write the same word, and lanes write to
// different banks. The bins of a warp are an array [NumBins][32].
template <class T, int NumBins>
struct ThreadBins {
  T* row = nullptr;  // first element whose sum is in the bins; null before the first row
  int64_t stride = 0;  // distance between neighboring elements

  // Add x to an element of the row.
  static CUFLASH_DEVICE void add(T* bins, int element, T x) { bins[32 * element + ptx::lane()] += x; }

  // Assign the bins to a row; sums of another row are added to memory first. Called by whole warps.
  CUFLASH_DEVICE void start(T* bins, T* new_row, int64_t new_stride) {
    if (new_row == row) return;
    flush(bins);
#pragma unroll 1
    for (int element = 0; element < NumBins; ++element) bins[32 * element + ptx::lane()] = 0;
    row = new_row;
    stride = new_stride;
  }

  // Add the sums to the row in memory. Each lane sums the bins of one element at a time. Called by whole warps.
  CUFLASH_DEVICE void flush(const T* bins) const {
    if (row == nullptr) return;
    __syncwarp();
#pragma unroll 1
    for (int element = ptx::lane(); element < NumBins; element += 32) {
      T sum = 0;
      // Lanes start at different bins, and therefore at different banks.
#pragma unroll 4
      for (int lane = 0; lane < 32; ++lane) sum += bins[32 * element + (ptx::lane() + lane) % 32];
      tile::add(row + element * stride, sum);
    }
    __syncwarp();
  }
};

}  // namespace cuflash::tile
