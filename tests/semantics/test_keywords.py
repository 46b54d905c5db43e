"""An unknown keyword of a public call raises a TypeError, which names ours if another library has that keyword."""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import cuflash
import numpy as np
import pytest
from cuflash import masks, testing
from cuflash.keywords.answers import keywords_of
from cuflash.keywords.elsewhere import ELSEWHERE, OF_ONE_CALL

Q = np.ones((2, 4, 8), np.float32)
# Methods that the library calls on masks, and executors on plans, with positional arguments.
ASKED_BY_THE_LIBRARY = {
    *("intervals", "rectangle", "resolve"),
}
# Their keywords are names that the caller chooses, of arrays or of results.
OPEN = {"Plan.forward", "Plan.backward", "Plan.jvp", "Plan.backward_jvp", "Score", "Example.but"}
OPEN |= {"assert_non_finite", "assert_not_finite_where_due"}
# models pass arbitrary keywords; the function itself refuses those that it does not know
OPEN |= {"transformers_attention"}


def _public(module: ModuleType) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the public calls of a module and of its public modules: functions, constructors and methods."""
    for value in (getattr(module, name) for name in module.__all__):
        if inspect.ismodule(value):
            yield from _public(value)
        elif inspect.isclass(value):
            if getattr(value, "_is_protocol", False):
                continue
            if value not in (masks.Mask, cuflash.Plan):  # users call their subclasses and `cuflash.plan` instead
                yield value.__qualname__, value
            yield from _methods(value)
        elif callable(value) and hasattr(value, "__qualname__"):
            yield f"{value.__module__.removeprefix('cuflash.')}.{value.__qualname__}", value


def _methods(owner: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    for base in owner.__mro__:
        if not base.__module__.startswith("cuflash"):
            continue
        for name, member in vars(base).items():
            is_call = inspect.isfunction(member) or isinstance(member, (classmethod, staticmethod))
            if is_call and not name.startswith("_") and name not in ASKED_BY_THE_LIBRARY:
                is_bound = isinstance(member, (classmethod, staticmethod))
                call = getattr(owner, name) if is_bound else _of_an_instance(member)
                yield f"{base.__qualname__}.{name}", call


def _of_an_instance(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method as a call that binds its arguments before it accesses the object."""
    return method.__get__(object())  # type: ignore[attr-defined, no-any-return]


def _has_open_keywords(call: Callable[..., Any]) -> bool:
    return any(each.kind is each.VAR_KEYWORD for each in inspect.signature(call).parameters.values())


MODULES = [cuflash, testing]
if find_spec("jax"):
    import cuflash.jax

    MODULES.append(cuflash.jax)
if find_spec("torch"):
    import cuflash.torch

    MODULES.append(cuflash.torch)
EVERY_CALL = {name: call for module in MODULES for name, call in _public(module)}
CALLS = {name: call for name, call in EVERY_CALL.items() if not _has_open_keywords(call)}
CALLS["Pullback"] = cuflash.attention_vjp(Q, Q, Q)[1]


def answer(call: Callable[..., Any], *keywords: str) -> str:
    with pytest.raises(TypeError) as raised:
        call(**dict.fromkeys(keywords))
    return str(raised.value)


def test_signatures_stay_closed() -> None:
    """Type checkers, `help` and `inspect.signature` see ** only in calls whose keywords are the caller's names."""
    for name in sorted(set(EVERY_CALL) - set(CALLS)):
        assert name in OPEN or name.rpartition(".")[2] in OPEN, name
    assert list(inspect.signature(cuflash.attention).parameters)[:5] == ["q", "k", "v", "mask", "causal"]
    assert str(inspect.signature(masks.Causal)) == "(align: 'str | None' = None) -> None"


@pytest.mark.parametrize("name", CALLS)
def test_every_public_call_answers_keywords_that_it_lacks(name: str) -> None:
    call = CALLS[name]
    own = set(inspect.signature(call).parameters)
    for keyword in {"is_causal", "softmax_scale", "cu_seqlens_q", "k_cache", "implementation", "no_such_keyword"} - own:
        assert f"() has no {keyword}: " in answer(call, keyword)


@pytest.mark.parametrize("name", ["api.attention", "api.attention_vjp", "api.plan", "KVCache.attention"])
def test_every_name_of_the_table_is_answered_by_what_to_write(name: str) -> None:
    own = set(inspect.signature(CALLS[name]).parameters)
    for keyword in ELSEWHERE:
        said, sentences = answer(CALLS[name], keyword), [*ELSEWHERE[keyword], *OF_ONE_CALL.values()]
        is_known = any(said.endswith(f"() has no {keyword}: {sentence}") for sentence in sentences)
        assert is_known or name != "api.attention", said
        assert "it takes" in said or keywords_of(said.partition(": ")[2]) <= own, said


