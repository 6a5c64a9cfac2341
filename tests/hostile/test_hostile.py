"""A stranger's checkpoint: every command answers with a named error, in bounded time and memory, and runs no code.

The files are made here, not kept: most are too large or too strange to lie in a repository.
"""

from __future__ import annotations

import copy
import json
import os
import pickle
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fewbit.checkpoints.registry import find_format, formats
from fewbit.checkpoints.tensor_files import INDEX, MAX_JSON_BYTES
from fewbit.errors import FewbitError
from fewbit.evaluation.verify import verify
from fewbit.models.conversion.convert import convert
from fewbit.models.inspect import inspect_checkpoint
from fewbit.models.load import load
from fewbit.models.quantization.quantize import quantize
from tests.checkpoints.layers import KEYS, SHAPE
from tests.tiny_models import save_tiny_model

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

SECONDS, MEGABYTES = 20, 700
MODULE = "model.layers.0.mlp.up_proj"


@pytest.fixture(scope="session")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small sound checkpoint, which each test damages a copy of."""
    folder = tmp_path_factory.mktemp("honest")
    quantize(
        save_tiny_model(folder / "model", num_hidden_layers=1), folder / "w4", "W4A16", group_size=32, effort="fast"
    )
    return folder / "w4"


@pytest.fixture
def folder(honest: Path, tmp_path: Path) -> Path:
    copied = tmp_path / "hostile"
    copied.mkdir()
    for file in honest.iterdir():
        (copied / file.name).write_bytes(file.read_bytes())
    return copied


def header_of(folder: Path) -> tuple[dict[str, Any], bytes]:
    raw = (folder / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def write_header(folder: Path, header: Any, data: bytes, length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    claimed = (len(text) if length is None else length).to_bytes(8, "little")
    (folder / "model.safetensors").write_bytes(claimed + text + data)


def change_config(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def answers(folder: Path, out: Path) -> dict[str, str]:
    """Command -> the error it gave, empty where it went well. Anything but fewbit's own error fails the test."""

    def run(command: Callable[[], Any]) -> str:
        try:
            found = command()
        except FewbitError as error:
            assert error.message
            return str(error)
        failed = [check.detail for check in found.checks if not check.passed] if hasattr(found, "checks") else []
        return "; ".join(failed)

    started, before = time.monotonic(), psutil.Process().memory_info().rss
    found = {
        "inspect": run(lambda: inspect_checkpoint(folder)),
        "verify": run(lambda: verify(folder)),
        "load": run(lambda: load(folder, device="cpu")),
        "convert": run(lambda: convert(folder, out, "gptq")),
    }
    assert time.monotonic() - started < SECONDS
    assert (psutil.Process().memory_info().rss - before) / 1e6 < MEGABYTES
    assert not found["convert"] or not out.exists()
    assert not list(out.parent.glob(f".{out.name}*")), "something half-written is left"
    return found


def edit(name: str, **changes: Any) -> Callable[[dict[str, Any]], None]:
    def change(header: dict[str, Any]) -> None:
        header[f"{MODULE}.{name}"].update(changes)

    return change


HEADERS: dict[str, Callable[[dict[str, Any]], None]] = {
    "a shape whose product overflows": edit("weight_packed", shape=[2**40, 2**40]),
    "a negative shape": edit("weight_packed", shape=[-128, 8]),
    "a shape of words": edit("weight_packed", shape=["128", "8"]),
    "a shape that does not go with its bytes": edit("weight_packed", shape=[128, 9]),
    "another shape of as many bytes": edit("weight_packed", shape=[8, 128]),
    "a dtype that does not exist": edit("weight_packed", dtype="I33"),
    "a dtype that is no word": edit("weight_packed", dtype=7),
    "scales as bytes": edit("weight_scale", dtype="I16"),
    "offsets beyond the end": edit("weight_packed", data_offsets=[0, 2**62]),
    "offsets beyond 64 bits": edit("weight_packed", data_offsets=[0, 2**70]),
    "offsets the wrong way round": edit("weight_packed", data_offsets=[64, 0]),
    "offsets that overlap": edit("weight_scale", data_offsets=[0, 1024]),
    "no offsets": lambda header: header[f"{MODULE}.weight_packed"].pop("data_offsets"),
    "an entry that is a list": lambda header: header.update({f"{MODULE}.weight_packed": [1, 2]}),
    "metadata that is no object": lambda header: header.update({"__metadata__": 5}),
    "an orphaned scale": lambda header: header.update(
        {f"{MODULE}.weight_scale_of_nothing": header.pop(f"{MODULE}.weight_packed")}
    ),
}


