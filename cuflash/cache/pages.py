"""Page tables of a cache: the page of each position of a sequence, as numbers on the host, without the arrays.

A page holds `page_size` consecutive positions of all key/value heads. A sequence has a table: page numbers in the order
of its positions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np


class Growth(NamedTuple):
    """A sequence that grows from `length` to `stop` positions."""

    sequence: int
    length: int
    stop: int


def growths(lengths: Iterable[int], stops: Iterable[int]) -> Iterator[Growth]:
    """Yield the growths of the sequences that become longer."""
    for sequence, (length, stop) in enumerate(zip(lengths, stops)):
        if stop > length:
            yield Growth(sequence, length, stop)


class Copy(NamedTuple):
    """The first rows of a page, to be copied to another page."""

    source: int
    target: int
    rows: int


class Shortage(NamedTuple):
    """A growth that needs more pages than are free."""

    growth: Growth
    wanted: int
    free: int


class OwnPages:
    """One page for each sequence, as long as the cache's capacity: a contiguous cache."""

    def __init__(self, batch: int, capacity: int) -> None:
        self.page_size = capacity
        self.num_pages = batch
        self.tables = [[sequence] for sequence in range(batch)]
        self.num_free = 0

    def hold(self, lengths: Iterable[int], stops: Iterable[int]) -> bool:
        """True if no sequence needs a new or copied page to grow from its length to its stop."""
        return True

    def shortages(self, growths: Iterable[Growth]) -> list[Shortage]:
        return []

    def copies(self, growth: Growth) -> list[Copy]:
        return []

    def grow(self, growth: Growth) -> None:
        pass

    def shrink(self, sequence: int, length: int) -> None:
        pass

    def fork(self, source: int, target: int, length: int) -> list[Copy]:
        """Return the rows to copy so that the target has the contents of the source."""
        return [Copy(source, target, length)]

    def num_shared(self, sequence: int) -> int:
        """Return the number of positions up to the last page that a sequence shares."""
        return 0

    def faults(self) -> list[str]:
        return []


