"""The rules of the house, checked on the source itself: import direction, sizes, names, error handling, settings.

Each rule is a function from a package's folder to the violations found there. It is run on `fewbit` and on small
packages that break it, since a checker that finds nothing proves nothing.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PACKAGE = REPOSITORY / "fewbit"

# A package imports those of lower number only. `algorithms` stands aside, see `_may_import`.
LEVELS = {
    "spec": 0,
    "numerics": 1,
    "packing": 2,
    "checkpoints": 3,
    "kernels": 3,
    "methods": 4,
    "models": 5,
    "runtime": 6,
    "weight_cache": 7,
    "evaluation": 8,
    "integrations": 8,
    "cli": 9,
}
FOUNDATIONS = {"errors", "discovery", "lazy"}  # modules that everything may import
ENTRANCES = {"__init__", "__main__"}  # modules at the top that may import everything, lazily
PUBLIC_FUNCTIONS = "a public function"  # of `fewbit` itself, which may come from anywhere in the house
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "common", "misc"}
ON_DISK_NAMES = re.compile(
    r"(?<![A-Za-z0-9])(qzeros|qweight|g_idx|weight_packed|weight_scale_inv|weight_global_scale|weight_zero_point"
    r"|weight_scale_2|weight_g_idx)(?![A-Za-z0-9])"
)
READS_ENVIRONMENT: set[str] = set()  # files that may; behaviour is set by options, which outputs record

Rule = Callable[[Path], list[str]]


@cache
def _sources(root: Path) -> list[tuple[Path, ast.Module]]:
    return [
        (path.relative_to(root), ast.parse(path.read_text(encoding="utf-8"))) for path in sorted(root.rglob("*.py"))
    ]


def _imports(root: Path, path: Path, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import anywhere in the file, relative ones and `import_module("...")` resolved."""
    package = [root.name, *path.parent.parts]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == root.name:
            yield node.lineno, f"{root.name}.{node.attr}"  # what `import fewbit` alone does not say
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{source}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and _called(node) == "import_module":
            named = [argument.value for argument in node.args[:1] if isinstance(argument, ast.Constant)]
            yield from ((node.lineno, ".".join(package) + name if name[0] == "." else name) for name in named)


def _called(node: ast.Call) -> str:
    """The last part of what is called: `f` of `f()` and of `module.f()`."""
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def _may_import(importer: str, imported: str) -> bool:
    if importer in ENTRANCES or imported == importer:
        return True
    if imported == PUBLIC_FUNCTIONS:
        return importer == "cli"
    if imported in FOUNDATIONS:
        return importer != "errors"
    if importer == "algorithms":
        return imported in ("spec", "numerics")
    if imported == "algorithms":
        return LEVELS.get(importer, -1) >= LEVELS["models"]
    return LEVELS.get(importer, -1) > LEVELS.get(imported, len(LEVELS))


def import_direction(root: Path) -> list[str]:
    """Imports against `spec -> numerics -> ... -> cli`, or of the public functions from inside."""
    found = []
    for path, tree in _sources(root):
        importer = path.parts[0].removesuffix(".py")
        for line, name in _imports(root, path, tree):
            top, *rest = name.split(".")
            if top != root.name or not rest or rest[0] == "__version__":
                continue
            imported = rest[0]
            if not ((root / imported).is_dir() or (root / f"{imported}.py").is_file()):
                imported = PUBLIC_FUNCTIONS
            if not _may_import(importer, imported):
                found.append(f"{path}:{line}: {importer} imports {imported}")
    return found


def spec_is_standard_library(root: Path) -> list[str]:
    """Imports of `spec` from outside the standard library."""
    return [
        f"{path}:{line}: spec imports {name}"
        for path, tree in _sources(root)
        if path.parts[0] == "spec"
        for line, name in _imports(root, path, tree)
        if name.split(".")[0] not in {*sys.stdlib_module_names, root.name}
    ]


def sizes(root: Path) -> list[str]:
    """Files and functions that are too long to read in one go."""
    found = []
    for path, tree in _sources(root):
        lines = len((root / path).read_text(encoding="utf-8").splitlines())
        if lines > MAX_FILE_LINES:
            found.append(f"{path}: {lines} lines")
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = node.end_lineno - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    found.append(f"{path}:{node.lineno}: {node.name} has {length} lines")
    return found


