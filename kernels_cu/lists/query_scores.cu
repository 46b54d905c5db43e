// Scores blocks for each query by products with keys that represent runs of keys, and chooses blocks, without storing
// scores in global memory. A thread block has neighboring queries of the heads that share a list, up to 64 rows, and
// visits the keys that they see; the scores of its queries stay in shared memory. cuflash/selectors is the
// specification.
#include <lists/few_columns.cuh>
#include <lists/query_scores.cuh>
#include <lists/rows_of_lanes.cuh>
#include <tile/copy_async.cuh>
#include <tile/warp_tile.cuh>

namespace cuflash::lists {

using Element = Config::Element;
constexpr int kBlockKv = Config::kBlockKv;
constexpr int kBlockQ = Config::kBlockQ;
constexpr int kHeadDim = Config::kHeadDim;
constexpr int kNumWarps = Config::kNumWarps;
constexpr int kThreads = 32 * kNumWarps;
constexpr int kWarpRows = kBlockQ / kNumWarps;
static_assert(kWarpRows == 16, "a warp multiplies sixteen rows");

using QTile = tile::SwizzledTile<Element, kBlockQ, kHeadDim>;
using KTile = tile::SwizzledTile<Element, kBlockKv, kHeadDim>;
using Scores = tile::WarpTile<1, kBlockKv / 8, kNumWarps>;
constexpr int kKeysStart = QTile::kBytes;
constexpr int kWeightsStart = kKeysStart + 2 * KTile::kBytes;
constexpr int kWeightPitch = kBlockKv + 4;  // rows of a tile of weights start in different banks
constexpr int kWeightsBytes = kBlockQ * kWeightPitch * 4;  // weights, for lists that several heads share

// Return whether the weights of a tile are stored before they are summed over heads; otherwise they stay in registers.
CUFLASH_DEVICE bool stores_weights(const QueryScores& params) {
  return params.heads_of_list > 1 && params.heads_of_list != 8 && params.heads_of_list != 16;
}

// Return the first element of rows that are only read: copies take pointers to elements that are not constant.
CUFLASH_DEVICE Element* elements(const StridedRows& rows) {
  return static_cast<Element*>(const_cast<void*>(rows.data));
}

// The queries of a thread block.
struct QueryTile {
  int64_t matrix;  // index of the batch entry and list
  int64_t q_start, k_start, lse_start;  // offsets of the first query and head in q and lse, and of the keys in k
  int first_query, num_queries;
  int num_keys;  // number of keys that the last query sees

  CUFLASH_DEVICE int num_rows(const QueryScores& params) const { return num_queries * params.heads_of_list; }
};

// Return how many keys a query sees.
CUFLASH_DEVICE int num_seen(const QueryScores& params, int query) {
  if (!params.choice.is_causal) return params.num_keys;
  const int64_t seen = floor_divided(query + params.choice.offset - (params.length - 1), params.step) + 1;
  return seen < 0 ? 0 : seen < params.num_keys ? static_cast<int>(seen) : params.num_keys;
}

CUFLASH_DEVICE QueryTile tile_of(const QueryScores& params, int number) {
  const int of_tile = params.queries_per_tile, seqlen_q = params.choice.seqlen_q;
  const int num_tiles = (seqlen_q + of_tile - 1) / of_tile;
  QueryTile tile;
  tile.matrix = number / num_tiles;
  tile.first_query = (num_tiles - 1 - number % num_tiles) * of_tile;  // the queries that see the most keys first
  tile.num_queries = min(of_tile, seqlen_q - tile.first_query);
  tile.num_keys = num_seen(params, tile.first_query + tile.num_queries - 1);
  const int num_lists = params.num_heads / params.heads_of_list;
  const int64_t head = tile.matrix % num_lists * params.heads_of_list;
  int64_t entry = tile.matrix / num_lists;
  tile.q_start = head * params.q.head_stride + tile.first_query * params.q.row_stride;
  tile.k_start = head / params.group_size * params.k.head_stride;
  tile.lse_start = head * params.lse.head_stride + tile.first_query * params.lse.row_stride;
  for (int axis = 2; axis >= 0; --axis) {
    const int64_t place = entry % params.batch[axis];
    tile.q_start += place * params.q.batch_strides[axis];
    tile.k_start += place * params.k.batch_strides[axis];
    tile.lse_start += place * params.lse.batch_strides[axis];
    entry /= params.batch[axis];
  }
  return tile;
}

// Multiply the queries by all keys that they see, one tile of keys at a time, and call `visit(s, first key)` for each
// tile. Called by all threads.
template <class Visit>
CUFLASH_DEVICE void walk_keys(const QueryScores& params, const QueryTile& queries, Visit visit) {
  const tile::Matrix<Element> k{elements(params.k) + queries.k_start, params.k.row_stride, params.k.column_stride,
                                params.num_keys, params.num_columns};
  const auto start = [&](int first, int slot) {
    if (first < queries.num_keys)
      tile::load_async<kThreads>(KTile{kKeysStart + slot * KTile::kBytes},
                                 k.rows(first, min(first + kBlockKv, params.num_keys)));
    ptx::cp_async_commit();
  };
  __syncthreads();  // all threads have read the keys of an earlier walk
  start(0, 0);
#pragma unroll 1
  for (int first = 0, slot = 0; first < queries.num_keys; first += kBlockKv, slot ^= 1) {
    ptx::cp_async_wait<0>();
    __syncthreads();  // the tile has arrived, and all threads have read the previous one
    start(first + kBlockKv, slot ^ 1);
    Scores s;
    tile::gemm_nt(s, QTile{0}, KTile{kKeysStart + slot * KTile::kBytes});
    visit(s, first);
  }
  ptx::cp_async_wait<0>();
}

// The rows of a thread: their queries, and how many keys they see.
struct ThreadRows {
  int num_seen[Scores::kRows];
  float shift[Scores::kRows];  // subtracted from scores in base 2; infinite for rows without a key

