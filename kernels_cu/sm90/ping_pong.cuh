#pragma once
#include <sm90/kv_pipeline.cuh>

// The order in which consumer warpgroups of forward kernels start products: one after the other (FlashAttention-3's
// ping-pong), so that the softmax of one overlaps the products of the others.
namespace cuflash::sm90 {

constexpr int kPingPongBarrier = 1, kQEmptyBarrier = 4;  // first of one named barrier per consumer warpgroup

template <class Config>
struct PingPong : KvPipeline<Config> {
  using Base = KvPipeline<Config>;
  using Base::kNumConsumers;

  static constexpr bool kPingPong = kNumConsumers > 1;

  // Return the index of the warpgroup, from 1 on. It is computed at each use, to save registers.
  static CUFLASH_DEVICE int own_group() { return threadIdx.x / kWarpgroupThreads; }
  // Wait until the warpgroup may start products.
  static CUFLASH_DEVICE void ping_pong_wait(int group) {
    if (kPingPong) ptx::bar_sync(kPingPongBarrier + group - 1, 2 * kWarpgroupThreads);
  }
  static CUFLASH_DEVICE void ping_pong_wait() { ping_pong_wait(own_group()); }
  // Let the next warpgroup start its products.
  static CUFLASH_DEVICE void ping_pong_signal(int group) {
    if (kPingPong) ptx::bar_arrive(kPingPongBarrier + group % kNumConsumers, 2 * kWarpgroupThreads);
  }
  static CUFLASH_DEVICE void ping_pong_signal() { ping_pong_signal(own_group()); }
};

}  // namespace cuflash::sm90
