// ldmatrix, stmatrix and mma on the operands of a whole warp. Diagrams in kernels_cu/ptx show which lane has which element.
#include "cta.hpp"
#include "eight.hpp"
#include "subnormals.hpp"

namespace cuflash::sim {

namespace {

MatrixLane& matrix_lane(void* const* arguments, int lane) { return *static_cast<MatrixLane*>(arguments[lane]); }

// Returns the two elements of matrix m that a lane's register holds, as positions in the rows of lanes 8m to 8m + 7.
template <bool kTrans>
uint16_t& element(void* const* arguments, int m, int lane, int which) {
  const int i = lane / 4, j = lane % 4 * 2 + which;
  return kTrans ? matrix_lane(arguments, m * 8 + j).row[i] : matrix_lane(arguments, m * 8 + i).row[j];
}

template <int kMatrices, bool kTrans>
void execute_ldmatrix(void* const* arguments, uint32_t) {
  for (int m = 0; m < kMatrices; ++m)
    for (int lane = 0; lane < 32; ++lane)
      matrix_lane(arguments, lane).matrices[m] =
          element<kTrans>(arguments, m, lane, 0) | static_cast<uint32_t>(element<kTrans>(arguments, m, lane, 1)) << 16;
}

template <int kMatrices, bool kTrans>
void execute_stmatrix(void* const* arguments, uint32_t) {
  for (int m = 0; m < kMatrices; ++m)
    for (int lane = 0; lane < 32; ++lane) {
      const uint32_t both = matrix_lane(arguments, lane).matrices[m];
      element<kTrans>(arguments, m, lane, 0) = static_cast<uint16_t>(both);
      element<kTrans>(arguments, m, lane, 1) = static_cast<uint16_t>(both >> 16);
    }
}

// d (16 x 8) += a (16 x kDepth) * b (kDepth x 8), summed in float from the first column to the last.
template <int kDepth>
CUFLASH_SIM_WITHIN void multiply_add(const float (&a)[16][kDepth], const Eight (&b)[kDepth], void* const* arguments) {
  Eight product[16];
  for (int i = 0; i < 16; ++i) {
    Eight sum = {};
    for (int k = 0; k < kDepth; ++k) sum += a[i][k] * b[k];
    product[i] = sum;
  }
  for (int lane = 0; lane < 32; ++lane) {
    float(&d)[4] = static_cast<MmaLane*>(arguments[lane])->d;
    for (int e = 0; e < 4; ++e) d[e] += product[lane / 4 + e / 2 * 8][lane % 4 * 2 + e % 2];
  }
}

CUFLASH_SIM_WIDE void mma_m16n8k16(void* const* arguments, bool is_bfloat16) {
  const Subnormals of_tensor_cores(false);
  float a[16][16];
  Eight b[16];
  for (int lane = 0; lane < 32; ++lane) {
    const auto& own = *static_cast<MmaLane*>(arguments[lane]);
    const int g = lane / 4, t = lane % 4 * 2;
    uint32_t words[4] = {own.b[0], own.b[1]};
    const Eight of_a = to_floats(own.a, is_bfloat16), of_b = to_floats(words, is_bfloat16);
    for (int e = 0; e < 2; ++e) {
      for (int r = 0; r < 4; ++r) a[g + r % 2 * 8][t + r / 2 * 8 + e] = of_a[2 * r + e];
      for (int r = 0; r < 2; ++r) b[t + r * 8 + e][g] = of_b[2 * r + e];
    }
  }
  multiply_add(a, b, arguments);
}

template <bool kIsBFloat16>
void execute_mma_m16n8k16(void* const* arguments, uint32_t) { mma_m16n8k16(arguments, kIsBFloat16); }

CUFLASH_SIM_WIDE void execute_mma_m16n8k8_tf32(void* const* arguments, uint32_t) {
  const Subnormals of_tensor_cores(false);
  const auto to_float = [](uint32_t bits) { return std::bit_cast<float>(bits & ~0x1fffu); };
  float a[16][8];
  Eight b[8];
  for (int lane = 0; lane < 32; ++lane) {
    const auto& own = *static_cast<MmaLane*>(arguments[lane]);
    const int g = lane / 4, t = lane % 4;
    for (int r = 0; r < 4; ++r) a[g + r % 2 * 8][t + r / 2 * 4] = to_float(own.a[r]);
    for (int r = 0; r < 2; ++r) b[t + r * 4][g] = to_float(own.b[r]);
  }
  multiply_add(a, b, arguments);
}

// PTX does not specify the order in which doubles are summed. The simulator uses the order of the columns of a.
template <int kRows>
void execute_mma_double(void* const* arguments, uint32_t) {
  const Subnormals of_tensor_cores(false);
  const auto lane = [&](int i) -> MmaDoubleLane& { return *static_cast<MmaDoubleLane*>(arguments[i]); };
  for (int i = 0; i < 32; ++i)
    for (int e = 0; e < kRows / 4; ++e)
      for (int k = 0; k < 4; ++k)
        lane(i).d[e] = __builtin_fma(lane(i / 4 * 4 + k).a[e / 2], lane((i % 4 * 2 + e % 2) * 4 + k).b, lane(i).d[e]);
}

}  // namespace

const Operation kLdmatrix[2][3] = {{{"ldmatrix_x1", execute_ldmatrix<1, false>, true},
                                    {"ldmatrix_x2", execute_ldmatrix<2, false>, true},
                                    {"ldmatrix_x4", execute_ldmatrix<4, false>, true}},
                                   {{"ldmatrix_x1_trans", execute_ldmatrix<1, true>, true},
                                    {"ldmatrix_x2_trans", execute_ldmatrix<2, true>, true},
                                    {"ldmatrix_x4_trans", execute_ldmatrix<4, true>, true}}};
const Operation kStmatrix[2][3] = {{{"stmatrix_x1", execute_stmatrix<1, false>, true},
                                    {"stmatrix_x2", execute_stmatrix<2, false>, true},
                                    {"stmatrix_x4", execute_stmatrix<4, false>, true}},
                                   {{"stmatrix_x1_trans", execute_stmatrix<1, true>, true},
                                    {"stmatrix_x2_trans", execute_stmatrix<2, true>, true},
                                    {"stmatrix_x4_trans", execute_stmatrix<4, true>, true}}};
const Operation kMmaHalf{"mma_m16n8k16 (Half)", execute_mma_m16n8k16<false>, true};
const Operation kMmaBFloat16{"mma_m16n8k16 (BFloat16)", execute_mma_m16n8k16<true>, true};
const Operation kMmaTf32{"mma_m16n8k8_tf32", execute_mma_m16n8k8_tf32, true};
const Operation kMmaDouble[2] = {{"mma_m8n8k4", execute_mma_double<8>, true},
                                 {"mma_m16n8k4", execute_mma_double<16>, true}};

}  // namespace cuflash::sim
