"""Configuration of Sphinx for these pages: `make docs`."""

import configparser
import re
from pathlib import Path
from typing import Any

import cuflash
import cuflash.distributed
import cuflash.testing
from numpydoc.xref import DEFAULT_LINKS

project = "cuflash"
author = "the cuflash developers"
copyright = author
release = version = cuflash.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.mathjax",
    "sphinx.ext.viewcode",
    "sphinx_gallery.gen_gallery",
    "sphinx_copybutton",
    "sphinx_design",
    "numpydoc",
    "myst_parser",
]
exclude_patterns = ["_build", "_templates", "examples"]
templates_path = ["_templates"]
html_theme = "furo"
html_title = f"cuflash {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
# `masks.Causal` in a docstring is a link.
default_role = "py:obj"
# Prompts and output are not copied.
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
# Diagrams and other text in fences without a language are not highlighted.
highlight_language = "none"

autosummary_generate = True
autodoc_typehints = "none"
autodoc_preserve_defaults = True
autodoc_inherit_docstrings = False
numpydoc_show_class_members = False
numpydoc_xref_param_type = True
numpydoc_xref_ignore = "all"
# Types of parameters that are public classes are links; numpydoc's own links lead to other sites.
numpydoc_xref_aliases = {name: name for name in DEFAULT_LINKS} | {
    name: f"{module.__name__}.{name}"
    for module in (cuflash, cuflash.distributed, cuflash.masks, cuflash.scores, cuflash.selectors, cuflash.study, cuflash.testing)
    for name in module.__all__
    if isinstance(getattr(module, name), type)
}
# The pages are built without these.
autodoc_mock_imports = ["torch", "jax"]
# A public docstring that breaks one of the rules is a warning, and so an error.
_setup = configparser.ConfigParser()
_setup.read(Path(__file__).parents[1] / "setup.cfg")
# A function that Hypothesis makes has no source that numpydoc could read.
numpydoc_validation_exclude = {r"\.testing\.masks$"}
numpydoc_validation_checks = set(_setup["tool:numpydoc_validation"]["checks"].split())

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3
suppress_warnings = ["myst.header"]

sphinx_gallery_conf = {
    "examples_dirs": "examples",
    "gallery_dirs": "gallery",
    "filename_pattern": r"plot_.*\.py",
    "only_warn_on_example_error": False,
    "abort_on_example_error": True,
    "within_subsection_order": "FileNameSortKey",
    "show_memory": False,
    "min_reported_time": 1e9,
    "show_signature": False,
    "download_all_examples": False,
}


def _escaped(signs: re.Match[str]) -> str:
    return "".join(f"\\{sign}" for sign in signs[1])


def escape_shapes(app: Any, what: str, name: str, obj: object, options: Any, lines: list[str]) -> None:
    """Add backslashes to the stars and bars of shapes and formulas in docstrings, which are not emphasis."""
    for place, line in enumerate(lines):
        if not line.lstrip().startswith((">>>", "...")):
            parts = re.split(r"(`+[^`]*`+)", line)
            parts[::2] = [re.sub(r"(?<![\\*\w])([*|]+)(?=\w)", _escaped, part) for part in parts[::2]]
            lines[place] = "".join(parts)


def skip_fields(app: Any, what: str, name: str, obj: object, skip: bool, options: Any) -> bool | None:
    """Leave out the fields of a named tuple, which the docstring of its class describes."""
    return True if (getattr(obj, "__doc__", None) or "").startswith("Alias for field number") else None


def lead_to_pages_of_the_site(app: Any, name: str, source: list[str]) -> None:
    """Replace links to pages at the top of the repository, as ../DESIGN.md, by those to the pages that include them."""
    source[0] = re.sub(r"\.\./(?=(CHANGELOG|CONTRIBUTING|DESIGN|SECURITY)\.md)", "", source[0])


def setup(app: Any) -> None:
    app.connect("source-read", lead_to_pages_of_the_site)
    app.connect("autodoc-skip-member", skip_fields)
    app.connect("autodoc-process-docstring", escape_shapes, priority=100)
