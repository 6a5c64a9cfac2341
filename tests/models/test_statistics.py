"""Statistics that are gathered once and kept: what they say, and what runs that read them write."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from fewbit.algorithms.statistics import InputStatistics
from fewbit.errors import OutputError, SchemeError
from fewbit.evaluation.divergence import divergence
from fewbit.evaluation.verify import verify
from fewbit.models.load import load
from fewbit.models.quantization import statistics
from fewbit.models.quantization.block_stream import BlockStream
from fewbit.models.quantization.calibration import Calibration
from fewbit.models.quantization.quantize import quantize
from fewbit.models.quantization.ranks import ALONE
from fewbit.models.quantization.statistics import BlockStatistics, StatisticsStore, gather_statistics
from fewbit.spec.recipe import Recipe
from tests.hashes import hashes
from tests.tiny_models import save_tiny_model

CALIBRATION = Calibration(torch.arange(96).reshape(6, 16) % 61, "numbers")
SIZES: dict[str, Any] = {"calibration_windows": 6, "calibration_length": 32}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("source") / "model", dtype=torch.float32)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_what_is_gathered_is_what_the_whole_model_shows(tmp_path: Path, family: str) -> None:
    folder = save_tiny_model(tmp_path / "model", family, dtype=torch.float32)
    inputs: dict[str, list[Tensor]] = {}
    whole = load(folder, device="cpu", dtype=torch.float32)
    found = list(gather_statistics(folder, CALIBRATION))
    names = [name for block in found for name in block.inputs]
    for name, module in whole.named_modules():
        if name in names:
            inputs[name] = []
            module.register_forward_pre_hook(
                lambda _, x, name=name: inputs[name].append(x[0].reshape(-1, x[0].shape[-1]))
            )
    with torch.no_grad():
        whole(input_ids=CALIBRATION.windows)
    assert len(inputs) >= 8
    for block in found:
        for name in inputs.keys() & block.inputs.keys():
            rows, seen = torch.cat(inputs[name]), block.inputs[name]
            assert seen.tokens == len(rows)
            assert torch.allclose(seen.gram, rows.T @ rows / len(rows), rtol=1e-4, atol=1e-5)
            assert torch.allclose(seen.mean_magnitude, rows.abs().mean(dim=0), rtol=1e-4)
            assert torch.allclose(seen.largest, rows.abs().amax(), rtol=1e-4)
    sizes = [len(names) for names, _ in found[0].groups]
    if family == "llama":
        assert sorted(sizes) == [1, 1, 2, 3]
    else:  # gate and up of an expert read one input, whichever batch comes to it first; the router has its own
        assert sorted(sizes) == sorted([3, 1, 1, *[2] * 4, *[1] * 4])


def test_layers_that_meet_in_a_later_batch_share_what_they_read(source: Path) -> None:
    """Experts that the first batch does not reach: who meets first, and what it had seen before, decides."""
    stream = BlockStream.__new__(BlockStream)
    stream.ranks, stream.histograms, stream.device = ALONE, True, torch.device("cpu")
    layers = {name: name for name in "abc"}
    shared, own = torch.ones(2, 4), torch.full((3, 4), 2.0)
    batches = [[("c", own)], [("a", shared), ("b", shared), ("c", own)], [("a", own), ("b", own), ("c", own)]]
    stream.model = torch.nn.ModuleDict({"block": torch.nn.Identity(), **{name: torch.nn.Identity() for name in layers}})
    stream.filled = lambda _: torch.no_grad()
    stream.states = [torch.zeros(1)] * len(batches)
    stream._forward = lambda _block, _path, index: [stream.model[name](x) for name, x in batches[index]] and own
    found = stream.gather("block", layers, grams=True)
    assert found["a"] is found["b"] and found["a"].tokens == 5
    assert found["c"] is not found["a"] and found["c"].tokens == 9


@pytest.fixture
def kept(source: Path, tmp_path: Path) -> Path:
    StatisticsStore(tmp_path / "kept").complete(source, CALIBRATION)
    return tmp_path / "kept"


def tensors(found: InputStatistics) -> list[Tensor]:
    assert found.histogram is not None
    return [found.gram, found.mean_magnitude, found.largest, found.histogram]


def test_what_is_kept_is_read_back_bit_for_bit(source: Path, kept: Path) -> None:
    for number, block in enumerate(gather_statistics(source, CALIBRATION)):
        again = StatisticsStore(kept).block(number)
        assert (again.block, [n for n, _ in again.groups]) == (block.block, [n for n, _ in block.groups])
        for (_, old), (_, new) in zip(block.groups, again.groups, strict=True):
            assert new.tokens == old.tokens
            assert all(torch.equal(a, b) for a, b in zip(tensors(old), tensors(new), strict=True))
        assert all(torch.equal(again.cache[side], block.cache[side]) for side in "kv")
    # Each input once: a triangle, mean and largest magnitudes, a histogram, all 96 rows; and the two caches.
    size = sum(4 * (k * (k + 1) // 2 + 2 * k + 1 + 96 * k) + 8 * 8192 for k in (64, 64, 64, 128)) + 4 * 2 * 2
    found = (kept / "units" / "00000.safetensors").stat().st_size
    assert size < found < size + 2500


def test_another_text_or_model_is_refused_by_name(source: Path, kept: Path, tmp_path: Path) -> None:
    store = StatisticsStore(kept)
    with pytest.raises(OutputError, match=r"calibration\.sha256 was .*Give another folder"):
        store.complete(source, Calibration(CALIBRATION.windows + 1, "numbers"))
    other = save_tiny_model(tmp_path / "other", dtype=torch.float32, tie_word_embeddings=True)
    with pytest.raises(OutputError, match=r"source\.tensors was"):
        store.complete(other, CALIBRATION)


@pytest.mark.parametrize(
    "asked",
    [
        {"scheme": "W4A16", "group_size": 32, "algorithm": "gptq"},
        {"scheme": "W3A16", "group_size": 32, "algorithm": "gptq"},
        {"scheme": "FP8", "kv_cache": "fp8_head", "effort": "fast"},
    ],
    ids=lambda asked: asked["scheme"],
)
def test_kept_statistics_quantize_again_without_a_forward_pass(
    source: Path, tmp_path: Path, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    quantize(source, tmp_path / "sequential", **asked, **SIZES)
    quantize(source, tmp_path / "first", **asked, **SIZES, keep_statistics=tmp_path / "kept")
    monkeypatch.setattr(BlockStream, "__init__", None)
    quantize(source, tmp_path / "again", **asked, **SIZES, keep_statistics=tmp_path / "kept")
    assert hashes(tmp_path / "again") == hashes(tmp_path / "first")
    assert verify(tmp_path / "first", source).passed
    recipe = Recipe.from_json((tmp_path / "first" / "fewbit_recipe.json").read_text())
    assert recipe.calibration is not None and recipe.calibration["inputs"] == "of the unquantized model"
    weights = hashes(tmp_path / "first")["model.safetensors"], hashes(tmp_path / "sequential")["model.safetensors"]
    # Static scales come from the unquantized model either way; GPTQ's inputs differ.
    assert (weights[0] == weights[1]) == (asked["scheme"] == "FP8")


def test_statistics_of_rotated_weights_are_kept_apart(source: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"algorithm": "gptq", "group_size": 16, **SIZES}
    rotated = {"transforms": ("rotation",), **settings}
    quantize(source, tmp_path / "rotated", keep_statistics=tmp_path / "kept", **rotated)
    quantize(source, tmp_path / "again", keep_statistics=tmp_path / "kept", **rotated)
    assert hashes(tmp_path / "again") == hashes(tmp_path / "rotated")
    with pytest.raises(OutputError, match="transforms"):
        quantize(source, tmp_path / "plain", keep_statistics=tmp_path / "kept", **settings)
    base = load(source, device="cpu", dtype=torch.float32)
    ids = torch.arange(64).reshape(2, 32) % 61
    quantize(source, tmp_path / "carried", **rotated)
    found = [divergence(load(tmp_path / n, device="cpu", dtype=torch.float32), base, ids) for n in ("again", "carried")]
    assert found[0].mean_kl < 2 * found[1].mean_kl  # inputs of other features would do far worse


CHAINS: dict[str, dict[str, Any]] = {
    "W3A16, gptq": {"scheme": "W3A16", "group_size": 32, "algorithm": "gptq"},
    "W4A16, default": {"scheme": "W4A16", "group_size": 32},
    "W4A16, clip": {"scheme": "W4A16", "group_size": 32, "algorithm": "clip"},
    "NVFP4A16, scale search by gptq": {"scheme": "NVFP4A16", "algorithm": "gptq", "settings": {"compensate": False}},
    "W4A16, awq, nearest": {"scheme": "W4A16", "group_size": 32, "effort": "fast", "transforms": ("awq:points=6",)},
    "W4A16, awq, gptq": {
        "scheme": "W4A16", "group_size": 32, "algorithm": "gptq", "transforms": ("awq:points=6",)
    },
    "W8A8, smoothquant, nearest": {"scheme": "W8A8", "effort": "fast", "transforms": ("smoothquant",)},
    "W8A8, awq, smoothquant, gptq": {
        "scheme": "W8A8", "algorithm": "gptq", "transforms": ("awq:points=4", "smoothquant")
    },
    "FP8, static after smoothquant": {"scheme": "FP8", "effort": "fast", "transforms": ("smoothquant",)},
}  # fmt: skip
"""What may be asked of one folder of statistics: algorithms, widths, transformations that choose by data."""


SPARSE = ("W4A16, default", "W8A8, awq, smoothquant, gptq")
"""Chains that are tried with experts too."""


@pytest.fixture(scope="module")
def gathered(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """A model of a family, and the folder in which a run has kept its statistics."""

    @cache
    def made(family: str) -> tuple[Path, Path]:
        folder = tmp_path_factory.mktemp("gathered")
        source = save_tiny_model(folder / "model", family, dtype=torch.float32)
        quantize(source, folder / "first", group_size=32, algorithm="gptq", keep_statistics=folder / "kept", **SIZES)
        return source, folder / "kept"

    return made


@pytest.mark.parametrize(
    ("family", "chain"), [*(("llama", chain) for chain in CHAINS), *(("qwen3_moe", chain) for chain in SPARSE)]
)
def test_one_folder_of_statistics_serves_every_chain_without_a_forward_pass(
    gathered: Callable[[str], tuple[Path, Path]],
    tmp_path: Path,
    family: str,
    chain: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, kept = gathered(family)
    asked, passes = CHAINS[chain] | SIZES, [0]
    forward = BlockStream._forward

    def counted(*given: Any) -> Tensor:
        passes[0] += 1
        return forward(*given)

    monkeypatch.setattr(BlockStream, "_forward", counted)
    carried = quantize(source, tmp_path / "carried", **asked)
    assert passes[0] > 0
    passes[0] = 0
    found = quantize(source, tmp_path / "found", **asked, keep_statistics=kept)
    assert passes[0] == 0
    assert verify(tmp_path / "found", source).passed
    mappings = [[one for one in report["transforms"] if "choice" in one] for report in (found, carried)]
    assert len(mappings[0]) == len(mappings[1]) and bool(mappings[0]) == ("transforms" in asked or "W8A8" in chain)
    for one, other in zip(*mappings, strict=True):
        if found["algorithm"] == "round_to_nearest" or ".layers.0" in one["block"]:  # else inputs differ
            assert one["choice"] == other["choice"]
            assert one.get("loss") == pytest.approx(other.get("loss"), rel=0.02)
    for one, other in zip(found["layers"], carried["layers"], strict=True):
        assert one["method"] == other["method"] and one["tokens"] == pytest.approx(other["tokens"], rel=0.3, abs=8)
        assert one["sqnr_db"] == pytest.approx(other["sqnr_db"], abs=0.05 if "nearest" in chain else 2)
    if found["algorithm"] == "round_to_nearest":  # whose inputs are the same: norms and scales are too
        weights = [load_file(tmp_path / name / "model.safetensors") for name in ("found", "carried")]
        for name, tensor in weights[0].items():
            if tensor.dtype == torch.float32:
                torch.testing.assert_close(tensor, weights[1][name], rtol=1e-3, atol=1e-6, msg=name)


def test_a_cache_of_values_that_awq_scales_is_refused(source: Path, tmp_path: Path) -> None:
    asked: dict[str, Any] = {"group_size": 32, "transforms": ("awq",), "kv_cache": "fp8", "effort": "fast"}
    with pytest.raises(SchemeError, match="before awq scales the values"):
        quantize(source, tmp_path / "q", "W4A16", keep_statistics=tmp_path / "kept", **asked, **SIZES)
    assert list(tmp_path.iterdir()) == []


def test_the_asymmetric_term_is_nothing_where_inputs_are_the_unquantized_model_s(source: Path, tmp_path: Path) -> None:
    asked: dict[str, Any] = {"group_size": 32, "algorithm": "gptq", "keep_statistics": tmp_path / "kept", **SIZES}
    plain = quantize(source, tmp_path / "plain", "W4A16", **asked)
    moved = quantize(source, tmp_path / "moved", "W4A16", settings={"asymmetric": 0.25}, **asked)
    hashes_of = [[layer["sha256"] for layer in report["layers"]] for report in (plain, moved)]
    assert hashes_of[0] == hashes_of[1]
    assert all("not compared" in layer["remarks"][0] for layer in moved["layers"])


def test_algorithms_that_kept_statistics_do_not_serve_are_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(SchemeError, match="sign_round tunes blocks"):
        quantize(source, tmp_path / "q", "NVFP4", algorithm="sign_round", keep_statistics=tmp_path / "kept", **SIZES)
    with pytest.raises(SchemeError, match="round_to_nearest reads no statistics"):
        quantize(source, tmp_path / "q", "NVFP4A16", keep_statistics=tmp_path / "kept", effort="fast")
    assert list(tmp_path.iterdir()) == []


def test_gathering_goes_on_where_it_stopped(source: Path, kept: Path, tmp_path: Path) -> None:
    store, taken = StatisticsStore(tmp_path / "broken"), []

    def two_blocks(*given: Any) -> Any:
        for block in gather_statistics(*given):
            if taken:
                raise KeyboardInterrupt
            taken.append(block)
            yield block

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(statistics, "gather_statistics", two_blocks)
        with pytest.raises(KeyboardInterrupt):
            store.complete(source, CALIBRATION)
    store.complete(source, CALIBRATION)
    assert hashes(tmp_path / "broken") == hashes(kept)


def test_groups_keep_the_order_of_their_first_reader() -> None:
    one, two = InputStatistics.empty(4), InputStatistics.empty(4)
    block = BlockStatistics("b", {"q": one, "o": two, "k": one}, {})
    assert [names for names, _ in block.groups] == [["q", "k"], ["o"]]
