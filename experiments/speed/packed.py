"""How fast are packed sequences and windows, compared with other libraries' kernels?

    python -m experiments packed                                            # all cases and libraries
    python -m experiments packed --cases mixed,window --peers torch_flash   # some of them

It needs an NVIDIA GPU, CuPy and PyTorch. A case is a set of causal sequences, concatenated in one array, in bfloat16
with head_dim 128. `mixed` has 16 sequences of 64 to 4096 tokens, with equal numbers of key/value heads and query heads,
and `mixed_gqa` the same with fewer key/value heads; `short` has 256 sequences of 128 tokens on average; `window` is one
sequence of 8192 tokens, in which each query attends 1024 keys. Every library computes o (and what its backward pass
needs), then the three gradients; FlashInfer, which has no backward pass, computes only o.

Rows of `cuflash` run a plan that is created once for the mask, on CuPy arrays. Rows of `cuflash, as called` call
`attention`, or the function that `attention_vjp` returns, with a mask that is created once from offsets on the device,
as for all layers of a model. Rows of `cuflash, new mask` create the mask for each call, and include the kernels that
compute each query's keys. `host_us` is the host time of a call without synchronization. Other libraries are included if
they can be imported and support the case; otherwise a row gives the reason.

Before a case is timed, some rows of two heads and their gradients are compared with float64; `error` is the largest
error divided by our kernels' bound, and may be up to 2 for other libraries, which may round once more often. Methods
alternate, and each call is timed between CUDA events, with the level-2 cache flushed before it: medians, and the width
of the middle half. TFLOP/s count two products forward and five backward, over the scores that the mask allows. `ratio`
is the time of the fastest other library divided by the row's time: above 1, the row is faster than all of them.

Found:  on an H200, calls with sequences of 64 to 4096 tokens take 1.00 to 1.08 times as long as with the fastest other
library, short ones 1.06 to 1.10 times forward and 0.55 backward, and windows 0.89 to 1.07 times;
docs/packed_sequences.md has the table.

Cost: Minutes of a GPU.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import cuflash
import numpy as np
from cuflash import masks
from harness import Record, Timing, check_names, gpu_versions, main, tabulated, time_on_device, why_no_gpu
from matplotlib.figure import Figure
from peers import Unavailable, versions
from rich.table import Table
from speed_vs_peers import as_cupy, as_torch
from spot_check import SpotCheck

HEAD_DIM = 128
WAYS = {"forward": 2, "backward": 5}  # passes, with their numbers of matrix products
OURS = ("cuflash", "cuflash, as called", "cuflash, new mask")
_MIXED = (863, 1123, 456, 3314, 3432, 2997, 2935, 68, 1350, 2924, 3767, 3052, 520, 1278, 934, 3747)
_SHORT = tuple(np.random.default_rng(0).integers(16, 241, 256).tolist())
_HOST_CALLS = 50


class Case(NamedTuple):
    """Sequences of these lengths; `left` is the number of previous keys that a query attends, or None for all."""

    lengths: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    left: int | None = None

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def num_scores(self) -> int:
        """The number of pairs of query and key that the mask keeps.

        >>> Case((3,), 1, 1).num_scores, Case((3,), 1, 1, left=1).num_scores
        (6, 5)
        """
        seen = (np.minimum(np.arange(n), n if self.left is None else self.left) + 1 for n in self.lengths)
        return int(sum(each.sum() for each in seen))

    def flops(self, way: str) -> int:
        return WAYS[way] * 2 * self.num_heads * HEAD_DIM * self.num_scores

    def mask(self, offsets: Any) -> masks.Mask:
        """Return cuflash's mask of the case; one sequence needs no offsets."""
        window = None if self.left is None else masks.SlidingWindow(self.left, 0)
        if len(self.lengths) == 1:
            return masks.Causal() if window is None else window
        sequences = masks.Sequences(offsets, causal=True)
        return sequences if window is None else sequences & window


CASES = {
    "mixed": Case(_MIXED, 16, 16),
    "mixed_gqa": Case(_MIXED, 32, 8),
    "short": Case(_SHORT, 32, 8),
    "window": Case((8192,), 16, 16, left=1023),
}
Attend = Callable[[Any, Any, Any], Any]


def torch_flash(case: Case, offsets: Any) -> Attend:
    """Return FlashAttention-2 as built into PyTorch."""
    import torch

    longest = max(case.lengths)

    def attend(q: Any, k: Any, v: Any) -> Any:
        return torch.ops.aten._flash_attention_forward(
            q, k, v, offsets, offsets, longest, longest, 0.0, True, False, window_size_left=case.left,
        )[0]  # fmt: skip

    return attend


