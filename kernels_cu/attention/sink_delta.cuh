#pragma once
#include <attention/sink.cuh>

namespace cuflash::attention {

// Return delta = rowsum(dO o O) - dlse of a query for the gradient of its head's sink, from the computed delta. In a
// row without a key, o is 0 and lse is the sink, so only dlse counts, whatever NaN and infinities dO contains. The same
// holds for a row whose keys have so little weight relative to the sink that o and lse round to these values.
template <class T>
CUFLASH_DEVICE T delta_beside_sink(
    const Params& params, const Sink& sink, const BatchHead& batch_head, int query, T delta) {
  if (delta == delta) return delta;
  const Shape& shape = params.shape;
  const auto lse = matrix<T>(params.lse, batch_head, batch_head.head, shape.seqlen_q, 1);
  if (lse.at(query, 0) != sink_logit<T>(sink, batch_head, batch_head.head)) return delta;
  const auto o = matrix<Config::Element>(params.o, batch_head, batch_head.head, shape.seqlen_q, shape.value_dim);
  for (int column = 0; column < shape.value_dim; ++column)
    if (tile::to_accumulator(o.at(query, column)) != 0) return delta;
  if (params.dlse.data == nullptr) return 0;
  return -matrix<T>(params.dlse, batch_head, batch_head.head, shape.seqlen_q, 1).at(query, 0);
}

}  // namespace cuflash::attention
