"""Calls under PyTorch's transformations, which are planned when tensors hold data, and batched by one more axis."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import nullcontext
from copy import copy
from typing import Any, TypeAlias

import torch
from torch._C._functorch import is_functionaltensor

from ..arrays import ShapeDtype, describe, is_array
from ..calls._call import composed_score
from ..calls._call_text import call_text, parsed_call
from ..calls._forward import with_one_score
from ..dropout import Dropout
from ..errors import refuse
from ..executors import checks, torch_gpu
from ..layouts import dtype_of, is_tensor, tensor_reasons
from ..masks.arrays import reads_numbers
from ..masks.base import Mask
from ..planning.dropout_launches import SEED
from ..planning.options import DOT, Options
from ..scores import Score
from ._mask_parts import MASK, MaskOfTensors
from ._passes import Call, OnGpu, looked_up_call, ran
from ._tensors import NEW, Axes, Tensor, own_integers

_ALIGNED = ("sink", "bias")  # operands whose batch axes, if any, are aligned to the last ones of q, k and v


class Transformed:
    """A call without its tensors, which may have tangents, or belong to a transformation or a batch.

    Attributes
    ----------
    names : tuple of str
        The names of the tensors: q, k, v, operands and, within compiled code, a mask or those of one.
    draws : tuple of int, or of torch.SymInt
        The seed, as a signed integer, and the offset of a dropout, if they are inputs of a graph.
    name : str, optional
        The name by which operators find the call.
    is_traced : bool
        True if a recorded graph runs the call repeatedly, so that nothing of one run is that of the next.
    """

    def __init__(self, names: tuple[str, ...], options: Options) -> None:
        self.names, self._options = names, options
        self.draws: Sequence[int] = ()
        self.name: str | None = None
        self.is_traced = False
        self._calls: dict[Hashable, Call] = {}

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Transformed, list[Tensor]]:
        """Split the arguments of a call into tensors and everything else.

        Raises
        ------
        TypeError
            q, k or v is not a tensor.
        """
        tensors = {"q": q, "k": k, "v": v}
        operands = {"sink": options.sink, "bias": options.bias}
        score = options.score
        if isinstance(score, Score):
            operands |= score.arrays
            shapes = {name: _without_data(array) for name, array in score.arrays.items()}
            score = score._with_arrays(shapes)
        tensors |= {name: each for name, each in operands.items() if is_tensor(each)}
        reasons = list[str]()
        dropout = options.dropout
        if isinstance(dropout, Dropout) and is_tensor(dropout.seed):
            tensors[SEED], dropout = dropout.seed, Dropout(dropout.p, 0, dropout.offset)
        for name, tensor in tensors.items():
            if not is_tensor(tensor):
                fix = "convert it with torch.as_tensor"
                raise TypeError(f"{name} must be a torch.Tensor; got {describe(tensor)}: {fix}")
            if is_functionaltensor(tensor):
                reasons += tensor_reasons(name, tensor)
        refuse(reasons)
        without = {name: _without_data(getattr(options, name)) for name in _ALIGNED}
        return cls(tuple(tensors), options._replace(score=score, dropout=dropout, **without)), [*tensors.values()]

    def drawing(self, *draws: int) -> Transformed:
        """Return the call with another seed and offset."""
        twin = copy(self)
        twin.draws = draws
        return twin

    @property
    def text(self) -> str:
        """A text that `read` converts to an equal call; it does not depend on lengths.

        Raises
        ------
        TypeError, UnsupportedProblem
            The call holds arrays or functions, or it is invalid.
        """
        score, parts = self._options.score, tuple[Any, ...]()
        if callable(score):
            score = score if isinstance(score, Score) else Score(score)
            parts = score._traced, *(array for name, array in score.arrays.items() if name not in self.names)
        sink, bias = (None if name in self.names else getattr(self._options, name) for name in _ALIGNED)
        score = None if parts else score
        return call_text((self.names, self._options._replace(score=score, sink=sink, bias=bias), parts))

    @classmethod
    def read(cls, text: str) -> Transformed:
        """Return the call that a text describes; its tensors must be passed to each pass."""
        names, options, parts = parsed_call(text, Options, MaskOfTensors)
        call = cls(names, options._replace(score=Score._of_trace(*parts)) if parts else options)
        call.name, call.is_traced = text, True
        return call

    def forward(self, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        """Compute o and lse of tensors with data."""
        if torch_gpu.is_elsewhere(tensors[0]):
            with torch_gpu.within(tensors[0]):
                return self.forward(*tensors)
        arrays, key = dict(zip(self.names, tensors)), (_layout(tensors), ())
        call = self._calls.get(key)
        if isinstance(call, OnGpu) and arrays.keys() >= {*call.names} and not checks.is_on():
            o, lse = call.forward(NEW, *(arrays[name] for name in call.names))
            return o, lse
        named, options = self._with_one_score(arrays, ())
        call, o, lse = ran(named, NEW, options, True)
        self._keep(key, call)
        return o, lse

    def on(self, tensors: dict[str, Tensor], wrt: Sequence[str]) -> Call:
        """Return the call on tensors with data, with gradients of the operands that `wrt` names."""
        key = _layout(tensors.values()), tuple(wrt)
        call = self._calls.get(key)
        if call is None:
            named, options = self._with_one_score(tensors, wrt)
            call = looked_up_call(named, NEW, options, True)
            self._keep(key, call)
        return call

    def _keep(self, key: Hashable, call: Call) -> None:
        """Keep a call for later passes, unless it contains values of a mask that the next run of a graph replaces."""
        if not self.is_traced or isinstance(call, OnGpu) and not isinstance(self._options.mask, MaskOfTensors):
            self._calls[key] = call

    def _with_one_score(self, tensors: dict[str, Tensor], wrt: Sequence[str]) -> tuple[dict[str, Tensor], Options]:
        """Return the tensors and options of a call whose softcap, bias and score are one Score over tensors."""
        options = self._options
        own = {name: tensors.get(name, getattr(options, name)) for name in _ALIGNED}
        score = options.score
        if isinstance(score, Score):
            arrays = {name: tensors.get(name, array) for name, array in score.arrays.items()}
            score = score._with_arrays(arrays)
        dropout = options.dropout
        if isinstance(dropout, Dropout):
            seed, offset = self.draws or (dropout.seed, dropout.offset)
            options = options._replace(dropout=Dropout(dropout.p, tensors.get(SEED, seed % (1 << 64)), offset))
        mask = tensors.get(MASK, options.mask)
        if isinstance(mask, MaskOfTensors):
            with torch_gpu.stream() if tensors["q"].is_cuda else nullcontext():
                mask = mask.over(tensors)
        options, operands = with_one_score(options._replace(mask=mask, score=score, wrt=tuple(wrt), **own))
        operands = {name: own_integers(name, each, tensors["q"]) for name, each in operands.items()}
        return {name: tensors[name] for name in ("q", "k", "v")} | operands, options

    def batched(
        self, name: str, size: int, inputs: Sequence[Tensor], in_dims: Axes, wrt: Sequence[str],
        apply: Callable[..., Sequence[Tensor]],
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Run a pass on a batch of calls: as one call with one more leading axis if the results are the same.

        Parameters
        ----------
        name : str
            The pass.
        size : int
            The number of calls.
        inputs : sequence of tensors
            The tensors of the pass; None for those that are absent.
        in_dims : sequence of int or None
            The mapped axis of each tensor; None for a tensor that all calls share.
        wrt : sequence of str
            The names of operands with gradients.
        apply : callable
            Runs the pass on tensors in the order of `inputs`.
        """
        names = names_of(name, self)
        tensors, axes = dict(zip(names, inputs)), dict(zip(names, in_dims))
        others = {each for each in self.names[3:] if each not in _ALIGNED}
        mapped = {each.removesuffix(DOT) for each, axis in axes.items() if axis is not None}
        if self._reads_batch_entries or others & (mapped | set(wrt)):
            alone = [apply(*(_entry(tensors[each], axes[each], n) for each in tensors)) for n in range(size)]
            return tuple(map(torch.stack, zip(*alone)))
        front = {
            each: _at_front(tensor, axes[each], size) if each.removesuffix(DOT) not in others else tensor
            for each, tensor in tensors.items()
        }
        rank = max(3, *(front[each].ndim - 1 for each in ("q", "k", "v")))
        ranks = dict.fromkeys(("q", "k", "v", "o", "do", "bias"), rank) | {"lse": rank - 1, "dlse": rank - 1}
        ranks["sink"] = rank - 2
        aligned = [
            tensor if tensor is None or each.removesuffix(DOT) not in ranks
            else _of_rank(tensor, 1 + ranks[each.removesuffix(DOT)])
            for each, tensor in front.items()
        ]  # fmt: skip
        has_heads = any(front[each].ndim > 3 for each in ("q", "k", "v"))
        results = dict(zip(results_of(name, wrt), apply(*aligned)))
        if not name.startswith("backward"):
            return tuple(result if has_heads else result.squeeze(1) for result in results.values())
        return tuple(result.reshape(front[of].shape) for of, result in results.items())

    @property
    def _reads_batch_entries(self) -> bool:
        """True if results depend on the number of a batch entry, which one more leading axis changes."""
        options = self._options
        composed = composed_score(options._replace(bias=None))
        reads_b = composed is not None and any(each.op == "b" for each in composed.program.instructions)
        return reads_b or options.dropout is not None or not _is_uniform(options.mask)


