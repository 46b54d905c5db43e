// Host twin of kernels_cu/ptx/ldmatrix.cuh. The lane that passes the address of a row reads or writes the row.
#pragma once

#include <ptx/types.cuh>

namespace cuflash::sim {

template <int kMatrices, bool kTrans>
CUFLASH_DEVICE void ldmatrix(uint32_t (&matrices)[kMatrices], uint32_t address, Location where) {
  const Operation& operation = kLdmatrix[kTrans][kMatrices / 2];
  MatrixLane lane;
  if (current->lane < kMatrices * 8) load_row(address, lane, operation.name, where);
  collective(operation, 0xffffffffu, &lane, where);
  for (int i = 0; i < kMatrices; ++i) matrices[i] = lane.matrices[i];
}

template <int kMatrices, bool kTrans>
CUFLASH_DEVICE void stmatrix(uint32_t address, const uint32_t (&matrices)[kMatrices], Location where) {
  const Operation& operation = kStmatrix[kTrans][kMatrices / 2];
  MatrixLane lane;
  for (int i = 0; i < kMatrices; ++i) lane.matrices[i] = matrices[i];
  collective(operation, 0xffffffffu, &lane, where);
  if (current->lane < kMatrices * 8) store_row(address, lane, operation.name, where);
}

}  // namespace cuflash::sim

namespace cuflash::ptx {

CUFLASH_DEVICE void ldmatrix_x1(uint32_t (&matrices)[1], uint32_t address, CUFLASH_SIM_WHERE) {
  sim::ldmatrix<1, false>(matrices, address, where);
}
CUFLASH_DEVICE void ldmatrix_x2(uint32_t (&matrices)[2], uint32_t address, CUFLASH_SIM_WHERE) {
  sim::ldmatrix<2, false>(matrices, address, where);
}
CUFLASH_DEVICE void ldmatrix_x4(uint32_t (&matrices)[4], uint32_t address, CUFLASH_SIM_WHERE) {
  sim::ldmatrix<4, false>(matrices, address, where);
}
CUFLASH_DEVICE void ldmatrix_x1_trans(uint32_t (&matrices)[1], uint32_t address, CUFLASH_SIM_WHERE) {
  sim::ldmatrix<1, true>(matrices, address, where);
}
CUFLASH_DEVICE void ldmatrix_x2_trans(uint32_t (&matrices)[2], uint32_t address, CUFLASH_SIM_WHERE) {
  sim::ldmatrix<2, true>(matrices, address, where);
}
CUFLASH_DEVICE void ldmatrix_x4_trans(uint32_t (&matrices)[4], uint32_t address, CUFLASH_SIM_WHERE) {
  sim::ldmatrix<4, true>(matrices, address, where);
}
CUFLASH_DEVICE void stmatrix_x1(uint32_t address, const uint32_t (&matrices)[1], CUFLASH_SIM_WHERE) {
  sim::stmatrix<1, false>(address, matrices, where);
}
CUFLASH_DEVICE void stmatrix_x2(uint32_t address, const uint32_t (&matrices)[2], CUFLASH_SIM_WHERE) {
  sim::stmatrix<2, false>(address, matrices, where);
}
CUFLASH_DEVICE void stmatrix_x4(uint32_t address, const uint32_t (&matrices)[4], CUFLASH_SIM_WHERE) {
  sim::stmatrix<4, false>(address, matrices, where);
}
CUFLASH_DEVICE void stmatrix_x1_trans(uint32_t address, const uint32_t (&matrices)[1], CUFLASH_SIM_WHERE) {
  sim::stmatrix<1, true>(address, matrices, where);
}
CUFLASH_DEVICE void stmatrix_x2_trans(uint32_t address, const uint32_t (&matrices)[2], CUFLASH_SIM_WHERE) {
  sim::stmatrix<2, true>(address, matrices, where);
}
CUFLASH_DEVICE void stmatrix_x4_trans(uint32_t address, const uint32_t (&matrices)[4], CUFLASH_SIM_WHERE) {
  sim::stmatrix<4, true>(address, matrices, where);
}

}  // namespace cuflash::ptx
