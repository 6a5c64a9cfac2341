"""Every kind of defect that formats, names and files have been seen to have is pinned by a test that names its id."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
KINDS = {
    "names": ("B01", "B03", "B05", "B07", "B08", "B10"),
    "detect": ("B11", "B12", "B14", "B16"),
    "int layout": ("B18", "B20", "B21", "B22", "B24", "B26", "B28"),
    "group": ("B30", "B31", "B32", "B34"),
    "nvfp4": ("B35", "B37", "B38"),
    "mx": ("B45", "B47"),
    "fp8": ("B39", "B41", "B43"),
    "int8": ("B48",),
    "moe": ("B49", "B51", "B53", "B54"),
    "head": ("B56", "B57"),
    "kv": ("B59", "B61", "B62"),
    "save": ("B71", "B72", "B74"),
    "load": ("B82",),
    "gguf": ("B84",),
}


def named() -> set[str]:
    """Ids in the names and docstrings of tests; not in this file."""
    files = [*REPOSITORY.glob("tests/**/*.py"), *REPOSITORY.glob("plugins/*/tests/*.py")]
    texts = (file.read_text() for file in files if file != Path(__file__))
    return {found.upper() for text in texts for found in re.findall(r"(?<![A-Za-z0-9])[Bb]\d\d(?![A-Za-z0-9])", text)}


@pytest.mark.parametrize("area", KINDS)
def test_every_kind_is_pinned_by_a_test(area: str) -> None:
    assert {*KINDS[area]} <= named(), {*KINDS[area]} - named()
