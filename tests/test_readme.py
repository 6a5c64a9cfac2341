"""The README stays true: its commands exist with the options it shows, its snippet runs, its links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from fewbit.cli.main import COMMANDS as KNOWN
from tests.tiny_models import save_tiny_model

REPOSITORY = Path(__file__).parents[1]
README = (REPOSITORY / "README.md").read_text()


def blocks(language: str) -> list[str]:
    found = re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)
    assert found, f"the README has no {language} block"
    return found


COMMANDS = sorted(
    {line.split("#")[0].strip() for text in blocks("sh") for line in text.splitlines() if "fewbit " in line}
)


@pytest.mark.parametrize("line", COMMANDS)
def test_command_exists_with_its_options(line: str) -> None:
    command = line.split()[1]
    shown = subprocess.run(
        [sys.executable, "-m", "fewbit", command, "--help"], capture_output=True, text=True, check=True
    ).stdout
    for option in re.findall(r"(?<!\S)--?[a-z][a-z-]*", line):
        assert re.search(rf"(?<![\w-]){option}(?![\w-])", shown), f"{option} is not in the help of {command}"


def test_every_command_is_shown() -> None:
    missing = {name for name in KNOWN if f"fewbit {name}" not in README and f"make {name}" not in README}
    assert not missing


def test_make_targets_exist() -> None:
    makefile = (REPOSITORY / "Makefile").read_text()
    for target in set(re.findall(r"\bmake ([a-z][a-z-]+)", README + (REPOSITORY / "CONTRIBUTING.md").read_text())):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), f"make {target} does not exist"


def test_snippet_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny_model(tmp_path / "MODEL")
    (snippet,) = blocks("python")
    assert len([line for line in snippet.splitlines() if line.strip()]) <= 6
    for name in ("MODEL", "OUT"):
        snippet = snippet.replace(f'"{name}"', repr(str(tmp_path / name)))
    exec(compile(snippet, "README.md", "exec"), {})
    assert "compressed-tensors" in capsys.readouterr().out


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", *(f"docs/{p.name}" for p in (REPOSITORY / "docs").glob("*.md"))]
)
def test_links_lead_somewhere(page: str) -> None:
    text = (REPOSITORY / page).read_text()
    for link in re.findall(r"\]\(([^)#]+)", text):
        assert link.startswith("http") or (REPOSITORY / page).parent.joinpath(link).exists(), f"{page}: {link}"
    assert not re.search(r"DEMO_TABLE|QUALITY_TABLE|KERNELS_LINE|TODO", text), f"{page} has an unfinished part"
