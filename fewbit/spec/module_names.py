"""What a module may be called besides its own name: members of joined projections, wrappers in either order.

Servers join the projections that read one input and name the result; checkpoints and configurations may name either.
Multimodal checkpoints put their language part below `language_model.model` or `model.language_model`, depending on who
wrote them.
"""

from __future__ import annotations

import re
from functools import cache

JOINED: dict[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Name of a joined projection -> its members, in the order of their rows."""

_WRAPPED = ("model.language_model.", "language_model.model.")
_JOINED_WORD = re.compile(rf"(?<![A-Za-z0-9_])({'|'.join(JOINED)})(?![A-Za-z0-9_])")


def members_of(name: str) -> tuple[str, ...]:
    """Names of the members of a joined projection; none for any other module."""
    owner, dot, leaf = name.rpartition(".")
    return tuple(f"{owner}{dot}{member}" for member in JOINED.get(leaf, ()))


def joined_of(name: str) -> str | None:
    """Name of the joined projection that a module of that name is a member of; None for any other module."""
    owner, dot, leaf = name.rpartition(".")
    found = next((joined for joined, members in JOINED.items() if leaf in members), None)
    return None if found is None else f"{owner}{dot}{found}"


@cache
def expanded(pattern: str) -> tuple[str, ...]:
    """A pattern, of whatever rule, and the patterns that name the members of a joined projection in it."""
    found = _JOINED_WORD.search(pattern)
    if found is None:
        return (pattern,)
    return (pattern, *(pattern[: found.start()] + member + pattern[found.end() :] for member in JOINED[found[1]]))


def spellings(name: str) -> tuple[str, ...]:
    """The name, and what it is where the wrapper of a language model is written in the other order."""
    for ours, theirs in (_WRAPPED, _WRAPPED[::-1]):
        if name.startswith(ours):
            return name, theirs + name.removeprefix(ours)
    return (name,)
