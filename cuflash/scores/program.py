"""Score programs: straight-line programs of a few operations that change a score, and their derivatives.

A `Program` holds everything that a kernel's text depends on, and therefore no data, lengths, addresses or numbers of
the user.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from ..arrays import Array
from ._primitives import PRIMITIVES, Derivation

BlockKind = Literal["real", "int", "bool"]
Curvature = Literal["shift", "scaled", "curved"]

COORDINATES = ("b", "h", "i", "j")
# These numbers are constants of a program; all others are arguments of kernels.
FOLDED_NUMBERS = frozenset((0.0, 1.0, -1.0, 2.0, 0.5, -math.inf))

# Operations on integers that exist for reals, too.
_OF_REALS_TOO = {each.name for each in PRIMITIVES.values() if each.signature in ("number", "choice")}
_NARROW_INTS = ("int8", "uint8", "int16", "uint16")
_RECIPROCALS = (2.0**-100, 2.0**100)  # divisors between these have a reciprocal that is normal in float32


class ProgramError(ValueError):
    """Raised for an operation that programs do not support; `trace` adds the function and the line."""


class Instruction(NamedTuple):
    """One operation on the results of earlier instructions.

    Attributes
    ----------
    op : str
        "s"; "s_dot", its tangent; "b", "h", "i", "j"; "const", "number"; "real" (int to real); "load"; or the name of
        one of `PRIMITIVES`.
    kind : "real", "int" or "bool"
        The kind of the result.
    args : tuple of int
        The numbers of earlier instructions that are operands; for a load, the indices of the array's last axes.
    value : bool, int, float or None
        The value of a const, the slot of a number, or the number of a load's array. An integer "number" is
        seqlen_kv - seqlen_q of the call.
    """

    op: str
    kind: BlockKind
    args: tuple[int, ...] = ()
    value: Array = None


_INPUTS = (Instruction("s", "real"), *(Instruction(coordinate, "int") for coordinate in COORDINATES))
_INPUT_NUMBERS: dict[tuple[Hashable, ...], int] = {instruction: n for n, instruction in enumerate(_INPUTS)}
_tuple_of = tuple.__new__  # three times as fast as `_make` of a NamedTuple


class ArrayType(NamedTuple):
    """A captured array without its data.

    Attributes
    ----------
    name : str
        The name of the array.
    rank : int
        The number of axes.
    dtype : str
        The name of the dtype, as in NumPy.
    kind : "real", "int" or "bool"
        The kind of loaded elements.
    is_single : tuple of bool
        Whether each axis has length 1.
    """

    name: str
    rank: int
    dtype: str
    kind: BlockKind
    is_single: tuple[bool, ...]


class _Hashed:
    """A slot for a hash that is computed once; pickles omit it, since hashes of strings differ between processes."""

    __slots__ = ("_hash",)
    _hash: int


@dataclass(frozen=True, slots=True)
class Program(_Hashed):
    """A function of (s, b, h, i, j) as instructions, each of which defines one value.

    Attributes
    ----------
    instructions : tuple of Instruction
        The instructions; all differ, and each is needed for a result.
    arrays : tuple of ArrayType
        All captured arrays, even if no instruction reads them.
    num_numbers : int
        The number of slots for numbers that are arguments.
    results : tuple of int
        The instruction of f. For a derived program: f, df/ds, and df/d(load) of each requested load. For a pushed
        program: the results of the original program, then the tangent of each.
    """

    instructions: tuple[Instruction, ...]
    arrays: tuple[ArrayType, ...]
    num_numbers: int
    results: tuple[int, ...]

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:
            computed = hash((self.instructions, self.arrays, self.num_numbers, self.results))
            object.__setattr__(self, "_hash", computed)
            return computed

    @property
    def shift_slot(self) -> int | None:
        """The slot of the number that is seqlen_kv - seqlen_q of the call; None if no instruction reads it."""
        slots = (each.value for each in self.instructions if each.op == "number" and each.kind == "int")
        return next(slots, None)

    def num_leading_axes(self, load: Instruction) -> int:
        """Return how many leading axes of its array a load indexes by the batch entry; they broadcast to the batch."""
        array: ArrayType = self.arrays[load.value]
        return array.rank - len(load.args)

    def __str__(self) -> str:
        lines = [f"x{n} = {self._text(instruction)}" for n, instruction in enumerate(self.instructions)]
        return "\n".join([*lines, "return " + ", ".join(f"x{n}" for n in self.results)])

    def _text(self, instruction: Instruction) -> str:
        op, args = instruction.op, [f"x{n}" for n in instruction.args]
        if op == "const":
            return repr(instruction.value)
        if op == "number":
            return f"number {instruction.value}"
        if op == "load":
            dots = ["..."] if self.num_leading_axes(instruction) else []
            return f"{self.arrays[instruction.value].name}[{', '.join([*dots, *args])}]"
        return f"{op}({', '.join(args)})" if args else op


class Builder:
    """A builder of programs, which merges equal instructions and simplifies operations.

    Parameters
    ----------
    arrays : iterable of ArrayType
        The captured arrays.
    num_numbers : int
        The number of slots that are already used, whose numbers are unknown to the builder.

    Attributes
    ----------
    numbers : list of float
        The numbers in the slots that the builder added.
    """

    def __init__(self, arrays: Iterable[ArrayType] = (), num_numbers: int = 0) -> None:
        self.arrays = list(arrays)
        self.instructions: list[Instruction] = []
        self.numbers: list[float] = []
        self._num_given = num_numbers
        self._number_of: dict[tuple[Hashable, ...], int] = {}
        self._slots: dict[str, int] = {}

    def put(self, op: str, kind: BlockKind, *args: int, value: Array = None) -> int:
        """Add an instruction without simplification, unless an equal one exists, and return its number."""
        key = op, kind, args, value
        instructions = self.instructions
        n = self._number_of.setdefault(key, len(instructions))
        if n == len(instructions):
            instructions.append(_tuple_of(Instruction, key))
        return n

    def put_inputs(self) -> Iterable[int]:
        """Add s, b, h, i and j to a builder without instructions, and return their numbers."""
        self.instructions += _INPUTS
        self._number_of |= _INPUT_NUMBERS
        return range(len(_INPUTS))

    def kind(self, n: int) -> BlockKind:
        return self.instructions[n].kind

    def const(self, value: bool | int | float) -> int:
        """Add a constant of the program."""
        kinds: dict[type, BlockKind] = {bool: "bool", int: "int", float: "real"}
        return self.put("const", kinds[type(value)], value=value)

    def number(self, value: float) -> int:
        """Add a number that is an argument of the program; a few numbers that simplify it become constants."""
        if value in FOLDED_NUMBERS and (value or math.copysign(1, value) > 0):
            return self.const(value)
        return self.put("number", "real", value=self._slot(value.hex(), value))

    def shift(self) -> int:
        """Add seqlen_kv - seqlen_q of the call, an integer: 0 until `planning.score_operands.numbers_of` sets it."""
        return self.put("number", "int", value=self._slot("shift", 0.0))

    def _slot(self, name: str, value: float) -> int:
        """Return the slot of a number; append the number if no slot has this name."""
        slot = self._slots.setdefault(name, self._num_given + len(self.numbers))
        if slot == self._num_given + len(self.numbers):
            self.numbers.append(value)
        return slot

    def load(self, array: int, indices: Iterable[int]) -> int:
        """Add a load from a captured array; if there are fewer indices than axes, b indexes the leading axes."""
        args = tuple(indices)
        if any([self.kind(n) != "int" for n in args]):
            raise ProgramError("an index must be an integer expression of b, h, i, j and integer arrays")
        return self.put("load", self.arrays[array].kind, *args, value=array)

    def real(self, n: int) -> int:
        """Return the instruction of a real value, or add the conversion of an integer value to a real."""
        instruction = self.instructions[n]
        if instruction.kind == "real":
            return n
        if instruction.kind == "bool":
            raise ProgramError("a comparison is not a number: use np.where(condition, a, b)")
        return self.number(float(instruction.value)) if instruction.op == "const" else self.put("real", "real", n)

    def apply(self, op: str, *args: int) -> int:
        """Add an operation of `PRIMITIVES`, simplified if possible."""
        signature, kind = PRIMITIVES[op].signature, self.instructions[args[0]].kind
        if signature == "number" and kind == self.instructions[args[-1]].kind != "bool":
            return self._arithmetic(op, kind, *args)
        if signature == "logical":
            return self._folded(op, "bool", *map(self._condition, args))
        if signature == "choice":
            return self._choice(*args)
        if signature == "whole":
            return self._folded(op, "int", *self._dividend_and_divisor(*args))
        if op == "pow" and self._is(args[1], 2):
            return self.apply("mul", args[0], args[0])
        if signature != "comparison" or not kind == self.instructions[args[1]].kind == "int":
            args = tuple([self.real(n) for n in args])
        if signature in ("comparison", "test"):
            return self._folded(op, "bool", *args)
        return self._quotient(*args) if op == "div" else self._arithmetic(op, "real", *args)

    def _dividend_and_divisor(self, a: int, b: int) -> tuple[int, int]:
        divisor = self.instructions[b]
        if self.kind(a) != "int" or divisor.kind != "int" or divisor.op != "const" or divisor.value <= 0:
            raise ProgramError("// and % take an integer expression and a positive integer literal")
        return a, b

    def _choice(self, condition: int, a: int, b: int) -> int:
        if self.kind(condition) != "bool":
            raise ProgramError("np.where takes a comparison first, as in np.where(i < j, a, b)")
        if self.kind(a) != "int" or self.kind(b) != "int":
            a, b = self.real(a), self.real(b)
        if self.instructions[condition].op == "const":
            return a if self.instructions[condition].value else b
        return a if a == b else self.put("where", self.kind(a), condition, a, b)

    def finish(self, *results: int) -> Program:
        """Return the program of the instructions that the results need, and reduce `numbers` to those that it uses."""
        program, slots = self.program_and_slots(results)
        self.numbers = [self.numbers[slot - self._num_given] for slot in slots if slot >= self._num_given]
        return program

    def program_and_slots(self, results: Sequence[int]) -> tuple[Program, list[int]]:
        """Return the program of the instructions that the results need, and the slots of its numbers in the builder's
        list.

        Integers that are used only as reals are computed as reals. This saves conversions, and the values are equal as
        long as all of them are exact.
        """
        needed = needed_for(self.instructions, results)
        only_reals = _only_reals(self.instructions, needed, self.arrays)
        if not only_reals:
            return self._pruned(results, needed)
        copy = Builder(self.arrays, self._num_given)
        copy.numbers, copy._slots = self.numbers, self._slots
        new: dict[int, int] = {}
        reals: dict[int, int] = {}
        for n in needed:
            instruction = self.instructions[n]
            if n in only_reals:
                reals[n] = copy._again_in_reals(instruction, new, reals)
            elif instruction.op == "real" and instruction.args[0] in only_reals:
                new[n] = reals[instruction.args[0]]
            else:
                args = (new[a] for a in instruction.args)
                new[n] = copy.put(instruction.op, instruction.kind, *args, value=instruction.value)
        converted = [new[n] for n in results]
        return copy._pruned(converted, needed_for(copy.instructions, converted))

    def _again_in_reals(self, instruction: Instruction, new: dict[int, int], reals: dict[int, int]) -> int:
        """Convert an operation on integers to one on reals; `new` and `reals` map old arguments to new numbers."""
        args = [reals[a] if a in reals else new[a] for a in instruction.args]
        return self.apply(instruction.op, *(a if self.kind(a) == "bool" else self.real(a) for a in args))

    def _pruned(self, results: Sequence[int], needed: Sequence[int]) -> tuple[Program, list[int]]:
        """Return the program of these results and of the instructions that they need, and the slots of its numbers."""
        place = {n: count for count, n in enumerate(needed)}
        slots = sorted({self.instructions[n].value for n in needed if self.instructions[n].op == "number"})
        instructions = []
        for n in needed:
            op, kind, args, value = self.instructions[n]
            value = slots.index(value) if op == "number" else value
            instructions.append(_tuple_of(Instruction, (op, kind, tuple([place[a] for a in args]), value)))
        program = Program(tuple(instructions), tuple(self.arrays), len(slots), tuple(place[n] for n in results))
        return program, slots

    def _condition(self, n: int) -> int:
        if self.kind(n) != "bool":
            raise ProgramError("& | ~ and np.logical_* take comparisons and bool arrays")
        return n

    def _is(self, n: int, value: float) -> bool:
        instruction = self.instructions[n]
        return instruction.op == "const" and instruction.kind != "bool" and bool(instruction.value == value)

    def _folded(self, op: str, kind: BlockKind, *args: int) -> int:
        """Add an operation, or a constant with its value if all arguments are constants."""
        fold = PRIMITIVES[op].fold
        if self.instructions[args[0]].op == self.instructions[args[-1]].op == "const" and fold is not None:
            value = fold(*(self.instructions[n].value for n in args))
            if value == value and (value or math.copysign(1, value) > 0):  # -0.0 would be equal to 0.0
                return self.const(value)
        return self.put(op, kind, *args)

    def _arithmetic(self, op: str, kind: BlockKind, *args: int) -> int:
        a, b = args[0], args[-1]
        if "const" != self.instructions[a].op and "const" != self.instructions[b].op:
            return self.put(op, kind, *args)
        if len(args) == 1:
            return self._folded(op, kind, a)
        if (op == "add" and self._is(a, 0)) or (op == "mul" and self._is(a, 1)):
            return b
        if (op in ("add", "sub") and self._is(b, 0)) or (op == "mul" and self._is(b, 1)):
            return a
        if op == "mul" and (self._is(a, -1) or self._is(b, -1)):
            return self._folded("neg", kind, b if self._is(a, -1) else a)
        return self._folded(op, kind, a, b)

    def _quotient(self, a: int, b: int) -> int:
        """Add a / b. If b is a number, multiply by its reciprocal, which becomes an additional number."""
        divisor = self.instructions[b]
        if divisor.op == "const" and divisor.value and math.isfinite(divisor.value):
            return self._arithmetic("mul", "real", a, self.const(1.0 / divisor.value))
        if divisor.op == "number" and divisor.value >= self._num_given:
            value = self.numbers[divisor.value - self._num_given]
            if _RECIPROCALS[0] <= abs(value) <= _RECIPROCALS[1]:
                return self._arithmetic("mul", "real", a, self.number(1.0 / value))
        return self.put("div", "real", a, b)


def needed_for(instructions: Sequence[Instruction], results: Iterable[int]) -> list[int]:
    """Return the instructions that these results need, in order."""
    needed: set[int] = set()
    stack = list(results)
    while stack:
        n = stack.pop()
        if n not in needed:
            needed.add(n)
            stack += instructions[n].args
    return sorted(needed)


def _only_reals(instructions: list[Instruction], needed: list[int], arrays: list[ArrayType]) -> set[int]:
    """Return the integer operations whose results are used only as reals, and whose arguments are exact as reals.

    Integers of captured arrays are exact as reals if their dtype is narrow; differences of wide ones would cancel.
    """
    if not any(instructions[n].op == "real" for n in needed):
        return set()
    uses: dict[int, list[int]] = {n: [] for n in needed}
    is_wide: set[int] = set()
    for n in needed:
        instruction = instructions[n]
        for a in instruction.args:
            uses[a].append(n)
        is_wide_load = instruction.op == "load" and arrays[instruction.value].dtype not in _NARROW_INTS
        if instruction.kind == "int" and (is_wide_load or any(a in is_wide for a in instruction.args)):
            is_wide.add(n)
    only_reals: set[int] = set()
    for n in reversed(needed):
        instruction = instructions[n]
        is_arithmetic = instruction.kind == "int" and instruction.op in _OF_REALS_TOO and n not in is_wide
        if is_arithmetic and uses[n] and all(instructions[m].op == "real" or m in only_reals for m in uses[n]):
            only_reals.add(n)
    return only_reals


def depends(program: Program) -> tuple[frozenset[str], ...]:
    """Return for each instruction the inputs among "s", "b", "h", "i" and "j" that affect its value.

    The tangent of s counts as s.

    Numbers and captured 0-d arrays depend on none of them.
    """
    dependencies: list[frozenset[str]] = []
    for instruction in program.instructions:
        own = {instruction.op} if instruction.op in ("s", *COORDINATES) else set()
        if instruction.op == "s_dot":
            own = {"s"}
        if instruction.op == "load":
            leading = program.arrays[instruction.value].is_single[: program.num_leading_axes(instruction)]
            own = {"b"} if not all(leading) else set()
        dependencies.append(frozenset(own.union(*(dependencies[a] for a in instruction.args))))
    return tuple(dependencies)


def gradient_loads(program: Program, wrt: Iterable[str]) -> tuple[int, ...]:
    """Return the loads of real arrays with these names, in order; a derived program has the same number of them."""
    names = set(wrt)
    return tuple(
        n
        for n, instruction in enumerate(program.instructions)
        if instruction.op == "load" and instruction.kind == "real" and program.arrays[instruction.value].name in names
    )


def curvature(program: Program) -> Curvature:
    """Return "shift" if df/ds is 1, "scaled" if it does not depend on s, "curved" if it does."""
    slopes = derived(program)
    slope = slopes.results[1]
    if slopes.instructions[slope] == Instruction("const", "real", (), 1.0):
        return "shift"
    return "curved" if "s" in depends(slopes)[slope] else "scaled"


@lru_cache(maxsize=256)
def derived(program: Program, wrt: tuple[str, ...] = ()) -> Program:
    """Return the program of f, df/ds and df/d(load) for each load of `gradient_loads(program, wrt)`, in this order.

    Its arrays and numbers are those of the original program.
    """
    sweep = _ReverseSweep(program)
    f = program.results[0]
    loads = gradient_loads(program, wrt)
    targets = [n for n, instruction in enumerate(program.instructions) if instruction.op == "s"]
    slope = sweep.adjoint(targets[0]) if targets else sweep.zero
    return sweep.builder.finish(f, slope, *(sweep.adjoint(n) for n in loads))


def pushed(program: Program, tangents: Iterable[str] = (), *, moves_score: bool = True) -> Program:
    """Return the program of all results of a program, followed by their tangents.

    The tangent of the score is the instruction "s_dot" if `moves_score`, else 0. The tangent of a real array named in
    `tangents` is an array of the same type called ``name.dot``; these arrays follow the program's arrays, in their
    order.
    """
    sweep = _ForwardSweep(program, frozenset(tangents), moves_score)
    return sweep.builder.finish(*program.results, *(sweep.tangents[n] for n in program.results))


class _Sweep(Derivation):
    """A builder that appends the instructions of derivatives to those of a program.

    A derivative that is 0 because a branch was not chosen stays 0 in products, so that an infinite or NaN factor in
    that branch does not reach the result: a product has the form `where(condition, product, 0)`.
    """

    def __init__(self, program: Program, arrays: Sequence[ArrayType]) -> None:
        self.builder = builder = Builder(arrays, program.num_numbers)
        for instruction in program.instructions:
            builder.put(instruction.op, instruction.kind, *instruction.args, value=instruction.value)
        self.zero, self.one = builder.const(0.0), builder.const(1.0)

    # The methods of `Derivation`, which the derivative rules in `PRIMITIVES` call.

    def op(self, n: int) -> str:
        return self.builder.instructions[n].op

    def const(self, value: float) -> int:
        return self.builder.const(value)

    def apply(self, op: str, *args: int) -> int:
        return self.builder.apply(op, *args)

    def times(self, g: int, factor: int) -> int:
        return self._guarded(g, lambda inner: self.apply("mul", inner, factor))

    def over(self, g: int, divisor: int) -> int:
        return self._guarded(g, lambda inner: self.apply("div", inner, divisor))

    def negative(self, g: int) -> int:
        return self._guarded(g, lambda inner: self.apply("neg", inner))

    def _guarded(self, g: int, change: Callable[[int], int]) -> int:
        """Apply `change` to the nonzero branches of an adjoint; the 0 of a branch that was not chosen stays 0."""
        builder = self.builder
        op, _, args, _ = builder.instructions[g]
        if g == self.zero:
            return g
        if op == "where" and self.zero in args[1:]:
            return builder.apply("where", args[0], *(self._guarded(a, change) for a in args[1:]))
        if op == "add" and all(self._is_guarded(a) for a in args):
            return builder.apply("add", *(self._guarded(a, change) for a in args))
        return change(g)

    def _is_guarded(self, g: int) -> bool:
        op, _, args, _ = self.builder.instructions[g]
        if op == "add":
            return all(self._is_guarded(a) for a in args)
        return op == "where" and self.zero in args[1:]


class _ReverseSweep(_Sweep):
    """The adjoints df/dx of a program's real instructions."""

    def __init__(self, program: Program) -> None:
        super().__init__(program, program.arrays)
        self._adjoints = {program.results[0]: self.one}
        for n in reversed(range(len(program.instructions))):
            instruction = program.instructions[n]
            if n in self._adjoints and instruction.kind == "real" and instruction.args:
                for argument, term in self._terms(n, instruction):
                    self._add(argument, term)

    def adjoint(self, n: int) -> int:
        return self._adjoints.get(n, self.zero)

    def _add(self, n: int, term: int) -> None:
        if self.builder.instructions[n].op in ("const", "number") or term == self.zero:
            return
        self._adjoints[n] = self.apply("add", self._adjoints[n], term) if n in self._adjoints else term

    def _terms(self, n: int, instruction: Instruction) -> list[tuple[int, int]]:
        """Return the terms that instruction n adds to the adjoints of its arguments; a converted integer adds none."""
        args, g = instruction.args, self._adjoints[n]
        rules = PRIMITIVES[instruction.op].derivative if instruction.op in PRIMITIVES else ()
        return [(a, rule(self, g, n, *args)) for a, rule in zip(args, rules) if rule is not None]


