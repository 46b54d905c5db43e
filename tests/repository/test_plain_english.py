"""The checks of the repository's language detect what they are meant to detect."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import plain_english
import pytest


@pytest.mark.parametrize(
    "code",
    [
        'def f():\n    """The number of rows."""',
        'def f():\n    """Whether a row is empty."""',
        'def f():\n    """Returns the number of rows."""',
        'def f():\n    """Return the number of rows"""',
        'class A:\n    """How rows are counted."""',
        'class A:\n    """Counts."""\n    @property\n    def f(self):\n        """Return the number of rows."""',
        '"""Makes plans."""',
    ],
)
def test_docstrings_that_break_a_rule_are_reported(code: str) -> None:
    (violation,) = plain_english.syntax_violations(Path("a.py"), code)
    assert violation.kind == "docstrings"


@pytest.mark.parametrize(
    "code",
    [
        'def f():\n    """Return the number of rows."""',
        'def f():\n    """True if a row is empty."""',
        'def test_f():\n    """The number of rows is known."""',
        'class A:\n    """Rows."""\n    @property\n    def f(self):\n        """The number of rows."""',
        '"""Plans of calls."""',
        '"""How fast is it?"""',
    ],
)
def test_docstrings_that_follow_the_rules_pass(code: str) -> None:
    assert list(plain_english.syntax_violations(Path("a.py"), code)) == []


@pytest.mark.parametrize(
    "code",
    [
        "made = 1",
        "for found in x: pass",
        "[told for told in x]",
        "def f(given): pass",
        "f = lambda asked: 1",
        "self.there = 1",
        "class A:\n    here: int",
        "def kept(): pass",
        "if (made := 1): pass",
        "with x as found: pass",
    ],
)
def test_names_that_say_nothing_are_reported(code: str) -> None:
    (violation,) = plain_english.syntax_violations(Path("a.py"), code)
    assert violation.kind == "names"
    assert not list(plain_english.syntax_violations(Path("a.py"), "from hypothesis import given\nf(found)"))


def test_words_and_phrases_are_reported(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        "# Made Anew, but for one.\n"  # codespell:ignore
        "# There is no plan; it is no longer needed; a newer one exists.\n"
        "anew  # codespell:ignore\n"
    )
    reports = list(plain_english.word_violations([Path("a.py")], tmp_path))
    assert [each.line for each in reports] == [1, 1]
    assert [each.text.partition(" ==>")[0].lower() for each in reports] == ["anew", "but for"]  # codespell:ignore
    assert reports[0].folder == "."


def test_the_dictionary_is_in_order() -> None:
    lines = plain_english.WORDS.read_text("utf-8").splitlines()
    assert lines == sorted(set(lines))
    assert all(line == line.lower() or "FP8" in line or "None" in line for line in lines)


def test_allowances_only_fall(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_english, "ALLOWANCES", tmp_path / "allowances.csv")
    counts = Counter({("cuflash", "words"): 2, ("docs", "names"): 1})
    plain_english.write_allowances(counts)
    assert plain_english.allowances() == counts
    repeated = [plain_english.Violation(Path("cuflash/a.py"), 1, "words", "") for _ in range(3)]
    monkeypatch.setattr(plain_english, "violations", lambda paths: repeated)
    monkeypatch.setattr("sys.argv", ["plain_english.py", "--lower"])
    assert plain_english.main() == 1
    assert plain_english.allowances() == Counter({("cuflash", "words"): 2})
    repeated.pop()
    assert plain_english.main() == 0
