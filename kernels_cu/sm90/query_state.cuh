#pragma once
#include <attention/params.cuh>

// The data about queries, other than the sums of dQ, that the kernels of a backward pass on Hopper pass to each other.
namespace cuflash::sm90 {

struct DqSemaphore;

// A kernel argument with this data. cuflash/planning/families/_passes.py has the same record.
struct QueryState {
  attention::Matrices query_stats;  // the QueryRecord of each tile of queries (sm90/query_stats.cuh)
  DqSemaphore* dq_semaphores;  // [batch, heads] if blocks finish dQ in the order of their tiles, else null
};

}  // namespace cuflash::sm90
