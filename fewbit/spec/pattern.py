"""Patterns: which modules an entry of a target or ignore list names.

fewbit's own rule, for the command line and recipes: an exact name, `re:` and a regular expression that must match the
whole name, a glob (`*`, `?`, `[`), or a run of whole dotted segments (`lm_head`, `mlp.down_proj`, `layers.0`). A run of
segments never matches a part of a segment: `b_proj` names `x.b_proj` and not `x.kv_b_proj`.

compressed-tensors' rule (version 0.20): an exact name, `re:` and a regular expression that must match from the start of
the name (`re.match`), or the name of a module class.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase

from fewbit.errors import SchemeError


def matches(pattern: str, name: str, class_name: str = "") -> bool:
    """Whether fewbit's own rule says that `pattern` names the module.

    Args:
        pattern: an entry of a target or ignore list.
        name: dotted module name.
        class_name: name of the module's class; a pattern equal to it matches.

    Raises:
        SchemeError: the pattern is a regular expression that does not compile.
    """
    if pattern.startswith("re:"):
        return _compiled(pattern).fullmatch(name) is not None
    if not pattern:
        return False  # else it would equal the class name of everything whose class is not given
    if pattern in (name, class_name):
        return True
    if any(character in pattern for character in "*?["):
        return fnmatchcase(name, pattern)
    return f".{pattern}." in f".{name}."


def matches_compressed_tensors(pattern: str, name: str, class_name: str = "") -> bool:
    """Whether compressed-tensors' rule says that `pattern` names the module."""
    if pattern.startswith("re:"):
        return _compiled(pattern).match(name) is not None
    return bool(pattern) and pattern in (name, class_name)


Matcher = Callable[[str, str, str], bool]


def unmatched(patterns: Iterable[str], modules: Iterable[tuple[str, str]], matcher: Matcher = matches) -> list[str]:
    """The patterns that name none of the `modules`, given as (name, class name)."""
    known = list(modules)
    return [pattern for pattern in patterns if not any(matcher(pattern, *module) for module in known)]


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern.removeprefix("re:"))
    except re.error as error:
        raise SchemeError(f"The pattern {pattern!r} is no regular expression: {error}.", "Mend it.") from error
