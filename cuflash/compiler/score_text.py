"""Printing of a score program as CUDA: a structure with its arrays and numbers, and with its functions as members.

A kernel takes the structure by value. Each operation belongs to one of four levels, each with its own function, and is
computed as rarely as its arguments allow: once per tile (one batch entry and head), per query, per key, or per score.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..planning.captured_sums import EXACT, EXACT_WORDS, OWN, axes_of_parts
from ..planning.score_launches import layout, num_leading, tables
from ..planning.staged_array import staged_load
from ..scores._primitives import PRIMITIVES
from ..scores.products import of_products
from ..scores.program import COORDINATES, Instruction, Program, depends, gradient_loads, needed_for
from ..scores.score import Printing
from .staged_text import ELEMENTS, constant, staged_matrices
from .uniform_text import KINDS, UniformText

_LEVELS = ("tile", "query", "key", "score")


def text(
    program: Program,
    wrt: tuple[str, ...] = (),
    accumulator: np.dtype = np.dtype(np.float32),
    sums: tuple[str, ...] = (),
    *,
    is_staged: bool = False,
    is_stored: bool = False,
    num_bins: int = 0,
    is_placed: bool = False,
    takes_products: bool = False,
    is_pushed: bool = False,
) -> str:
    """Return a program as C++ that replaces kernels_cu/attention/score_function.cuh.

    Parameters
    ----------
    program : Program
        A program with one result for kernels that compute scores, or its derivative for kernels that compute gradients.
    wrt : tuple of str
        Names of the captured arrays whose gradients are additional members of the structure. The functions of a derived
        program add to these gradients.
    accumulator : dtype
        The dtype in which kernels compute, float32 or float64.
    sums : tuple of str
        For each of these gradients, the name of a bitwise reproducible way to sum it; see `planning.captured_sums`.
    is_staged : bool
        True if kernels pass an element of the staged array (see `planning.staged_array`) to the function.
    is_stored : bool
        True if kernels store the gradient of the staged array themselves.
    num_bins : int
        Number of bins per thread for the gradient of a short table (see `planning.score_bins`); 0 without bins.
    is_placed : bool
        True if the structure has the first batch entry, head, query and key of the call in a larger call, which are
        added to the positions.
    takes_products : bool
        True if kernels pass q . k and the softmax scale separately to the function (see `scores.products`).
    is_pushed : bool
        True if the second half of the program's results are the tangents of the first half: kernels also pass the
        tangent of the score to the function.
    """
    facts = {"kTakesProducts": takes_products, "kIsUnscaled": False}
    staged = staged_load(program) if is_staged else None
    if takes_products:
        program, facts["kIsUnscaled"] = of_products(program)
    return Printer(program, wrt, accumulator, sums, staged, is_stored, num_bins, is_placed, facts, is_pushed).text()


Printing.text = text


class Printer:
    """The printer of one score program."""

    def __init__(
        self,
        program: Program,
        wrt: tuple[str, ...],
        accumulator: np.dtype,
        sums: tuple[str, ...],
        staged: int | None,
        is_stored: bool,
        num_bins: int,
        is_placed: bool,
        facts: Mapping[str, bool],
        is_pushed: bool,
    ) -> None:
        self.num_bins, self.is_placed, self._of_products = num_bins, is_placed, facts
        self.program, self.wrt, self.sums = program, wrt, sums
        self.kinds = dict(zip(wrt, sums))  # by array name, how the array's gradient is summed; default OWN
        self.accumulator, self.layout = accumulator, layout(program, wrt, accumulator, sums, is_placed)
        self.loads = gradient_loads(program, wrt) if len(program.results) > (4 if is_pushed else 2) else ()
        self.staged, self.stored = staged, staged if is_stored else None
        self.levels = [_level(names) for names in depends(program)]
        # Values that functions take as parameters, with the names of these parameters.
        self.renamed = {} if staged is None else {staged: "staged"}
        self.extra_parameters = ", T s_dot" if is_pushed else "" if staged is None else ", T staged"
        # Values that functions of other levels use, as members of the structure of the value's level.
        self.exported = self._exported()
        # Positions that are used only as reals, which functions take as parameters in addition to the integers.
        self.only_real = {
            n for n, instruction in enumerate(program.instructions)
            if instruction.op in ("i", "j") and n not in self.exported and n not in program.results
            and all(user.op == "real" for user in program.instructions if n in user.args)
        }  # fmt: skip

        self.uniform = UniformText(self, is_wanted=not is_pushed)

    def text(self) -> str:
        is_derived = len(self.program.results) > 1
        head = [
            "namespace cuflash {",
            "constexpr bool kHasScore = true;",
            *["CUFLASH_DEVICE Config::Accumulator* bins_of_warp();"] * bool(self.num_bins),
            "}  // namespace cuflash",
            "namespace cuflash::score {",
            "using T = Config::Accumulator;",
            *(f"struct {level.capitalize()} {{ {self._members(level)} }};" for level in _LEVELS[:3]),
            "struct Slopes {",
            *(f"  T d{number};" for number in range(len(self.program.results) - 1)),
            "};",
            *(self._sums(level) for level in _LEVELS),
            *self.uniform.structures(),
            "struct Function {",
            "  using Number = T;",
            "  using Derivatives = Slopes;",
            *(f"  using Of{name} = {name}; using Of{name}Sums = {name}Sums;" for name in ("Tile", "Query", "Key")),
            "  using OfScoreSums = ScoreSums;",
            f"  static constexpr bool kIsDerived = {str(is_derived).lower()};",
            f"  static constexpr bool kAddsGradients = {str(bool({*self.loads} - {self.stored})).lower()};",
            *self._facts(),
            *self._fields(),
        ]
        functions = [*self._of_levels(), *self.values(is_derived), *self._additions(), *self._flushes()]
        functions += staged_matrices(self)
        functions += self.uniform.functions(is_derived)
        size = self.layout.itemsize
        tail = ["};", f'static_assert(sizeof(Function) == {size}, "Function");']
        if EXACT in self.sums and self.loads:
            tail.append(f"static_assert(tile::ExactSum<T>::kNumWords == {EXACT_WORDS[self.accumulator]});")
        tail += ["}  // namespace cuflash::score", ""]
        return "\n".join([*head, *functions, *tail])

    # Parts of the structure.

    def _facts(self) -> list[str]:
        """Return the constants that select code in kernels; the header attention/score_function.cuh explains them."""
        dependencies = depends(self.program)
        loads = [n for n, each in enumerate(self.program.instructions) if each.op == "load" and n != self.staged]
        slopes = self.program.results[1:]
        is_one = Instruction("const", "real", (), 1.0)
        facts = {
            "kReadsAtPositions": any(self.levels[n] != "tile" for n in loads),
            "kCanBeUniform": self.uniform.is_useful,
            "kSumsByDistance": self.uniform.sums_by_distance,
            "kIsStaged": self.staged is not None,
            "kStoresGradient": self.stored is not None,
            "kIsShift": bool(slopes) and self.program.instructions[slopes[0]] == is_one,
            "kSlopesNeedScore": any("s" in dependencies[n] for n in slopes),
            "kNeedsDistancesAlone": self._needs_distances_alone(),
            **self._of_products,
        }
        lines = [f"  static constexpr bool {name} = {str(value).lower()};" for name, value in facts.items()]
        return [*lines, f"  static constexpr int kNumBins = {self.num_bins};"]

    def _needs_distances_alone(self) -> bool:
        """True if the positions of queries and keys are used only to subtract them from each other."""
        instructions = self.program.instructions
        of_position = {n for n, each in enumerate(instructions) if each.op in ("i", "j")}
        reals = {n for n, each in enumerate(instructions) if each.op == "real" and each.args[0] in of_position}
        users = [each for each in instructions if {*each.args} & (of_position | reals)]
        return len(reals) == 2 and all(
            each.op == "real" or (each.op == "sub" and {*each.args} == reals) for each in users
        )

    def _fields(self) -> list[str]:
        names = dict(zip(tables(self.program, self.wrt, self.sums), self._pointer_names()))
        lines = []
        for name, (field, *_) in (self.layout.fields or {}).items():
            if name == "numbers":
                lines.append(f"  T numbers[{field.shape[0]}];")
            elif name == "batch_extents":
                lines.append(f"  int64_t batch_extents[{num_leading(self.program)}];")
            elif name == "starts":
                lines.append("  int starts[4];")
            elif name in names:
                kind, member = names[name]
                lines.append(f"  {kind}* {member};")
                owner = member
            elif name == "unused":
                lines.append("  uint64_t unused;")
            else:
                lines.append(f"  int64_t {owner}_strides[{field.shape[0]}];")
        return lines

    def _pointer_names(self) -> list[tuple[str, str]]:
        """Return the element type and the member name of each pointer, in the order of `tables`."""
        arrays = list(enumerate(self.program.arrays))
        pointers = [(f"const {ELEMENTS[array.dtype]}", f"array_{n}") for n, array in arrays]
        return pointers + [(self._sum_type(n), f"gradient_{n}") for n, array in arrays if array.name in self.wrt]

    def _kind(self, array: int) -> str:
        return self.kinds.get(self.program.arrays[array].name, OWN)

    def _sum_type(self, array: int) -> str:
        """Return the element type of the sums for an array's gradient: a number, or a word of an exact sum."""
        if self.stored is not None and array == self.program.instructions[self.stored].value:
            return ELEMENTS[self.program.arrays[array].dtype]
        return "int64_t" if self._kind(array) == EXACT else "T"

    def num_part_axes(self, array: int) -> int:
        return len(axes_of_parts(self._kind(array)))

    def _members(self, level: str) -> str:
        values = (n for n in self.exported if self.levels[n] == level)
        lines = [f"{KINDS[self.program.instructions[n].kind]} x{n};" for n in values]
        if level == "tile":
            lines += [f"int64_t at{name};" for name in self._leading()]
            lines += [f"int64_t part_{n};" for n in self._arrays_with_parts()]
        return " ".join(lines)

    def _leading(self) -> dict[str, tuple[str, int]]:
        """Return the pointer and the number of batch axes for each required batch offset, by the offset's suffix."""
        offsets = {}
        for n, load in enumerate(self.program.instructions):
            if load.op != "load" or not self.program.num_leading_axes(load):
                continue
            axes = self.program.num_leading_axes(load)
            offsets[f"_array_{load.value}_{axes}"] = (f"array_{load.value}", axes)
            if n in self.loads:
                offsets[f"_gradient_{load.value}_{axes}"] = (f"gradient_{load.value}", axes)
        return offsets

    def _arrays_with_parts(self) -> list[int]:
        return sorted({load for n in self.loads if self.num_part_axes(load := self.program.instructions[n].value)})

    def _of_levels(self) -> list[str]:
        lines = ["  CUFLASH_DEVICE Tile of_tile(int b, int h, T scale = 1) const {", "    Tile tile;"]
        extents = num_leading(self.program)
        for name, (member, axes) in self._leading().items():
            kind, number = member.split("_")
            skipped = self.num_part_axes(int(number)) if kind == "gradient" else 0
            of = f"batch_extents + {extents - axes}, {member}_strides" + f" + {skipped}" * bool(skipped)
            lines.append(f"    tile.at{name} = leading_offset<{axes}>({self._position('b')}, {of});")
        for n in self._arrays_with_parts():
            terms = (f"{axis} * gradient_{n}_strides[{at}]" for at, axis in enumerate(axes_of_parts(self._kind(n))))
            lines.append(f"    tile.part_{n} = {' + '.join(terms)};")
        lines += [*self._body("tile"), "    return tile;", "  }"]
        for level, position in (("query", "i"), ("key", "j")):
            name = level.capitalize()
            parameters = f"const Tile& tile, int {position}"
            lines.append(f"  CUFLASH_DEVICE {name} of_{level}({parameters}, T real_{position}) const {{")
            lines += [f"    {name} {level};", *self._body(level), f"    return {level};", "  }"]
            lines.append(f"  CUFLASH_DEVICE {name} of_{level}({parameters}) const {{")
            lines += [f"    return of_{level}(tile, {position}, static_cast<T>({position}));", "  }"]
        return lines

    def values(self, is_derived: bool) -> list[str]:
        """Return the score function itself, which also computes slopes if the program is derived."""
        f, *slopes = self.program.results
        parameters = "const Tile& tile, const Query& query, const Key& key, int i, int j, T s"
        parameters += ", Slopes& slopes" * is_derived + self.extra_parameters
        lines = [f"  CUFLASH_DEVICE T value({parameters}) const {{", *self._body("score")]
        if is_derived:
            lines += [f"    slopes.d{place} = {self._named(n, 'score')};" for place, n in enumerate(slopes)]
        return [*lines, f"    return {self._named(f, 'score')};", "  }"]

    def _body(self, level: str) -> list[str]:
        """Return the operations of one level in program order."""
        lines = []
        for n, instruction in enumerate(self.program.instructions):
            if self.levels[n] != level or instruction.op == "const" or n in self.only_real or n in self.renamed:
                continue
            lines.append(self.assignment(n, level))
            if n in self.exported:
                lines.append(f"    {level}.x{n} = x{n};")
        return lines

    # Gradients of captured arrays: dF times the slope, which each thread sums over its scores that share an element.

    def _sums(self, level: str) -> str:
        if level == "score" and self.num_bins:
            ((place, _),) = self.loads_of(level)
            members = f"tile::ThreadBins<T, {self.num_bins}> g{place};"
        elif level == "score":
            repeated = [place for place, n in self.loads_of(level) if self._repeats(n)]
            of_place = {place: self._sum_type(self.program.instructions[n].value) for place, n in self.loads_of(level)}
            members = " ".join(f"tile::RunningSum<T, {of_place[place]}> g{place};" for place in repeated)
        else:
            members = " ".join(f"T g{place} = 0;" for place, n in self.loads_of(level))
        return f"struct {level.capitalize()}Sums {{ {members} }};"

    def loads_of(self, level: str) -> list[tuple[int, int]]:
        """Return the loads of a level whose arrays have a gradient: the number of the gradient, and the instruction."""
        return [(place, n) for place, n in enumerate(self.loads) if self.levels[n] == level and n != self.stored]

    def _repeats(self, n: int) -> bool:
        """True if several scores of a thread may read the same element: its indices lack the query or the key."""
        return not {"i", "j"} <= {self.program.instructions[a].op for a in self.program.instructions[n].args}

    def part(self, place: int, adds_zeros: bool = False) -> str:
        """Return a score's term of an array's gradient. With bins or `adds_zeros`, a dF of 0 times infinity is 0."""
        is_finite = self.program.instructions[self.program.results[place + 2]].op == "const"
        slope = f"slopes.d{place + 1}"
        return f"df_times(df, {slope})" if (adds_zeros or self.num_bins) and not is_finite else f"df * {slope}"

    def _addition(self, place: int, n: int) -> str:
        """Return a statement that adds a score's term to the gradient of the element that a load reads."""
        if self.num_bins:
            index = self._named(self.program.instructions[n].args[-1], "score")
            return f"    of_score.g{place}.add(bins_of_warp(), {index}, {self.part(place)});"
        address, x = self.address(n, "score"), self.part(place)
        return f"    of_score.g{place}.add({address}, {x});" if self._repeats(n) else f"    tile::add({address}, {x});"

    def _additions(self) -> list[str]:
        arguments = (
            "const Tile& tile, const Query& query, const Key& key, int i, int j, T s, T df, const Slopes& slopes"
        )
        sums = "TileSums& of_tile, QuerySums& of_query, KeySums& of_key, ScoreSums& of_score"
        lines = [f"  CUFLASH_DEVICE void add({arguments}, {sums}) const {{"]
        for level in _LEVELS[:3]:
            lines += [f"    of_{level}.g{place} += {self.part(place)};" for place, _ in self.loads_of(level)]
        own = self.loads_of("score")
        if own:
            lines += self._indices([n for _, n in own])
        return [*lines, *(self._addition(place, n) for place, n in own), "  }"]

    def _indices(self, loads: Sequence[int]) -> list[str]:
        """Return the operations of the score level that compute the indices of these loads."""
        needed = needed_for(self.program.instructions, [a for n in loads for a in self.program.instructions[n].args])
        is_own = (self.levels[n] == "score" and self.program.instructions[n].op != "const" for n in needed)
        return [self.assignment(n, "score") for n, own in zip(needed, is_own) if own]

    def _flushes(self) -> list[str]:
        parameters_of = {"tile": "const Tile& tile", "query": "const Tile& tile, const Query& query",
                         "key": "const Tile& tile, const Key& key"}  # fmt: skip
        lines = []
        for level, parameters in parameters_of.items():
            lines.append(f"  CUFLASH_DEVICE void flush({parameters}, const {level.capitalize()}Sums& sums) const {{")
            for place, n in self.loads_of(level):
                add = "tile::add_of_warp" if level == "tile" else "tile::add"
                lines.append(f"    {add}({self.address(n, '')}, sums.g{place});")
            lines.append("  }")
        repeated = [place for place, n in self.loads_of("score") if self._repeats(n)]
        if self.num_bins:
            return [*lines, "  CUFLASH_DEVICE void flush(const ScoreSums&) const {}", *self._bins()]
        lines.append("  CUFLASH_DEVICE void flush(const ScoreSums& sums) const {")
        return [*lines, *(f"    sums.g{place}.flush();" for place in repeated), "  }"]

    def _bins(self) -> list[str]:
        """Return functions that prepare the bins for a tile's row of the table, and that add the final sums to it."""
        ((place, n),) = self.loads_of("score")
        load = self.program.instructions[n]
        axes = self.program.num_leading_axes(load)
        row = self.place(load._replace(args=load.args[:-1]), "", "gradient", axes)
        stride = f"gradient_{load.value}_strides[{axes + len(load.args) - 1}]"
        return [
            "  CUFLASH_DEVICE void start_bins(const Tile& tile, T* bins, ScoreSums& sums) const {",
            f"    sums.g{place}.start(bins, {row}, {stride});",
            "  }",
            "  CUFLASH_DEVICE void finish_bins(const T* bins, const ScoreSums& sums) const {",
            f"    sums.g{place}.flush(bins);",
            "  }",
        ]

    # Expressions.

    def _exported(self) -> set[int]:
        used = set(self.program.results)
        for n, instruction in enumerate(self.program.instructions):
            used |= {a for a in instruction.args if self.levels[a] != self.levels[n]}
        for n in self.loads:
            used |= set(self.program.instructions[n].args)
        is_variable = [each.op != "const" for each in self.program.instructions]
        return {n for n in used if self.levels[n] != "score" and is_variable[n]}

    def _named(self, n: int, level: str) -> str:
        """Return the C++ expression that names the value of an instruction in a function of this level."""
        instruction = self.program.instructions[n]
        if instruction.op == "const":
            return constant(instruction)
        if n in self.renamed:
            return self.renamed[n]
        return f"x{n}" if self.levels[n] == level else f"{self.levels[n]}.x{n}"

    def assignment(self, n: int, level: str) -> str:
        """Return a line of C++ that computes the value of an instruction."""
        instruction = self.program.instructions[n]
        return f"    const {KINDS[instruction.kind]} x{n} = {self._expression(instruction, level)};"

    def _expression(self, instruction: Instruction, level: str) -> str:
        op = instruction.op
        args = [self._named(n, level) for n in instruction.args]
        if op in COORDINATES:
            return self._position(op)
        if op in ("s", "s_dot", "scale"):
            return op
        if op == "inverse_scale":
            return "ptx::reciprocal_approx(scale)"
        if op == "number":
            return f"numbers[{instruction.value}]"
        if op == "load":
            return self._load(instruction, level)
        if op == "real" and self.program.instructions[instruction.args[0]].op in ("i", "j"):
            return self._position(self.program.instructions[instruction.args[0]].op, "real_")
        return f"static_cast<T>({args[0]})" if op == "real" else PRIMITIVES[op].cuda.format(*args)

    def _position(self, op: str, prefix: str = "") -> str:
        """Return the C++ expression of a score's coordinate, in the larger call if the call is a part of one."""
        place = COORDINATES.index(op)
        return f"({prefix}{op} + starts[{place}])" if self.is_placed else f"{prefix}{op}"

    def _load(self, load: Instruction, level: str) -> str:
        element = f"*{self.place(load, level, 'array')}"
        return {"real": f"real<T>({element})", "int": f"whole({element})", "bool": f"{element} != 0"}[load.kind]

    def address(self, n: int, level: str) -> str:
        """Return the address of the gradient of the element that a load reads."""
        return self.place(self.program.instructions[n], level, "gradient")

    def place(self, load: Instruction, level: str, what: str, axes: int | None = None) -> str:
        member = f"{what}_{load.value}"
        axes = self.program.num_leading_axes(load) if axes is None else axes
        skipped = self.num_part_axes(load.value) if what == "gradient" else 0
        terms = [member] + [f"tile.part_{load.value}"] * bool(skipped)
        if axes:
            terms.append(f"tile.at_{member}_{axes}")
        at = skipped + axes
        terms += [f"{self._named(n, level)} * {member}_strides[{at + axis}]" for axis, n in enumerate(load.args)]
        return f"({' + '.join(terms)})"


def _level(names: frozenset[str]) -> str:
    """Return the level of a value with these coordinates: it is computed once per tile, query, key or score."""
    if names <= {"b", "h"}:
        return "tile"
    if names <= {"b", "h", "i"}:
        return "query"
    return "key" if names <= {"b", "h", "j"} else "score"
