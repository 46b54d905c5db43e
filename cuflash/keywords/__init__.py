"""Answers to keywords that a public call does not have, such as those of other libraries."""

from .answers import explains_keywords, require_own_names

__all__ = ["explains_keywords", "require_own_names"]
