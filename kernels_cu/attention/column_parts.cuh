#pragma once
#include <attention/members.cuh>
#include <tile/counter.cuh>

// Sums of dK and dV of keys that many queries chose. Several thread blocks each process a part of the queries, and the
// last of them to arrive adds the parts in order, so that results are bitwise reproducible.
namespace cuflash::attention {

// The threads of a block that hold the sums of a tile of keys.
struct SumThreads {
  int count, index;  // number of these threads, and index of this one
};

// Call visit(element, number) for each of a thread's elements of a tile; `number` is unique among all threads.
template <class Tile, class Visit>
CUFLASH_DEVICE void for_each_sum(Tile& sums, const SumThreads& threads, Visit visit) {
#pragma unroll
  for (int i = 0; i < Tile::kRows; ++i)
#pragma unroll
    for (int j = 0; j < Tile::kColumns; ++j)
      visit(sums.at(i, j), (i * Tile::kColumns + j) * threads.count + threads.index);
}

// Add up the parts, and return whether dk and dv are now the sums over all queries of a column. They are in the thread
// block that arrives last. `is_last` is an int in shared memory, and `synchronize` is a barrier of the threads. Called
// by all of these threads.
template <int Height, class WarpDk, class WarpDv, class Synchronize>
CUFLASH_DEVICE bool add_parts(const Params& params, const ChosenLists& chosen, const WorkTile& work,
                              const Column& column, WarpDk& dk, WarpDv& dv, int& is_last, const SumThreads& threads,
                              Synchronize synchronize) {
  if (chosen.num_parts == 1) return true;
  const Shape& shape = params.shape;
  const int first = chosen.part_pointers[column.number], num_parts = chosen.part_pointers[column.number + 1] - first;
  if (num_parts == 0) return true;
  const int num_dk = WarpDk::kRows * WarpDk::kColumns * threads.count,
            num_dv = WarpDv::kRows * WarpDv::kColumns * threads.count;
  const int tiles_in_block = (params.work.block_kv + Height - 1) / Height;
  const int num_kv_heads = shape.num_heads / shape.group_size;
  const int64_t matrix = work.batch_head.batch_index * static_cast<int64_t>(num_kv_heads) +
                         divmod(work.batch_head.head, shape.group_size).quotient;
  float* const parts =
      chosen.column_parts +
      ((matrix * chosen.max_parts + first) * tiles_in_block + column.tile * num_parts) * (num_dk + num_dv);
  float* const own = parts + static_cast<int64_t>(column.part) * (num_dk + num_dv);
  for_each_sum(dk, threads, [&](float x, int number) { own[number] = x; });
  for_each_sum(dv, threads, [&](float x, int number) { own[num_dk + number] = x; });
  const int num_tiles = (shape.seqlen_kv + Height - 1) / Height;
  int* const arrivals = chosen.part_arrivals + matrix * num_tiles + work.first / Height;
  synchronize();  // the part is written
  if (threads.index == 0) is_last = tile::arrives_last(arrivals, num_parts);
  synchronize();
  if (!is_last) return false;
  dk.fill(0);
  dv.fill(0);
#pragma unroll 1
  for (int part = 0; part < num_parts; ++part) {
    const float* const sums = parts + static_cast<int64_t>(part) * (num_dk + num_dv);
    for_each_sum(dk, threads, [&](float& x, int number) { x += sums[number]; });
    for_each_sum(dv, threads, [&](float& x, int number) { x += sums[num_dk + number]; });
  }
  return true;
}

}  // namespace cuflash::attention