  CUFLASH_DEVICE ThreadRows(const QueryScores& params, const QueryTile& queries) {
#pragma unroll
    for (int i = 0; i < Scores::kRows; ++i) {
      const int row = Scores::first_row() + Scores::row(i), query = row / params.heads_of_list;
      const bool has_row = row < queries.num_rows(params);
      num_seen[i] = has_row ? lists::num_seen(params, queries.first_query + query) : 0;
      shift[i] = 0;
      if (!has_row || params.lse.data == nullptr) continue;
      const float lse = static_cast<const float*>(params.lse.data)[
          queries.lse_start + query * params.lse.row_stride + row % params.heads_of_list * params.lse.head_stride];
      shift[i] = lse == ptx::negative_infinity<float>() ? -lse : lse * 1.44269504088896340736f;
    }
  }
};

// Compute the logarithms of the sums of exponentials of the rows, in base 2. Called by all threads.
CUFLASH_DEVICE void find_shifts(const QueryScores& params, const QueryTile& queries, ThreadRows& rows) {
  const float scale = static_cast<float>(params.scale_log2);
  float greatest[Scores::kRows], sum[Scores::kRows];
#pragma unroll
  for (int i = 0; i < Scores::kRows; ++i) {
    greatest[i] = ptx::negative_infinity<float>();
    sum[i] = 0;
  }
  walk_keys(params, queries, [&](Scores& s, int first) {
#pragma unroll
    for (int i = 0; i < Scores::kRows; ++i) {
      float most = greatest[i];
#pragma unroll
      for (int j = 0; j < Scores::kColumns; ++j) {
        const bool is_seen = first + Scores::first_column() + Scores::column(j) < rows.num_seen[i];
        s.at(i, j) = is_seen ? s.at(i, j) * scale : ptx::negative_infinity<float>();
        most = fmaxf(most, s.at(i, j));
      }
      const float shift = most == ptx::negative_infinity<float>() ? 0.0f : most;  // -inf - (-inf) would be NaN
      sum[i] *= ptx::exp2_approx(greatest[i] - shift);
#pragma unroll
      for (int j = 0; j < Scores::kColumns; ++j) sum[i] += ptx::exp2_approx(s.at(i, j) - shift);
      greatest[i] = most;
    }
  });
#pragma unroll
  for (int i = 0; i < Scores::kRows; ++i) {
    const float most = tile::quad_max(greatest[i]);
    const bool has_maximum = most != ptx::negative_infinity<float>();
    sum[i] = tile::quad_sum(sum[i] * ptx::exp2_approx(greatest[i] - (has_maximum ? most : 0.0f)));
    const bool is_empty = !has_maximum && sum[i] == 0;  // a NaN score makes the sum NaN, but no maximum
    rows.shift[i] = is_empty ? -most : most + ptx::log2_approx(sum[i]);
  }
}

// The scores of blocks for one query, computed from the scores of keys in shared memory.
struct ScoresOfKeys {
  const float* keys;
  const QueryScores& params;
  int num_keys;  // number of keys that have scores

