#pragma once
#include <attention/params.cuh>

// The scores of all queries and keys, which naive kernels pass to each other.
namespace cuflash::naive {

// Whole matrices [seqlen_q, seqlen_kv], of accumulators. cuflash/planning/families/naive.py has the same record.
struct ScoreMatrices {
  attention::Matrices scores;  // S in base 2, which P overwrites
  attention::Matrices score_gradients;  // null in the forward pass
};

}  // namespace cuflash::naive
