#pragma once
#include <attention/page_table.cuh>
#include <attention/sink.cuh>
#include <sm90/kv_storage.cuh>
#include <sm90/sequence_tiles.cuh>

// The scheduler warp of the pipeline over keys (sm90/kv_pipeline.cuh). It takes one tile of queries after the other,
// skips tiles that see no key, and writes a message about each other tile, which all other warps read.
namespace cuflash::sm90 {

template <class Config>
struct KvTileScheduler : KvStorage<Config> {
  using Base = KvStorage<Config>;
  using typename Base::ChosenArgument, typename Base::Element, typename Base::Listed, typename Base::PagesArgument,
      typename Base::SinkArgument, typename Base::TangentsArgument, typename Base::Walk, typename Base::WorkTileInfo;
  using Base::kBlockKv, Base::kBlockQ, Base::kHasTangents, Base::kLoadsDo, Base::kNumConsumers, Base::shared, Base::tile_info_index,
      Base::tile_info_phase;

  // Return the index of the block's next tile, which no other block takes. Called by a warp.
  static CUFLASH_DEVICE int advance_tile(const attention::Params& params, bool is_first, int num_tiles) {
    if (is_first) return attention::first_tile_number();
    int number = 0;
    if (is_first_lane()) number = attention::next_tile_number(params, num_tiles);
    return __shfl_sync(0xffffffffu, number, 0);
  }

  // Return the tile with index `number`. With pages, the tile omits queries that belong to no sequence.
  static CUFLASH_DEVICE attention::WorkTile tile_at(const attention::Params& params, attention::NoPages,
                                                    ChosenArgument chosen, int number) {
    return attention::tile_of_queries_at<Listed>(params, chosen, kBlockQ, number);
  }
  static CUFLASH_DEVICE attention::WorkTile tile_at(const attention::Params& params, const attention::Pages& pages,
                                                    ChosenArgument, int number) {
    return attention::query_tile_of_sequence<Listed>(params, pages, kBlockQ, number);
  }

  // Return the range of keys that 64 queries of a tile, from row `first_row` on, visit.
  static CUFLASH_DEVICE GroupVisitRange group_visit_range(const attention::Params& params, attention::WorkTile work,
                                                          int first_row) {
    work.first += first_row;
    work.last = min(work.last, work.first + 64);
    if (work.is_empty()) return {};
    const attention::VisitRange visit_range = attention::visit_range_of_queries(params, work);
    return {visit_range.stop, visit_range.full_start, visit_range.full_stop};
  }

  // Determine whether the intervals of a tile's queries form a band, and if so store the first query's interval in
  // `band`. In a band, each interval ends one key after the previous query's, and either also starts one key later or
  // starts at key 0. Called by a whole warp.
  static CUFLASH_DEVICE bool find_band(const attention::Params& params, const attention::WorkTile& work,
                                       attention::Interval& band) {
    using namespace attention;
    const Interval first = interval(params, work.batch_head, work.first);
    bool is_band = true, lo_moves = true, lo_stays = true;
#pragma unroll
    // unrolled, so that the loads overlap: loading the first K of the tile waits for them
    for (int i = 0; i < kBlockQ / 32; ++i) {
      const int rows = min(32 * i + tile::lane(), work.last - work.first - 1);
      const Interval keys = interval(params, work.batch_head, work.first + rows);
      is_band &= keys.hi == first.hi + rows;
      lo_moves &= keys.lo == first.lo + rows;
      lo_stays &= keys.lo == 0;
    }
    lo_moves = __all_sync(0xffffffffu, lo_moves);
    lo_stays = __all_sync(0xffffffffu, lo_stays);
    band = {lo_moves ? first.lo : clamped_to_int(-(int64_t{1} << 32)), first.hi};
    return __all_sync(0xffffffffu, is_band) && (lo_moves || lo_stays);
  }

