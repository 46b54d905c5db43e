"""The part of a score function's text for tiles in which captured arrays are read at one element each."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Protocol

from ..scores.program import Program, needed_for
from ..scores.uniform import Direction, uniform

KINDS = {"real": "T", "int": "int", "bool": "bool"}
_CORNERS = {1: ("first", "last"), 0: ("first", "first"), -1: ("last", "first")}  # of the least and the greatest value


class Printer(Protocol):
    """The parts of `score_text.Printer` that the functions below read and change."""

    program: Program
    levels: list[str]
    renamed: dict[int, str]
    given: str
    staged: int | None
    num_bins: int

    def loads_of(self, level: str) -> list[tuple[int, int]]: ...
    def assignment(self, n: int, level: str) -> str: ...
    def address(self, n: int, level: str) -> str: ...
    def values(self, is_derived: bool) -> list[str]: ...
    def part(self, place: int) -> str: ...


class UniformText:
    """Structures and members of the function that kernels use for uniform tiles, whose scores read the same elements.

    ``is_uniform`` says whether a tile is one, ``of_uniform`` finds the values, and further forms of ``value``, ``add``
    and ``flush`` take them.
    """

    def __init__(self, printer: Printer) -> None:
        self._printer, program = printer, printer.program
        found = uniform(program)
        self._loads = printer.loads_of("score")
        self.is_useful = bool(found.values) and printer.staged is None
        self.is_useful &= all(n in found.values for _, n in self._loads)
        self._roots = found.roots
        indices = {a for _, n in self._loads for a in program.instructions[n].args}
        users = (each.args for n, each in enumerate(program.instructions) if n not in found.values)
        used = {a for args in users for a in args} | {*program.results} | indices
        self._members = sorted(used & found.values | indices & {*found.roots})

    def structures(self) -> list[str]:
        """The values, and sums of what is added to the elements of captured arrays."""
        if not self.is_useful:
            return []
        kinds = [KINDS[self._printer.program.instructions[n].kind] for n in self._members]
        members = " ".join(f"{kind} x{n};" for kind, n in zip(kinds, self._members))
        sums = " ".join(f"T g{place} = 0;" for place, _ in self._loads)
        return [f"struct Uniform {{ {members} }};", f"struct UniformSums {{ {sums} }};"]

    def functions(self, is_derived: bool) -> list[str]:
        """The members of the function."""
        if not self.is_useful:
            return ["  struct OfUniform {};", "  struct OfUniformSums {};"]
        given = copy(self._printer)
        given.renamed = {n: f"uniform.x{n}" for n in self._members}
        given.given = ", const Uniform& uniform"
        lines = ["  using OfUniform = Uniform; using OfUniformSums = UniformSums;", *self._search()]
        return [*lines, *given.values(is_derived), *self._additions(given)]

    def _search(self) -> list[str]:
        lines = []
        for n in self._roots:
            lines += [f"  CUFLASH_DEVICE int root_{n}(const Tile& tile, int i, int j) const {{", *self._made([n])]
            lines += [f"    return x{n};", "  }"]
        corners = " && ".join(f"{self._root(n, by, 0)} == {self._root(n, by, 1)}" for n, by in self._roots.items())
        tile = "const Tile& tile, int first_i, int last_i, int first_j, int last_j"
        lines += [f"  CUFLASH_DEVICE bool is_uniform({tile}) const {{", f"    return {corners};", "  }"]
        lines += ["  CUFLASH_DEVICE Uniform of_uniform(const Tile& tile, int i, int j) const {", "    Uniform uniform;"]
        stored = (f"    uniform.x{n} = x{n};" for n in self._members)
        return [*lines, *self._made(self._members), *stored, "    return uniform;", "  }"]

    def _root(self, n: int, direction: Direction, end: int) -> str:
        query, key = (_CORNERS[sign][end] for sign in direction)
        return f"root_{n}(tile, {query}_i, {key}_j)"

    def _made(self, results: Sequence[int]) -> list[str]:
        """The operations that these values need at one query and key, but for those of a tile."""
        local = copy(self._printer)
        local.levels = ["tile" if level == "tile" else "score" for level in self._printer.levels]
        instructions = self._printer.program.instructions
        needed = needed_for(instructions, results)
        is_made = (instructions[n].op != "const" and local.levels[n] != "tile" for n in needed)
        return [local.assignment(n, "score") for n, is_own in zip(needed, is_made) if is_own]

    def _additions(self, given: Printer) -> list[str]:
        """Sums over a tile in registers, and their addition to memory."""
        arguments = "const Tile& tile, const Query&, const Key&, int, int, T, T df, const Slopes& slopes"
        sums = "TileSums& of_tile, QuerySums& of_query, KeySums& of_key, UniformSums& of_uniform"
        lines = [f"  CUFLASH_DEVICE void add({arguments}, {sums}) const {{"]
        for level, name in (("tile", "tile"), ("query", "query"), ("key", "key"), ("score", "uniform")):
            loads = self._printer.loads_of(level)
            lines += [f"    of_{name}.g{place} += {given.part(place)};" for place, _ in loads]
        parameters = "const Tile& tile, const Uniform& uniform, const UniformSums& sums, ScoreSums& of_score"
        lines += ["  }", f"  CUFLASH_DEVICE void flush({parameters}) const {{"]
        joined = (f"g{place}.{self._joined(given, place, n)};" for place, n in self._loads)
        return [*lines, *(f"    of_score.{each}" for each in joined), "  }"]

    def _joined(self, given: Printer, place: int, n: int) -> str:
        """Return the call that adds the sum of a tile to the sums of the steps."""
        if given.num_bins:
            return f"add(bins_of_warp(), {given.renamed[given.program.instructions[n].args[-1]]}, sums.g{place})"
        return f"join({given.address(n, 'score')}, sums.g{place})"