class PagePool:
    """Pages taken from a free list; several sequences may share a page until one of them writes to it.

    Parameters
    ----------
    page_size, num_pages : int
    tables : list of lists of int
        The pages of each sequence.
    owns_rest : bool
        If True, pages in no table are free; otherwise they belong to someone else.

    Examples
    --------
    >>> pool = PagePool(16, 4, [[], []])
    >>> pool.grow(Growth(0, 0, 20))
    >>> pool.fork(0, 1, 20), pool.tables, pool.num_free
    ([], [[0, 1], [0, 1]], 2)
    >>> pool.copies(Growth(1, 20, 21))     # sequence 1 writes to a page that sequence 0 reads: it gets a copy
    [Copy(source=1, target=2, rows=4)]
    >>> pool.grow(Growth(1, 20, 21))
    >>> pool.tables
    [[0, 1], [0, 2]]
    """

    def __init__(self, page_size: int, num_pages: int, tables: list[list[int]], *, owns_rest: bool = True) -> None:
        self.page_size = page_size
        self.num_pages = num_pages
        self.tables = tables
        self._owned = range(num_pages) if owns_rest else sorted({page for table in tables for page in table})
        self.version = 0  # changes whenever a table changes
        self._count()

    def table(self, max_pages: int) -> np.ndarray:
        """Return the tables as int32 [batch, max_pages]; -1 marks a missing page."""
        table = np.full((len(self.tables), max_pages), -1, np.int32)
        for row, pages in zip(table, self.tables):
            row[: len(pages)] = pages
        return table

    @property
    def num_free(self) -> int:
        return len(self._free)

    def hold(self, lengths: Iterable[int], stops: Iterable[int]) -> bool:
        """True if no sequence needs a new or copied page to grow from its length to its stop."""
        for sequence, (length, stop) in enumerate(zip(lengths, stops)):
            if stop > length and not self._has_page(sequence, length, stop):
                return False
        return True

    def shortages(self, growths: Iterable[Growth]) -> list[Shortage]:
        """Return the growths that lack pages if all are done in this order; growths that fail take no pages."""
        shortages, free, dropped = [], len(self._free), dict[int, int]()
        for growth in growths:
            if self._has_page(*growth):
                continue
            shared = [page for _, page in self._written(growth) if self._references[page] - dropped.get(page, 0) > 1]
            wanted = max(self._pages(growth.stop) - len(self.tables[growth.sequence]), 0) + len(shared)
            if wanted > free:
                shortages.append(Shortage(growth, wanted, free))
                continue
            free -= wanted
            dropped |= {page: dropped.get(page, 0) + 1 for page in shared}
        return shortages

    def copies(self, growth: Growth) -> list[Copy]:
        """Return the rows of a shared page that must be copied before `grow`, to the page that it takes first."""
        place, rows = divmod(growth.length, self.page_size)
        page = self.tables[growth.sequence][place] if rows else -1
        return [Copy(page, self._free[-1], rows)] if self._references[page] > 1 else []

    def grow(self, growth: Growth) -> None:
        """Give a sequence pages of its own for its new positions."""
        if self._has_page(*growth):
            return
        table = self.tables[growth.sequence]
        with self._counting():
            for place, page in self._written(growth):
                if self._references[page] > 1:
                    table[place] = self._take()
                    self._drop(page)
            while len(table) < self._pages(growth.stop):
                table.append(self._take())

    def shrink(self, sequence: int, length: int) -> None:
        """Free the pages of a sequence that no position below a length needs."""
        table = self.tables[sequence]
        with self._counting():
            while len(table) > self._pages(length):
                self._drop(table.pop())

    def fork(self, source: int, target: int, length: int) -> list[Copy]:
        """Let the target share the source's pages instead of its own."""
        shared = self.tables[source][: self._pages(length)]
        with self._counting():
            self._references.update(shared)
            self.shrink(target, 0)
            self.tables[target].extend(shared)
            self.version += 1
        return []

    def num_shared(self, sequence: int) -> int:
        """Return the number of positions up to the last page that a sequence shares."""
        table = self.tables[sequence]
        places = (place + 1 for place, page in enumerate(table) if self._references[page] > 1)
        return max(places, default=0) * self.page_size

    def faults(self) -> list[str]:
        """List contradictions among the tables."""
        named = Counter(page for table in self.tables for page in table)
        faults = [f"page {page} is in {named[page]} tables and is counted as in {count}"
                  for page, count in self._references.items() if named[page] != count]  # fmt: skip
        faults += [f"page {page} is in a table and outside of 0..{self.num_pages - 1}" for page in named
                   if not 0 <= page < self.num_pages]  # fmt: skip
        faults += [f"page {page} is in a table and free" for page in self._free if page in named]
        if len(named) + len(set(self._free)) != len(self._owned):
            faults.append(f"{len(named)} pages are in tables and {len(set(self._free))} free, of {len(self._owned)}")
        return faults

    def _count(self) -> None:
        """Count the tables that name each page, and list the free pages, of which the last is taken first."""
        self._references = Counter(page for table in self.tables for page in table)
        self._free = [page for page in self._owned if page not in self._references][::-1]

    @contextmanager
    def _counting(self) -> Iterator[None]:
        """Count pages from the tables if a change of the tables is interrupted."""
        try:
            yield
        except BaseException:
            self.version += 1
            self._count()
            raise

    def _has_page(self, sequence: int, length: int, stop: int) -> bool:
        """True if all new positions are on one page that this sequence, and no other, already has."""
        table, place = self.tables[sequence], length // self.page_size
        return (stop - 1) // self.page_size == place < len(table) and self._references[table[place]] == 1

    def _pages(self, length: int) -> int:
        return -(-length // self.page_size)

    def _written(self, growth: Growth) -> Iterator[tuple[int, int]]:
        """Yield the pages that a sequence already has and will write to, with their positions in its table."""
        table = self.tables[growth.sequence]
        for place in range(growth.length // self.page_size, min(self._pages(growth.stop), len(table))):
            yield place, table[place]

    def _take(self) -> int:
        page = self._free.pop()
        self.version += 1
        self._references[page] = 1
        return page

    def _drop(self, page: int) -> None:
        self.version += 1
        self._references[page] -= 1
        if not self._references[page]:
            del self._references[page]
            self._free.append(page)


def sharing_reasons(lengths: list[int], pages: OwnPages | PagePool) -> list[str]:
    """Return why sequences that the device counts cannot be cut to these lengths: it would write to shared pages."""
    reasons = []
    for sequence, length in enumerate(lengths):
        shared = pages.num_shared(sequence)
        if length < shared:
            reasons.append(
                f"lengths must not end on pages that sequences share if the device counts rows; got {length} for "
                f"sequence {sequence}, which shares its first {shared} positions: truncate before count_on_device()"
            )
    return reasons


def length_faults(pages: OwnPages | PagePool, sequence: int, length: int, capacity: int) -> list[str]:
    """Return why a sequence cannot have this many positions, in a list with one sentence or none.

    >>> length_faults(OwnPages(2, 40), 1, 41, 40)
    ['sequence 1 has 41 positions and 1 pages of 40']
    """
    held, size = len(pages.tables[sequence]), pages.page_size
    if 0 <= length <= min(held * size, capacity):
        return []
    return [f"sequence {sequence} has {length} positions and {held} pages of {size}"]