  // Schedule the tiles of this block. A tile is scheduled once the steps of the previous tile are loaded (with
  // kFetchesTileEarly: once its first step is loaded). If tiles were taken earlier, another block might have been able
  // to start them sooner. Called by a warp.
  template <class Hooks>
  static CUFLASH_DEVICE void schedule_tiles(const attention::Params& params, const TensorMaps& maps, SinkArgument sink,
                                            PagesArgument pages, ChosenArgument chosen, TangentsArgument dots) {
    using namespace attention;
    const int num_tiles = num_tiles_of_queries<Listed>(params, chosen, kBlockQ);
    unsigned num_tiles_done = 0;
    WorkTile queries{};  // if sequences are cut: queries of the last block of positions that are not yet in a tile
    for (bool is_first = true;; is_first = false) {
      const tile::PipelineSlot& tile_info_slot = shared().tile_info_slots[tile_info_index(num_tiles_done)];
      // the first tile does not wait
      wait_slot_empty(tile_info_slot, tile_info_phase(num_tiles_done + kNumTileInfos - 1));
      const bool takes_number = !Config::kCutsSequences || queries.is_empty();
      const int number = takes_number ? advance_tile(params, is_first, num_tiles) : 0;
      const bool is_end = number >= num_tiles;
      WorkTile work{};
      VisitRange visit_range{};
      if (!is_end) {
        if constexpr (Config::kCutsSequences) {
          if (takes_number) queries = queries_of_block<kBlockQ>(params, tile_at(params, pages, chosen, number));
          if (!queries.is_empty()) work = take_tile<kBlockQ, kBlockKv>(params, queries);
        } else {
          work = tile_at(params, pages, chosen, number);
        }
        if (work.is_empty()) continue;
        visit_range = visit_range_of_tile(params, chosen, work);
        if (Config::kIsPaged) align_steps(visit_range, kBlockKv);
        if (Config::kIsQuantized && visit_range.start < visit_range.stop)
          visit_range.start -= visit_range.start % kBlockKv;
        if (kStagesArray && visit_range.start < visit_range.stop)
          visit_range.start -= visit_range.start % 8;  // the start is a multiple of 16 bytes of an array
        if (!BlockIterator<kBlockKv, Walk, Listed>(params, visit_range).has_next()) {
          if constexpr (kHasTangents) Hooks::write_empty_rows(params, work, sink, dots.arrays);
          else Hooks::write_empty_rows(params, work, sink, chosen);
          continue;
        }
      }
      WorkTileInfo& tile_info = shared().tile_infos[tile_info_index(num_tiles_done)];
      Interval band{};
      const bool has_band = Config::kIsPaged && !is_end && find_band(params, work, band);
      if (!is_end && tile::lane() < kNumConsumers)
        tile_info.group_ranges[tile::lane()] = group_visit_range(params, work, 64 * tile::lane());
      if (is_first_lane()) {
        tile_info.work = work;
        tile_info.visit_range = visit_range;
        tile_info.is_end = is_end;
        tile_info.kv_head = work.batch_head.head / params.shape.group_size;
        tile_info.coords[kQ] = tma_coords(params.q, work.batch_head, work.batch_head.head);
        tile_info.coords[kK] = tma_coords(params.k, work.batch_head, tile_info.kv_head);
        tile_info.coords[kV] = tma_coords(params.v, work.batch_head, tile_info.kv_head);
        if constexpr (kLoadsDo) tile_info.coords[kDo] = tma_coords(params.do_, work.batch_head, work.batch_head.head);
        if constexpr (!kLoadsDo) {
          const int num_rows = work.last - work.first;
          tile_info.epilogue_target = {
              &matrix<float>(params.lse, work.batch_head, work.batch_head.head, 0, 1).at(work.first, 0), num_rows,
              (num_rows % kBoxRows == 0 || work.last == params.shape.seqlen_q) &&
                  params.shape.value_dim % tile::kChunkOf<Element> == 0 && has_tensor_map(maps.o, params.o),
              work.first, tma_coords(params.o, work.batch_head, work.batch_head.head)};
        }
        tile_info.is_band = Config::kIsPaged ? has_band : !Config::kIsListed && params.work.lo == nullptr;
        tile_info.band = Config::kIsPaged ? band
                                          : Interval{clamped_to_int(work.first + params.work.lower),
                                                     clamped_to_int(work.first + params.work.upper + 1)};
      }
      tile::arrive(tile_info_slot.full);
      if (is_end) return;
      ++num_tiles_done;
    }
  }
};

}  // namespace cuflash::sm90
