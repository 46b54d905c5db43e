"""Attention as operators of PyTorch's dispatcher, for compilers and modes that trace or count operators.

An operator gets the tensors of a call, the seed and offset of its dropout, and the name of a `Transformed`, which has
everything else: its text, which every process can read, or, for calls that no text can hold, a number that only this
process knows. Eager calls do not use these operators.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import count
from secrets import token_hex
from types import new_class
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch._C import (
    _are_functorch_transforms_active as is_transforming, _AutoDispatchBelowAutograd as _below_autograd,
    _len_torch_dispatch_stack as num_modes,
)  # fmt: skip
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch._C._functorch import is_functorch_wrapped_tensor as is_wrapped
from torch._functorch.autograd_function import VmapInfo
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd.function import Function, _SingleLevelFunction

from ..blocks.index import BlockIndex
from ..dropout import Dropout
from ..errors import UnsupportedProblem
from ..keywords.answers import UNTRACED
from ..layouts import dense_strides, has_dual_level
from ..masks.base import Mask
from ..masks.content import UNCHECKED
from ..planning.dropout_launches import SEED
from ..planning.options import Options
from ..plans import Plan
from ..scores import Score
from ._mask_parts import MASK, MaskOfTensors, Parts, constant, parts_of, trace_masks
from ._tensors import Axes, Tensor, in_autocast
from ._transformed import AnyCall, Transformed, names_of, results_of, run_pass

_TAGS = (torch.Tag.needs_exact_strides,)
_NAMESPACE = __name__.partition(".")[0]  # so that another copy of the library has operators of its own
_LIBRARY = torch.library.Library(_NAMESPACE, "DEF")
_LIBRARY.define("forward(Tensor[] tensors, SymInt[] draws, str call) -> (Tensor, Tensor)", tags=_TAGS)
_LIBRARY.define(
    "derivative(str name, Tensor?[] tensors, str[] wrt, SymInt[] draws, str call) -> Tensor[]", tags=_TAGS
)  # fmt: skip
_OPERATORS = getattr(torch.ops, _NAMESPACE)

_HERE = f"call of process {token_hex(16)}, number "
_numbers = count()
_calls: WeakValueDictionary[str, Transformed] = WeakValueDictionary()
_traced: list[Transformed] = []  # keeps traced calls alive, since graphs hold only their names


def name_of(call: Transformed, is_traced: bool) -> str:
    """Return the name by which operators find a call while it exists; a traced call has a text, or is kept forever."""
    if is_traced and not call.is_traced:
        call.is_traced = True
        try:
            call.name = call.text
        except (TypeError, RecursionError, UnsupportedProblem):
            _traced.append(call)
    if call.name is None:
        call.name = f"{_HERE}{next(_numbers)}"
        _calls[call.name] = call
    return call.name


def _call(name: str, draws: Sequence[int] = ()) -> Transformed:
    """Return the call with a name, which draws the weights of a seed and an offset.

    Raises
    ------
    UnsupportedProblem
        The name is that of another process.
    """
    call = _read(name) if name.startswith("[") else _calls.get(name)
    if call is None:
        fix = "use Score, or masks in closed form, and export again"
        raise UnsupportedProblem([f"the call holds Python functions or arrays, which torch.export cannot save: {fix}"])
    return call.drawing(*draws) if draws else call


_read = lru_cache(maxsize=1024)(Transformed.read)


def run(call: AnyCall, name: str, wrt: Sequence[str], tensors: Sequence[Tensor | None]) -> Sequence[Tensor]:
    """Run a pass on tensors in the order of `names_of`; modes of PyTorch's dispatcher see one operator."""
    if not isinstance(call, Transformed) or not _are_traced(tensors):
        return run_pass(call, name, wrt, tensors)
    text = name_of(call, _has_proxies())
    with torch.enable_grad(), _below_autograd():  # transformations below this one still differentiate
        return _operator(name, tensors, wrt, call.draws, text)


