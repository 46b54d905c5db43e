#pragma once
#include <attention/chosen_lists.cuh>
#include <attention/dropout.cuh>
#include <attention/page_table.cuh>
#include <attention/scales.cuh>
#include <attention/sink.cuh>
#include <sm90/tensor_maps.cuh>

// The constants that all parts of Hopper's pipelines take from the specification of a kernel, which is their template
// parameter Config.
namespace cuflash::sm90 {

constexpr int kWarpgroupThreads = 128;  // threads per warpgroup

template <class Config>
struct Constants {
  using Element = typename Config::Element;
  static constexpr int kBlockQ = Config::kBlockQ, kBlockKv = Config::kBlockKv;
  static constexpr int kHeadDim = Config::kHeadDim, kValueDim = Config::kValueDim;
  static constexpr int kNumStages = Config::kNumStages, kMinBlocks = Config::kMinBlocks;
  static constexpr int kThreads = 32 * Config::kNumWarps;
  // The kernel computes tangents: tiles of those of Q, K, V and dO, if they exist, follow these.
  static constexpr bool kHasTangents =
      Config::kHasQDot || Config::kHasKDot || Config::kHasVDot || Config::kHasSinkDot || Config::kHasDoDot;

  using Listed = attention::StaticListed<Config::kIsListed, Config::kIsOrdered>;

  // Types of the arguments that belong to features.
  using SinkArgument = attention::SinkArgument<Config>;
  using PagesArgument = attention::PagesArgument<Config>;
  using ScalesArgument = attention::ScalesArgument<Config>;
  using DropoutArgument = attention::DropoutArgument<Config>;
  using ChosenArgument = attention::ChosenArgument<Config>;
  using TangentsArgument = attention::FeatureArgument<kHasTangents, TangentOperands, NoTangentOperands>;
};

}  // namespace cuflash::sm90
