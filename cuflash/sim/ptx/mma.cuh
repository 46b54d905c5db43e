// Host twin of kernels_cu/ptx/mma.cuh.
#pragma once

#include <ptx/types.cuh>

namespace cuflash::sim {

CUFLASH_DEVICE void mma(const Operation& operation, float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                        Location where) {
  MmaLane lane{{d[0], d[1], d[2], d[3]}, {a[0], a[1], a[2], a[3]}, {b[0], b[1]}};
  collective(operation, 0xffffffffu, &lane, where);
  for (int i = 0; i < 4; ++i) d[i] = lane.d[i];
}

}  // namespace cuflash::sim

namespace cuflash::ptx {

CUFLASH_DEVICE void mma_m16n8k16(Half, float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                                 CUFLASH_SIM_WHERE) {
  sim::mma(sim::kMmaHalf, d, a, b, where);
}
CUFLASH_DEVICE void mma_m16n8k16(BFloat16, float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                                 CUFLASH_SIM_WHERE) {
  sim::mma(sim::kMmaBFloat16, d, a, b, where);
}
template <class T>
CUFLASH_DEVICE void first_mma_m16n8k16(T tag, float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                                       CUFLASH_SIM_WHERE) {
  for (float& x : d) x = 0;
  mma_m16n8k16(tag, d, a, b, where);
}
CUFLASH_DEVICE void mma_m16n8k8_tf32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], CUFLASH_SIM_WHERE) {
  sim::mma(sim::kMmaTf32, d, a, b, where);
}
CUFLASH_DEVICE void mma_m8n8k4(double& d0, double& d1, double a, double b, CUFLASH_SIM_WHERE) {
  sim::MmaDoubleLane lane{{d0, d1}, {a}, b};
  sim::collective(sim::kMmaDouble[0], 0xffffffffu, &lane, where);
  d0 = lane.d[0], d1 = lane.d[1];
}
CUFLASH_DEVICE void mma_m16n8k4(double& d0, double& d1, double& d2, double& d3, double a0, double a1, double b,
                                CUFLASH_SIM_WHERE) {
  sim::MmaDoubleLane lane{{d0, d1, d2, d3}, {a0, a1}, b};
  sim::collective(sim::kMmaDouble[1], 0xffffffffu, &lane, where);
  d0 = lane.d[0], d1 = lane.d[1], d2 = lane.d[2], d3 = lane.d[3];
}

}  // namespace cuflash::ptx