def _operator(
    name: str, tensors: Sequence[Tensor | None], wrt: Sequence[str], draws: Sequence[int], call: str
) -> Sequence[Tensor]:
    """Call the operator of a pass."""
    results: Sequence[Tensor]
    if name == "forward":
        results = _OPERATORS.forward(list(tensors), draws, call)
    else:
        results = _OPERATORS.derivative(name, list(tensors), list(wrt), draws, call)
    return results


def _implement(kernel: Callable[..., Sequence[Tensor]], key: str) -> None:
    """Register a function as the implementation of both operators for a key of the dispatcher, or for fake tensors."""

    def forward(tensors: Sequence[Tensor], draws: Sequence[int], call: str) -> tuple[Tensor, ...]:
        return tuple(kernel("forward", tensors, (), draws, call))

    def derivative(
        name: str, tensors: Sequence[Tensor | None], wrt: Sequence[str], draws: Sequence[int], call: str
    ) -> list[Tensor]:
        return list(kernel(name, tensors, wrt, draws, call))

    for function in (forward, derivative):
        if key == "fake":
            torch.library.register_fake(f"{_NAMESPACE}::{function.__name__}", function, lib=_LIBRARY)
        else:
            _LIBRARY.impl(function.__name__, function, key)


def differentiate(functions: dict[str, type[Function]]) -> None:
    """Register the autograd functions of passes, by name, as the derivatives of the operators."""
    single = {name: _of_one_level(function) for name, function in functions.items()}

    def recorded(
        name: str, tensors: Sequence[Tensor | None], wrt: Sequence[str], draws: Sequence[int], call: str
    ) -> Sequence[Tensor]:
        if _is_differentiated():
            with enable_single_level_autograd_function():
                results: Sequence[Tensor] = single[name].apply(_call(call, draws), tuple(wrt), *tensors)
                return results
        with _below_autograd():
            return _operator(name, tensors, wrt, draws, call)

    _implement(recorded, "Autograd")


def _is_differentiated() -> bool:
    """True if something may differentiate an operator; passes of compiled functions save an autograd function."""
    return torch.is_grad_enabled() or has_dual_level() or is_transforming()


def _of_one_level(function: type[Function]) -> type[_SingleLevelFunction]:
    """Return a function that does not enter again the transformation to which the dispatcher has descended."""
    own = {name: vars(function)[name] for name in ("forward", "setup_context", "backward", "jvp")}
    return new_class(function.__name__, (_SingleLevelFunction,), exec_body=lambda body: body.update(own))


def _has_proxies() -> bool:
    """True if a tracer such as `make_fx` is recording a graph that will run later."""
    module = sys.modules.get("torch.fx.experimental.proxy_tensor")
    return module is not None and module.get_proxy_mode() is not None


def _are_traced(tensors: Sequence[Tensor | None]) -> bool:
    """True if a mode sees operators, or tensors have no data, as while a function is compiled."""
    if num_modes():
        return True
    fake = getattr(sys.modules.get("torch._subclasses.fake_tensor"), "FakeTensor", ())
    return any(each is not None and (is_wrapped(each) or isinstance(each, fake)) for each in tensors)


