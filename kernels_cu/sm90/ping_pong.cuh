#pragma once
#include <sm90/kv_storage.cuh>

// The order in which consumer warpgroups of forward kernels start products: one after the other (FlashAttention-3's
// ping-pong), so that the softmax of one runs under the products of the others.
namespace cuflash {

constexpr bool kPingPong = kNumConsumers > 1;

constexpr int kPingPongBarrier = 1, kQEmptyBarrier = 4;  // numbers of named barriers, one for each consumer warpgroup

// Return the number of the warpgroup, from 1 on. It is computed at each use, to save registers.
CUFLASH_DEVICE int own_group() { return threadIdx.x / kWarpgroupThreads; }
// Wait until the warpgroup may start products.
CUFLASH_DEVICE void ping_pong_wait(int group) {
  if (kPingPong) ptx::bar_sync(kPingPongBarrier + group - 1, 2 * kWarpgroupThreads);
}
CUFLASH_DEVICE void ping_pong_wait() { ping_pong_wait(own_group()); }
// Let the next warpgroup start its products.
CUFLASH_DEVICE void ping_pong_signal(int group) {
  if (kPingPong) ptx::bar_arrive(kPingPongBarrier + group % kNumConsumers, 2 * kWarpgroupThreads);
}
CUFLASH_DEVICE void ping_pong_signal() { ping_pong_signal(own_group()); }

}  // namespace cuflash