def clear_names(root: Path) -> list[str]:
    """Files and folders whose name says nothing about what is in them."""
    return [
        str(path.relative_to(root))
        for path in sorted(root.rglob("*"))
        if path.stem in VAGUE_NAMES and (path.suffix == ".py" or path.is_dir())
    ]


def on_disk_names(root: Path) -> list[str]:
    """Names of stored tensors in code outside `checkpoints`; docstrings and comments may explain with them."""
    found = []
    for path, tree in _sources(root):
        if path.parts[0] == "checkpoints":
            continue
        docstrings = {
            id(node.body[0].value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and ast.get_docstring(node) is not None
        }
        for node in ast.walk(tree):
            if id(node) in docstrings:
                continue
            words = [getattr(node, field, None) for field in ("id", "attr", "arg", "name", "value")]
            for word in words:
                if isinstance(word, str) and (match := ON_DISK_NAMES.search(word)):
                    found.append(f"{path}:{getattr(node, 'lineno', '?')}: {match[0]}")
    return found


def _catches_everything(node: ast.AST) -> bool:
    if isinstance(node, ast.ExceptHandler):
        caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        names = {getattr(kind, "id", "") for kind in caught}
        # Catching everything to tidy up and raise again hides nothing.
        raises_again = isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None
        return node.type is None or "Exception" in names or ("BaseException" in names and not raises_again)
    if isinstance(node, ast.Call) and _called(node) == "suppress":
        return any(getattr(kind, "id", "") in ("Exception", "BaseException") for kind in node.args)
    return False


def narrow_excepts(root: Path) -> list[str]:
    """Handlers that would swallow a defect together with what they were written for."""
    return [
        f"{path}:{node.lineno}: catches everything"
        for path, tree in _sources(root)
        for node in ast.walk(tree)
        if _catches_everything(node)
    ]


def no_environment(root: Path) -> list[str]:
    """Reads of environment variables outside the files that may."""
    readers = {"environ", "environb", "getenv"}
    found = []
    for path, tree in _sources(root):
        if str(path) in READS_ENVIRONMENT:
            continue
        for node in ast.walk(tree):
            imported = (
                isinstance(node, ast.ImportFrom)
                and node.module == "os"
                and any(alias.name in readers for alias in node.names)
            )
            if imported or (isinstance(node, ast.Attribute) and node.attr in readers):
                found.append(f"{path}:{node.lineno}: reads the environment")
    return found


RULES: list[Rule] = [
    import_direction,
    spec_is_standard_library,
    sizes,
    clear_names,
    on_disk_names,
    narrow_excepts,
    no_environment,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_fewbit_keeps_the_rule(rule: Rule) -> None:
    assert rule(PACKAGE) == []


@pytest.mark.parametrize("folder", ["plugins", "tests", "benchmarks", "examples"])
@pytest.mark.parametrize("rule", [sizes, clear_names, narrow_excepts], ids=lambda rule: rule.__name__)
def test_the_rest_of_the_repository_keeps_the_rule(rule: Rule, folder: str) -> None:
    if not (REPOSITORY / folder).is_dir():
        pytest.skip(f"There is no folder {folder} yet.")
    assert rule(REPOSITORY / folder) == []


PLANTED = [
    (import_direction, "spec/key.py", "import fewbit.numerics"),
    (import_direction, "numerics/cast.py", "from fewbit import kernels"),
    (import_direction, "kernels/linear/fast.py", "def run():\n    from fewbit.checkpoints.gptq import read"),
    (import_direction, "kernels/linear/fast.py", "from ...checkpoints import gptq"),
    (import_direction, "checkpoints/gptq.py", "from ..kernels import registry"),
    (import_direction, "checkpoints/gptq.py", "if TYPE_CHECKING:\n    import fewbit.algorithms.gptq as g"),
    (import_direction, "algorithms/gptq.py", "from fewbit.packing import registry"),
    (import_direction, "methods/online.py", "from fewbit.algorithms import gptq"),
    (import_direction, "runtime/decode.py", "from importlib import import_module\nimport_module('fewbit.cli')"),
    (import_direction, "models/load.py", "import fewbit\nfewbit.quantize()"),
    (import_direction, "models/load.py", "import fewbit.spec\nx = fewbit.evaluation.verify"),
    (import_direction, "models/load.py", "from fewbit import quantize_model"),
    (import_direction, "evaluation/report.py", "from fewbit.integrations import vllm"),
    (import_direction, "errors.py", "from fewbit.spec import key"),
    (import_direction, "elsewhere/thing.py", "from fewbit.spec import key"),
    (spec_is_standard_library, "spec/key.py", "def f():\n    import torch"),
    (spec_is_standard_library, "spec/key.py", "from numpy.linalg import norm"),
    (sizes, "cli/main.py", "x = 0\n" * (MAX_FILE_LINES + 1)),
    (sizes, "cli/main.py", "class A:\n    async def f(self):\n" + "        x = 0\n" * MAX_FUNCTION_LINES),
    (clear_names, "models/utils.py", ""),
    (clear_names, "models/common/names.py", ""),
    (on_disk_names, "kernels/linear/fast.py", "layer.qweight = 1"),
    (on_disk_names, "models/load.py", "name = f'{prefix}.weight_scale_inv'"),
    (on_disk_names, "methods/linear.py", "def create(weight_packed): pass"),
    (narrow_excepts, "cli/main.py", "try:\n    f()\nexcept:\n    pass"),
    (narrow_excepts, "cli/main.py", "try:\n    f()\nexcept (OSError, Exception) as error:\n    raise"),
    (narrow_excepts, "cli/main.py", "try:\n    f()\nexcept BaseException:\n    pass"),
    (narrow_excepts, "cli/main.py", "import contextlib\nwith contextlib.suppress(Exception):\n    f()"),
    (no_environment, "kernels/probe.py", "import os\nx = os.environ['FAST']"),
    (no_environment, "kernels/probe.py", "from os import getenv\nx = getenv('FAST')"),
]

CLEAN = [
    (import_direction, "spec/key.py", "import re\nfrom fewbit.errors import SchemeError\nfrom . import element"),
    (import_direction, "kernels/linear/fast.py", "from fewbit.packing import registry\nfrom ..interface import Kernel"),
    (
        import_direction,
        "models/quantization/pipeline.py",
        "from fewbit.algorithms import gptq\nfrom fewbit.kernels import select",
    ),
    (import_direction, "algorithms/gptq.py", "from fewbit.numerics import quantize\nfrom fewbit.spec import key"),
    (import_direction, "cli/run.py", "from fewbit import quantize_model\nfrom fewbit.integrations import vllm"),
    (import_direction, "models/load.py", "import fewbit\nprint(fewbit.__version__)"),
    (import_direction, "__init__.py", "def f():\n    from fewbit.models import load"),
    (sizes, "cli/main.py", "def f():\n" + "    x = 0\n" * (MAX_FUNCTION_LINES - 1)),
    (on_disk_names, "checkpoints/gptq.py", "NAME = 'qweight'"),
    (on_disk_names, "models/load.py", "def f():\n    '''Reads qweight.'''\n    return 1  # qzeros"),
    (narrow_excepts, "cli/main.py", "try:\n    f()\nexcept BaseException:\n    g()\n    raise"),
    (narrow_excepts, "cli/main.py", "try:\n    f()\nexcept (OSError, re.error):\n    pass"),
]


def _dummy_package(folder: Path, file: str, source: str) -> Path:
    root = folder / "fewbit"
    for name in [*LEVELS, "algorithms"]:
        (root / name).mkdir(parents=True)
    for name in FOUNDATIONS:
        (root / f"{name}.py").write_text("")
    path = root / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    return root


@pytest.mark.parametrize(("rule", "file", "source"), PLANTED)
def test_a_planted_violation_is_found(rule: Rule, file: str, source: str, tmp_path: Path) -> None:
    found = rule(_dummy_package(tmp_path, file, source))
    assert len(found) == 1, found
    assert found[0].split(":")[0] in (file, str(Path(file).parent))


@pytest.mark.parametrize(("rule", "file", "source"), CLEAN)
def test_clean_code_passes(rule: Rule, file: str, source: str, tmp_path: Path) -> None:
    assert rule(_dummy_package(tmp_path, file, source)) == []


def test_every_folder_of_the_package_has_a_place_in_the_house() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and any(path.rglob("*.py"))}
    assert folders - {"__pycache__"} <= {*LEVELS, "algorithms"}


@pytest.mark.parametrize("modules", ["fewbit", "spec"])
def test_descriptions_import_without_torch(modules: str) -> None:
    names = (
        ["fewbit"] if modules == "fewbit" else [f"fewbit.spec.{path.stem}" for path in PACKAGE.glob("spec/[!_]*.py")]
    )
    code = f"import sys, {', '.join(names)}; print(*({{'torch', 'transformers', 'numpy'}} & sys.modules.keys()))"
    result = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert result.stdout.split() == []