def unknown_in(sentence: str) -> list[str]:
    """List the names in a sentence that cuflash does not have, and the keywords that its calls do not accept."""
    faults = []
    for path, arguments in re.findall(r"cuflash((?:\.\w+)+)(\([^()]*\))?", sentence):
        value: Any = cuflash
        for part in path[1:].split("."):
            value = getattr(value, part, None) if part not in ("torch", "jax") else part
        if value is None:
            faults.append(f"cuflash{path}")
        elif arguments:
            parameters = inspect.signature(value).parameters
            faults += [f"{path}({each}=)" for each in re.findall(r"(\w+)=", arguments) if each not in parameters]
    return faults


SENTENCES = sorted({sentence for sentences in ELSEWHERE.values() for sentence in sentences} | set(OF_ONE_CALL.values()))


@pytest.mark.parametrize("sentence", SENTENCES)
def test_sentences_name_what_exists(sentence: str) -> None:
    assert unknown_in(sentence) == []
    taken = [set(inspect.signature(call).parameters) for call in CALLS.values()]
    assert any(keywords_of(sentence) <= own for own in taken)


def rows_of(page: str) -> Iterator[tuple[list[str], str]]:
    """Yield the rows of a page's tables of names: the names, and the sentence without backticks."""
    for table in re.findall(r"^\| [^`|]+ \| cuflash \|\n\|--.*\n((?:\|.*\n)+)", page, re.MULTILINE):
        for row in table.splitlines():
            names, sentence = re.fullmatch(r"\| (.*?) \| (.*) \|", row).groups()  # type: ignore[union-attr]
            yield re.findall(r"`(\w+)`", names), sentence.replace("`", "").replace("\\|", "|")


def faults_of(page: str) -> list[str]:
    """List the names with a sentence on a page that differs from the table's, and those that the page lacks."""
    rows = list(rows_of(page))
    wrong = [name for names, said in rows for name in names if ELSEWHERE.get(name, [""])[0] != said]
    return [*wrong, *sorted(set(ELSEWHERE) - {name for names, _ in rows for name in names})]


PAGE = (Path(__file__).parents[2] / "docs" / "coming_from.md").read_text("utf-8")


def test_the_page_about_other_libraries_has_the_table() -> None:
    assert faults_of(PAGE) == []


def test_all_unknown_keywords_are_answered_at_once() -> None:
    with pytest.raises(TypeError) as raised:
        cuflash.attention(Q, Q, Q, is_causal=True, scale=1.0, sm_scale=1.0, casual=True, nothing=0)  # type: ignore
    first, *lines = str(raised.value).split("\n")
    assert first == "4 unknown keywords:"
    assert lines[0].startswith("- attention() has no is_causal: use causal=True")
    assert lines[1:3] == [
        "- attention() has no sm_scale: use scale=", "- attention() has no casual: did you mean causal=?"
    ]  # fmt: skip
    assert lines[3].startswith("- attention() has no nothing: it takes q, k, v, mask, ")


def test_calls_without_such_an_argument_say_what_they_take_and_where_it_is_taken() -> None:
    said = answer(cuflash.merge, "softmax_scale")
    assert said == "merge() has no softmax_scale: it takes outs, lses; in cuflash.attention, use scale="
    assert answer(cuflash.cache_info, "verbose") == "cache_info() has no verbose: it takes no arguments"


def test_plans_answer_names_of_options() -> None:
    ready = cuflash.plan(Q, Q, Q)
    o, lse = ready.forward(Q, Q, Q)
    for array in (True, Q):
        with pytest.raises(TypeError, match=r"Plan.forward\(\) has no is_causal: .* in cuflash.plan, use causal="):
            ready.forward(Q, Q, Q, is_causal=array)
        with pytest.raises(TypeError, match=r"Plan.backward\(\) has no sm_scale: .* in cuflash.plan, use scale="):
            ready.backward(Q, Q, Q, Q, o, lse, sm_scale=array)


@pytest.mark.parametrize(
    ("arguments", "keywords", "said"),
    [
        ((Q, Q), {}, "missing 1 required positional argument: 'v'"),
        ((Q, Q, Q, Q), {"scale": 1.0}, "takes 3 positional arguments but 4 "),
        ((Q, Q, Q), {"q": Q}, "multiple values for argument 'q'"),
    ],
)
def test_other_errors_of_binding_are_those_of_python(arguments: Any, keywords: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        cuflash.attention(*arguments, **keywords)


def test_errors_inside_of_a_call_pass_as_they_are() -> None:
    """The caller's own TypeError is raised unchanged, through at most one extra stack frame."""
    own = TypeError("mine")

    def rule(b: Any, h: Any, i: Any, j: Any) -> Any:
        raise own

    with pytest.raises(TypeError) as raised:
        cuflash.attention(Q, Q, Q, mask=rule, scale=1.0)
    frames = [frame.filename for frame in traceback.extract_tb(raised.tb)]
    assert raised.value is own
    assert sum(name.endswith("answers.py") for name in frames) == 1
