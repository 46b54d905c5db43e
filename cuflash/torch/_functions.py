"""Attention and its derivatives as functions that PyTorch differentiates and batches.

The derivatives of the four functions are again these functions:

- the tangent of `Attention` is `_Tangent` (pass "jvp"), its gradient `_Gradients` (pass "backward");
- the tangent of `_Gradients` is `_Second` (pass "backward_jvp"), and so is its gradient, except with respect to do:
  this gradient is `_Tangent`;
- the gradient of `_Tangent` is `_Gradients` with respect to tangents, and `_Second` with respect to the other arrays;
- `_Second` refuses: third derivatives are not supported.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NoReturn

import torch
from torch._C import _are_functorch_transforms_active as is_transforming
from torch._functorch.autograd_function import VmapInfo
from torch.autograd import Function
from torch.autograd.function import FunctionCtx, _SingleLevelFunction

from ..errors import UnsupportedProblem
from ..layouts import has_dual_level
from ._passes import Call
from ._operators import differentiate, run
from ._tensors import Axes, Outs, Results, Tensor, require_cotangents
from ._transformed import AnyCall, Transformed, run_pass


class Recorded(_SingleLevelFunction):
    """A call with gradients: PyTorch guards its saved tensors against in-place changes, and frees them.

    It is called outside of transformations of torch.func, so that PyTorch need not look for one at each call.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, call: Call, outs: Outs, *tensors: Tensor) -> Sequence[Tensor]:
        o, lse = call.forward(outs, *tensors)
        if outs[0] is not None or outs[1] is not None:
            o, lse = o.detach(), lse.detach()
        ctx.call = call
        ctx.save_for_backward(o, lse, *tensors)
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx: FunctionCtx, do: Tensor | None, dlse: Tensor | None) -> Results:
        return None, None, *_pulled_back(ctx, ctx.needs_input_grad[2:], do, dlse)


def _pulled_back(ctx: FunctionCtx, needed: Sequence[bool], do: Tensor | None, dlse: Tensor | None) -> Results:
    """Return the gradients of a call's tensors; None for operands without a gradient."""
    o, lse, *tensors = ctx.saved_tensors
    do = torch.zeros_like(o) if do is None else do
    call: AnyCall = ctx.call
    wrt = _named(call, needed)
    is_plain = not (torch.is_grad_enabled() or isinstance(call, Transformed) or is_transforming() or has_dual_level())
    try:
        if is_plain:  # no derivative of the gradients is needed
            results = run_pass(call, "backward", wrt, (*_resolved((do, dlse)), o, lse, *tensors))
        else:
            results = _Gradients.apply(call, wrt, do, dlse, o, lse, *tensors)
    except RuntimeError:
        require_cotangents(do=do, dlse=dlse)
        raise
    return _placed(call, wrt, results)


def _with_passes(kind: type[Function]) -> type[Function]:
    """Let a function with arguments (call, wrt, *tensors) run its pass, save its tensors for both modes, and batch it.

    A forward method of its own replaces the common one.
    """

    def forward(call: AnyCall, wrt: Sequence[str], *tensors: Tensor | None) -> Results:
        return tuple(run(call, kind.runs, wrt, _resolved(tensors)))

    def setup_context(ctx: FunctionCtx, inputs: Sequence[Tensor], output: Sequence[Tensor]) -> None:
        ctx.call, ctx.wrt, *tensors = inputs
        if kind.saves_results:
            tensors = [*output, *tensors]
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.set_materialize_grads(False)

    def vmap(
        info: VmapInfo, in_dims: Axes, call: AnyCall, wrt: Sequence[str], *tensors: Tensor
    ) -> tuple[Results, Axes]:
        if not isinstance(call, Transformed):
            fix = "make the call inside torch.vmap, or differentiate it with torch.func.vjp"
            raise UnsupportedProblem([f"gradients of a call outside of torch.vmap must not be batched: {fix}"])
        results = call.batched(
            kind.runs, info.batch_size, tensors, in_dims[2:], wrt, lambda *each: kind.apply(call, wrt, *each)
        )
        return results, (0,) * len(results)

    if "forward" not in vars(kind):
        kind.forward = staticmethod(forward)
    kind.setup_context, kind.vmap = staticmethod(setup_context), staticmethod(vmap)
    return kind


@_with_passes
class Attention(Function):
    """A call whose tensors have tangents, or are those of a transformation of torch.func."""

    runs, saves_results = "forward", True

    @staticmethod
    def forward(call: Transformed, wrt: Sequence[str], *tensors: Tensor) -> Results:
        o, lse = run(call, "forward", (), tensors)
        return o, lse

    @staticmethod
    def backward(ctx: FunctionCtx, do: Tensor | None, dlse: Tensor | None) -> Results:
        return None, None, *_pulled_back(ctx, ctx.needs_input_grad[2:], do, dlse)

    @staticmethod
    def jvp(ctx: FunctionCtx, call: None, wrt: None, *dots: Tensor | None) -> Results:
        o, lse, *tensors = ctx.saved_tensors
        # Autocast may change the dtype of a tangent.
        dots = tuple(None if dot is None else dot.to(tensor.dtype) for dot, tensor in zip(dots, tensors))
        results: Results = _Tangent.apply(ctx.call, (), o, lse, *tensors, *dots)
        return results


