"""Patterns: which modules an entry of a target or ignore list names.

fewbit's own rule, for the command line and recipes: an exact name, `re:` and a regular expression that must match the
whole name, a glob (`*`, `?`, `[`), or a run of whole dotted segments (`lm_head`, `mlp.down_proj`, `layers.0`). A run of
segments never matches a part of a segment: `b_proj` names `x.b_proj` and not `x.kv_b_proj`.

compressed-tensors' rule (version 0.20): an exact name, `re:` and a regular expression that must match from the start of
the name (`re.match`), or the name of a module class.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from functools import cache

from fewbit.errors import SchemeError

Matcher = Callable[[str, str, str], bool]
"""A rule: whether a pattern names the module of a name and a class."""

Predicate = Callable[[str, str], bool]
"""Whether any pattern of a list names the module of a name and a class."""

_GLOB_SIGNS = frozenset("*?[")
_WORTH_AN_INDEX = 8


def by_segments(literal_of: Callable[[str], str | None]) -> Callable[[Matcher], Matcher]:
    """Says of a rule which patterns name a module only by its class or by a run of whole segments of its name.

    A list of thousands of them need not be asked one by one.

    Args:
        literal_of: the class or run that a pattern stands for, None where it may match anything else.
    """

    def mark(matcher: Matcher) -> Matcher:
        matcher.literal_of = literal_of  # type: ignore[attr-defined]
        return matcher

    return mark


def prepared_by(prepare: Callable[[tuple[str, ...]], Predicate]) -> Callable[[Matcher], Matcher]:
    """Says how a list of patterns under a rule is made ready; the answers must be those of asking each pattern."""

    def mark(matcher: Matcher) -> Matcher:
        matcher.prepare = prepare  # type: ignore[attr-defined]
        return matcher

    return mark


class PatternLists:
    """Lists of patterns under one rule, made ready to be asked about many modules.

    Args:
        lists: entries of an ignore list and of the targets of each rule, say.
        matcher: the rule.
    """

    def __init__(self, lists: Iterable[Iterable[str]], matcher: Matcher) -> None:
        listed = [tuple(patterns) for patterns in lists]
        many = sum(map(len, listed)) > _WORTH_AN_INDEX
        literal_of_rule = getattr(matcher, "literal_of", _nothing) if many else _nothing
        prepare = getattr(matcher, "prepare", lambda patterns: _asking_each(patterns, matcher))
        self._matcher = matcher
        self._literals: dict[str, list[tuple[int, str]]] = {}
        self._others: list[tuple[int, Predicate]] = []
        for index, patterns in enumerate(listed):
            others = []
            for pattern in patterns:
                literal = literal_of_rule(pattern)
                if literal is None:
                    others.append(pattern)
                else:
                    self._literals.setdefault(literal, []).append((index, pattern))
            if others:
                self._others.append((index, prepare(tuple(others))))
        self._lengths = tuple({literal.count(".") + 1 for literal in self._literals})

    def first(self, name: str, class_name: str = "") -> int | None:
        """Index of the first list of which a pattern names the module, None where none does.

        Raises:
            SchemeError: a pattern is a regular expression that does not compile.
        """
        texts = (class_name, *_runs(name, self._lengths)) if self._literals else ()
        possible = (found for text in texts for found in self._literals.get(text, ()))
        best = min((index for index, pattern in possible if self._matcher(pattern, name, class_name)), default=None)
        for index, names in self._others:
            if best is not None and index >= best:
                break
            if names(name, class_name):
                return index
        return best


def literal_of(pattern: str) -> str | None:
    """The pattern itself, unless it is a glob or, after `re:`, a regular expression."""
    return None if pattern.startswith("re:") or _GLOB_SIGNS & {*pattern} else pattern


def unescaped(expression: str) -> str | None:
    """The one text that a regular expression `^...$` matches; None where it may match others."""
    text = expression.removeprefix("^").removesuffix("$").replace("\\", "")
    return text if expression == f"^{re.escape(text)}$" else None


@by_segments(literal_of)
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
    if _GLOB_SIGNS & {*pattern}:
        return fnmatchcase(name, pattern)
    return f".{pattern}." in f".{name}."


@by_segments(lambda pattern: unescaped(pattern[3:]) if pattern.startswith("re:") else pattern)
def matches_compressed_tensors(pattern: str, name: str, class_name: str = "") -> bool:
    """Whether compressed-tensors' rule says that `pattern` names the module."""
    if pattern.startswith("re:"):
        return _compiled(pattern).match(name) is not None
    return bool(pattern) and pattern in (name, class_name)


def unmatched(patterns: Iterable[str], modules: Iterable[tuple[str, str]], matcher: Matcher = matches) -> list[str]:
    """The patterns that name none of the `modules`, given as (name, class name)."""
    known = list(modules)
    literal_of_rule: Callable[[str], str | None] = getattr(matcher, "literal_of", _nothing)
    by_run: dict[str, list[tuple[str, str]]] = {}
    for module in known:
        for run in (module[1], *_runs(module[0])):
            by_run.setdefault(run, []).append(module)

    def possible(pattern: str) -> list[tuple[str, str]]:
        literal = literal_of_rule(pattern)
        return known if literal is None else by_run.get(literal, [])

    return [pattern for pattern in patterns if not any(matcher(pattern, *module) for module in possible(pattern))]


def _asking_each(patterns: tuple[str, ...], matcher: Matcher) -> Predicate:
    return lambda name, class_name: any(matcher(pattern, name, class_name) for pattern in patterns)


def _nothing(_pattern: str) -> None:
    return None


def _runs(name: str, lengths: Iterable[int] | None = None) -> Iterator[str]:
    """Every run of whole segments of a name, `a`, `a.b`, `b` of `a.b`, or those of some numbers of segments."""
    parts = name.split(".")
    counts = range(1, len(parts) + 1) if lengths is None else [count for count in lengths if count <= len(parts)]
    return (".".join(parts[at : at + count]) for count in counts for at in range(len(parts) - count + 1))


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern.removeprefix("re:"))
    except re.error as error:
        raise SchemeError(f"The pattern {pattern!r} is no regular expression: {error}.", "Mend it.") from error
