// Rounds the new keys and values of each sequence to e4m3, with a scale for each row of a head, and appends them to a
// KV cache as append.cu does. A scale is the least power of two for which no quotient exceeds 448, so that division and
// multiplication by it are exact. Numbers below 2^-126 count as 0, and numbers above 1.875 2^127 count as 1.875 2^127:
// for those, the next FP8 number times the scale would be infinite. A row that contains NaN or an infinity becomes NaN.
#include <attention/append_work.cuh>
#include <attention/cache_scales.cuh>
#include <tile/e4m3.cuh>

namespace cuflash::cache {

using attention::Append;
using attention::CachePages;
using attention::CacheScales;
using attention::Matrices;
using attention::NewRows;
using Element = Config::Element;

constexpr int kThreads = 32 * Config::kNumWarps;
constexpr int kColumnsOfLane = 8;  // rows have at most 256 columns
constexpr uint32_t kLastExponent = 127 + 120;  // biased exponent of the largest scale: 256 2^120 exceeds float's range

// A row of keys or values of one head in the registers of a warp: a lane holds every 32nd column.
class Row {
 public:
  // Load a row; columns past the last one are 0.
  CUFLASH_DEVICE void load(const Matrices& from, int sequence, int head, int row, int num_columns) {
    const auto data = attention::matrix<Element>(from, {{sequence}, 0, head}, head, 0, 0);
#pragma unroll
    for (int c = 0; c < kColumnsOfLane; ++c) {
      const int column = 32 * c + ptx::lane();
      const float x = column < num_columns ? tile::to_accumulator(data.at(row, column)) : 0;
      const uint32_t bits = __float_as_uint(x);
      x_[c] = bits & 0x7f800000u ? x : __uint_as_float(bits & 0x80000000u);
    }
  }
  CUFLASH_DEVICE void store(const Matrices& to, const Matrices& scales, int page, int head, int row,
                            int num_columns) const {
    const attention::BatchHead place{{page}, 0, head};
    const auto data = attention::matrix<ptx::Float8E4M3>(to, place, head, 0, 0);
    const uint32_t largest = largest_bits();
    const bool is_finite = largest < 0x7f800000u;
    // If the mantissa exceeds that of 448 = 1.75 2^8, the sum carries into the exponent.
    const uint32_t exponent = max((largest + 0x1fffffu) >> 23, 9u) - 8;
    const float inverse = __uint_as_float((254 - exponent) << 23);
    const float most = exponent == kLastExponent ? 240.0f : 448.0f;
#pragma unroll
    for (int c = 0; c < kColumnsOfLane; ++c) {
      const int column = 32 * c + ptx::lane();
      if (column < num_columns)
        data.at(row, column) =
            is_finite ? tile::to_e4m3(fmaxf(-most, fminf(x_[c] * inverse, most))) : ptx::Float8E4M3{0x7f};
    }
    const uint32_t scale = !is_finite ? 0x7fc00000u : largest == 0 ? 0x3f800000u : exponent << 23;
    if (ptx::lane() == 0) attention::matrix<float>(scales, place, head, 0, 0).at(row, 0) = __uint_as_float(scale);
  }

 private:
  // Return the bits of the largest magnitude. The bits of nonnegative floats are ordered like the numbers, and those of
  // NaN are the largest.
  CUFLASH_DEVICE uint32_t largest_bits() const {
    uint32_t largest = 0;
#pragma unroll
    for (int c = 0; c < kColumnsOfLane; ++c) largest = max(largest, __float_as_uint(x_[c]) & 0x7fffffffu);
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2)
      largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
    return largest;
  }

  float x_[kColumnsOfLane];
};

// The keys or the values of one head.
struct Place {
  bool is_value;
  int head, num_columns;

  CUFLASH_DEVICE Place(const CachePages& cache, int number)
      : is_value(number >= cache.num_kv_heads), head(is_value ? number - cache.num_kv_heads : number),
        num_columns(is_value ? cache.value_dim : cache.head_dim) {}
};

}  // namespace cuflash::cache

extern "C" __global__ void __launch_bounds__(cuflash::cache::kThreads)
cache_append_e4m3(const __grid_constant__ cuflash::attention::Append params,
                  const __grid_constant__ cuflash::attention::CacheScales scales) {
  using namespace cuflash;
  using namespace cuflash::cache;
  const CachePages& cache = params.cache;
  const attention::DivMod at = attention::divmod(blockIdx.x, params.blocks_per_sequence);
  const int sequence = at.quotient, warp = at.remainder * Config::kNumWarps + threadIdx.x / 32;
  const int num_warps = params.blocks_per_sequence * Config::kNumWarps, num_places = 2 * cache.num_kv_heads;
  const NewRows rows = attention::new_rows(params, sequence, at.remainder);
  // Each warp takes one pair of row and place at a time, in order, and advances by the number of warps.
  attention::DivMod item = attention::divmod(warp, num_places);
  const attention::DivMod step = attention::divmod(num_warps, num_places);
  while (item.quotient < rows.num_rows) {
    const Place place(cache, item.remainder);
    const int position = rows.length + item.quotient, page = attention::page_of(cache, sequence, position);
    if (page == cache.num_pages) {
      if (item.remainder == 0 && ptx::lane() == 0) ptx::fetch_add(cache.num_faults, 1);
    } else {
      Row row;
      row.load(place.is_value ? params.v : params.k, sequence, place.head, item.quotient, place.num_columns);
      row.store(place.is_value ? cache.v : cache.k, place.is_value ? scales.v_scale : scales.k_scale, page, place.head,
                position % cache.page_size, place.num_columns);
    }
    item.quotient += step.quotient;
    item.remainder += step.remainder;
    if (item.remainder >= num_places) {
      item.remainder -= num_places;
      ++item.quotient;
    }
  }
  attention::set_length(params, sequence, rows);
}
