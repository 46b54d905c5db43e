#pragma once
#include <attention/epilogue_mma.cuh>
#include <attention/members.cuh>

// The epilogue of the gradient of queries: queries of one head, or neighboring queries that each choose their key
// blocks.
namespace cuflash {

// Stage and store the rows of a tile. Called by all threads.
template <class Gradient, class Tile>
CUFLASH_DEVICE void write_gradient_of_queries(attention::NoChosenLists, const attention::Matrices& to,
                                              const attention::WorkTile& work, int num_columns, Tile staging,
                                              Gradient& gradient) {
  write_gradient(to, work, work.batch_head.head, num_columns, staging, gradient);
}
template <class Gradient, class Tile>
CUFLASH_DEVICE void write_gradient_of_queries(const attention::ChosenLists& chosen, const attention::Matrices& to,
                                              const attention::WorkTile& work, int num_columns, Tile staging,
                                              Gradient& gradient) {
  if (to.is_accumulator)
    return attention::write_accumulators(attention::rows_of_tile<float>(chosen, to, work, num_columns), gradient);
  tile::store(staging, gradient);
  __syncthreads();  // all rows are staged
  tile::store<kThreads>(attention::rows_of_tile<Element>(chosen, to, work, num_columns), staging);
}

}  // namespace cuflash