@_with_passes
class _Tangent(Function):
    """The tangents of o and lse: a function of o, lse, the call's tensors and their tangents."""

    runs, saves_results = "jvp", True

    @staticmethod
    def backward(ctx: FunctionCtx, u: Tensor | None, u_lse: Tensor | None) -> Results:
        call, (o_dot, lse_dot, o, lse, *both) = ctx.call, ctx.saved_tensors
        num = len(call.names)
        tensors, needed = both[:num], ctx.needs_input_grad[4:]
        u = torch.zeros_like(o) if u is None else u
        of_primals: Results = [None] * num
        if any(needed[:num]):
            wrt = _named(call, needed[:num])
            second = _Second.apply(call, wrt, u, u_lse, o, lse, o_dot, lse_dot, None, None, *both)
            of_primals = _placed(call, wrt, second)
        of_tangents: Results = [None] * num
        if any(needed[num:]):
            wrt = _named(call, needed[num:])
            of_tangents = _placed(call, wrt, _Gradients.apply(call, wrt, u, u_lse, o, lse, *tensors))
        present = (each if dot is not None else None for each, dot in zip(of_tangents, both[num:]))
        return None, None, None, None, *of_primals, *present

    @staticmethod
    def jvp(ctx: FunctionCtx, *dots: Tensor | None) -> NoReturn:
        fix = "take torch.func.jvp of torch.func.grad, or finite differences of the tangent"
        rule = "attention must not have a tangent of its tangent, which no pass computes; got one"
        raise UnsupportedProblem([f"{rule}: {fix}"])


@_with_passes
class _Gradients(Function):
    """The gradients of q, k, v and the operands in `wrt`: a function of do, dlse, o, lse and the call's tensors."""

    runs, saves_results = "backward", False

    @staticmethod
    def backward(ctx: FunctionCtx, *cotangents: Tensor | None) -> Results:
        call, (do, dlse, o, lse, *tensors) = ctx.call, ctx.saved_tensors
        if all(each is None for each in cotangents):
            return (None,) * len(ctx.needs_input_grad)
        dots = _placed(call, ctx.wrt, cotangents)
        o_dot, lse_dot = _Tangent.apply(call, (), o, lse, *tensors, *dots)
        needed = ctx.needs_input_grad[6:]
        of_tensors: Results = [None] * len(tensors)
        if any(needed):
            wrt = _named(call, needed)
            second = _Second.apply(call, wrt, do, dlse, o, lse, o_dot, lse_dot, None, None, *tensors, *dots)
            of_tensors = _placed(call, wrt, second)
        return None, None, o_dot, None if dlse is None else lse_dot, None, None, *of_tensors

    @staticmethod
    def jvp(
        ctx: FunctionCtx, call: None, wrt: None, do_dot: Tensor | None, dlse_dot: Tensor | None, o_dot: Tensor,
        lse_dot: Tensor, *dots: Tensor | None,
    ) -> Results:  # fmt: skip
        do, dlse, o, lse, *tensors = ctx.saved_tensors
        if all(dot is None for dot in dots):  # linear in do and dlse
            do_dot = torch.zeros_like(do) if do_dot is None else do_dot
            results: Results = _Gradients.apply(ctx.call, ctx.wrt, do_dot, dlse_dot, o, lse, *tensors)
            return results
        dlse = torch.zeros_like(lse) if dlse is None and dlse_dot is not None else dlse
        results = _Second.apply(
            ctx.call, ctx.wrt, do, dlse, o, lse, o_dot, lse_dot, do_dot, dlse_dot, *tensors, *dots
        )  # fmt: skip
        return results


@_with_passes
class _Second(Function):
    """The tangents of gradients: a function of all tensors of the other passes and of their tangents."""

    runs, saves_results = "backward_jvp", False

    @staticmethod
    def backward(ctx: FunctionCtx, *cotangents: Tensor | None) -> NoReturn:
        _refuse_third()

    @staticmethod
    def jvp(ctx: FunctionCtx, *dots: Tensor | None) -> NoReturn:
        _refuse_third()


def _refuse_third() -> NoReturn:
    fix = "take finite differences of the second, and leave torch.autograd.forward_ad.dual_level before backward"
    raise UnsupportedProblem([f"attention must be differentiated at most twice; got a third derivative: {fix}"])


def _resolved(tensors: Iterable[Tensor | None]) -> list[Tensor | None]:
    """Return tensors in memory: PyTorch may postpone a negation, and derivatives that are 0 may have no memory."""
    return [
        tensor if tensor is None else tensor.clone() if tensor._is_zerotensor() else tensor.resolve_neg()
        for tensor in tensors
    ]


def _named(call: AnyCall, needed: Sequence[bool]) -> tuple[str, ...]:
    """Return the names of the operands that need gradients."""
    return tuple([name for name, is_needed in zip(call.names[3:], needed[3:]) if is_needed])


def _placed(call: AnyCall, wrt: Sequence[str], results: Results) -> Results:
    """Return results for q, k, v and the operands in `wrt` in the order of the call's tensors, with None for others."""
    by_name = dict(zip(wrt, results[3:]))
    return [*results[:3], *[by_name.get(name) for name in call.names[3:]]]


differentiate({"forward": Attention, "jvp": _Tangent, "backward": _Gradients, "backward_jvp": _Second})
