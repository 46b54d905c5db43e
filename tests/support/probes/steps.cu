// Lists each step that tiles visit, and every element that a step allows. `probe` defines the tile sizes.
#include <attention/block_iterator.cuh>
using namespace cuflash;
using namespace cuflash::attention;

constexpr int kFields = 8;  // fields of a record: entry, head, first, last, start, stop, kind, side (queries or keys)

struct Log {
  int* count;
  int* records;
  int capacity;

  // Blocks have one thread and run one after another, so record numbers give their order.
  CUFLASH_DEVICE void write(const WorkTile& work, const KvBlock& block, int side) const {
    const int number = atomicAdd(count, 1);
    if (number >= capacity) return;
    int* record = records + number * kFields;
    record[0] = work.batch_head.batch_index;
    record[1] = work.batch_head.head;
    record[2] = work.first;
    record[3] = work.last;
    record[4] = block.start;
    record[5] = block.stop;
    record[6] = static_cast<int>(block.kind);
    record[7] = side;
  }
};

// Writes batch entry, head, first and last row of a block's tile.
CUFLASH_DEVICE void message(const WorkTile& work, int side, int* tiles) {
  int* tile = tiles + (2 * blockIdx.x + side) * 4;
  tile[0] = work.batch_head.batch_index;
  tile[1] = work.batch_head.head;
  tile[2] = work.first;
  tile[3] = work.last;
}

// Increments the count of each allowed element, so that a repeated visit shows.
CUFLASH_DEVICE void count(const Params& params, const WorkTile& work, const KvBlock& block, bool rows_are_queries,
                          int* semaphore) {
  const Shape& shape = params.shape;
  const int64_t matrix = static_cast<int64_t>(work.batch_head.batch_index) * shape.num_heads + work.batch_head.head;
  for (int x = work.first; x < work.last; ++x)
    for (int y = block.start; y < block.stop; ++y) {
      const int query = rows_are_queries ? x : y, key = rows_are_queries ? y : x;
      if (block.is_allowed(params, work.batch_head, query, key))
        semaphore[(matrix * shape.seqlen_q + query) * shape.seqlen_kv + key] += 1;
    }
}

extern "C" __global__ void steps(const __grid_constant__ Params params, int num_query_tiles, int num_key_tiles, int* number,
                                 int* records, int capacity, int* by_queries, int* by_keys, int* tiles) {
  if (threadIdx.x > 0) return;
  const Log log{number, records, capacity};
  if (static_cast<int>(blockIdx.x) < num_query_tiles) {
    const WorkTile work = query_tile(params, probe::kQueryTile);
    message(work, 0, tiles);
    if (!work.is_empty()) {
      const VisitRange visit_range = visit_range_of_queries(params, work);
      BlockIterator<probe::kKeyStep, OverKvBlocks> walk(params, visit_range);
      for (KvBlock block; walk.next(block);) {
        log.write(work, block, 0);
        count(params, work, block, true, by_queries);
      }
    }
  }
  if (static_cast<int>(blockIdx.x) < num_key_tiles) {
    WorkTile work = key_tile(params, probe::kKeyTile);
    message(work, 1, tiles);
    if (work.is_empty()) return;
    const int first_head = work.batch_head.head;
    for (int head = first_head; head < first_head + params.shape.group_size; ++head) {
      work.batch_head.head = head;
      const VisitRange visit_range = visit_range_of_keys(params, work);
      BlockIterator<probe::kQueryStep, OverQBlocks> walk(params, visit_range);
      for (KvBlock block; walk.next(block);) {
        log.write(work, block, 1);
        count(params, work, block, false, by_keys);
      }
    }
  }
}