  CUFLASH_DEVICE float score(const BlocksOfRow&, int column) const {
    if (params.parts_of_block == 1 && params.num_parts == 1) return column < num_keys ? keys[column] : 0.0f;
    const int start = column * params.parts_of_block, stop = start + params.parts_of_block;
    const int first = start - params.num_parts + 1 > 0 ? start - params.num_parts + 1 : 0;
    float sum = 0;
    for (int n = first; n < stop && n < num_keys; ++n) {
      const int begin = n > start ? n : start, end = n + params.num_parts < stop ? n + params.num_parts : stop;
      sum += static_cast<float>(end - begin) * keys[n];
    }
    return sum;
  }
  CUFLASH_DEVICE double share(const BlocksOfRow& row, int column) const {
    return params.has_shares ? static_cast<double>(score(row, column)) : 1.0;
  }
};

// Halve the columns of a lane: keep the first Half of 2 Half columns (in lanes with the bit 2 Half: the others), and
// add the same columns of the other lane.
template <int Half>
CUFLASH_DEVICE void sum_halves(float (&x)[Scores::kColumns]) {
  const bool is_upper = (ptx::lane() & 2 * Half) != 0;
#pragma unroll
  for (int j = 0; j < Half; ++j) {
    const float own = is_upper ? x[Half + j] : x[j], other = is_upper ? x[j] : x[Half + j];
    x[j] = own + __shfl_xor_sync(0xffffffffu, other, 2 * Half);
  }
}

// Sum columns over the eight rows of lanes whose indices are equal modulo 4, and store the sums. In each of three
// steps, a lane keeps half of its columns. Called by whole warps.
CUFLASH_DEVICE void store_sums(float (&x)[Scores::kColumns], float* to, int num_columns) {
  static_assert(Scores::kColumns == 16, "three steps leave a pair of columns");
  sum_halves<8>(x);
  sum_halves<4>(x);
  sum_halves<2>(x);
  const int lane = ptx::lane(), pair = lane / 16 * 4 + lane / 8 % 2 * 2 + lane / 4 % 2;
  const int column = 8 * pair + Scores::first_column();
  if (column < num_columns) to[column] = x[0];
  if (column + 1 < num_columns) to[column + 1] = x[1];
}

// Store the scores of a tile of keys: products, or weights that are summed over the heads of a list. Called by all
// threads.
CUFLASH_DEVICE void store_scores(const QueryScores& params, const QueryTile& queries, const ThreadRows& rows, Scores& s,
                                 int first, float* scores, int pitch) {
  const float scale = static_cast<float>(params.scale_log2);
  const bool is_summed = stores_weights(params);
  const int num_columns = min(kBlockKv, queries.num_keys - first);
  if (params.heads_of_list == 8 || params.heads_of_list == 16) {  // a thread's rows belong to two queries, or to one
    float sums[Scores::kRows][Scores::kColumns];
#pragma unroll
    for (int i = 0; i < Scores::kRows; ++i)
#pragma unroll
      for (int j = 0; j < Scores::kColumns; ++j) {
        const bool is_seen = first + Scores::first_column() + Scores::column(j) < rows.num_seen[i];
        sums[i][j] = is_seen ? ptx::exp2_approx(s.at(i, j) * scale - rows.shift[i]) : 0.0f;
      }
    const int query = Scores::warp_row() / params.heads_of_list;
    if (params.heads_of_list == 16) {
#pragma unroll
      for (int j = 0; j < Scores::kColumns; ++j) sums[0][j] += sums[1][j];
      store_sums(sums[0], scores + query * pitch + first, query < queries.num_queries ? num_columns : 0);
    } else {
#pragma unroll
      for (int i = 0; i < Scores::kRows; ++i)
        store_sums(sums[i], scores + (query + i) * pitch + first, query + i < queries.num_queries ? num_columns : 0);
    }
    return;
  }
  float* const weights = reinterpret_cast<float*>(ptx::dynamic_shared<unsigned char>() + kWeightsStart);
#pragma unroll
  for (int i = 0; i < Scores::kRows; ++i) {
    const int row = Scores::first_row() + Scores::row(i);
    float* const to = is_summed ? weights + row * kWeightPitch : scores + row * pitch + first;
#pragma unroll
    for (int j = 0; j < Scores::kColumns; ++j) {
      const int column = Scores::first_column() + Scores::column(j);
      float x = s.at(i, j) * scale;
      if (params.sums_weights) x = first + column < rows.num_seen[i] ? ptx::exp2_approx(x - rows.shift[i]) : 0.0f;
      if (is_summed || (row < queries.num_queries && first + column < queries.num_keys)) to[column] = x;
    }
  }
  if (!is_summed) return;
  const bool is_local = kWarpRows % params.heads_of_list == 0;  // whether a warp has all heads of its queries
  if (is_local) __syncwarp();
  else __syncthreads();
  const int of_warp = kWarpRows / params.heads_of_list;
  const int first_query = is_local ? ptx::thread_index() / 32 * of_warp : 0;
  const int last_query = is_local ? min(first_query + of_warp, queries.num_queries) : queries.num_queries;
  const int num_threads = is_local ? 32 : kThreads, thread = is_local ? ptx::lane() : ptx::thread_index();
  for (int at = thread; at < (last_query - first_query) * kBlockKv; at += num_threads) {
    const int query = first_query + at / kBlockKv, column = at % kBlockKv;
    if (column >= num_columns) continue;
    float sum = 0;
    for (int head = 0; head < params.heads_of_list; ++head)
      sum += weights[(query * params.heads_of_list + head) * kWeightPitch + column];
    scores[query * pitch + first + column] = sum;
  }
}

}  // namespace cuflash::lists

