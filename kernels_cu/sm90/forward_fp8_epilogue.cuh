#pragma once
#include <attention/sink.cuh>
#include <sm90/forward_fp8_storage.cuh>
#include <sm90/kv_pipeline.cuh>
#include <sm90/store_boxes.cuh>

// Results of sm90_forward_fp8: lse and O of a tile.
namespace cuflash::sm90 {

template <class Config>
struct ForwardFp8Epilogue : ForwardFp8Storage<Config> {
  using Base = ForwardFp8Storage<Config>;
  using typename Base::Element, typename Base::Output, typename Base::SinkArgument, typename Base::Softmax,
      typename Base::WorkTileInfo;
  using Base::kBlockQ, Base::kSmemOOffset, Base::kStoresOByTma, Base::kValueDim, Base::merge_sink_into, Base::shared,
      Base::store_lse, Base::tile_info_index;

  // Write a warp's rows of O without TMA: rounded, if TMA cannot store them, or as floats.
  template <class T>
  static CUFLASH_DEVICE void store_rows(const tile::Matrix<T>& to, Output& o) {
    tile::store(to, o);
  }
  static CUFLASH_DEVICE void store_rows(const tile::Matrix<float>& to, Output& o) {
#pragma unroll
    for (int i = 0; i < Output::kRows; ++i) {
      const int row = o.first_row() + o.row(i);
#pragma unroll
      for (int j = 0; j < Output::kColumns; ++j) {
        const int column = o.first_column() + o.column(j);
        if (row < to.num_rows && column < to.num_columns) to.at(row, column) = o.at(i, j);
      }
    }
  }

  // Round a warp's rows of O, stage them in shared memory, and store them by TMA.
  template <class T>
  static CUFLASH_DEVICE void stage_and_store(T, const TensorMaps& maps, const EpilogueTarget& target, const Output& o) {
    using SmemO = tile::WgmmaTile<T, kBlockQ, kValueDim>;
    const SmemO o_smem{kSmemOOffset};
    ptx::bulk_wait_read<0>();  // TMA has read the previous tile
    __syncwarp();
    store_boxes<T>(maps, target, o_smem, o);
  }
  static CUFLASH_DEVICE void stage_and_store(float, const TensorMaps&, const EpilogueTarget&, const Output&) {}

  // Write lse and O of a tile. If TMA can store O, each warp stages its rows in shared memory and stores them as a box.
  static CUFLASH_DEVICE void epilogue(const attention::Params& params, const TensorMaps& maps, unsigned num_tiles_done,
                                      const Softmax& softmax, Output& o, SinkArgument sink) {
    using namespace attention;
    const WorkTileInfo& tile_info = shared().tile_infos[tile_info_index(num_tiles_done)];
    const BatchHead& batch_head = tile_info.work.batch_head;
    const float logit = sink_logit<float>(sink, batch_head, batch_head.head);
    float row_lse[Output::kRows];
    softmax.finalize(o, row_lse);
    merge_sink_into(o, row_lse, [&](int) { return logit; });
    const EpilogueTarget target = tile_info.epilogue_target;
    if (kStoresOByTma && target.uses_tma_store) {
      stage_and_store(Element{}, maps, target, o);
    } else {
      const auto all = matrix<Element>(params.o, batch_head, batch_head.head, 0, params.shape.value_dim);
      store_rows(all.rows(tile_info.work.first, tile_info.work.last), o);
    }
    store_lse(params, target, o, row_lse);
  }
};

}  // namespace cuflash::sm90
