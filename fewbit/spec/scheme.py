"""Schemes: which modules get which key."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from fewbit.errors import SchemeError
from fewbit.spec.element import Element
from fewbit.spec.granularity import Granularity
from fewbit.spec.key import LinearKey, QuantKey
from fewbit.spec.module_names import expanded, members_of, spellings
from fewbit.spec.pattern import Matcher, PatternLists, matches, unmatched


@dataclass(frozen=True)
class Rule:
    """The modules that `targets` name get `key`; None leaves them as they are, whatever later rules say."""

    targets: tuple[str, ...]
    key: LinearKey | None


@dataclass(frozen=True)
class Scheme:
    """Module pattern -> `LinearKey`, exclusions, and the KV cache's key.

    The first rule that names a module decides; `ignore` beats every rule.

    Attributes:
        name: what people call it, say `W4A16`.
        rules: tried in order.
        ignore: patterns of modules that stay as they are.
        kv_cache: key of the KV cache, or None where it stays in the model's dtype.
        variant: which variant of its format a checkpoint's configuration announces, for formats that have several.
        aliases: module name -> what else it is called.
    """

    name: str
    rules: tuple[Rule, ...]
    ignore: tuple[str, ...] = ("lm_head",)
    kv_cache: QuantKey | None = None
    variant: str = ""
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict, compare=False)

    @cached_property
    def keys(self) -> tuple[LinearKey, ...]:
        """Every key that the rules give, each once, in their order."""
        return tuple(dict.fromkeys(rule.key for rule in self.rules if rule.key))

    def key_for(self, name: str, class_name: str = "Linear", matcher: Matcher = matches) -> LinearKey | None:
        """The key of the module, or None where it stays as it is.

        An entry means a module by its own name, an alias, or either order of wrappers. An entry that names a joined
        projection (`qkv_proj`) means its members; entries that name the members mean the joined one if they agree.

        Raises:
            SchemeError: the members of a joined projection are treated differently.
        """
        module = (matcher, name, class_name)
        if module not in self.derived:
            self.derived[module] = self._key_of(self._decide_joined(name, class_name, matcher))
        found: LinearKey | None = self.derived[module]
        return found

    def _decide_joined(self, name: str, class_name: str, matcher: Matcher) -> int:
        """`_decide` for a module that may be a joined projection."""
        decided = self._decide(name, class_name, matcher)
        members = members_of(name)
        if members:
            decisions = [self._decide(member, class_name, matcher) for member in members]
            if decided >= min(decisions):  # an entry that names the joined module itself, before any member, wins
                self._require_one_key(name, members, decisions)
                decided = decisions[0]
        return decided

    def _decide(self, name: str, class_name: str, matcher: Matcher) -> int:
        """What names the module first: -1 for `ignore`, the index of a rule, or the number of rules for nothing."""
        names = {*spellings(name), *(other for alias in self.aliases.get(name, ()) for other in spellings(alias))}
        lists = self._lists(matcher)
        found = [index for called in names if (index := lists.first(called, class_name)) is not None]
        return min(found) - 1 if found else len(self.rules)

    def _lists(self, matcher: Matcher) -> PatternLists:
        """The entries of `ignore` and then of each rule, those that name joined projections with their members."""
        if matcher not in self.derived:
            entries = (self.ignore, *(rule.targets for rule in self.rules))
            self.derived[matcher] = PatternLists(
                (tuple(one for entry in listed for one in expanded(entry)) for listed in entries), matcher
            )
        found: PatternLists = self.derived[matcher]
        return found

    @cached_property
    def derived(self) -> dict[Any, Any]:
        """What was computed from the scheme, by whoever did, so that it is done once; no part of its value."""
        return {}

    def _key_of(self, decided: int) -> LinearKey | None:
        return self.rules[decided].key if 0 <= decided < len(self.rules) else None

    def _require_one_key(self, name: str, members: tuple[str, ...], decisions: list[int]) -> None:
        keys = [self._key_of(decided) for decided in decisions]
        if len(set(keys)) > 1:
            found = ", ".join(f"{member} is {key or 'left plain'}" for member, key in zip(members, keys, strict=True))
            raise SchemeError(
                f"{name} is one matrix, and the configuration treats its members differently: {found}.",
                "Name all of them or none.",
            )

    def unmatched(self, modules: Iterable[tuple[str, str]], matcher: Matcher = matches) -> list[str]:
        """The patterns, targets and exclusions alike, that name none of `modules` (name, class name)."""
        patterns = [*(target for rule in self.rules for target in rule.targets), *self.ignore]
        called = [
            (other, class_name)
            for name, class_name in modules
            for own in (name, *self.aliases.get(name, ()), *members_of(name))
            for other in spellings(own)
        ]
        return [
            pattern
            for pattern in patterns
            if len(unmatched(expanded(pattern), called, matcher)) == len(expanded(pattern))
        ]

    def also_called(self, aliases: Mapping[str, tuple[str, ...]]) -> Scheme:
        """The same scheme for modules that have other names as well, by which entries may mean them."""
        return replace(self, aliases=aliases)

    def ignoring(self, patterns: Iterable[str]) -> Scheme:
        """The same scheme with more exclusions."""
        return replace(self, ignore=tuple(dict.fromkeys([*self.ignore, *patterns])))

    def with_granularity(self, granularity: Granularity) -> Scheme:
        """The same scheme with its weight scales at another granularity.

        Raises:
            SchemeError: the scheme's group is part of its format (MX, NVFP4) or its weights have no groups.
        """
        for key in self.keys:
            weight = key.weight
            if weight.global_scale or weight.scale.element.is_exponent_only or weight.granularity.kind == "block":
                raise SchemeError(
                    f"{self.name} fixes its own granularity ({weight.granularity}).", "Leave the group size out."
                )
        return self._map_weights(lambda key: key.with_granularity(granularity))

    def with_scale_element(self, element: Element) -> Scheme:
        """The same scheme with 16- and 32-bit float weight scales stored in `element`."""
        return self._map_weights(lambda key: key.with_scale_element(element) if key.scale.element.bits > 8 else key)

    def with_keys(self, change: Callable[[LinearKey], LinearKey]) -> Scheme:
        """The same scheme with every key changed."""
        return replace(
            self, rules=tuple(replace(rule, key=change(rule.key)) if rule.key else rule for rule in self.rules)
        )

    def _map_weights(self, change: Any) -> Scheme:
        rules = (
            replace(rule, key=replace(rule.key, weight=change(rule.key.weight))) if rule.key else rule
            for rule in self.rules
        )
        return replace(self, rules=tuple(rules))

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `from_json` reads back."""
        return {
            "name": self.name,
            "rules": [
                {"targets": list(rule.targets), "key": str(rule.key) if rule.key else None} for rule in self.rules
            ],
            "ignore": list(self.ignore),
            "kv_cache": str(self.kv_cache) if self.kv_cache else None,
            "variant": self.variant,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Scheme:
        """Reads `to_json` back.

        Raises:
            SchemeError: a field is missing or cannot be understood.
        """
        try:
            rules = tuple(
                Rule(_words(rule["targets"]), None if rule["key"] is None else LinearKey.parse(rule["key"]))
                for rule in data["rules"]
            )
            kv_cache = QuantKey.parse(data["kv_cache"]) if data.get("kv_cache") else None
            return cls(data["name"], rules, _words(data["ignore"]), kv_cache, data.get("variant", ""))
        except (KeyError, TypeError, AttributeError) as error:
            raise SchemeError(f"The scheme's JSON lacks or misuses {error}.", "Compare it with a saved one.") from error


def _words(patterns: Any) -> tuple[str, ...]:
    """A JSON list of strings; a lone string would otherwise fall apart into its letters."""
    if not isinstance(patterns, list) or not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(f"the patterns {patterns!r}, which are no list of strings")
    return tuple(patterns)
