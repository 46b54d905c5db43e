"""The pages on packed sequences and on KV caches: their examples run, and print what the page shows."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "docs" / name for name in ("packed_sequences.md", "kv_cache.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_examples_of_a_page_run_in_order(page: Path) -> None:
    text, names = page.read_text("utf-8"), dict[str, Any]()
    blocks = list(re.finditer(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```)?", text, re.MULTILINE | re.DOTALL))
    assert len(blocks) == text.count("```python")
    for block in blocks:
        printed, line = io.StringIO(), text.count("\n", 0, block.start()) + 1
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * line + block[1], page.name, "exec"), names)
        assert printed.getvalue() == (block[2] or "")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_and_paths_of_a_page_lead_somewhere(page: Path) -> None:
    text = page.read_text("utf-8")
    links = {page.parent / link for link in re.findall(r"\]\(([^)\s]+)\)", text)}
    paths = {ROOT / path for path in re.findall(r"`([\w-]+/[\w./-]+)`", text)}
    assert [path for path in links | paths if not path.exists()] == []
