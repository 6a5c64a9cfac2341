"""Products of calibration: which settings of torch are changed for them, where, and that they are put back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from fewbit.algorithms.gptq import Gptq
from fewbit.algorithms.statistics import InputStatistics
from fewbit.models.quantization import products
from fewbit.models.quantization.block_stream import BlockStream
from fewbit.models.quantization.quantize import quantize
from fewbit.spec.hardware import device
from tests.tiny_models import save_tiny_model

CPU = torch.device("cpu")
SETTING = torch.backends.mkldnn.matmul


def on(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(products, "this_machine", lambda _: device(name))


@pytest.mark.parametrize(("name", "rounds"), [("x86-amx", True), ("x86-avx512-vnni", False), ("x86-avx2", False)])
def test_cpus_with_matrix_units_alone_round(monkeypatch: pytest.MonkeyPatch, name: str, rounds: bool) -> None:
    on(monkeypatch, name)
    before, config = SETTING.fp32_precision, LlamaConfig(dtype="bfloat16")
    assert products.calibration_dtype(config, CPU) == (torch.bfloat16 if rounds else torch.float32)
    assert products.calibration_dtype(config, torch.device("cuda")) == torch.bfloat16
    assert products.has_matrix_units(CPU) is rounds and not products.has_matrix_units(torch.device("cuda"))
    with pytest.raises(KeyError), products.calibration_products(CPU):
        assert SETTING.fp32_precision == ("bf16" if rounds else before)
        raise KeyError
    assert SETTING.fp32_precision == before


def test_gpus_do_without_attention_that_is_planned() -> None:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    with pytest.raises(KeyError), products.calibration_products(torch.device("cuda")):
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        raise KeyError
    assert torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(before)


def test_passes_and_statistics_are_made_so_and_solving_is_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    on(monkeypatch, "x86-amx")
    seen: dict[str, set[str]] = {"forward": set(), "add": set(), "compare": set(), "solve": set()}

    def noted(what: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            seen[what].add(SETTING.fp32_precision)
            return plain(*given, **named)

        return call

    for owner, name, what in (
        (BlockStream, "_forward", "forward"),
        (BlockStream, "_forward_reference", "forward"),
        (InputStatistics, "add", "add"),
        (InputStatistics, "compare", "compare"),
        (Gptq, "quantize_layers", "solve"),
    ):
        monkeypatch.setattr(owner, name, noted(what, getattr(owner, name)))
    before = SETTING.fp32_precision
    source = save_tiny_model(tmp_path / "model")
    quantize(source, tmp_path / "q", group_size=32, calibration_windows=4, calibration_length=32, self_samples=0)
    assert seen == {"forward": {"bf16"}, "add": {"bf16"}, "compare": {"bf16"}, "solve": {before}}
    assert SETTING.fp32_precision == before
