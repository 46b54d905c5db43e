"""How long does it take to convert a mask to a kernel's work list, and how much memory?

    python -m experiments mask_compile

Two masks: causal attention within documents at 128k tokens, and a butterfly at a million tokens, whose dense forms have
2 GB and 137 GB of bits. Times are medians. Memory is the peak of allocations by Python and NumPy during one call, and
the memory of the result.

Expect: closed forms classify rows and blocks, so neither time nor memory grows with seqlen squared.
Found:  6 ms for causal and documents at 128k tokens, 26 ms for a butterfly at 1M tokens; listing all blocks takes at
most 69 MiB.

Cost: Half a minute on one core.
"""

import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from cuflash import BlockIndex, masks, patterns
from cuflash.blocks.work_list import ListedWork, WorkList, work_list
from harness import Record, main, time_alternately, track
from rich.table import Table


@dataclass(frozen=True, kw_only=True)
class Config:
    """Lengths, in tokens, and the kernel's tile; the defaults are the published run."""

    documents_seqlen: int = 2**17
    mean_document: int = 1000
    butterfly_seqlen: int = 2**20
    block: int = 128
    repeats: int = 9

    def __post_init__(self) -> None:
        if min(self.documents_seqlen, self.mean_document, self.butterfly_seqlen, self.block, self.repeats) < 1:
            raise ValueError("lengths, block and repeats must be positive")


def document_ids(seqlen: int, mean_document: int) -> np.ndarray:
    """Draw the sorted document number of each token, int32 [seqlen]; lengths are exponentially distributed."""
    starts = np.random.default_rng(0).random(seqlen) < 1 / mean_document
    return np.cumsum(starts, dtype=np.int32)


def packed(seqlen: int, config: Config) -> Callable[[], masks.Mask]:
    """Return a function that creates the mask of causal attention within documents, with ids that are drawn before."""
    ids = document_ids(seqlen, config.mean_document)
    return lambda: masks.Causal() & masks.Documents(ids)


def butterfly(seqlen: int, config: Config) -> Callable[[], masks.Mask]:
    """Return a function that creates a butterfly pattern over the entire grid."""
    return lambda: patterns.butterfly(seqlen, block=config.block)


def check(mask: masks.Mask, seqlen: int, block: int) -> None:
    """Assert that the index of a small mask has exactly the elements of the mask; large masks are not checked."""
    shape = masks.MaskShape((), 1, seqlen, seqlen)
    index = BlockIndex.from_mask(mask, block=block, **shape._asdict())
    if not np.array_equal(index.toarray()[0], mask.toarray(**shape._asdict())):
        raise AssertionError("the block index holds other elements than the mask")


def listed(mask: masks.Mask, shape: masks.MaskShape, block: int) -> WorkList:
    """Create the work lists of the forward and backward pass."""
    work = work_list(mask.resolve(shape), shape, (block, block))
    if isinstance(work, ListedWork):
        work.make_ready()
    return work


def peak_bytes(call: Callable[[], object]) -> int:
    """Return the peak number of bytes allocated during a call."""
    tracemalloc.start()
    call()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


def run(config: Config) -> list[Record]:
    """Return one record for each mask and each object computed from it, including the mask itself."""
    records = []
    cases = (("causal & documents", packed, config.documents_seqlen), ("butterfly", butterfly, config.butterfly_seqlen))
    for name, maker, seqlen in track(cases, "masks"):
        check(maker(1000, config)(), 1000, config.block)
        make, shape, block = maker(seqlen, config), masks.MaskShape((), 1, seqlen, seqlen), config.block
        calls: dict[str, Callable[[], object]] = {
            "work list": lambda make=make, shape=shape: listed(make(), shape, block),
            "block index": lambda make=make, shape=shape: BlockIndex.from_mask(make(), block=block, **shape._asdict()),
        }
        list_sizes = {"work list": {"kept_mib": listed(make(), shape, block).nbytes / 2**20}}
        for form, timing in time_alternately(calls, repeats=config.repeats, budget_s=10).items():
            row: Record = {"mask": name, "seqlen": seqlen, "block": block, "made": form, "ms": timing.median_ms}
            row |= {"spread_ms": timing.spread_ms, "peak_mib": peak_bytes(calls[form]) / 2**20}
            records.append(row | list_sizes.get(form, {}))
    return records


def table(records: list[Record]) -> Table:
    """Tabulate the measurements."""
    result = Table(title="masks compiled on the host")
    for column in ("mask", "seqlen", "made", "ms", "± ms", "peak MiB", "kept MiB"):
        result.add_column(column, justify="left" if column in ("mask", "made") else "right")
    for row in records:
        numbers = (f"{row[name]:.2f}" if name in row else "" for name in ("ms", "spread_ms", "peak_mib", "kept_mib"))
        result.add_row(row["mask"], str(row["seqlen"]), row["made"], *numbers)
    return result


if __name__ == "__main__":
    main(Config, run, table)
