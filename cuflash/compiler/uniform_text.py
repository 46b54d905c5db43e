"""CUDA text of a score function for uniform tiles, in which all scores read the same element of each captured array."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING

from ..scores.program import needed_for
from ..scores.uniform import Direction, of_distance, uniform

if TYPE_CHECKING:
    from .score_text import Printer

KINDS = {"real": "T", "int": "int", "bool": "bool"}
# The positions with the least and the greatest value, if values rise (1), stay equal (0) or fall (-1) with positions.
_CORNERS = {1: ("first", "last"), 0: ("first", "first"), -1: ("last", "first")}


class UniformText:
    """Structures and member functions for uniform tiles, whose scores all read the same elements of captured arrays.

    In the printed code, ``is_uniform`` tests a tile, ``of_uniform`` computes the values that its scores share, and
    overloads of ``value``, ``add`` and ``flush`` take these values.
    """

    def __init__(self, printer: Printer, *, is_wanted: bool) -> None:
        self._printer, program = printer, printer.program
        shared = uniform(program)
        self._loads = printer.loads_of("score")
        self.is_useful = is_wanted and bool(shared.values) and printer.staged is None
        self.is_useful &= all(n in shared.values for _, n in self._loads)
        self._roots = shared.roots
        indices = {a for _, n in self._loads for a in program.instructions[n].args}
        users = (each.args for n, each in enumerate(program.instructions) if n not in shared.values)
        used = {a for args in users for a in args} | {*program.results} | indices
        self._members = sorted(used & shared.values | indices & {*shared.roots})
        self.sums_by_distance = len(self._loads) == 1 and not printer.num_bins and indices <= of_distance(program) | {
            n for n, level in enumerate(printer.levels) if level == "tile"
        }

    def structures(self) -> list[str]:
        """Return the structures of the shared values and of the sums for elements of captured arrays."""
        if not self.is_useful:
            return []
        kinds = [KINDS[self._printer.program.instructions[n].kind] for n in self._members]
        members = " ".join(f"{kind} x{n};" for kind, n in zip(kinds, self._members))
        sums = " ".join(f"T g{place} = 0;" for place, _ in self._loads)
        return [f"struct Uniform {{ {members} }};", f"struct UniformSums {{ {sums} }};"]

    def functions(self, is_derived: bool) -> list[str]:
        """Return the member functions of the score function for uniform tiles."""
        distances = self._of_distances() if self.sums_by_distance else []
        if not self.is_useful:
            return ["  struct OfUniform {};", "  struct OfUniformSums {};", *distances]
        printer = copy(self._printer)
        printer.renamed = {n: f"uniform.x{n}" for n in self._members}
        printer.extra_parameters = ", const Uniform& uniform"
        lines = ["  using OfUniform = Uniform; using OfUniformSums = UniformSums;", *self._search()]
        return [*lines, *printer.values(is_derived), *self._additions(printer), *distances]

    def _search(self) -> list[str]:
        lines = []
        for n in self._roots:
            lines.append(f"  CUFLASH_DEVICE int root_{n}(const Tile& tile, int i, int j) const {{")
            lines += [*self._computations([n]), f"    return x{n};", "  }"]
        corners = " && ".join(f"{self._root(n, by, 0)} == {self._root(n, by, 1)}" for n, by in self._roots.items())
        tile = "const Tile& tile, int first_i, int last_i, int first_j, int last_j"
        lines += [f"  CUFLASH_DEVICE bool is_uniform({tile}) const {{", f"    return {corners};", "  }"]
        lines += ["  CUFLASH_DEVICE Uniform of_uniform(const Tile& tile, int i, int j) const {", "    Uniform uniform;"]
        stored = (f"    uniform.x{n} = x{n};" for n in self._members)
        return [*lines, *self._computations(self._members), *stored, "    return uniform;", "  }"]

    def _root(self, n: int, direction: Direction, end: int) -> str:
        query, key = (_CORNERS[sign][end] for sign in direction)
        return f"root_{n}(tile, {query}_i, {key}_j)"

    def _computations(self, results: Sequence[int]) -> list[str]:
        """Return the operations that compute these values at a query and key, without those of the tile's level."""
        local = self._local()
        instructions = self._printer.program.instructions
        needed = needed_for(instructions, results)
        return [
            local.assignment(n, "score")
            for n in needed
            if instructions[n].op != "const" and local.levels[n] != "tile"
        ]

    def _local(self) -> Printer:
        """Return a printer of functions that compute all values that depend on the query or the key themselves."""
        local = copy(self._printer)
        local.levels = ["tile" if level == "tile" else "score" for level in self._printer.levels]
        return local

    def _of_distances(self) -> list[str]:
        """Return functions that sum scores at the same distance, and that add such a sum to the element they share."""
        ((_, n),) = self._loads
        lines = self._addition("T& sum", "sum")
        lines.append("  CUFLASH_DEVICE void flush_distance(const Tile& tile, int i, int j, T sum) const {")
        lines += self._computations(self._printer.program.instructions[n].args)
        return [*lines, f"    tile::add({self._local().address(n, 'score')}, sum);", "  }"]

    def _addition(self, parameter: str, sum_of: str) -> list[str]:
        """Return a function that adds the terms of a score to sums in registers."""
        arguments = "const Tile& tile, const Query&, const Key&, int, int, T, T df, const Slopes& slopes"
        sums = f"TileSums& of_tile, QuerySums& of_query, KeySums& of_key, {parameter}"
        lines = [f"  CUFLASH_DEVICE void add({arguments}, {sums}) const {{"]
        of = {"tile": "of_tile.g{}", "query": "of_query.g{}", "key": "of_key.g{}", "score": sum_of}
        for level, name in of.items():
            loads = self._printer.loads_of(level)
            parts = ((place, self._printer.part(place, self.sums_by_distance)) for place, _ in loads)
            lines += [f"    {name.format(place)} += {part};" for place, part in parts]
        return [*lines, "  }"]

    def _additions(self, printer: Printer) -> list[str]:
        """Return functions that sum over a tile in registers, and that add these sums to memory."""
        lines = self._addition("UniformSums& of_uniform", "of_uniform.g{}")
        parameters = "const Tile& tile, const Uniform& uniform, const UniformSums& sums, ScoreSums& of_score"
        lines.append(f"  CUFLASH_DEVICE void flush({parameters}) const {{")
        calls = (f"g{place}.{self._call_of_sum(printer, place, n)};" for place, n in self._loads)
        return [*lines, *(f"    of_score.{call}" for call in calls), "  }"]

    def _call_of_sum(self, printer: Printer, place: int, n: int) -> str:
        """Return the call that adds the sum of a tile to the running sums of its thread."""
        if printer.num_bins:
            return f"add(bins_of_warp(), {printer.renamed[printer.program.instructions[n].args[-1]]}, sums.g{place})"
        return f"join({printer.address(n, 'score')}, sums.g{place})"
