"""The softmax mass of every block; block selectors estimate this mass, and are judged by it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ..arrays import Array, ShapeDtype, describe, namespace, require_arrays
from ..calls._call import planned
from ..errors import UnsupportedProblem, collecting
from ..executors._bound_plan import EXECUTORS
from ..executors._layout_key import layout_key
from ..executors import checks, cpu_mass, gpu
from ..executors.launch import BoundPass, PassLayout
from ..keywords import explains_keywords
from ..masks.shape import block_pair
from ..planning._call_cache import CALLS
from ..planning.block_mass import mass_kernels, mass_shape, takes_turned_columns
from ..planning.chosen_lists import UnionWork
from ..planning.options import Causality, MaskLike, Options, ScoreLike
from ..planning.problem import reasons_without_v
from ..planning.spec import SIMT
from ..plans.conversion import as_arrays
from ..plans.fit import require_fit
from ..plans.plan import Plan

MAX_DIM = 4096  # largest head_dim; kernels sum scores over chunks of it


@np.errstate(all="ignore")
@explains_keywords
def block_mass(
    q: Array,
    k: Array,
    *,
    block: int | tuple[int, int],
    mask: MaskLike | None = None,
    causal: Causality = False,
    scale: float | None = None,
    score: ScoreLike | None = None,
    lse: Array | None = None,
    executor: str = "auto",
) -> Array:
    """Compute the softmax mass of each block of queries and keys, without storing the scores.

    Parameters
    ----------
    q, k : arrays
        Queries and keys, as in `attention`, except that head_dim may be up to 4096.
    block : int or (int, int)
        Block size in tokens, or block_q and block_kv; any size from 1.
    mask, causal, scale, score : optional
        As in `attention`.
    lse : array [..., num_heads, seqlen_q], optional
        The lse that `attention` returns with ``return_lse=True``; the weights are then exp(s - lse). By default the
        softmax is over the keys that the mask allows, and scores are computed twice unless tensor cores multiply them.
    executor : {"auto", "cpu", "gpu", "sim"}
        As in `attention`. Kernels multiply 16-bit elements on tensor cores if the compute capability is at least 8.0
        and blocks have at least 8 keys. Otherwise they multiply in float32, or in float64 if q is float64.

    Returns
    -------
    array [..., num_heads, num_q_blocks, num_kv_blocks]
        The weights of each query summed over the keys of a block, averaged over the queries of the block that attend a
        key; float64 if q is float64, otherwise float32. Rows sum to 1, or to 0 if no query of the block attends a key.
        With the lse of a larger mask they sum to the mean of `recall`'s mass.

    Raises
    ------
    TypeError
        q, k or lse is not an array, or `mask` is not a mask.
    UnsupportedProblem
        An argument is invalid. The error lists every reason.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q, k = np.random.default_rng(0).standard_normal((2, 4, 64, 16))
    >>> mass = cuflash.study.block_mass(q, k, block=16, causal=True)
    >>> mass.shape, bool(np.allclose(mass.sum(-1), 1)), float(mass[0, 0, 1])
    ((4, 4, 4), True, 0.0)
    """
    key = None
    if score is None:
        arrays = (q, k) if lse is None else (q, k, lse)
        options = Options(mask, causal, scale=scale, executor=executor)
        key = options.key(layout_key(*arrays), "block_mass", repr(block))
    bound = None if checks.is_on() else CALLS.get(key)
    if bound is not None:
        mass_plan, call = bound
        mass, *new_lses = call(*arrays)
        return _mean(mass, new_lses[0] if lse is None else lse, block_pair(block)[0], mass_plan.problem.seqlen_q)
    operands = as_arrays({"q": q, "k": k, "lse": lse})
    ready, sides = _planned(operands, block, mask, causal, scale, score, executor)
    problem = ready._plan.problem
    xp, lse = namespace(operands["q"]), operands.pop("lse")
    result = ShapeDtype(mass_shape(problem, sides), problem.accumulator)
    new_lse = ShapeDtype(problem.lse_shape(), problem.accumulator)
    if ready._plan.is_empty:
        return xp.zeros(result.shape, result.dtype)
    inputs = operands if lse is None else operands | {"lse": lse}
    outputs = {"mass": result, "lse": new_lse} if lse is None else {"mass": result}
    arrays_by_name = problem.keyed({**inputs, **ready._captured})
    if ready.executor == "cpu":
        results = [xp.zeros(output.shape, output.dtype) for output in outputs.values()]
        of_call = arrays_by_name | dict(zip(outputs, results))
        cpu_mass.block_mass(ready._plan, of_call, sides, has_lse=lse is not None)
    else:
        kernels = mass_kernels(ready._plan, sides, has_lse=lse is not None)
        mass_plan = replace(ready._plan, kernels=kernels)
        call = EXECUTORS[ready.executor].bind(mass_plan, PassLayout("forward", arrays_by_name, outputs, pins=True))
        if key is not None and not checks.is_on():
            CALLS.put(key, (mass_plan, call))
        check = checks.Check(xp, arrays_by_name) if checks.is_on() else None
        results = call(*arrays_by_name.values(), check=check)
    mass, *rest = results
    return _mean(mass, rest[0] if lse is None else lse, sides[0], problem.seqlen_q)


def require_served(q: Array, k: Array, scale: float, executor: str) -> None:
    """Raise the error of `block_mass` if it does not support an executor, the dtypes, head_dim or the scale.

    Raises
    ------
    UnsupportedProblem
        An argument is invalid. The error lists every reason.
    """
    _planned({"q": q, "k": k, "lse": None}, 1, None, False, scale, None, executor)


class BoundMass(NamedTuple):
    """The computation of block masses as one launch on the current GPU.

    Attributes
    ----------
    launches : BoundPass
        The launch, which takes the addresses of q, k and the results.
    results : dict of ShapeDtype by name
        "mass", the block masses times the number of queries in each block row that attend a key, and "lse".
    """

    launches: BoundPass
    results: dict[str, ShapeDtype]


def bound_block_mass(
    q: Array, k: Array, block: tuple[int, int], mask: MaskLike | None, scale: float, turned_columns: int = 0
) -> BoundMass | None:
    """Bind the computation of block masses to one launch on the current GPU, for arrays with the layouts of q and k.

    Parameters
    ----------
    q, k, block, mask, scale
        As in `block_mass`.
    turned_columns : int
        If not 0, the groups of `turned_columns` columns in each row of q are in reverse order: the last comes first.

    Returns
    -------
    BoundMass or None
        None if the problem is empty, or if no kernel supports such an order of columns.
    """
    ready, sides = _planned({"q": q, "k": k, "lse": None}, block, mask, False, scale, None, "gpu")
    plan = ready._plan
    problem = plan.problem
    if plan.is_empty or turned_columns and not takes_turned_columns(problem, plan.device, sides[1], turned_columns):
        return None
    kernels = mass_kernels(plan, sides, has_lse=False, turned_columns=turned_columns)
    outputs = {
        "mass": ShapeDtype(mass_shape(problem, sides), problem.accumulator),
        "lse": ShapeDtype(problem.lse_shape(), problem.accumulator),
    }
    layout = PassLayout("forward", {"q": q, "k": k}, outputs)
    return BoundMass(gpu.bound_pass(replace(plan, kernels=kernels), layout), outputs)


def _planned(
    operands: dict[str, Array], block: int | tuple[int, int], mask: MaskLike | None, causal: Causality,
    scale: float | None, score: ScoreLike | None, executor: str,
) -> tuple[Plan, tuple[int, int]]:
    """Check the arguments, and return the plan of a call with q's head_dim, and the block size in tokens."""
    q, k, lse = operands.values()
    require_arrays({"q": q, "k": k} if lse is None else operands)
    reasons: list[str] = []
    sides = (1, 1)
    with collecting(reasons):
        sides = block_pair(block)
    dim = int(q.shape[-1]) if q.ndim else 0
    has_dims = q.ndim >= 2 and k.ndim >= 2 and 1 <= dim <= MAX_DIM and k.shape[-1] == dim
    if q.ndim >= 2 and not 1 <= dim <= MAX_DIM:
        reasons.append(f"q's last axis (head_dim) must be 1..{MAX_DIM}; got shape {tuple(q.shape)}")
    elif q.ndim >= 2 and k.ndim >= 2 and k.shape[-1] != dim:
        reasons.append(f"k must have q's head_dim={dim} as its last axis; got shape {tuple(k.shape)}")
    ready, more_reasons = None, list[str]()
    # `planned` checks everything except head_dim. It receives the first column of q as q, and that of k as k and v.
    columns = [array[..., :1] if array.ndim >= 2 else array for array in (q, k)]
    arguments = columns[0], columns[1], columns[1]
    with collecting(more_reasons):
        of_dim = 1 / math.sqrt(dim) if scale is None and has_dims else scale
        options = Options(mask, causal, scale=of_dim, score=score, executor=executor)
        ready = planned(*arguments, options)
        if isinstance(ready._plan.work, UnionWork):  # kernels of masses walk lists, but not unions of queries' lists
            ready = planned(*arguments, options._replace(kernel=SIMT))
        arrays = dict(zip("qkv", arguments)) | dict(ready._captured)
        require_fit(ready._plan, ready.executor, "forward", arrays, {})
    reasons += reasons_without_v(more_reasons, q, k, arguments)
    if ready is not None:
        reasons += _lse_reasons(ready, q, lse) + _scale_reasons(ready)
    if reasons or ready is None:
        raise UnsupportedProblem(reasons)
    problem = replace(ready._plan.problem, head_dim=dim)
    sides = min(sides[0], max(problem.seqlen_q, 1)), min(sides[1], max(problem.seqlen_kv, 1))
    return replace(ready, _plan=replace(ready._plan, problem=problem)), sides