AnyCall: TypeAlias = Call | Transformed


def names_of(name: str, call: AnyCall) -> tuple[str, ...]:
    """Return the names of the tensors that a pass reads, in the order of its autograd function."""
    if name == "forward":
        return call.names
    if name == "backward":
        return "do", "dlse", "o", "lse", *call.names
    dots = [f"{each}{DOT}" for each in call.names]
    if name == "jvp":
        return "o", "lse", *call.names, *dots
    of_results = (f"{each}{DOT}" for each in ("o", "lse", "do", "dlse"))
    return "do", "dlse", "o", "lse", *of_results, *call.names, *dots


def results_of(name: str, wrt: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the tensors that have the shapes of a pass's results."""
    return ("q", "k", "v", *wrt) if name.startswith("backward") else ("o", "lse")


def run_pass(call: AnyCall, name: str, wrt: Sequence[str], tensors: Sequence[Tensor | None]) -> Sequence[Tensor]:
    """Run a pass on tensors in the order of `names_of`; gradients are those of q, k, v and `wrt`."""
    if isinstance(call, Transformed) and name == "forward":
        return call.forward(*(tensor.detach() for tensor in tensors if tensor is not None))
    arrays = {each: tensor for each, tensor in zip(names_of(name, call), tensors) if tensor is not None}
    if torch_gpu.is_elsewhere(arrays["q"]):
        with torch_gpu.within(arrays["q"]):
            return run_pass(call, name, wrt, tensors)
    if isinstance(call, Transformed):
        call = call.on({each: arrays[each] for each in call.names}, wrt)
        arrays = {each: tensor for each, tensor in arrays.items() if not each.startswith(MASK)}
    results = call.run(name, arrays)
    if name == "jvp" or len(results) == 3 + len(wrt):
        return results
    by_name = dict(zip(call.wrt, results[3:]))
    return *results[:3], *(by_name[each] for each in wrt)


def _is_uniform(mask: object) -> bool:
    """True if one more leading batch axis does not change the elements of a mask's batch entries."""
    if not isinstance(mask, Mask):
        return mask is None or is_tensor(mask) or is_array(mask)
    return not reads_numbers(mask)


def _layout(tensors: Iterable[Tensor]) -> Hashable:
    return tuple([(each.shape, each.stride(), each.dtype, each.device, each.is_neg()) for each in tensors])


def _without_data(array: Any) -> Any:
    """Return a tensor as its shape and dtype; any other value unchanged."""
    return ShapeDtype(tuple(array.shape), dtype_of(array)) if is_tensor(array) else array


def _entry(tensor: Tensor, axis: int | None, number: int) -> Tensor:
    """Return one entry of a mapped tensor; other values unchanged."""
    return tensor if axis is None else tensor.select(axis, number)


def _at_front(tensor: Tensor, axis: int | None, size: int) -> Tensor:
    """Return a tensor whose leading axis is the mapped one; a tensor that all calls share is not copied."""
    if tensor is None:
        return None
    return tensor.expand(size, *tensor.shape) if axis is None else tensor.movedim(axis, 0)


def _of_rank(tensor: Tensor, rank: int) -> Tensor:
    """Return a tensor with further axes of length 1 after its leading axis."""
    return tensor[(slice(None), *[None] * (rank - tensor.ndim))]