def compiled(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor] | None:
    """Compute o and lse within `torch.compile`, which traces this function; None for a mask that no graph holds."""
    tensors: dict[str, Tensor] = dict(zip(("q", "k", "v"), in_autocast(q, k, v)))
    mask, causal, window, scale, score, softcap, bias, sink, dropout, _, *words = options[:-2]  # neither has a value
    draws: tuple[int, ...] = ()
    drops: Any = dropout
    if isinstance(dropout, Dropout):
        seed, offset, drops = dropout.seed, dropout.offset, dropout.p
        if isinstance(seed, torch.Tensor):
            tensors[SEED], seed = seed, 0
        draws = seed if seed < 1 << 63 else seed - (1 << 64), offset
    if isinstance(mask, torch.Tensor):
        tensors[MASK], mask = mask, None
    of_mask: dict[str, Tensor] = {}
    parts = parts_of(mask, of_mask) if isinstance(mask, Mask) else None
    if parts is not None:
        tensors.update(of_mask)
    elif isinstance(mask, Mask) and getattr(mask, UNCHECKED, False):
        return None
    if sink is not None:
        tensors["sink"] = sink
    if bias is not None:
        tensors["bias"] = bias
    if isinstance(score, Score):
        for name, array in score.arrays.items():
            if isinstance(array, torch.Tensor):
                tensors[name] = array
    mask_id = id(mask) if parts is None and isinstance(mask, (Mask, BlockIndex)) else 0
    score_id = id(score) if isinstance(score, Score) else 0
    mask, score = None if parts or mask_id else mask, None if score_id else score
    values = [constant(each) for each in (causal, window, scale, score, softcap, drops, len(draws) > 0, *words)]
    name = _named(tuple(tensors), mask_id, score_id, mask, parts, *values)
    o, lse = _OPERATORS.forward(list(tensors.values()), draws, name)
    return o, lse


def _named(
    names: tuple[str, ...], mask_id: int, score_id: int, mask: Any, parts: Parts | None, causal: Any, window: Any,
    scale: Any, score: Any, softcap: Any, dropout: Any, has_draws: bool, *words: Any,
) -> str:  # fmt: skip
    """Return the name of a call while its function is compiled; its arguments become constants of the graph.

    Masks and scores are passed by `id`, 0 for none: until version 2.13, PyTorch took no such objects as constants.
    """
    mask, score = _object_at(mask_id, mask), _object_at(score_id, score)
    if parts:
        mask = MaskOfTensors(parts)
        with suppress(UnsupportedProblem):  # which the call raises when it runs
            mask = mask if any(name.startswith(MASK) for name in names) else mask.over({})
    dropout = Dropout(dropout, seed=0) if has_draws else dropout
    options = Options(mask, causal, window, scale, score, softcap, None, None, dropout, (), *words)
    return name_of(Transformed(names, options), is_traced=True)


def _object_at(address: int, other: Any) -> Any:
    """Return the object with an `id`, which the compiled function has; the other value if it is 0."""
    return ctypes.cast(address, ctypes.py_object).value if address else other


_named._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as assume_constant_result, without its import
_SKIP = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)


def leave_to_python(*functions: Any) -> None:
    """Make `torch.compile` break its graph at functions, and trace neither them nor what they call."""
    for function in functions:
        vars(function).update(UNTRACED)  # as torch.compiler.disable does, but without its import
        set_code_exec_strategy(function.__code__, _SKIP)


def trace(*functions: Any) -> None:
    """Let `torch.compile` trace public calls; outside of a graph, it traces none."""
    for function in functions:
        function._torchdynamo_disable = False
        set_code_exec_strategy(function.__code__, _SKIP)  # all public calls share the code of one wrapper


leave_to_python(Score.__call__, Plan.forward, Plan.backward, Plan.jvp, Plan.backward_jvp)
trace_masks(trace)


def _executed(
    name: str, tensors: Sequence[Tensor | None], wrt: Sequence[str], draws: Sequence[int], call: str
) -> list[Tensor]:
    """Run a pass on tensors with data; results have the strides that the operator promises."""
    results = run_pass(_call(call, draws), name, wrt, tensors)
    promised = (strides for *_, strides in _promised(name, tensors, wrt, call, *_KNOWN))
    return [_with_strides(tensor, strides) for tensor, strides in zip(results, promised)]


