"""The public names and signatures equal those of one file, and few of them are in the top-level package."""

from __future__ import annotations

import inspect

import public_surface

import cuflash

MOST_NAMES = 30  # names in the top-level package


def test_public_names_and_signatures_are_those_of_the_file() -> None:
    recorded, actual = public_surface.SURFACE.read_text("utf-8"), public_surface.surface()
    gone = sorted(set(recorded.splitlines()) - set(actual.splitlines()))
    new = sorted(set(actual.splitlines()) - set(recorded.splitlines()))
    advice = "if that is meant: python tests/repository/public_surface.py --write, and a line in CHANGELOG.md"
    assert recorded == actual, "\n".join([*(f"- {line}" for line in gone), *(f"+ {line}" for line in new), advice])


def test_a_changed_default_and_a_new_parameter_are_seen() -> None:
    def before(x: int, *, scale: float | None = None) -> None: ...
    def other_default(x: int, *, scale: float | None = 1.0) -> None: ...
    def more(x: int, *, scale: float | None = None, bias: object = None) -> None: ...

    lines = {line for call in (before, other_default, more) for line in public_surface._lines("x", call)}
    assert lines == {"x(x, *, scale=None)", "x(x, *, scale=1.0)", "x(x, *, scale=None, bias=None)"}


def test_few_names_are_at_the_top() -> None:
    assert len(cuflash.__all__) <= MOST_NAMES


def test_options_of_attention_are_spelled_alike_everywhere() -> None:
    """A parameter that another public call shares with `attention` has the same default there."""
    options = inspect.signature(cuflash.attention).parameters
    calls = cuflash.attention_vjp, cuflash.plan, cuflash.precompile, cuflash.study.recall
    for call in calls:
        for name, parameter in inspect.signature(call).parameters.items():
            if name in options and (call, name) != (cuflash.study.recall, "mask"):
                assert parameter.default == options[name].default, (call, name)
    for name in set(cuflash.selectors.__all__) - {"Budget", "Forced", "page_bounds", "quest"}:
        parameters = inspect.signature(getattr(cuflash.selectors, name)).parameters
        assert list(parameters)[:2] == ["q", "k"] and {"budget", "forced", "mask", "window", "scale"} <= set(parameters)
        assert parameters["block"].default == (128, 128) and parameters["causal"].default is False
