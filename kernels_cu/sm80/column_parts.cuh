#pragma once
#include <attention/members.cuh>
#include <ptx/arrival.cuh>

// Sums of dK and dV of keys that many queries chose. Several thread blocks each process a part of the queries, and the
// last of them to arrive adds the parts in order, so that results are bitwise reproducible.
namespace cuflash::sm80 {

// Call visit(element, number) for a thread's elements of a tile; `number` counts them over the threads of the block.
template <class Tile, class Visit>
CUFLASH_DEVICE void for_each_sum(Tile& sums, Visit visit) {
#pragma unroll
  for (int i = 0; i < Tile::kRows; ++i)
#pragma unroll
    for (int j = 0; j < Tile::kColumns; ++j)
      visit(sums.at(i, j), (i * Tile::kColumns + j) * kThreads + static_cast<int>(threadIdx.x));
}

// Return whether dk and dv are the sums over all queries, which they are in the thread block that arrives last.
// `is_last` is shared memory for an int. Called by all threads.
template <class WarpDk, class WarpDv>
CUFLASH_DEVICE bool add_parts(const attention::Params&, attention::NoChosenLists, const attention::WorkTile&, WarpDk&,
                              WarpDv&, int&) {
  return true;
}
template <class WarpDk, class WarpDv>
CUFLASH_DEVICE bool add_parts(const attention::Params& params, const attention::ChosenLists& chosen,
                              const attention::WorkTile& work, WarpDk& dk, WarpDv& dv, int& is_last) {
  using namespace attention;
  if (chosen.num_parts == 1) return true;
  const Shape& shape = params.shape;
  const Column column(params, chosen, work, kBlockKv);
  const int first = chosen.part_pointers[column.number], num_parts = chosen.part_pointers[column.number + 1] - first;
  if (num_parts == 0) return true;
  constexpr int kDkSums = WarpDk::kRows * WarpDk::kColumns * kThreads,
                kDvSums = WarpDv::kRows * WarpDv::kColumns * kThreads;
  const int tiles_in_block = (params.work.block_kv + kBlockKv - 1) / kBlockKv;
  const int num_kv_heads = shape.num_heads / shape.group_size;
  const int64_t matrix = work.batch_head.batch_index * static_cast<int64_t>(num_kv_heads) +
                         divmod(work.batch_head.head, shape.group_size).quotient;
  float* const parts =
      chosen.column_parts + ((matrix * chosen.max_parts + first) * tiles_in_block + column.tile * num_parts) *
                                (kDkSums + kDvSums);
  float* const own = parts + static_cast<int64_t>(column.part) * (kDkSums + kDvSums);
  for_each_sum(dk, [&](float x, int number) { own[number] = x; });
  for_each_sum(dv, [&](float x, int number) { own[kDkSums + number] = x; });
  const int num_tiles = (shape.seqlen_kv + kBlockKv - 1) / kBlockKv;
  int* const arrivals = chosen.part_arrivals + matrix * num_tiles + work.first / kBlockKv;
  __syncthreads();  // the part is written
  if (threadIdx.x == 0) {
    is_last = ptx::fetch_add_acq_rel(arrivals, 1) == num_parts - 1;
    if (is_last) *arrivals = 0;
  }
  __syncthreads();
  if (!is_last) return false;
  dk.fill(0);
  dv.fill(0);
#pragma unroll 1
  for (int part = 0; part < num_parts; ++part) {
    const float* const sums = parts + static_cast<int64_t>(part) * (kDkSums + kDvSums);
    for_each_sum(dk, [&](float& x, int number) { x += sums[number]; });
    for_each_sum(dv, [&](float& x, int number) { x += sums[kDkSums + number]; });
  }
  return true;
}

}  // namespace cuflash::sm80
