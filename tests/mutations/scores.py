"""Planted faults in score functions: programs, derivatives, ranges, errors, and their use by the cpu executor."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import test_score_alignment as alignment
from mutations import score_guards
from mutations.calls import refuses
from mutations.planting import Edit
from mutations.python_guards import part


def attends_aligned(score: Any, **options: Any) -> Callable[[Any], Any]:
    """Return a probe: a score that was created without an alignment is refused."""
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 3, 8)), rng.standard_normal((2, 40, 8))

    def call(library: ModuleType) -> Any:
        arguments = {name: make(library) for name, make in options.items()}
        return library.attention(q, k, k, score=score(library), **arguments)

    return refuses(call, "score must have an alignment")


def looked_up_after_an_aligned_one(library: ModuleType) -> None:
    q, k = np.ones((2, 3, 8)), np.ones((2, 40, 8))
    for align in ("top_left", "top_left", None):
        library.attention(q, k, k, causal="bottom_right", score=alignment.alibi(library, align=align))


def reads_at_the_last_key(library: ModuleType) -> None:
    key_shift = part(library, "scores.trace").key_shift
    score = library.scores.Score(lambda s, b, h, i, j, table: s + table[i + key_shift(i)], table=np.zeros(43))
    library.attention(np.ones((3, 8)), np.ones((40, 8)), np.ones((40, 8)), score=score)


def has_lengths_that_float32_rounds(library: ModuleType) -> None:
    q, k = (library.ShapeDtype((2, rows, 8), "f4") for rows in (1, 2**24 + 2))
    score = alignment.alibi(library, align="bottom_right")
    library.plan(q, k, k, score=score, device=library.DeviceSpec.host())


def bottom_right(library: ModuleType) -> str:
    return "bottom_right"


PRIMITIVES = "scores/_primitives.py"
PROGRAM, TRACE, RANGES = "scores/program.py", "scores/trace.py", "scores/ranges.py"
VALUES, SCORE, LIBRARY = "scores/values.py", "scores/score.py", "scores/library.py"
COMPOSITION = "scores/composition.py"
PLACES = "scores/places.py"
TILES, BLOCKS = "executors/tile_scores.py", "executors/tile_program.py"
CPU, OPERANDS = "executors/cpu.py", "planning/score_operands.py"

FAULTS = {
    score_guards.aligned_scores_are_right: {
        "distances are moved the other way": Edit(LIBRARY, "alibi", "i - j + key_shift(i)", "i - j - key_shift(i)"),
        "queries are longer than keys": Edit(
            OPERANDS, "numbers_of", "shape.seqlen_kv - shape.seqlen_q", "shape.seqlen_q - shape.seqlen_kv"
        ),
        "the shift is a real": Edit(
            VALUES, "result", 'int(number) if instruction.kind == "int" else real(number)', "real(number)"
        ),
        "a sequence has the shift of the call": Edit(TRACE, "key_shift", "if shift is not None:", "if False:"),
        "shifts of sequences are those of their queries": Edit(
            PLACES, "_shifts", "(kv[entry][1:] - kv[entry][:-1]) -", "-"
        ),
        "sequences have no shift": Edit(PLACES, "within.restarted", "query + shift", "query"),
        "positions of a cache are shifted": Edit(
            PLACES, "in_cache.in_cache", "with shifted_by(0):", "with shifted_by(None):"
        ),
    },
    attends_aligned(alignment.alibi, causal=bottom_right): {
        "causal at the bottom right needs no alignment": Edit(
            OPERANDS, "alignment_reasons", 'causal == "bottom_right"', "False"
        ),
        "alibi without an alignment has one": Edit(LIBRARY, "_aligned", "if align is None:", "if False:"),
    },
    attends_aligned(
        lambda library: alignment.t5(library).renamed({"table": "other"}),
        mask=lambda library: library.masks.Causal("bottom_right").on_blocks(2),
    ): {
        "a mask at the bottom right needs no alignment": Edit(
            OPERANDS, "alignment_reasons", 'getattr(part, "align", None) == "bottom_right"', "False"
        ),
        "a mask in blocks is not looked into": Edit(
            "masks/content.py", "held_masks", "value in _held(mask) if", "value in [mask] if"
        ),
    },
    attends_aligned(
        lambda library: library.scores.within(alignment.alibi(library), [0, 3], [0, 40]),
        mask=lambda library: library.masks.Sequences([0, 3], [0, 40], causal="bottom_right"),
    ): {
        "a score within sequences is aligned": Edit(
            PLACES, "within", "score.facts if align is None", "frozenset() if align is None"
        ),
    },
    score_guards.arrays_are_widened: {
        "integers of arrays wrap around in a call on arrays": Edit(
            SCORE, "_widened", "namespace(x).clip(x, *integer_range(dtype)).astype(np.int64)", "x"
        ),
        "narrow reals stay so in a call on arrays": Edit(SCORE, "_widened", "return x.astype(np.float32)", "return x"),
    },
    score_guards.powers_by_0_are_constant: {
        "a power by the number 0 has a slope": Edit(
            PRIMITIVES, "_slope_by_base", "d.zero if b == d.zero else slope", "slope"
        ),
    },
    refuses(lambda library: library.scores.Score(lambda s, b, h, i, j: s - np.reciprocal(j + 1)), "write 1 / x"): {
        "integers have real reciprocals": Edit(
            TRACE, "Symbol.__array_ufunc__", 'if self._builder.kind(self._n) == "int":', "if False:"
        ),
    },
    refuses(reads_at_the_last_key, "may be -3..42"): {
        "an index at the last key is within its axis": Edit(
            RANGES, "_range_of", 'Range(-extents["i"], extents["j"])', "Range(0, 0)"
        ),
    },
    refuses(has_lengths_that_float32_rounds, "at most 2**24 in magnitude"): {
        "lengths differ by any number in float32": Edit(OPERANDS, "numbers_of", "abs(shift) > _MOST_EXACT", "False"),
    },
    refuses(looked_up_after_an_aligned_one, "score must have an alignment"): {
        "equal programs are equally aligned": Edit(
            "planning/options.py", "Options.key", "score.numbers, score.facts", "score.numbers"
        ),
    },
    score_guards.texts_have_their_programs: {
        "the text of a function has the numbers of another": Edit(
            "scores/trace.py", "Traced.__call__", "else self.numbers[value]", "else self.numbers[0]"
        ),
        "the text of a function counts from the first query and key": Edit(
            "scores/trace.py", "Traced.__call__", 'if kind == "int" else', "if False else"
        ),
        "the text of a function lacks its facts": Edit(
            "scores/trace.py", "Traced.facts", "frozenset(self.names_of_facts)", "frozenset()"
        ),
    },
    score_guards.values_are_right: {
        "a number's reciprocal is the number": Edit(
            PROGRAM, "Builder._quotient", "self.number(1.0 / value)", "self.number(value)"
        ),
        "the branches of where change places": Edit(
            PROGRAM, "Builder._choice",
            '"where", self.kind(a), condition, a, b', '"where", self.kind(a), condition, b, a',
        ),
        "slots are not counted again": Edit(
            PROGRAM, "Builder._pruned", 'slots.index(value) if op == "number" else value', "value"
        ),
        "wide integers are subtracted as reals": Edit(
            PROGRAM, "_only_reals", "in _OF_REALS_TOO and n not in is_wide", "in _OF_REALS_TOO"
        ),
        "integers wrap around at int32": Edit(
            VALUES, "Operands.loaded", "np.clip(x, *integer_range(x.dtype)).astype(np.int64)", "x.astype(np.int32)"
        ),
        "batch axes are those of the first arrays": Edit(
            VALUES, "Operands.place", "entries[len(self.batch) - num_leading :]", "entries[:num_leading]"
        ),
    },
    score_guards.derivatives_are_right: {
        "the second term of a difference keeps its sign": Edit(
            PRIMITIVES, None, "(lambda d, g, n, a, b: g, lambda d, g, n, a, b: d.negative(g))",
            "(lambda d, g, n, a, b: g, lambda d, g, n, a, b: g)",
        ),
        "factors are not exchanged": Edit(
            PRIMITIVES, None, "(lambda d, g, n, a, b: d.times(g, b), lambda d, g, n, a, b: d.times(g, a))",
            "(lambda d, g, n, a, b: d.times(g, a), lambda d, g, n, a, b: d.times(g, b))",
        ),
        "a tie of min goes to the second": Edit(
            PRIMITIVES, "_extremum", 'd.apply("where", d.apply(order, a, b), g, d.zero)',
            'd.apply("where", d.apply(order.replace("le", "lt"), a, b), g, d.zero)',
        ),
        "the branch that is not chosen has the derivative": Edit(
            PRIMITIVES, None, 'lambda d, g, n, a, b, c: d.apply("where", a, d.zero, g)',
            'lambda d, g, n, a, b, c: d.apply("where", a, g, d.zero)',
        ),
        "a branch that is not chosen leaks": Edit(
            PROGRAM, "_Sweep._guarded", 'op == "where" and self.zero in args[1:]', "False"
        ),
        "the exponent of 0 has an infinite slope": Edit(
            PRIMITIVES, "_slope_by_exponent", 'd.op(a) != "number"', "False"
        ),
        "an exponent has no derivative": Edit(
            PRIMITIVES, "_slope_by_exponent", 'd.op(b) in ("const", "number", "real")', "True"
        ),
        "the last use alone counts": Edit(
            PROGRAM, "_ReverseSweep._add",
            'self.apply("add", self._adjoints[n], term) if n in self._adjoints else term', "term",
        ),
        "exp2 lacks log 2": Edit(
            PRIMITIVES, None, "d.times(d.times(g, n), d.const(_LN_2))", "d.times(g, n)"
        ),
        "arctan has the slope of its result": Edit(
            PRIMITIVES, None,
            'd.apply("add", d.one, d.apply("mul", a, a))', 'd.apply("add", d.one, d.apply("mul", n, n))',
        ),
    },
    score_guards.errors_hold: {
        "a difference of equal integers may be anything": Edit(
            PRIMITIVES, "_error_of_sum", "np.equal(x, 0) & np.equal(passed, 0)", "False"
        ),
        "0 to a power may be anything": Edit(
            PRIMITIVES, "_error_of_power", "np.equal(a.value, 0) & np.equal(a.error, 0)", "False"
        ),
        "a sum forgets its second term": Edit(
            PRIMITIVES, "_error_of_sum", "passed = a.error + b.error", "passed = a.error"
        ),
        "exp passes its argument's error": Edit(
            PRIMITIVES, "_error_of_exp", "np.abs(x) * np.expm1(a.error * base)", "a.error"
        ),
        "arctan is flat where its argument is": Edit(
            PRIMITIVES, "_error_of_arctan", "np.maximum(np.abs(a.value) - a.error, 0)", "np.abs(a.value)"
        ),
        "where errs as the chosen branch": Edit(
            PRIMITIVES, "_error_of_choice", "np.where(condition.error, either, chosen)", "chosen"
        ),
        "a power is as exact as its base": Edit(
            PRIMITIVES, "_error_of_power", "exponent = np.abs(b.value) * e_log +", "exponent = 0 * e_log +"
        ),
        "a comparison never turns": Edit(PRIMITIVES, "_turns", "np.greater(room, 0) &", "False &"),
        "a product forgets a factor": Edit(
            PRIMITIVES, "_error_of_product", "np.abs(a.value) * b.error +", ""
        ),
    },
    score_guards.programs_are_simple: {
        "finished programs keep the first numbers": Edit(
            TRACE, "_finished", "cached.program, tuple([values[slot] for slot in cached.slots])",
            "cached.program, tuple(cached.further) + tuple([values[0] for _ in cached.slots[len(cached.further) :]])",
        ),
        "finished programs forget their arrays": Edit(TRACE, "_finished", ", tuple(builder.arrays)", ""),
        "a read at the batch entry depends on none": Edit(
            PROGRAM, "depends", 'own = {"b"} if not all(leading) else set()', "own = set()"
        ),
    },
    score_guards.indices_are_proven: {
        "a remainder reaches its divisor": Edit(PRIMITIVES, "_range_of_remainder", "(0, divisor - 1)", "(0, divisor)"),
        "an index may be the extent": Edit(RANGES, "_index_reasons", "most < extent", "most <= extent"),
        "what an array holds is trusted": Edit(
            RANGES, "_range_of", "integer_range(program.arrays[instruction.value].dtype)", "Range(0, 0)"
        ),
        "integers may overflow": Edit(RANGES, "range_reasons", "or known[n].most > LARGEST", ""),
        "2^24 + 1 becomes a float32": Edit(
            RANGES, "range_reasons", "extents.get(name, 0) > _MOST_EXACT", "extents.get(name, 0) > _MOST_EXACT + 1"
        ),
    },
    score_guards.refusals_are_told: {
        "a real index is taken": Edit(PROGRAM, "Builder.load", 'any([self.kind(n) != "int" for n in args])', "False"),
        "an index is left out": Edit(
            TRACE, "ArraySymbol.__getitem__", "not is_batched and len(indices) != rank", "False"
        ),
        "an index from the end is taken": Edit(TRACE, "ArraySymbol._index", "is_int(value) and value < 0", "False"),
        "a comparison is a number": Edit(PROGRAM, "Builder.real", 'instruction.kind == "bool"', "False"),
        "the divisor is not looked at": Edit(
            PROGRAM, "Builder._dividend_and_divisor",
            'divisor.kind != "int" or divisor.op != "const" or divisor.value <= 0', "False",
        ),
        "an earlier symbol is taken": Edit(TRACE, "_number_of", "value._builder is not builder", "False"),
        "reserved names are taken": Edit(SCORE, "Score.__init__", "if name in RESERVED", "if name in ()"),
        "nine arrays are taken": Edit(SCORE, "Score._make", "len(arrays) > most", "len(arrays) > most + 1"),
        "swapped bytes are taken": Edit(SCORE, "_array_type", "if dtype.isnative else None", ""),
        "options of a ufunc are dropped": Edit(
            TRACE, "Symbol.__array_ufunc__", 'method != "__call__" or options', 'method != "__call__"'
        ),
        "a number is a condition": Edit(PROGRAM, "Builder._condition", 'self.kind(n) != "bool"', "False"),
        "a slice is None": Edit(TRACE, "ArraySymbol.__getitem__", "or isinstance(each, slice)", ""),
        "the signature is not looked at": Edit(
            TRACE, "_require_signature", "signature.bind(*symbols, **captured)",
            "pass",
        ),
    },
    score_guards.results_are_right: {
        "the function is applied after the mask": Edit(
            CPU, "HostCall.score_steps",
            "\n            if self.score is not None:\n                self.score.apply(s, self._row_places(tiles, "
            "steps))\n            self.mask_keys(tiles, steps, -np.inf, s)\n            ",
            "\n            self.mask_keys(tiles, steps, -np.inf, s)\n            if self.score is not None:\n        "
            "        self.score.apply(s, self._row_places(tiles, steps))\n            ",
        ),
        "the slope is left out": Edit(TILES, "TileScores.gradients", "ds *= values[slope]", "pass"),
        "the function is left out": Edit(
            TILES, "TileScores.apply", "np.copyto(s[block.tiles, block.keys], block.values[f])", "pass"
        ),
        "weights are powers of two": Edit(CPU, "HostCall.of", "else (np.exp, 1.0", "else (np.exp2, 1.0"),
        "P is made in place of scores that are read later": Edit(
            TILES, "TileScores.gradients", 'instructions[n].op == "s" for n', 'instructions[n].op == "b" for n'
        ),
        "P is not masked": Edit(TILES, "TileScores.gradients", "mask(is_seen.view(np.uint8))", "pass"),
        "weights of 0 are not looked for": Edit(TILES, "zeros_of", "p.min() > 0", "True"),
        "delta is left out": Edit(TILES, "TileScores.gradients", "ds -= delta[block.tiles, None, :]", "pass"),
        "all blocks have the keys of the first": Edit(
            BLOCKS, "Block.of", "self.keys if x.shape[1] >", "slice(self.keys.stop - self.keys.start) if x.shape[1] >"
        ),
        "a value is overwritten before its last use": Edit(
            BLOCKS, "_schedule", "if last_use[a] == n and a in memory_of", "if a in memory_of"
        ),
        "the last block of a tile is left out": Edit(
            BLOCKS, "_parts", "range(0, num_keys, keys)", "range(0, max(1, num_keys - keys), keys)"
        ),
        "broadcast axes are not summed": Edit(
            TILES, "TileScores._add", "terms.sum(axis=axes, keepdims=True)", "terms.max(axis=axes, keepdims=True)"
        ),
        "an element counts once a tile": Edit(
            TILES, "TileScores._add",
            "np.add.at(total.reshape(-1), np.broadcast_to(flat, terms.shape).ravel(), terms.ravel())",
            "total.reshape(-1)[np.broadcast_to(flat, terms.shape).ravel()] += terms.ravel()",
        ),
        "gradients are not zeroed": Edit(TILES, "TileScores.of", "total[...] = 0", "total[...] = 1"),
        "positions of queries and keys are exchanged": Edit(
            TILES, "coordinates",
            "_stacked(queries)[:, None, :], _stacked(keys)[:, :, None]",
            "_stacked(keys)[:, :, None], _stacked(queries)[:, None, :]",
        ),
        "the head is that of the keys": Edit(
            CPU, "HostCall._row_places", "[(tile.b, tile.h) for tile", "[(tile.b, tile.h // self.group_size) for tile"
        ),
        "scores are in base 2 for the function": Edit(
            CPU, "HostCall.of", "(np.exp, 1.0, 1.0)", "(np.exp, 1.0, _LOG2_E)"
        ),
        "f's own error is left out of the bound": Edit(
            "bounds/forward.py", "_scores", "score, e_score = (np.where(allowed, x, 0) for x in final[:2])",
            "score, e_score = np.where(allowed, final.f, 0), 0 * e_score",
        ),
        "the bound has no slope": Edit(
            "bounds/gradients.py", "through_slope", "e_ds = slope * e_df +", "e_ds = 0 * e_df +"
        ),
        "the bound of an array's gradient is that of one read": Edit(
            "bounds/captured.py", "_gradient_tolerance", "), (tolerance, terms), (masses, mass))", "), (masses, mass))"
        ),
        "a result is overwritten": Edit(BLOCKS, "_schedule", "and a not in requested", ""),
    },
    score_guards.compositions_are_right: {
        "biases are equal whatever their dtype": Edit(COMPOSITION, "_key", "type(bias), bias.dtype,", "type(bias),"),
        "scores share what is composed": Edit(
            COMPOSITION, "composition", "_with_score.setdefault(score, {})", "_without_score"
        ),
        "functions hold the arrays of their scores": Edit(
            SCORE, "Score.__matmul__", "[*self.arrays], [*other.arrays]", "self.arrays, other.arrays"
        ),
    },
    score_guards.calls_are_right: {
        "the bias is added before the cap": Edit(
            LIBRARY, "composed", "reduce(matmul, parts)", "reduce(matmul, [*parts[:-2], *parts[-2:][::-1]])"
        ),
        "numbers are remembered": Edit(
            "planning/options.py", "Options.key", "score.program, score.numbers", "score.program"
        ),
        "arrays of a plan cannot be replaced": Edit(
            "plans/plan.py", "Plan._with_operands", "{**self._captured, **operands}", "{**operands, **self._captured}"
        ),
        "a cap that float32 rounds to infinity is taken": Edit(OPERANDS, "_number_reasons", "<= most", "< math.inf"),
        "float64 holds no more than float32": Edit(
            OPERANDS, "_number_reasons", "np.finfo(accumulator.name)", "np.finfo(np.float32)"
        ),
        "the bias's shape is not looked at": Edit(
            OPERANDS, "captured_operands", 'if "bias" in score.arrays:', "if False:"
        ),
        "integers have gradients": Edit(
            "planning/problem.py", "with_operands", "if array.name not in integers", "if True"
        ),
        "sums are added as threads finish": Edit(
            CPU, "backward", "columns, in_order=in_order, num_tiles", "columns, num_tiles"
        ),
    },
}
