// What tiles visit, listed step by step, and every element that a step allows. `probe` says how large tiles are.
#include <attention/steps.cuh>
using namespace cuflash;
using namespace cuflash::attention;

constexpr int kFields = 8;  // of a record: entry, head, first, last, start, stop, kind, from queries or keys

struct Log {
  int* count;
  int* records;
  int capacity;

  // A block of one thread after another: numbers of records tell the order.
  CUFLASH_DEVICE void write(const WorkTile& work, const Step& step, int side) const {
    const int number = atomicAdd(count, 1);
    if (number >= capacity) return;
    int* record = records + number * kFields;
    record[0] = work.place.entry;
    record[1] = work.place.head;
    record[2] = work.first;
    record[3] = work.last;
    record[4] = step.start;
    record[5] = step.stop;
    record[6] = static_cast<int>(step.kind);
    record[7] = side;
  }
};

// Which tile a block works on: entry, head, first, last.
CUFLASH_DEVICE void note(const WorkTile& work, int side, int* tiles) {
  int* tile = tiles + (2 * blockIdx.x + side) * 4;
  tile[0] = work.place.entry;
  tile[1] = work.place.head;
  tile[2] = work.first;
  tile[3] = work.last;
}

// One more for each element that is allowed: what is visited twice shows.
CUFLASH_DEVICE void count(const Params& params, const WorkTile& work, const Step& step, bool rows_are_queries, int* counts) {
  const Shape& shape = params.shape;
  const int64_t matrix = static_cast<int64_t>(work.place.entry) * shape.num_heads + work.place.head;
  for (int x = work.first; x < work.last; ++x)
    for (int y = step.start; y < step.stop; ++y) {
      const int query = rows_are_queries ? x : y, key = rows_are_queries ? y : x;
      if (step.is_allowed(params, work.place, query, key))
        counts[(matrix * shape.seqlen_q + query) * shape.seqlen_kv + key] += 1;
    }
}

extern "C" __global__ void steps(const __grid_constant__ Params params, int num_query_tiles, int num_key_tiles, int* number,
                                 int* records, int capacity, int* by_queries, int* by_keys, int* tiles) {
  if (threadIdx.x > 0) return;
  const Log log{number, records, capacity};
  if (static_cast<int>(blockIdx.x) < num_query_tiles) {
    const WorkTile work = query_tile(params, probe::kQueryTile);
    note(work, 0, tiles);
    if (!work.is_empty()) {
      const Reach reach = reach_of_queries(params, work);
      Steps<probe::kKeyStep, OverKeys> walk(params, reach);
      for (Step step; walk.next(step);) {
        log.write(work, step, 0);
        count(params, work, step, true, by_queries);
      }
    }
  }
  if (static_cast<int>(blockIdx.x) < num_key_tiles) {
    WorkTile work = key_tile(params, probe::kKeyTile);
    note(work, 1, tiles);
    if (work.is_empty()) return;
    const int first_head = work.place.head;
    for (int head = first_head; head < first_head + params.shape.group_size; ++head) {
      work.place.head = head;
      const Reach reach = reach_of_keys(params, work);
      Steps<probe::kQueryStep, OverQueries> walk(params, reach);
      for (Step step; walk.next(step);) {
        log.write(work, step, 1);
        count(params, work, step, false, by_keys);
      }
    }
  }
}