def _promised(
    name: str, tensors: Sequence[Tensor | None], wrt: Sequence[str], call: str,
    shapes: Callable[..., tuple[tuple[int, ...], tuple[int, ...]]], dense: Callable[..., Sequence[int]],
) -> Iterator[tuple[Tensor, Sequence[int], Sequence[int]]]:  # fmt: skip
    """Yield, for each result of a pass, a tensor of its kind, its shape and its strides."""
    arrays = {each: x for each, x in zip(names_of(name, _call(call)), tensors) if x is not None}
    if name != "forward":
        likes = (arrays[of] for of in results_of(name, wrt))
        yield from ((like, like.shape, dense(like.is_cuda, like.shape, like.stride())) for like in likes)
        return
    q, k, v = (arrays[of] for of in ("q", "k", "v"))
    o, lse = shapes(q.shape, k.shape, v.shape)
    yield q, o, dense(q.is_cuda, q.shape, q.stride(), o)
    yield q, lse, dense_strides(lse)


def _with_strides(tensor: Tensor, strides: Sequence[int]) -> Tensor:
    """Return a tensor with the strides that the operator promises."""
    if tensor.stride() == tuple(strides):
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _shapes(q: Sequence[int], k: Sequence[int], v: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    lse = (*torch.broadcast_shapes(q[:-3], k[:-3], v[:-3]), *q[-3:-1])
    return (*lse, v[-1]), lse


def _dense(is_on_gpu: bool, shape: Sequence[int], strides: Sequence[int], of: Sequence[int] = ()) -> Sequence[int]:
    """Return strides of a result of a shape (default: the same) in the order of dense strides on a GPU, or in C order.

    Parameters
    ----------
    is_on_gpu : bool
    shape, strides : sequences of int
        Those of the tensor whose order in memory the result has.
    of : sequence of int
        The shape of the result.
    """
    of, last = tuple(of or shape), len(shape) - 1
    if not is_on_gpu or len(of) != len(shape):
        return dense_strides(of)
    axes = (*sorted(range(last), key=lambda axis: (-strides[axis], axis)), last)
    lies_so = zip(shape, strides, dense_strides(tuple(shape), axes))
    is_dense = all(extent == 1 or step == dense for extent, step, dense in lies_so)
    return dense_strides(of, axes if is_dense else None)


_KNOWN = lru_cache(maxsize=256)(_shapes), lru_cache(maxsize=256)(_dense)


def _fake(
    name: str, tensors: Sequence[Tensor | None], wrt: Sequence[str], draws: Sequence[int], call: str
) -> list[Tensor]:
    """Return results without data."""
    promised = _promised(name, tensors, wrt, call, _shapes, _dense)
    fakes = [like.new_empty_strided(shape, strides) for like, shape, strides in promised]
    wide = torch.float64 if fakes[0].dtype == torch.float64 else torch.float32
    return [fakes[0], fakes[1].to(wide)] if name == "forward" else fakes


def _batched(
    info: VmapInfo, axes: Axes, name: str, tensors: Sequence[Tensor | None], wrt: Sequence[str],
    draws: Sequence[int], call: str,
) -> tuple[tuple[Tensor, ...], Axes]:
    """Run a pass on a batch of tensors, whose mapped axes are `axes`."""

    def apply(*each: Tensor | None) -> Sequence[Tensor]:
        return _operator(name, each, wrt, draws, call)

    results = _call(call).batched(name, info.batch_size, tensors, axes, wrt, apply)
    return results, (0,) * len(results)


def _batched_forward(
    info: VmapInfo, in_dims: Sequence[Axes], tensors: Sequence[Tensor], draws: Sequence[int], call: str
) -> tuple[tuple[Tensor, ...], Axes]:
    return _batched(info, in_dims[0], "forward", tensors, (), draws, call)


def _batched_derivative(
    info: VmapInfo, in_dims: Sequence[Axes], name: str, *arguments: Any
) -> tuple[list[Tensor], list[int | None]]:
    results, axes = _batched(info, in_dims[1], name, *arguments)
    return [*results], [*axes]


_implement(_executed, "CompositeExplicitAutograd")
_implement(_fake, "fake")
torch.library.register_vmap(f"{_NAMESPACE}::forward", _batched_forward, lib=_LIBRARY)
torch.library.register_vmap(f"{_NAMESPACE}::derivative", _batched_derivative, lib=_LIBRARY)