extern "C" __global__ void __launch_bounds__(32 * cuflash::Config::kNumWarps, cuflash::Config::kMinBlocks)
lists_query_scores(const __grid_constant__ cuflash::lists::QueryScores params) {
  using namespace cuflash;
  using namespace cuflash::lists;
  const QueryTile queries = tile_of(params, blockIdx.x);
  const tile::Matrix<Element> heads{elements(params.q) + queries.q_start, params.q.head_stride,
                                    params.q.column_stride, params.heads_of_list, params.num_columns};
  tile::load_async<kThreads>(QTile{0},
                             tile::StackedRows<Element>{heads, params.q.row_stride, queries.num_rows(params)});
  const int pitch = (params.num_keys + 31) / 32 * 32 + 1;  // neighboring queries are in different banks
  unsigned char* const storage = ptx::dynamic_shared<unsigned char>();
  const int scores_start = kWeightsStart + (stores_weights(params) ? kWeightsBytes : 0);
  float* const scores = reinterpret_cast<float*>(storage + scores_start);
  ThreadRows rows(params, queries);
  if (params.sums_weights && params.lse.data == nullptr) find_shifts(params, queries, rows);
  walk_keys(params, queries, [&](Scores& s, int first) {
    store_scores(params, queries, rows, s, first, scores, pitch);
  });
  __syncthreads();  // all scores are stored
  const int warp = ptx::thread_index() / 32, places_start = scores_start + 4 * params.queries_per_tile * pitch;
  uint32_t* const places =
      reinterpret_cast<uint32_t*>(storage + (params.keeps_places ? places_start : kKeysStart));
  const Choice& choice = params.choice;
  const bool has_count_alone = choice.mass == 0 && !choice.has_threshold && choice.count > 0;
  const int first_row = static_cast<int>(queries.matrix * choice.seqlen_q) + queries.first_query;
  if (has_count_alone && params.uses_lanes) {
    for (int start = warp * kRowsOfLanes; start < queries.num_queries; start += kNumWarps * kRowsOfLanes) {
      const int query = start + ptx::lane() % kRowsOfLanes, own = min(query, queries.num_queries - 1);
      list_by_lanes({choice, first_row + own}, query < queries.num_queries, scores + own * pitch, queries.num_keys);
    }
    return;
  }
  for (int query = warp; query < queries.num_queries; query += kNumWarps) {
    const int row = first_row + query;
    Row<WarpOfRow, ScoresOfKeys> blocks(params.choice, row, {}, {scores + query * pitch, params, queries.num_keys});
    if (has_count_alone && blocks.num_columns <= kFewColumns) {
      list_few(blocks);
      continue;
    }
    choose_of_row(blocks, places + warp * params.place_columns);
    __syncwarp();  // all lanes have read the places
  }
}
