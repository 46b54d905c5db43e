"""What does a prefill chunk on a KV cache cost, paged or not, compared with contiguous arrays?

    python -m experiments chunked_prefill                        # all cases, into packed.csv
    python -m experiments chunked_prefill --cases chunks         # one of them

It needs an NVIDIA GPU, CuPy and PyTorch. A case consists of new tokens of some sequences and the tokens before them, in
bfloat16, with 32 query heads that share 8 key/value heads of head_dim 128. `chunks` has 4 sequences of 8192 tokens, of
which the last 512 are new; `unequal` has 8 sequences of 512 to 16384 tokens, of which 64 to 512 are new.

Rows of `cuflash` are `KVCache.attention` on a contiguous cache and on pages of 256, 64 and 16 tokens in random order,
with the kernels of sm90 and of sm80, and counts on the device. `cuflash, packed` and PyTorch's FlashAttention-2 attend
to the same tokens as packed sequences, which is simpler than a cache. FlashInfer, on pages of 16, is included if it can
be imported. Each result is compared with that of packed sequences: `error` is the largest difference. Times are
measured as in packed.py; `ratio` is the time of the fastest other library divided by the row's time.

Found:  on an H100 a chunk takes 0.42 to 0.61 times the time of PyTorch's FlashAttention on packed sequences, and with
the kernels of sm80 1.2 to 1.4 times; docs/kv_cache.md has the table.

Cost: Two minutes of a GPU.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import cuflash
import ml_dtypes
import numpy as np
from cuflash import masks
from harness import Record, check_names, gpu_versions, main, time_on_device, why_no_gpu
from packed import host_time, table
from peers import versions

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
PAGE_SIZES = (256, 64, 16)
OURS = "cuflash"
_MOST_ERROR = 0.05  # for elements of about 0.1; the largest elements are rounded to bfloat16


class Case(NamedTuple):
    """Sequences with these lengths, of which the last `news` tokens are new."""

    lengths: tuple[int, ...]
    news: tuple[int, ...]

    @property
    def flops(self) -> int:
        """The floating-point operations of two products, for the scores that causality keeps.

        >>> Case((3,), (2,)).flops // (4 * HEADS * HEAD_DIM)
        5
        """
        pairs = sum(new * length - new * (new - 1) // 2 for length, new in zip(self.lengths, self.news))
        return 4 * HEADS * HEAD_DIM * pairs


CASES = {
    "chunks": Case((8192,) * 4, (512,) * 4),
    "unequal": Case((512, 1024, 2048, 3072, 4096, 6144, 8192, 16384), (512, 64, 512, 128, 512, 256, 512, 384)),
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """The cases to measure; the defaults are the published run."""

    cases: tuple[str, ...] = tuple(CASES)
    repeats: int = 20

    def __post_init__(self) -> None:
        check_names(self, {"cases": CASES})
        if self.repeats < 1:
            raise ValueError("repeats must be positive")


class Tokens:
    """The tokens of a case as CuPy arrays, both packed and split by sequence."""

    def __init__(self, case: Case) -> None:
        import cupy

        def normal(heads: int, rows: int) -> Any:
            sample = cupy.random.standard_normal((heads, rows, HEAD_DIM), dtype=np.float32)
            return sample.astype(ml_dtypes.bfloat16)

        self.case = case
        self.q = normal(HEADS, sum(case.news))
        self.k, self.v = (normal(KV_HEADS, sum(case.lengths)) for _ in range(2))
        self.q_offsets, self.kv_offsets = (np.cumsum([0, *each]) for each in (case.news, case.lengths))

    def padded(self, packed: Any, offsets: np.ndarray) -> Any:
        """Pad packed rows to [sequences, heads, longest sequence, HEAD_DIM]."""
        import cupy

        lengths = np.diff(offsets)
        result = cupy.zeros((len(lengths), packed.shape[0], lengths.max(), HEAD_DIM), packed.dtype)
        for number, (start, stop) in enumerate(zip(offsets, offsets[1:])):
            result[number, :, : stop - start] = packed[:, start:stop]
        return result

    def packed(self, padded: Any) -> Any:
        """Pack padded rows of the new tokens."""
        import cupy

        return cupy.concatenate([rows[:, :new] for rows, new in zip(padded, self.case.news)], axis=1)


def cache_of(tokens: Tokens, page_size: int | None) -> Any:
    """Return a cache with all tokens of the sequences, in pages in random order or one page per sequence."""
    import cupy

    batch, capacity = len(tokens.case.lengths), max(tokens.case.lengths)
    sizes: dict[str, Any] = {"batch": batch, "num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "capacity": capacity}
    if page_size is None:
        cache = cuflash.KVCache(**sizes, dtype=ml_dtypes.bfloat16, xp=cupy)
    else:
        table = np.random.default_rng(0).permutation(batch * capacity // page_size).reshape(batch, -1)
        pages = cupy.empty((2, table.size, KV_HEADS, page_size, HEAD_DIM), ml_dtypes.bfloat16)
        cache = cuflash.KVCache.over(pages[0], pages[1], table, [0] * batch)
    k, v = (tokens.padded(x, tokens.kv_offsets) for x in (tokens.k, tokens.v))
    cache.append(k, v, counts=list(tokens.case.lengths))
    cache.count_on_device()
    return cache


def calls_of_cuflash(tokens: Tokens) -> Iterator[tuple[str, Callable[[], Any], bool]]:
    """Yield library name, call, and whether its result is padded."""
    import cupy

    q = tokens.padded(tokens.q, tokens.q_offsets)
    counts = cupy.asarray(np.array(tokens.case.news, np.int32))
    for page_size in (None, *PAGE_SIZES):
        cache = cache_of(tokens, page_size)
        name = "contiguous" if page_size is None else f"pages of {page_size}"
        for kernel in ("sm90", "sm80"):

            def call(cache: Any = cache, kernel: str = kernel) -> Any:
                return cache.attention(q, counts=counts, kernel=kernel)

            yield f"{OURS}, {kernel}, {name}", call, True
    offsets = (cupy.asarray(each) for each in (tokens.q_offsets, tokens.kv_offsets))
    mask = masks.Sequences(*offsets, causal="bottom_right")
    plan = cuflash.plan(tokens.q, tokens.k, tokens.v, mask=mask)
    plan.compile()
    yield f"{OURS}, packed", lambda: plan.forward(tokens.q, tokens.k, tokens.v)[0], False


def calls_of_others(tokens: Tokens) -> Iterator[tuple[str, Callable[[], Callable[[], Any]]]]:
    """Yield library name, and a factory of its call, which returns a PyTorch tensor [new tokens, heads, HEAD_DIM]."""
    import torch

    def as_torch(x: Any) -> Any:
        return torch.from_dlpack(x.view(np.int16)).view(torch.bfloat16).transpose(0, 1).contiguous()

    q, k, v = (as_torch(x) for x in (tokens.q, tokens.k, tokens.v))
    q_offsets, kv_offsets = (
        torch.from_numpy(each.astype(np.int32)).cuda() for each in (tokens.q_offsets, tokens.kv_offsets)
    )
    most = max(tokens.case.news), max(tokens.case.lengths)

    def flash() -> Callable[[], Any]:
        function = torch.ops.aten._flash_attention_forward
        return lambda: function(q, k, v, q_offsets, kv_offsets, *most, 0.0, True, False)[0]

    yield "torch_flash, packed", flash

    def flashinfer(page: int = 16) -> Callable[[], Any]:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        lengths = torch.tensor(tokens.case.lengths)
        pages = (lengths + page - 1) // page
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), pages.cumsum(0)]).int().cuda()
        total = int(pages.sum())
        pair = torch.zeros(2, total * page, KV_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        for number, first in enumerate(starts[:-1].tolist()):
            begin, end = tokens.kv_offsets[number : number + 2]
            for to, rows in zip(pair, (k, v)):
                to[first * page : first * page + end - begin] = rows[begin:end]
        order = torch.randperm(total, device="cuda")
        places = torch.empty_like(pair).view(2, total, page, KV_HEADS, HEAD_DIM)
        places[:, order] = pair.view(2, total, page, KV_HEADS, HEAD_DIM)
        wrapper = BatchPrefillWithPagedKVCacheWrapper(torch.empty(256 << 20, dtype=torch.uint8, device="cuda"), "NHD")
        last = (lengths - (pages - 1) * page).int().cuda()
        wrapper.plan(
            q_offsets, starts, order.int(), last, HEADS, KV_HEADS, HEAD_DIM, page, causal=True,
            q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
        )  # fmt: skip
        return lambda: wrapper.run(q, (places[0], places[1]))

    yield "flashinfer, pages of 16", flashinfer


def measured(name: str, config: Config) -> Iterator[Record]:
    """Yield the rows of a case, one per library and layout."""
    import cupy
    import torch

    tokens = Tokens(CASES[name])
    calls, errors, notes = dict[str, Callable[[], Any]](), dict[str, float](), dict[str, str]()
    results = dict[str, Any]()
    for library, call, is_padded in calls_of_cuflash(tokens):
        calls[library] = call
        results[library] = tokens.packed(call()) if is_padded else call()
    right = results[f"{OURS}, packed"].astype(np.float32)
    for library, make in calls_of_others(tokens):
        try:
            calls[library] = make()
            bits = calls[library]().transpose(0, 1).contiguous().view(torch.int16)
            results[library] = cupy.from_dlpack(bits).view(ml_dtypes.bfloat16)
        except Exception as error:  # other libraries raise different errors for unsupported cases
            calls.pop(library, None)
            notes[library] = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
            print(f"{name}, {library}: {notes[library]}", file=sys.stderr)
    for library, result in results.items():
        errors[library] = float(abs(result.astype(np.float32) - right).max())
        if not errors[library] < _MOST_ERROR:
            notes[library] = f"wrong: {errors[library]:.3g} off"
            del calls[library]
    times = time_on_device(calls, repeats=config.repeats)
    others = [timing.median_ms for library, timing in times.items() if not library.startswith(OURS)]
    case = CASES[name]
    for library in {**times, **notes}:
        timing = times.get(library)
        ms = None if timing is None else timing.median_ms
        is_ours = library.startswith(OURS) and ms is not None
        yield {
            "case": name, "pass": "forward", "library": library, "sequences": len(case.lengths),
            "tokens": sum(case.news), "heads": HEADS, "kv_heads": KV_HEADS, "window": None, "ms": ms,
            "spread_ms": timing and timing.spread_ms, "tflops": case.flops / ms / 1e9 if ms else None,
            "ratio": min(others) / ms if is_ours and others and ms else None,
            "host_us": host_time(calls[library]) if is_ours else None,
            "error": errors.get(library), "note": notes.get(library, ""),
        }  # fmt: skip


def run(config: Config) -> Iterator[Record]:
    """Yield the rows of all cases, with the versions that GPU measurements depend on."""
    reason = why_no_gpu()
    if reason:
        sys.exit(f"chunked_prefill compares libraries on a GPU: {reason}")
    import cupy

    for name in config.cases:
        for record in measured(name, config):
            print(*(record[column] for column in ("case", "library", "ms", "tflops", "error")), flush=True)
            yield record | gpu_versions() | versions()
        cupy.get_default_memory_pool().free_all_blocks()


if __name__ == "__main__":
    main(Config, run, table, replacing=("gpu", "case", "pass", "library"), name=lambda _: "packed")
