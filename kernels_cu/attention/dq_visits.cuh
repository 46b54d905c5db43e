#pragma once
#include <attention/steps.cuh>
#include <tile/count.cuh>
#include <tile/range.cuh>

// Of a list, whose tiles of queries few tiles of keys come to: who comes first stores what it makes of dQ, so that nobody sets
// sums to 0 beforehand, and others, who add, wait until it has. Where very few come, the last of them waits until all others
// are done, takes their sums and finishes dQ. Each waits for those alone who came before.
namespace cuflash::attention {

// How many tiles of keys have come to a tile of queries, and kDqIsStored; or, where the last of `num` that will come finishes
// dQ, kVisitIsDone for each that is done.
struct DqVisits {
  int count, num;
};
constexpr int kDqIsStored = 1 << 30, kVisitIsDone = 1 << 16;

// What who comes does, where the last one finishes.
struct DqVisit {
  int before;   // came before
  int awaited;  // of them, who have to be done
  bool is_last;

  // Of what the count was and how many will come.
  static CUFLASH_DEVICE DqVisit of(int count, int num) {
    const int before = count % kVisitIsDone;
    const bool is_last = before == num - 1;
    return {before, is_last ? before : min(before, 1), is_last};
  }
};

// Wait until all are done that are waited for. By whole warps.
CUFLASH_DEVICE void await_visits(const DqVisit& visit, const int* count) {
  if (visit.awaited > 0) ptx::wait_for_count(count, -kVisitIsDone, visit.awaited * kVisitIsDone);
}

// How many tiles of Width keys come to a tile of queries: those of its row of the list that some query sees, as Steps over
// queries has it. By a warp.
template <int Width>
CUFLASH_DEVICE int num_visits(const Params& params, const WorkTile& work) {
  const Work& list = params.work;
  const int64_t row = list_matrix(list, work.place) * list.num_q_blocks + work.first / list.block_q;
  const int lo = interval(params, work.place, work.first).lo, hi = interval(params, work.place, work.last - 1).hi;
  return tile::sum_of(list.row_pointers[row], list.row_pointers[row + 1], [&](int entry) {
    const bool is_cut = static_cast<Kind>(list.kinds[entry]) == Kind::kInterval;
    const int first = list.kv_blocks[entry] * list.block_kv, last = min(first + list.block_kv, params.shape.seqlen_kv);
    int num = 0;
    for (int key = first; key < last; key += Width) num += !is_cut || (lo < min(key + Width, last) && hi > key);
    return num;
  });
}

// Before anybody comes: nobody has, and so many will. Where nobody will, dQ is 0. By the first warp.
template <int Width, class Element>
CUFLASH_DEVICE void expect_visits(const Params& params, const WorkTile& work, DqVisits& visits) {
  const int num = num_visits<Width>(params, work);
  if (threadIdx.x == 0) visits = {0, num};
  if (num > 0) return;
  const Shape& shape = params.shape;
  tile::clear(matrix<Element>(params.dq, work.place, work.place.head, shape.seqlen_q, shape.head_dim)
                  .rows(work.first, work.last));
}

}  // namespace cuflash::attention