class _ForwardSweep(_Sweep):
    """The tangents of a program's instructions; those of integers and bools are 0.

    Attributes
    ----------
    tangents : list of int
        For each instruction, the instruction of its tangent.
    """

    def __init__(self, program: Program, names: frozenset[str], moves_score: bool) -> None:
        moved = [n for n, each in enumerate(program.arrays) if each.name in names]
        arrays = [program.arrays[n] for n in moved]
        super().__init__(program, (*program.arrays, *(each._replace(name=f"{each.name}.dot") for each in arrays)))
        self._dots = {n: len(program.arrays) + place for place, n in enumerate(moved)}
        self._score = self.builder.put("s_dot", "real") if moves_score else self.zero
        self.tangents: list[int] = []
        for n, instruction in enumerate(program.instructions):
            self.tangents.append(self._tangent(n, instruction))

    def _tangent(self, n: int, instruction: Instruction) -> int:
        op, kind, args, value = instruction
        if op == "s":
            return self._score
        if op == "load" and value in self._dots:
            return self.builder.load(self._dots[value], args)
        if kind == "real" and op == "where":
            return self.apply(op, args[0], *(self.tangents[a] for a in args[1:]))
        rules = PRIMITIVES[op].derivative if kind == "real" and op in PRIMITIVES else ()
        total = self.zero
        for a, rule in zip(args, rules):
            if rule is not None and self.tangents[a] != self.zero:
                term = rule(self, self.tangents[a], n, *args)
                total = term if total == self.zero else self.apply("add", total, term)
        return total