@pytest.mark.parametrize("kind", HEADERS)
def test_headers_that_lie(kind: str, folder: Path, tmp_path: Path) -> None:
    header, data = header_of(folder)
    HEADERS[kind](header)
    write_header(folder, header, data)
    found = answers(folder, tmp_path / "out")
    assert all(found.values()), found


@pytest.mark.parametrize("length", [0, 7, 2**31, 2**63, 2**64 - 1], ids=["none", "short", "2 GiB", "2**63", "all ones"])
def test_a_header_of_another_length_than_it_claims(length: int, folder: Path, tmp_path: Path) -> None:
    header, data = header_of(folder)
    write_header(folder, header, data, length)
    assert all(answers(folder, tmp_path / "out").values())


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[]", b"null", b"5", b'"x"', b"\xff\xfe{}", b"[" * 100_000, b'{"a":' * 100_000, b"{}\x00", b"NaN"],
    ids=["empty", "open", "list", "null", "number", "word", "no UTF-8", "deep lists", "deep objects", "zero", "NaN"],
)
@pytest.mark.parametrize("file", ["config.json", "model.safetensors", INDEX, "hf_quant_config.json"])
def test_json_that_is_none(file: str, text: bytes, folder: Path, tmp_path: Path) -> None:
    if file == "model.safetensors":
        write_header(folder, text, b"")
    else:
        (folder / file).write_bytes(text)
    found = answers(folder, tmp_path / "out")
    assert all(found.values()), found


def test_a_json_of_more_than_100_megabytes(folder: Path, tmp_path: Path) -> None:
    with (folder / "config.json").open("wb") as stream:
        stream.truncate(MAX_JSON_BYTES + 1)
    found = answers(folder, tmp_path / "out")
    assert all("at most 100000000 are read" in text for text in found.values()), found


def test_a_header_of_100_megabytes(folder: Path, tmp_path: Path) -> None:
    with (folder / "model.safetensors").open("wb") as stream:
        stream.write((100_000_001).to_bytes(8, "little") + b'{"a":')
        stream.truncate(100_000_020)
    assert all(answers(folder, tmp_path / "out").values())


def test_a_name_twice_in_a_header_means_its_last_entry(folder: Path, tmp_path: Path) -> None:
    header, data = header_of(folder)
    name = f"{MODULE}.weight_packed"
    lie = json.dumps({name: {"dtype": "I32", "shape": [2**20, 2**20], "data_offsets": [0, 2**42]}})
    honest = json.dumps(header)
    write_header(folder, (honest[:-1] + ", " + lie[1:]).encode(), data)
    assert all(answers(folder, tmp_path / "out").values())
    write_header(folder, (lie[:-1] + ", " + honest[1:]).encode(), data)
    assert not any(answers(folder, tmp_path / "fine").values())


