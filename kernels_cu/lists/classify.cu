// Classifies each cell of the grid: computes its kind and, if the mask has elements, its bits. A warp classifies one
// cell, or 32 cells if the mask consists of whole blocks.
#include <lists/params.cuh>

namespace cuflash::lists {

// One matrix of the mask with the row intervals that it is intersected with.
struct MaskMatrix {
  const Params& params;
  const uint8_t* mask;
  const int32_t* lo;
  const int32_t* hi;

  CUFLASH_DEVICE MaskMatrix(const Params& p, int matrix) : params(p) {
    const int head = matrix % p.num_heads, batch_entry = matrix / p.num_heads;
    int64_t start = head * p.mask_head_stride;
    int rest = batch_entry;
#pragma unroll 1  // unrolled, it spills 16 bytes on sm_90
    for (int axis = kBatchAxes - 1; axis >= 0; --axis) {
      start += rest % p.batch[axis] * p.mask_batch_strides[axis];
      rest /= p.batch[axis];
    }
    mask = p.mask + start;
    const int64_t first = batch_entry * p.interval_batch_stride + head * p.interval_head_stride;
    lo = p.lo == nullptr ? nullptr : p.lo + first;
    hi = p.hi + (p.lo == nullptr ? 0 : first);
  }

  // Return the address of the mask's element for a query and a key.
  CUFLASH_DEVICE const uint8_t* at(int query, int key) const {
    return mask + query / params.divisor_q * params.mask_row_stride +
        key / params.divisor_kv * params.mask_column_stride;
  }
};

// Return the mask's elements for eight keys from `key` on as bits; in `exists`, the bit of each key that exists is set.
CUFLASH_DEVICE int bits_of_keys(const MaskMatrix& matrix, int query, int key, int exists) {
  const Params& params = matrix.params;
  const uint8_t* address = matrix.at(query, key);
  int allowed = 0;
  const bool is_packet = params.divisor_kv == 1 && params.mask_column_stride == 1 && exists == 0xff;
  if (is_packet && reinterpret_cast<uint64_t>(address) % 8 == 0) {
    const uint64_t bytes = *reinterpret_cast<const uint64_t*>(address), low = 0x7f7f7f7f7f7f7f7f;
    const uint64_t ones = (((bytes & low) + low) | bytes) >> 7 & 0x0101010101010101;  // 1 for each byte that is not 0
    allowed = static_cast<int>(ones * 0x0102040810204080 >> 56);  // byte n as bit n
  } else {
    for (int n = 0; n < 8; ++n)
      if (exists >> n & 1) allowed |= (*matrix.at(query, key + n) != 0) << n;
  }
  if (matrix.lo != nullptr) {
    const int lo = matrix.lo[query], hi = matrix.hi[query];
    for (int n = 0; n < 8; ++n)
      if (key + n < lo || key + n >= hi) allowed &= ~(1 << n);
  }
  return allowed & exists;
}

// Return the kind of a cell under a mask with elements, and write the cell's bits.
CUFLASH_DEVICE int kind_by_elements(const MaskMatrix& matrix, int cell, int q_block, int kv_block) {
  const Params& params = matrix.params;
  const int num_bytes = (params.block_kv + 7) / 8, size = params.block_q * num_bytes;
  uint8_t* bits = params.bits + static_cast<int64_t>(cell) * size;
  bool has_some = false, is_full = true;
  for (int place = ptx::lane(); place < size; place += 32) {
    const int query = q_block * params.block_q + place / num_bytes, first = place % num_bytes * 8;
    const int key = kv_block * params.block_kv + first;
    const int num_keys = min(params.block_kv - first, params.seqlen_kv - key);
    const int exists = query >= params.seqlen_q || num_keys <= 0 ? 0 : num_keys >= 8 ? 0xff : (1 << num_keys) - 1;
    const int allowed = exists == 0 ? 0 : bits_of_keys(matrix, query, key, exists);
    bits[place] = static_cast<uint8_t>(allowed);
    has_some |= allowed != 0;
    is_full &= allowed == exists;
  }
  if (__all_sync(0xffffffffu, is_full)) return kFull;
  return __any_sync(0xffffffffu, has_some) ? kBits : kAbsent;
}

// Return the kind of a cell that a mask of whole blocks keeps. Called by a warp.
CUFLASH_DEVICE int kind_of_whole_block(const MaskMatrix& matrix, int q_block, int kv_block) {
  const Params& params = matrix.params;
  const int query = q_block * params.block_q, key = kv_block * params.block_kv;
  const int last_query = min(query + params.block_q, params.seqlen_q);
  const int last_key = min(key + params.block_kv, params.seqlen_kv);
  bool has_some = false, is_full = true;
  for (int row = query + ptx::lane(); row < last_query; row += 32) {
    const int lo = matrix.lo[row], hi = matrix.hi[row];
    has_some |= max(lo, key) < min(hi, last_key);
    is_full &= lo <= key && last_key <= hi;
  }
  if (__all_sync(0xffffffffu, is_full)) return kFull;
  return __any_sync(0xffffffffu, has_some) ? kInterval : kAbsent;
}

// Return the kind of a cell if neither end of the intervals decreases from one query to the next. The intervals of the
// first and the last query determine it; if they do not, return kBits.
CUFLASH_DEVICE Kind kind_by_ends(const MaskMatrix& matrix, int q_block, int kv_block) {
  const Params& params = matrix.params;
  const int query = q_block * params.block_q, key = kv_block * params.block_kv;
  const int last_query = min(query + params.block_q, params.seqlen_q) - 1;
  const int last_key = min(key + params.block_kv, params.seqlen_kv);
  const int first_lo = matrix.lo[query], first_hi = matrix.hi[query];
  const int last_lo = matrix.lo[last_query], last_hi = matrix.hi[last_query];
  if (last_lo <= key && last_key <= first_hi) return kFull;
  if (last_hi <= key || last_key <= first_lo) return kAbsent;
  const bool has_some = max(first_lo, key) < min(first_hi, last_key) ||
      max(last_lo, key) < min(last_hi, last_key);
  return has_some ? kInterval : kBits;
}

// A cell of the grid.
struct Cell {
  int q_block, kv_block;
  MaskMatrix matrix;

