#pragma once
#include <attention/dropout.cuh>
#include <attention/mask_softmax_mma.cuh>
#include <attention/sink.cuh>
#include <sm90/forward_tiles.cuh>
#include <sm90/store_boxes.cuh>

// Results of sm90_forward: lse and O of a tile.
namespace cuflash::sm90 {

template <class Config>
struct ForwardEpilogue : ForwardTiles<Config> {
  using Base = ForwardTiles<Config>;
  using typename Base::ChosenArgument, typename Base::DropoutArgument, typename Base::Element, typename Base::Output, typename Base::Scores,
      typename Base::SinkArgument, typename Base::SmemQ;
  using Base::kBlockQ, Base::kHeadDim, Base::kPacksQueries, Base::kPingPong, Base::kQStages, Base::kValueDim, Base::merge_sink_into,
      Base::own_group, Base::q_smem, Base::q_stage_of, Base::shared, Base::sink_of_rows, Base::store_lse, Base::tile_info_index;

  using Softmax = attention::LazySoftmax<Scores::kRows>;

  // O is staged in the slot of its Q: a warp writes only where its own rows of Q were.
  using SmemO = tile::WgmmaTile<Element, kBlockQ, kValueDim>;
  static constexpr bool kStoresOByTma =
      kQStages > 1 && kValueDim <= kHeadDim&& SmemO::kPanelWidth == SmemQ::kPanelWidth;

  // Write lse and O of a tile. If TMA can store O, each warp stages its rows in the slot of Q and stores them as a box.
  static CUFLASH_DEVICE void epilogue(const attention::Params& params, const TensorMaps& maps, unsigned num_tiles_done,
                                      const Softmax& softmax, Output& o, bool is_last, SinkArgument sink,
                                      DropoutArgument dropout, ChosenArgument chosen) {
    using namespace attention;
    const WorkTile& work = shared().tile_infos[tile_info_index(num_tiles_done)].work;
    const auto logit_of = sink_of_rows(sink, work, chosen);
    float row_lse[Output::kRows];
    softmax.finalize(o, shared().softmax_scale_log2, row_lse);
    if constexpr (Config::kHasDropout) o.scale(dropout.factor);
    merge_sink_into(o, row_lse, logit_of);
    const EpilogueTarget target = shared().tile_infos[tile_info_index(num_tiles_done)].epilogue_target;
    if (kStoresOByTma && target.uses_tma_store) {
      // The warpgroup's products must have read Q. With ping-pong, the wait before the next tile's first products
      // ensures this.
      if (!kPingPong || is_last) ptx::bar_sync(kQEmptyBarrier + own_group(), kWarpgroupThreads);
      store_boxes<Element>(maps, target, SmemO{q_smem(q_stage_of(num_tiles_done)).start}, o);
    } else {
      tile::store(rows_of_tile<Element>(chosen, params.o, work, params.shape.value_dim), o);
    }
    if constexpr (kPacksQueries) store_lse(rows_of_tile<float>(chosen, params.lse, work, 1), o, row_lse);
    else store_lse(params, target, o, row_lse);
  }

  // Release one of the two slots of Q, that of a tile, once TMA has read O from it.
  static CUFLASH_DEVICE void release_q(unsigned num_tiles_done) {
    ptx::bulk_wait_read<0>();
    tile::arrive(shared().q[q_stage_of(num_tiles_done)].empty);
  }
};

}  // namespace cuflash::sm90
