#pragma once
#include <attention/feature_argument.cuh>
#include <attention/softmax_simt.cuh>
#include <attention/tile_scheduler.cuh>

// Attention sinks: a logit per head that takes part in the head's softmax and has no value. A row (o, lse) that was
// computed without the sink is merged with (0, sink).
namespace cuflash::attention {

// A kernel argument, in kernels whose specification has a sink.
struct Sink {
  Matrices sink;  // one number per head
  Matrices dsink;  // its gradient: an accumulator if is_accumulator, else of type `dtype`
  int64_t dtype;
};
enum SinkDtype { kHalfSink, kBFloat16Sink, kFloatSink, kDoubleSink };

struct NoSink {};
template <class Config>
using SinkArgument = FeatureArgument<Config::kHasSink, Sink, NoSink>;
constexpr NoSink sink{};

// Return the number of a head from an array of one number per head.
template <class T>
CUFLASH_DEVICE T of_head(const Matrices& numbers, int64_t dtype, const BatchHead& batch_head, int head) {
  const auto of = [&](auto zero) {
    return static_cast<T>(tile::to_accumulator(matrix<decltype(zero)>(numbers, batch_head, head, 1, 1).at(0, 0)));
  };
  if (dtype == kHalfSink) return of(ptx::Half());
  if (dtype == kBFloat16Sink) return of(ptx::BFloat16());
  if (dtype == kDoubleSink) return of(double());
  return of(float());
}

// Return the sink of a head; -inf in kernels without a sink.
template <class T>
CUFLASH_DEVICE T sink_logit(const Sink& sink, const BatchHead& batch_head, int head) {
  return of_head<T>(sink.sink, sink.dtype, batch_head, head);
}
template <class T>
CUFLASH_DEVICE T sink_logit(NoSink, const BatchHead&, int) {
  return ptx::negative_infinity<T>();
}

// Return the weight of a logit relative to another: exp(logit - other).
template <class T>
CUFLASH_DEVICE T sink_weight(T logit, T other) {
  return ptx::exp2_accurate((logit - other) * T(kLog2E));
}

// Merge a row with its head's sink: update lse, and return the factor of o. A sink of -inf leaves both as they are.
template <class T>
CUFLASH_DEVICE T merge_sink(T& lse, T sink) {
  if (sink == ptx::negative_infinity<T>()) return 1;
  const T most = tile::maximum(lse, sink);
  const T weight = sink_weight(lse, most), total = weight + sink_weight(sink, most);
  lse = most + ptx::log_accurate(total);
  return weight / total;
}

// Compute dsink of the head that a block works on: minus the sum over queries of the sink's weight times delta. If
// heads or batch entries share an element of dsink, the block of the first one sums over all of them. `delta_of`
// returns the delta of a batch entry and head and a query. Each thread sums every Threads-th query; then the threads'
// sums are added in pairs in a fixed order, so that results are bitwise reproducible. `partial_sums` is shared memory
// for one number per thread.
template <class T, int Threads, class DeltaOf>
CUFLASH_DEVICE void sum_sink_gradient(const Params& params, const Sink& sink, T* partial_sums, DeltaOf delta_of) {
  const Shape& shape = params.shape;
  const BatchHead first = own_batch_head(params);
  const auto shared = [](int64_t stride, int extent) { return stride == 0 ? extent : 1; };
  const auto is_first = [](int64_t stride, int at) { return stride != 0 || at == 0; };
  bool is_own = is_first(sink.dsink.head_stride, first.head);
  int num_shared = shared(sink.dsink.head_stride, shape.num_heads);
  for (int axis = 0; axis < kBatchAxes; ++axis) {
    is_own &= is_first(sink.dsink.batch_strides[axis], first.batch[axis]);
    num_shared *= shared(sink.dsink.batch_strides[axis], shape.batch[axis]);
  }
  if (!is_own) return;

  T sum = 0;
  for (int number = 0; number < num_shared; ++number) {
    BatchHead batch_head = first;
    int rest = number;
    for (int axis = kBatchAxes - 1; axis >= 0; --axis) {
      const int extent = shared(sink.dsink.batch_strides[axis], shape.batch[axis]);
      batch_head.batch[axis] += rest % extent;
      rest /= extent;
    }
    batch_head.head += rest;
    const T logit = sink_logit<T>(sink, batch_head, batch_head.head);
    if (logit == ptx::negative_infinity<T>()) continue;
    const auto lse = matrix<T>(params.lse, batch_head, batch_head.head, shape.seqlen_q, 1);
    for (int row = threadIdx.x; row < shape.seqlen_q; row += Threads)
      sum += sink_weight(logit, lse.at(row, 0)) * delta_of(batch_head, row);
  }
  partial_sums[threadIdx.x] = sum;
  for (int half = Threads / 2; half > 0; half /= 2) {
    __syncthreads();  // the sums of the previous round are stored
    if (static_cast<int>(threadIdx.x) < half) partial_sums[threadIdx.x] += partial_sums[threadIdx.x + half];
  }
  if (threadIdx.x != 0) return;
  const auto write = [&](auto zero) {
    using To = decltype(zero);
    To& to = matrix<To>(sink.dsink, first, first.head, 1, 1).at(0, 0);
    if constexpr (sizeof(To) == sizeof(double)) to = -partial_sums[0];
    else tile::to_element(static_cast<float>(-partial_sums[0]), to);
  };
  if (sink.dsink.is_accumulator) write(T());
  else if (sink.dtype == kHalfSink) write(ptx::Half());
  else if (sink.dtype == kBFloat16Sink)
    matrix<ptx::BFloat16>(sink.dsink, first, first.head, 1, 1).at(0, 0) =
        ptx::bfloat16_by_integers(static_cast<float>(-partial_sums[0]));
  else if (sink.dtype == kDoubleSink) write(double());
  else write(float());
}

}  // namespace cuflash::attention
