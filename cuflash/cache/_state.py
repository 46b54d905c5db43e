"""The state of a cache: its pages, the length of each sequence, and the device's copy of both."""

from __future__ import annotations


import numpy as np

from ..arrays import Array, namespace, to_host
from ..errors import UnsupportedProblem, refuse
from ..executors import checks
from ..planning.decoding import CacheLayout
from ..plans.conversion import as_arrays
from .arguments import Counts, capacity_reason, excess_reasons, numbers, require_appended, shortage_reason
from .on_device import OnDevice, device_reasons, is_capturing, is_on_device, require_no_capture
from .paged_rows import PagedRows
from .pages import Growth, OwnPages, PagePool, growths, length_faults
from .steps import Steps


class CacheState:
    """The state of a cache.

    Attributes
    ----------
    is_counted_on_device : bool
        True if the device counts positions, so that `lengths` are unknown on the host.
    device : OnDevice, optional
        None on the host.
    steps : Steps
        The bound calls of the cache.

    Parameters
    ----------
    rows : PagedRows
    pages : OwnPages or PagePool
    lengths : list of int
        Number of positions of each sequence.
    capacity : int
    part_keys : int, optional
    """

    def __init__(
        self, rows: PagedRows, pages: OwnPages | PagePool, lengths: list[int], capacity: int, part_keys: int | None
    ) -> None:
        self.rows, self.pages, self.lengths, self.capacity = rows, pages, lengths, capacity
        self.part_keys = None if part_keys is None else int(part_keys)
        self.is_counted_on_device, self.device, self.steps = False, None, Steps(*rows.held)
        if not isinstance(rows.k, np.ndarray):
            self.device = OnDevice(rows, self.layout, len(lengths), self.is_paged, self.steps)

    @property
    def is_paged(self) -> bool:
        return isinstance(self.pages, PagePool)

    @property
    def layout(self) -> CacheLayout:
        page_size = self.pages.page_size
        return CacheLayout(self.capacity, page_size, self.pages.num_pages, -(-self.capacity // page_size))

    def length_array(self) -> Array:
        """Return the length of each sequence, int32 [batch], on the device of the cache."""
        if self.is_counted_on_device:
            assert self.device is not None
            return self.device.lengths.copy()
        return namespace(self.rows.k).asarray(np.array(self.lengths, np.int32))

    def block_table(self) -> Array:
        """Return the pages of each sequence, int32 [batch, max_pages], on the device of the cache."""
        xp = namespace(self.rows.k)
        if isinstance(self.pages, PagePool):
            return xp.asarray(self.pages.table(self.layout.max_pages))
        return xp.asarray(np.arange(len(self.lengths), dtype=np.int32)[:, None])

    def lengths_now(self) -> list[int]:
        """Return the length of each sequence; waits for the device if it counts them."""
        return list(map(int, to_host(self.length_array()))) if self.is_counted_on_device else self.lengths

    def faults(self) -> list[str]:
        """Return contradictions among lengths, tables and page counts, as sentences."""
        faults = self.pages.faults() + ([] if self.device is None else self.device.faults())
        for sequence, length in enumerate(self.lengths_now()):
            faults += length_faults(self.pages, sequence, length, self.capacity)
        return faults

    def counted(self, counts: Counts | None, num_rows: int) -> Counts:
        """Return the number of rows that belong to each sequence: a list, or an array on the device."""
        if counts is None:
            return [num_rows] * len(self.lengths)
        news = self.numbers("counts", counts)
        if not isinstance(news, list):
            return news
        refuse(excess_reasons(news, num_rows))
        return news

    def queried(self, counts: Counts | None, num_rows: int) -> Counts:
        """Return the number of queries of each sequence, after checking that it does not have more than tokens.

        If the device counts tokens, the check runs only with CUFLASH_CHECK, since it waits for the device.
        """
        news = self.counted(counts, num_rows)
        if not self.is_counted_on_device or checks.is_on() and not is_capturing():
            lengths = self.lengths_now()
            if num_rows > min(lengths):
                require_appended(news, lengths, has_counts=counts is not None)
        return news

    def numbers(self, name: str, value: Counts) -> Counts:
        """Return one number per sequence: a list, or a device array; with an array, start counting on the device."""
        value = as_arrays({name: value})[name]
        if self.device is None or not is_on_device(value):
            return numbers(name, value, len(self.lengths))
        refuse(device_reasons(name, value, len(self.lengths), self.rows.k))
        self.count_on_device()
        return value

    def counts_on_device(self, counts: Counts | None) -> bool:
        """True if the device of a cache on a GPU counts positions, or starts to in a call with these counts."""
        return self.is_counted_on_device or is_on_device(as_arrays({"counts": counts})["counts"])

    def count_on_device(self) -> None:
        """Start counting on the device, as in `KVCache.count_on_device`."""
        if self.device is None:
            raise UnsupportedProblem("the cache must be on a GPU to be counted there; got NumPy arrays: pass xp=cupy")
        if self.is_counted_on_device:
            return
        size = self.pages.page_size
        to_ends = [
            Growth(sequence, length, max(length, len(table) * size))
            for sequence, (length, table) in enumerate(zip(self.lengths, self.pages.tables))
        ]
        if self.is_paged:
            shortages = self.pages.shortages(to_ends)
            refuse([shortage_reason("pages", each, self.pages.num_pages) for each in shortages])
            self._grow(to_ends)
        self.on_device()
        self.is_counted_on_device = True

    def on_device(self) -> OnDevice:
        """Return the arrays of the cache that kernels read, updated from the host's state."""
        assert self.device is not None
        self.device.put(None if self.is_counted_on_device else self.lengths, self.pages)
        return self.device

    def make_room(self, name: str, stops: list[int]) -> None:
        """Allocate pages for sequences to grow to these lengths, or refuse the argument with this name."""
        wanted = list(growths(self.lengths, stops))
        reasons = [capacity_reason(name, growth, self.capacity) for growth in wanted if growth.stop > self.capacity]
        if not reasons:
            reasons = [shortage_reason(name, each, self.pages.num_pages) for each in self.pages.shortages(wanted)]
        refuse(reasons)
        self._grow(wanted)

    def require_no_capture(self) -> None:
        """Refuse a call on rows that the host counts while CuPy's current stream is being captured.

        Raises
        ------
        RuntimeError
            The cache is on a GPU, and the stream is being captured.
        """
        if self.device is not None:
            require_no_capture()

    def _grow(self, wanted: list[Growth]) -> None:
        """Give sequences pages of their own for their new positions."""
        self.require_no_capture()  # a capture would delay the copies
        for growth in wanted:
            for copy in self.pages.copies(growth):  # before tables change, so that an interrupted call loses no rows
                self.rows.copy(copy)
            self.pages.grow(growth)