def torch_cudnn(case: Case, offsets: Any) -> Attend:
    """Return cuDNN's attention on PyTorch's nested tensors."""
    from torch.nested import nested_tensor_from_jagged
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    if case.left is not None:
        raise Unavailable("takes no window")
    if case.num_heads != case.num_kv_heads:
        raise Unavailable("takes no nested tensors of which query heads share keys")
    wide = offsets.long()

    def attend(q: Any, k: Any, v: Any) -> Any:
        nested = [nested_tensor_from_jagged(x, wide, max_seqlen=max(case.lengths)).transpose(1, 2) for x in (q, k, v)]
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(*nested, is_causal=True).transpose(1, 2).values()

    return attend


def flash_attn_2(case: Case, offsets: Any) -> Attend:
    """Return the function of the package flash-attn."""
    from flash_attn import flash_attn_varlen_func

    return _varlen(flash_attn_varlen_func, case, offsets)


def flash_attn_3(case: Case, offsets: Any) -> Attend:
    """Return the function of FlashAttention-3's own package."""
    from flash_attn_interface import flash_attn_varlen_func

    return _varlen(flash_attn_varlen_func, case, offsets)


def flash_attn_4(case: Case, offsets: Any) -> Attend:
    """Return the function of the package flash-attn-4, whose kernels for Hopper are FlashAttention-3's."""
    from flash_attn.cute import flash_attn_varlen_func

    return _varlen(flash_attn_varlen_func, case, offsets)


def _varlen(function: Callable[..., Any], case: Case, offsets: Any) -> Attend:
    """Return the varlen function that FlashAttention's packages share; some return a tuple that starts with o."""
    sizes = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
    longest = {"max_seqlen_q": max(case.lengths), "max_seqlen_k": max(case.lengths)}
    window = {} if case.left is None else {"window_size": (case.left, 0)}

    def attend(q: Any, k: Any, v: Any) -> Any:
        output = function(q, k, v, **sizes, **longest, causal=True, **window)
        return output[0] if isinstance(output, tuple) else output

    return attend


def flashinfer(case: Case, offsets: Any) -> Attend:
    """Return FlashInfer's prefill kernels, which have no backward pass."""
    import torch
    from flashinfer import BatchPrefillWithRaggedKVCacheWrapper

    wrapper = BatchPrefillWithRaggedKVCacheWrapper(torch.empty(256 << 20, dtype=torch.uint8, device="cuda"), "NHD")
    wrapper.plan(
        offsets, offsets, case.num_heads, case.num_kv_heads, HEAD_DIM, causal=True,
        window_left=-1 if case.left is None else case.left, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
    )  # fmt: skip
    return lambda q, k, v: wrapper.run(q, k, v)


def flex(case: Case, offsets: Any) -> Attend:
    """Return FlexAttention, compiled for the shape, with the sequences as a BlockMask."""
    import torch
    from torch.nn.attention import flex_attention as flexible

    torch._dynamo.reset()
    compiled = torch.compile(flexible.flex_attention, dynamic=False, fullgraph=True)
    ids = torch.repeat_interleave(torch.arange(len(case.lengths), device="cuda"), offsets.diff())

    def is_seen(b: Any, h: Any, i: Any, j: Any) -> Any:
        seen = (ids[i] == ids[j]) & (i >= j)
        return seen if case.left is None else seen & (i - j <= case.left)

    blocks = flexible.create_block_mask(is_seen, None, None, case.tokens, case.tokens, device="cuda")

    def attend(q: Any, k: Any, v: Any) -> Any:
        heads_first = [x.transpose(0, 1)[None] for x in (q, k, v)]
        has_groups = case.num_heads != case.num_kv_heads
        return compiled(*heads_first, block_mask=blocks, enable_gqa=has_groups)[0].transpose(0, 1)

    return attend


PEERS: dict[str, Callable[[Case, Any], Attend]] = {
    peer.__name__: peer
    for peer in (torch_flash, torch_cudnn, flash_attn_2, flash_attn_3, flash_attn_4, flashinfer, flex)
}
FORWARD_ALONE = ("flashinfer",)


@dataclass(frozen=True, kw_only=True)
class Config:
    """The cases to measure; the defaults are the published run."""

    cases: tuple[str, ...] = tuple(CASES)
    peers: tuple[str, ...] = tuple(PEERS)
    repeats: int = 20

    def __post_init__(self) -> None:
        check_names(self, {"cases": CASES, "peers": PEERS})
        if self.repeats < 1:
            raise ValueError("repeats must be positive")


class Method(NamedTuple):
    """The passes of a library on the arrays of a case.

    Attributes
    ----------
    forward : callable
        Returns o.
    backward : callable, optional
        Takes do, and returns a function that computes dq, dk and dv.
    in_heads : callable
        Converts a result to [1, heads, tokens, HEAD_DIM].
    cotangent : callable
        Converts PyTorch's do [1, heads, tokens, HEAD_DIM] to the library's layout.
    """

    forward: Callable[[], Any]
    backward: Callable[[Any], Callable[[], Any]] | None
    in_heads: Callable[[Any], Any]
    cotangent: Callable[[Any], Any]


