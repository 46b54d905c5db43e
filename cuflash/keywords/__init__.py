"""Error messages for unknown keywords of public calls, which translate the keywords of other libraries."""

from .answers import explains_keywords, require_keywords, require_own_names

__all__ = ["explains_keywords", "require_keywords", "require_own_names"]