@pytest.mark.parametrize("target", ["../secret.safetensors", "/etc/passwd", "..", "a/../../secret.safetensors", ""])
def test_an_index_that_leads_out_of_the_folder(target: str, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    header, _ = header_of(folder)
    weight_map = dict.fromkeys((name for name in header if name != "__metadata__"), target)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    found = answers(folder, tmp_path / "out")
    assert all(found.values()), found


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "tokenizer.json"])
def test_links_that_lead_out_of_the_folder(file: str, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").write_bytes((folder / file).read_bytes())
    (folder / file).unlink()
    (folder / file).symlink_to(tmp_path / "outside")
    assert "leads out of the folder" in answers(folder, tmp_path / "out")["convert"]


def test_links_in_a_circle(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(folder / "model.safetensors")
    assert all(answers(folder, tmp_path / "out").values())


class _Bomb:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.safetensors"])
def test_no_pickle_is_opened(name: str, folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(_Bomb(tmp_path / "ran")))
    found = answers(folder, tmp_path / "out")
    assert all(found.values()) and not (tmp_path / "ran").exists(), found


def test_code_beside_the_model_is_not_run(folder: Path, tmp_path: Path) -> None:
    (folder / "modeling_evil.py").write_text(f"import os; os.mkdir({str(tmp_path / 'ran')!r})\nclass Evil: pass\n")
    change_config(
        folder,
        lambda config: config.update(
            {"model_type": "evil", "auto_map": dict.fromkeys(("AutoConfig", "AutoModel"), "modeling_evil.Evil")}
        ),
    )
    found = answers(folder, tmp_path / "out")
    assert all(found[command] for command in ("verify", "load", "convert"))
    assert not (tmp_path / "ran").exists()


VALUES: list[Any] = [
    10**9, -5, 0, 2**70, "four", None, [], {}, True, 1.5, -1e308, "re:(", "\x00", [[]], {"a": {}}, float("nan"),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=lambda value: repr(value)[:20])
@pytest.mark.parametrize("name", ["num_bits", "group_size", "symmetric", "strategy", "type"])
def test_settings_out_of_any_range(name: str, value: Any, folder: Path, tmp_path: Path) -> None:
    def change(config: dict[str, Any]) -> None:
        for group in config["quantization_config"]["config_groups"].values():
            group["weights"][name] = value

    change_config(folder, change)
    answers(folder, tmp_path / "out")  # fine or an error: nothing else


SETTINGS = ("bits", "group_size", "w_bit", "quant_algo", "ignore", "weight_block_size")


@pytest.mark.parametrize("method", sorted({alias for found in formats().values() for alias in found.quant_methods}))
def test_settings_of_every_format(method: str) -> None:
    given_by_file: tuple[dict[str, Any], ...] = ({}, {"bits": 4, "group_size": 32, "quant_algo": "FP8"})
    for base, name, value in product(given_by_file, SETTINGS, VALUES):
        config = {"quant_method": method, **base, name: value}
        found = find_format(config)
        assert found is not None
        with suppress(FewbitError):
            found.scheme(config).key_for(MODULE, "Linear", type(found).matcher)


WRITTEN = sorted(name for name, found in formats().items() if found.writes_layers)


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, item in inner for found in _paths(item, (*path, key)))]


@pytest.mark.parametrize("name", WRITTEN)
def test_every_place_of_a_configuration_with_a_wrong_value(name: str) -> None:
    found = formats()[name]
    held = [key for key in KEYS.values() if found.refuse(key, SHAPE) is None]
    for key in [held[0], held[len(held) // 2], held[-1]]:
        honest = found.config({MODULE: key}, ["lm_head"])
        for (*way, last), value in product(_paths(honest)[1:], [*VALUES, [None], [{}], {"x": [1]}]):
            config = copy.deepcopy(honest)
            owner = config
            for step in way:
                owner = owner[step]
            owner[last] = value
            with suppress(FewbitError):
                read = find_format(config)
                if read is not None:
                    read.scheme(config).key_for(MODULE, "Linear", type(read).matcher)


def _mutated(value: Any, data: st.DataObject) -> Any:
    """The value with one place in it replaced by anything, or taken out."""
    changed = copy.deepcopy(value)
    *way, last = data.draw(st.sampled_from(_paths(value)[1:]))
    owner = changed
    for step in way:
        owner = owner[step]
    leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6) | st.sampled_from(VALUES)
    if isinstance(owner, dict) and data.draw(st.booleans()):
        del owner[last]
    else:
        owner[last] = data.draw(st.recursive(leaves, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
    return changed


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_mutated_configurations(data: st.DataObject, folder: Path, honest: Path) -> None:
    config = json.loads((honest / "config.json").read_text())
    config["quantization_config"] = _mutated(config["quantization_config"], data)
    (folder / "config.json").write_text(json.dumps(config))
    with suppress(FewbitError):
        inspect_checkpoint(folder)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_mutated_headers(data: st.DataObject, folder: Path, honest: Path) -> None:
    header, rest = header_of(honest)
    write_header(folder, _mutated(header, data), rest)
    with suppress(FewbitError):
        inspect_checkpoint(folder)
        convert(folder, folder.parent / f"out-{time.monotonic_ns()}", "gptq")


@settings(max_examples=60)
@given(data=st.data(), name=st.sampled_from(WRITTEN))
def test_mutated_configurations_of_every_format(data: st.DataObject, name: str) -> None:
    found = formats()[name]
    key = next(key for key in KEYS.values() if found.refuse(key, SHAPE) is None)
    config = _mutated(found.config({MODULE: key}, ["lm_head"]), data)
    with suppress(FewbitError):
        read = find_format(config)
        if read is not None:
            read.scheme(config).key_for(MODULE, "Linear", type(read).matcher)
