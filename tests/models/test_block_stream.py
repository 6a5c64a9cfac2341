"""Carrying calibration through blocks: which inputs a layer sees, and when its weight is final."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fewbit.algorithms.statistics import InputStatistics
from fewbit.checkpoints.tensor_files import TensorFolder
from fewbit.evaluation.divergence import divergence
from fewbit.evaluation.verify import verify
from fewbit.models.families import blocks_of
from fewbit.models.fill import PartialModel
from fewbit.models.load import load
from fewbit.models.names import build_on_meta, read_config
from fewbit.models.quantization.block_stream import BATCH, BlockStream, windows_at_once
from fewbit.models.quantization.calibration import load_tokenizer, token_windows
from fewbit.models.quantization.passes import LiveBytes
from fewbit.models.quantization.quantize import quantize
from fewbit.models.quantization.texts import builtin_text
from tests.tiny_models import save_tiny_model

WINDOWS = torch.arange(96).reshape(6, 16) % 61


def stream_of(folder: Path, reference: bool = False, **how: Any) -> tuple[BlockStream, PartialModel]:
    model = build_on_meta(read_config(folder), torch.float32)
    partial = PartialModel(model, TensorFolder(folder))
    return BlockStream(model, partial.filled, WINDOWS, batch=2, reference=reference, **how), partial


def linear_layers(partial: PartialModel, block: str) -> dict[str, str]:
    """Stored name -> path, of the linear layers of a block."""
    found = {}
    for stored in partial.folder.headers:
        module = stored.removesuffix(".weight")
        path = partial.destinations.module(module) if stored != module else ""
        if path.startswith(f"{block}.") and isinstance(partial.model.get_submodule(path), torch.nn.Linear):
            found[module] = path
    return found


@pytest.mark.parametrize("family", ["llama", "phi3"])
@pytest.mark.parametrize("most_held", [10**9, 0])
def test_inputs_are_compared_with_those_of_the_unquantized_model(tmp_path: Path, family: str, most_held: int) -> None:
    folder = save_tiny_model(tmp_path / "model", family, dtype=torch.float32)
    stream, partial = stream_of(folder, reference=True, compares=True, most_held=most_held)
    shifts: dict[str, Tensor] = {}
    changed: dict[str, Tensor] = {}
    paths: dict[str, str] = {}

    def solve(names: list[str], statistics: InputStatistics) -> dict[str, Tensor]:
        assert statistics.mean_shift is not None and statistics.shifted == statistics.tokens
        for name in names:
            shifts[name] = statistics.mean_shift * statistics.shifted
            changed[name] = partial.folder.load(f"{name}.weight") * 0.9
        return {name: changed[name] for name in names}

    for block in blocks_of(partial.model):
        layers = linear_layers(partial, block)
        paths |= layers
        stream.solve(block, layers, solve)

    seen: list[dict[str, list[Tensor]]] = []
    for replaced in ({}, changed):
        whole, inputs = load(folder, device="cpu", dtype=torch.float32), {}
        for name, path in paths.items():
            module = whole.get_submodule(path)
            module.weight.data.copy_(replaced.get(name, module.weight))
            module.register_forward_pre_hook(
                lambda _, x, n=name, i=inputs: i.setdefault(n, []).append(x[0].flatten(0, 1))
            )
        with torch.no_grad():
            whole(input_ids=WINDOWS)
        seen.append(inputs)
    for name, shift in shifts.items():
        before, after = (torch.cat(found[name]) for found in seen)
        assert torch.allclose(shift, (before - after).T @ after, rtol=1e-3, atol=1e-4), name
    assert stream.reference[0].shape == stream.states[0].shape and not torch.equal(
        stream.reference[0], stream.states[0]
    )


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "phi3", "qwen3_moe", "gpt_neox"])
def test_each_layer_sees_what_the_new_layers_before_it_put_out(tmp_path: Path, family: str) -> None:
    """The statistics of every layer are those of a whole forward pass in which all earlier layers are changed."""
    folder = save_tiny_model(tmp_path / "model", family, dtype=torch.float32)
    stream, partial = stream_of(folder)
    changed: dict[str, Tensor] = {}
    seen: dict[str, tuple[int, Tensor]] = {}
    solved_together: list[list[str]] = []

    def solve(names: list[str], statistics: InputStatistics) -> dict[str, Tensor]:
        solved_together.append(names)
        for name in names:
            seen[name] = (statistics.tokens, statistics.gram)
            changed[name] = partial.folder.load(f"{name}.weight") * 0.9
        return {name: changed[name] for name in names}

    paths: dict[str, str] = {}
    for block in blocks_of(partial.model):
        layers = linear_layers(partial, block)
        paths |= layers
        stream.solve(block, layers, solve)

    whole = load(folder, device="cpu", dtype=torch.float32)
    partial_names = {path: name for name, path in paths.items()}
    grams: dict[str, Tensor] = {}
    for path, module in whole.named_modules():
        if path in partial_names and partial_names[path] in changed:
            module.weight.data.copy_(changed[partial_names[path]])
            module.register_forward_pre_hook(
                lambda _, x, path=path: grams.update(
                    {path: grams.get(path, 0) + (r := x[0].reshape(-1, x[0].shape[-1])).T @ r}
                )
            )
    with torch.no_grad():
        for batch in WINDOWS.split(2):
            whole(input_ids=batch)
    compared = [name for name, path in paths.items() if path in grams]
    assert len(compared) >= 8
    for name in compared:
        tokens, gram = seen[name]
        assert torch.allclose(gram * tokens, grams[paths[name]], rtol=1e-3, atol=1e-4), name
    if family == "llama":
        assert [len(names) for names in solved_together] == [3, 1, 2, 1] * 2


def test_the_reference_stream_is_the_unquantized_model(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", dtype=torch.float32)
    stream, partial = stream_of(folder, reference=True)
    targets: list[Tensor] = []
    for block in blocks_of(partial.model):
        layers = linear_layers(partial, block)

        def refine(output, target, layers=layers):  # type: ignore[no-untyped-def]
            weights = {name: partial.folder.load(f"{name}.weight") for name in layers}
            targets[:] = [target(index) for index in range(3)]
            assert torch.allclose(output(weights, 1), stream.reference[1], rtol=1e-4, atol=1e-5)
            return weights

        stream.solve(
            block,
            layers,
            lambda names, _: {n: torch.zeros_like(partial.folder.load(f"{n}.weight")) for n in names},
            refine,
        )
    whole = load(folder, device="cpu", dtype=torch.float32)
    outputs: list[Tensor] = []
    list(blocks_of(whole).values())[-1].register_forward_hook(
        lambda *call: outputs.append(call[2][0] if isinstance(call[2], tuple) else call[2])
    )
    with torch.no_grad():
        for batch in WINDOWS.split(2):
            whole(input_ids=batch)
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(targets, outputs, strict=True))


@pytest.mark.parametrize("family", ["llama", "phi3", "qwen3_moe"])
def test_passes_that_hold_too_much_begin_anew_with_the_same_result(tmp_path: Path, family: str) -> None:
    folder = save_tiny_model(tmp_path / "model", family, dtype=torch.float32)
    seen: list[list[Tensor]] = []
    for most_held in (10**9, 1):
        stream, partial = stream_of(folder, most_held=most_held)
        seen.append([])

        def solve(names: list[str], found: InputStatistics, partial: PartialModel = partial) -> dict[str, Tensor]:
            seen[-1] += [found.gram, found.mean_magnitude, found.largest, torch.tensor(found.tokens)]
            return {name: partial.folder.load(f"{name}.weight") * 0.9 for name in names}

        for block in blocks_of(partial.model):
            stream.solve(block, linear_layers(partial, block), solve)
        seen[-1] += stream.states
    assert len(seen[0]) == len(seen[1]) > 16
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


def test_what_a_pass_holds_is_what_its_frames_refer_to() -> None:
    alive = LiveBytes()
    weight = torch.zeros(10, 10)
    with alive:
        kept = weight.t() @ weight
        assert alive.live == 400  # the transposed view is the caller's storage
        part = (kept + 1)[:2]
        assert alive.live == 800  # a view holds the whole
        del part
        assert alive.live == 400
        kept.add_(1)
        assert alive.live == 400
    assert kept.shape == (10, 10)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("scheme", ["W4A16", "NVFP4"])
def test_algorithms_that_use_data_end_nearer_to_the_model(tmp_path: Path, family: str, scheme: str) -> None:
    folder = save_tiny_model(tmp_path / "model", family)
    reference = load(folder, device="cpu", dtype=torch.float32)
    ids = token_windows(load_tokenizer(folder), builtin_text(), 64, 40)[32:]

    found = {}
    for algorithm, settings in (("round_to_nearest", {}), ("gptq", {}), ("sign_round", {"iterations": 10})):
        size = 32 if scheme.startswith("W") else None
        output = tmp_path / algorithm
        report = quantize(
            folder, output, scheme, group_size=size, algorithm=algorithm, settings=settings,
            calibration_windows=32, calibration_length=64,
        )  # fmt: skip
        assert verify(output, folder).passed
        assert report["algorithm"] == algorithm
        loaded = load(output, device="cpu", dtype=torch.float32)
        found[algorithm] = divergence(loaded, reference, ids).mean_kl
    assert found["gptq"] < found["round_to_nearest"]
    assert found["sign_round"] < found["round_to_nearest"]


def test_narrow_models_pass_more_windows_at_once_on_a_gpu_alone() -> None:
    assert [windows_at_once(512, widest, on_cpu=False) for widest in (1536, 16384, 1 << 20)] == [170, 16, 16]
    assert windows_at_once(8192, 16384, on_cpu=False) == BATCH
    assert windows_at_once(512, 1536, on_cpu=True) == windows_at_once(512, 1536, on_cpu=False, tunes=True) == BATCH


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_blocks_of_one_structure_are_looked_at_once(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What reads what is the same in each; where a batch does not come to every expert, each block is asked again."""
    source = save_tiny_model(tmp_path / "model", family, num_hidden_layers=3, dtype=torch.float32)
    looked: list[str] = []
    plain = BlockStream._seen_inputs

    def noted(stream: BlockStream, block: torch.nn.Module, path: str, inside: Any) -> Any:
        looked.append(path)
        return plain(stream, block, path, inside)

    monkeypatch.setattr(BlockStream, "_seen_inputs", noted)
    sizes = {"calibration_windows": 1, "calibration_length": 16, "self_samples": 0}
    quantize(source, tmp_path / "q", group_size=32, algorithm="gptq", **sizes)
    assert len(looked) == 1 if family == "llama" else 1 <= len(looked) <= 3
