"""Patterns: which modules an entry of a target or ignore list names."""

from __future__ import annotations

import pytest

from fewbit.errors import SchemeError
from fewbit.spec.pattern import Matcher, matches, matches_compressed_tensors, unmatched

OWN_RULE = [
    # exact names and classes
    ("lm_head", "lm_head", "Linear", True),
    ("Linear", "model.layers.0.q_proj", "Linear", True),
    ("Linear", "model.layers.0.q_proj", "Embedding", False),
    ("Lin", "model.layers.0.q_proj", "Linear", False),
    ("linear", "model.layers.0.q_proj", "Linear", False),
    # runs of whole dotted segments, never a part of one
    ("b_proj", "x.b_proj", "", True),
    ("b_proj", "x.kv_b_proj", "", False),
    ("b_proj", "b_proj.x", "", True),
    ("kv_b", "x.kv_b_proj", "", False),
    ("5.attn.g_proj", "layers.5.attn.g_proj", "", True),
    ("5.attn.g_proj", "layers.15.attn.g_proj", "", False),
    ("5.attn", "layers.5.attn.g_proj", "", True),
    ("layers.1", "model.layers.1.mlp", "", True),
    ("layers.1", "model.layers.11.mlp", "", False),
    ("attn.g_proj", "layers.5.attn.x.g_proj", "", False),
    ("lm_head", "model.lm_head", "", True),
    ("lm_head", "model.lm_head_norm", "", False),
    # regular expressions match the whole name
    (r"re:.*\.b_proj", "x.b_proj", "", True),
    (r"re:.*b_proj", "x.kv_b_proj", "", True),
    (r"re:.*mlp\.gate", "layers.0.mlp.gate", "", True),
    (r"re:.*mlp\.gate", "layers.0.mlp.gate_proj", "", False),
    (r"re:mlp\.gate", "layers.0.mlp.gate", "", False),
    (r"re:.*layers\.[0-3]\..*", "model.layers.2.q", "", True),
    (r"re:Linear", "model.layers.2.q", "Linear", False),
    # globs match the whole name, and a star crosses dots
    ("*.gate", "layers.0.mlp.gate", "", True),
    ("*.gate", "layers.0.mlp.gate_proj", "", False),
    ("vision_tower*", "vision_tower.blocks.0.fc", "", True),
    ("vision_tower*", "model.vision_tower.blocks.0.fc", "", False),
    ("layers.?.q", "layers.1.q", "", True),
    ("layers.?.q", "layers.11.q", "", False),
    ("layers.[01].q", "layers.1.q", "", True),
    ("*GATE", "mlp.gate", "", False),  # case counts
    ("*gate", "mlp.GATE", "", False),
    # nothing names nothing
    ("", "x.y", "", False),
    ("", "x.y", "Linear", False),
]

COMPRESSED_TENSORS_RULE = [
    ("lm_head", "lm_head", "Linear", True),
    ("lm_head", "model.lm_head", "Linear", False),  # an exact name or nothing
    ("b_proj", "x.b_proj", "Linear", False),
    ("Linear", "x.b_proj", "Linear", True),
    ("re:.*mlp.gate$", "layers.0.mlp.gate", "Linear", True),
    ("re:.*mlp.gate$", "layers.0.mlp.gate_proj", "Linear", False),
    ("re:visual.*", "visual.blocks.0", "Linear", True),
    ("re:visual.*", "model.visual.blocks.0", "Linear", False),  # from the start
    ("re:.*mlp.gate", "layers.0.mlp.gate_proj", "Linear", True),  # and not to the end
    ("*.gate", "mlp.gate", "Linear", False),  # it has no globs
    ("", "x.y", "", False),
]


@pytest.mark.parametrize(("pattern", "name", "class_name", "expected"), OWN_RULE)
def test_own_rule(pattern: str, name: str, class_name: str, expected: bool) -> None:
    assert matches(pattern, name, class_name) is expected


@pytest.mark.parametrize(("pattern", "name", "class_name", "expected"), COMPRESSED_TENSORS_RULE)
def test_compressed_tensors_rule(pattern: str, name: str, class_name: str, expected: bool) -> None:
    assert matches_compressed_tensors(pattern, name, class_name) is expected


@pytest.mark.parametrize("matcher", [matches, matches_compressed_tensors])
def test_a_broken_regular_expression_is_named(matcher: Matcher) -> None:
    with pytest.raises(SchemeError, match=r"re:\(open"):
        matcher("re:(open", "x", "")


def test_patterns_that_match_nothing_are_reported_in_their_order() -> None:
    modules = [("model.layers.0.q_proj", "Linear"), ("lm_head", "Linear"), ("embed", "Embedding")]
    patterns = ["typo", "lm_head", "Linear", "re:.*q_proj", "Conv1d", "re:layers.*"]
    assert unmatched(patterns, modules) == ["typo", "Conv1d", "re:layers.*"]
    assert unmatched(["layers.0"], modules) == []
    assert unmatched(["layers.0"], modules, matches_compressed_tensors) == ["layers.0"]


def test_modules_may_come_from_a_generator() -> None:
    assert unmatched(["a", "b"], ((name, "Linear") for name in ("b", "a"))) == []