def _lse_reasons(ready: Plan, q: Array, lse: Array | None) -> list[str]:
    problem = ready._plan.problem
    if lse is None:
        return []
    is_right = lse.shape == problem.lse_shape() and lse.dtype == problem.accumulator and namespace(lse) is namespace(q)
    rule = f"lse must be on q's device, with shape {problem.lse_shape()} and dtype {problem.accumulator}"
    return [] if is_right else [f"{rule}; got {describe(lse)}: attention returns it with return_lse=True"]


def _scale_reasons(ready: Plan) -> list[str]:
    problem = ready._plan.problem
    if not any(problem.scaling[1:]):
        return []
    return [
        f"scale must have a magnitude from 2**-64 to 2**64 (2**-512 to 2**512 for float64); got "
        f"{describe(problem.softmax_scale)}: multiply q or k by a power of two"
    ]


def _mean(mass: Array, lse: Array, block_q: int, seqlen_q: int) -> Array:
    """Divide masses that are summed over the queries of a block by the number of queries that attend a key."""
    if block_q == 1:
        return mass
    xp, num_blocks = namespace(mass), mass.shape[-2]
    has_key = lse != -np.inf
    if seqlen_q % block_q:
        of_blocks = xp.zeros((*lse.shape[:-1], num_blocks * block_q), dtype=bool)
        of_blocks[..., :seqlen_q] = has_key
        has_key = of_blocks
    counts = has_key.reshape(*lse.shape[:-1], num_blocks, block_q).sum(axis=-1, dtype=mass.dtype)
    return mass / xp.maximum(counts, 1)[..., None]
