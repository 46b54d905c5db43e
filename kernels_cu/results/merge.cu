// Merges finished results of attention over disjoint keys, as in FlashAttention-2 (arXiv 2307.08691, section 3.1): lse
// = log sum_p exp(lse_p), o = sum_p exp(lse_p - lse) o_p. The threads of a row divide its columns among themselves, and
// each adds the parts in their order. cuflash/merging.py is the specification.
#include <results/params.cuh>
#include <results/rounding.cuh>
#include <tile/element.cuh>

extern "C" __global__ void __launch_bounds__(cuflash::results::kThreads)
results_merge(const __grid_constant__ cuflash::results::Merge merge) {
  using namespace cuflash;
  using Accumulator = Config::Accumulator;
  using Element = Config::Element;
  constexpr int kColumns = 4;  // maximum number of columns per thread
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * results::kThreads + ptx::thread_index();
  const int64_t row = thread / merge.threads_per_row;
  const int first_column = static_cast<int>(thread % merge.threads_per_row);
  if (row >= merge.num_rows) return;
  const auto lse_of = [&](int part) { return static_cast<const Accumulator*>(merge.lses[part])[row]; };
  Accumulator shift = ptx::negative_infinity<Accumulator>(), total = 0, o[kColumns] = {};
  for (int part = 0; part < merge.num_parts; ++part) shift = tile::maximum(shift, lse_of(part));
  if (shift == ptx::negative_infinity<Accumulator>()) shift = 0;  // avoids -inf - (-inf), which is NaN
  for (int part = 0; part < merge.num_parts; ++part) {
    const Accumulator lse = lse_of(part), weight = ptx::exp_accurate(lse - shift);
    total += weight;
    if (lse == ptx::negative_infinity<Accumulator>()) continue;  // an empty part adds nothing, whatever it holds
    const Element* const out = static_cast<const Element*>(merge.outs[part]) + row * merge.num_columns;
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      const int column = first_column + n * merge.threads_per_row;
      if (column < merge.num_columns) o[n] += weight * tile::to_accumulator(out[column]);
    }
  }
  const bool is_empty = total == 0;
#pragma unroll
  for (int n = 0; n < kColumns; ++n) {
    const int column = first_column + n * merge.threads_per_row;
    if (column < merge.num_columns)
      results::round_to(is_empty ? Accumulator(0) : o[n] / total,
                        static_cast<Element*>(merge.o)[row * merge.num_columns + column]);
  }
  if (first_column == 0)
    static_cast<Accumulator*>(merge.lse)[row] =
        is_empty ? ptx::negative_infinity<Accumulator>() : shift + ptx::log_accurate(total);
}