def of_plan(case: Case, arrays: Sequence[Any]) -> Method:
    """Return a cuflash plan as a method; the plan is created once."""
    import cupy

    q, k, v = (as_cupy(x) for x in arrays)
    plan = cuflash.plan(q, k, v, mask=case.mask(cupy.asarray(_offsets(case))))
    plan.compile()

    def backward(do: Any) -> Callable[[], Any]:
        o, lse = plan.forward(q, k, v)
        return lambda: plan.backward(do, q, k, v, o, lse)

    return Method(lambda: plan.forward(q, k, v)[0], backward, lambda x: x, as_cupy)


def as_called(case: Case, arrays: Sequence[Any], makes_mask: bool) -> Method:
    """Return cuflash's public functions as a method, with a mask of device offsets, created once or for each call."""
    import cupy

    q, k, v = (as_cupy(x) for x in arrays)
    offsets = cupy.asarray(_offsets(case))
    mask = case.mask(offsets)

    def forward() -> Any:
        return cuflash.attention(q, k, v, mask=case.mask(offsets) if makes_mask else mask)

    def backward(do: Any) -> Callable[[], Any]:
        _, vjp = cuflash.attention_vjp(q, k, v, mask=mask)
        return lambda: vjp(do)

    return Method(forward, backward, lambda x: x, as_cupy)


def of_peer(name: str, case: Case, arrays: Sequence[Any]) -> Method:
    """Return another library's passes, by automatic differentiation, on arrays [tokens, heads, HEAD_DIM]."""
    import torch

    attend = PEERS[name](case, torch.from_numpy(_offsets(case)).int().cuda())
    inputs = [x[0].transpose(0, 1).contiguous() for x in arrays]

    def forward() -> Any:
        with torch.no_grad():
            return attend(*inputs)

    def backward(do: Any) -> Callable[[], Any]:
        leaves = [x.detach().requires_grad_() for x in inputs]
        o = attend(*leaves)
        return lambda: torch.autograd.grad(o, leaves, do, retain_graph=True)

    passes = forward, None if name in FORWARD_ALONE else backward
    return Method(*passes, lambda x: x.transpose(0, 1)[None], lambda do: do[0].transpose(0, 1).contiguous())


def _offsets(case: Case) -> np.ndarray:
    return np.cumsum([0, *case.lengths])


class Wrong(Exception):
    """The error raised if a result exceeds its bound."""


def checked(method: Method, check: SpotCheck, case: Case, most: float) -> float:
    """Return the largest ratio of an error to its bound for o, dq and, without GQA, dk and dv; raise above `most`."""
    results = {"o": method.in_heads(method.forward())}
    if method.backward is not None:
        gradients = method.backward(method.cotangent(as_torch(check.do)))()
        names = ("dq", "dk", "dv") if case.num_heads == case.num_kv_heads else ("dq",)
        results |= {name: method.in_heads(gradient) for name, gradient in zip(names, gradients)}
    share = check.share(**results)
    if not share <= most:
        raise Wrong(f"wrong: {share:.3g} times the bound")
    return share


def measured(name: str, config: Config) -> Iterator[Record]:
    """Yield the rows of a case, one per pass and library."""
    import torch

    case = CASES[name]
    generator = torch.Generator("cuda").manual_seed(0)
    heads = (case.num_heads, case.num_kv_heads, case.num_kv_heads, case.num_heads)
    operands = (torch.randn(1, each, case.tokens, HEAD_DIM, generator=generator, device="cuda") for each in heads)
    q, k, v, do = (x.to(torch.bfloat16) for x in operands)
    group = case.num_heads // case.num_kv_heads
    spread = [as_cupy(x.repeat_interleave(group, 1)) for x in (k, v)]
    check = SpotCheck.of(as_cupy(q), *spread, case.mask(_offsets(case)))
    makers: dict[str, Callable[[], Method]] = {
        OURS[0]: lambda: of_plan(case, (q, k, v)), OURS[1]: lambda: as_called(case, (q, k, v), False),
        OURS[2]: lambda: as_called(case, (q, k, v), True),
        **{peer: lambda peer=peer: of_peer(peer, case, (q, k, v)) for peer in config.peers},
    }  # fmt: skip
    methods, errors, notes = dict[str, Method](), dict[str, float](), dict[str, str]()
    for library, make in makers.items():
        try:
            method = make()
            errors[library] = checked(method, check, case, 1 if library in OURS else 2)
            methods[library] = method
        except Exception as error:
            if library in OURS and not isinstance(error, Wrong):
                raise
            notes[library] = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
            print(f"{name}, {library}: {notes[library]}", file=sys.stderr)
    for way in WAYS:
        calls = calls_of(methods, way, do)
        times = time_on_device(calls, repeats=config.repeats)
        host = {library: host_time(calls[library]) for library in OURS if library in calls}
        yield from rows_of(name, way, times, host, errors, notes)