  CUFLASH_DEVICE Cell(const Params& params, int number)
      : q_block(number / params.num_kv_blocks % params.num_q_blocks), kv_block(number % params.num_kv_blocks),
        matrix(params, number / params.num_kv_blocks / params.num_q_blocks) {}
};

// Classify 32 cells under a mask of whole blocks; most of them are absent. Called by a warp.
CUFLASH_DEVICE void classify_whole_blocks(const Params& params, int first) {
  const int own = first + ptx::lane();
  bool is_kept = false;
  if (own < params.num_cells()) {
    const Cell cell(params, own);
    is_kept = *cell.matrix.at(cell.q_block * params.block_q, cell.kv_block * params.block_kv) != 0;
  }
  int own_kind = is_kept ? kFull : kAbsent;
  if (is_kept && params.lo != nullptr) {
    const Cell cell(params, own);
    own_kind = kind_by_ends(cell.matrix, cell.q_block, cell.kv_block);
  }
  for (uint32_t open = __ballot_sync(0xffffffffu, own_kind == kBits); open != 0; open &= open - 1) {
    const int number = __ffs(open) - 1;
    const Cell cell(params, first + number);
    const int kind = kind_of_whole_block(cell.matrix, cell.q_block, cell.kv_block);
    if (ptx::lane() == number) own_kind = kind;
  }
  if (own < params.num_cells()) params.grid_kinds[own] = static_cast<uint8_t>(own_kind);
}

}  // namespace cuflash::lists

extern "C" __global__ void __launch_bounds__(32 * cuflash::Config::kNumWarps)
lists_classify(const __grid_constant__ cuflash::lists::Params params) {
  using namespace cuflash;
  using namespace cuflash::lists;
  if (params.bits == nullptr) {
    classify_whole_blocks(params, 32 * warp_of_grid());
    return;
  }
  const int number = warp_of_grid();
  if (number >= params.num_cells()) return;
  const Cell cell(params, number);
  const int kind = kind_by_elements(cell.matrix, number, cell.q_block, cell.kv_block);
  if (ptx::lane() == 0) params.grid_kinds[number] = static_cast<uint8_t>(kind);
}