def calls_of(methods: Mapping[str, Method], way: str, do: Any) -> dict[str, Callable[[], Any]]:
    """Return the call of a pass by library, for libraries that have the pass; a backward pass creates no mask."""
    if way == "forward":
        return {library: method.forward for library, method in methods.items()}
    return {
        library: method.backward(method.cotangent(do))
        for library, method in methods.items()
        if method.backward is not None and library != OURS[2]
    }


def host_time(call: Callable[[], Any]) -> float:
    """Return the median host time of a call in microseconds, without synchronization."""
    import cupy

    spent = []
    for _ in range(_HOST_CALLS):
        cupy.cuda.runtime.deviceSynchronize()
        begin = time.perf_counter()
        call()
        spent.append(time.perf_counter() - begin)
    cupy.cuda.runtime.deviceSynchronize()
    return statistics.median(spent) * 1e6


def rows_of(
    name: str,
    way: str,
    times: Mapping[str, Timing],
    host: Mapping[str, float],
    errors: Mapping[str, float],
    notes: Mapping[str, str],
) -> Iterator[Record]:
    """Yield one row per library; cuflash's rows have the ratio of the fastest other library's time to their own."""
    case = CASES[name]
    others = [timing.median_ms for library, timing in times.items() if library not in OURS]
    for library in (*times, *notes):
        timing = times.get(library)
        ms = None if timing is None else timing.median_ms
        is_ours = library in OURS and ms and others
        yield {
            "case": name, "pass": way, "library": library, "sequences": len(case.lengths), "tokens": case.tokens,
            "heads": case.num_heads, "kv_heads": case.num_kv_heads,
            "window": None if case.left is None else case.left + 1,
            "ms": ms, "spread_ms": timing and timing.spread_ms,
            "tflops": case.flops(way) / ms / 1e9 if ms else None,
            "ratio": min(others) / ms if is_ours and ms else None, "host_us": host.get(library),
            "error": errors.get(library), "note": notes.get(library, ""),
        }  # fmt: skip


def run(config: Config) -> Iterator[Record]:
    """Yield the rows of all cases, with the versions that GPU measurements depend on."""
    reason = why_no_gpu()
    if reason:
        sys.exit(f"packed compares libraries on a GPU: {reason}")
    import cupy
    import torch

    for name in config.cases:
        for record in measured(name, config):
            print(*(record[column] for column in ("case", "pass", "library", "ms", "ratio", "host_us")), flush=True)
            yield record | gpu_versions() | versions()
        cupy.get_default_memory_pool().free_all_blocks()
        torch.cuda.empty_cache()


def table(records: list[Record]) -> Table:
    """Tabulate times and rates of this run."""
    columns = "case", "pass", "library", "ms", "tflops", "ratio", "host_us", "error"
    return tabulated("Packed sequences", columns, records)


def plot(records: list[Record]) -> Figure:
    """Plot the TFLOP/s of each library: a panel per pass, a group of bars per case."""
    cases = list(dict.fromkeys(record["case"] for record in records))
    libraries = list(dict.fromkeys(record["library"] for record in records if record["ms"]))
    figure = Figure(figsize=(8, 3), layout="constrained")
    panels = figure.subplots(1, len(WAYS), sharey=True)
    for panel, way in zip(panels, WAYS, strict=True):
        for place, library in enumerate(libraries):
            rates = {
                record["case"]: float(record["tflops"])
                for record in records
                if (record["pass"], record["library"]) == (way, library) and record["ms"]
            }
            at = [cases.index(case) + place / (len(libraries) + 1) for case in rates]
            color = {OURS[0]: "black", OURS[1]: "grey", OURS[2]: "silver"}.get(library, f"C{place}")
            panel.bar(at, list(rates.values()), 1 / (len(libraries) + 1), label=library, color=color, align="edge")
        panel.set_xticks([place + 0.4 for place in range(len(cases))], cases)
        panel.set(title=way, ylabel="TFLOP/s" if way == "forward" else "")
    if libraries:
        panels[0].legend(fontsize="x-small")
    return figure


if __name__ == "__main__":
    if any(record["note"].startswith("wrong") for record in main(
        Config, run, table, plot, replacing=("gpu", "case", "pass", "library")
    ) if record["library"] in OURS):  # fmt: skip
        sys.exit("a result of ours was wrong, and was not timed")
