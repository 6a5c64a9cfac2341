"""Quantizing a checkpoint: what is written, what is left alone, what happens when it cannot be done."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fewbit.checkpoints.registry import formats
from fewbit.errors import CheckpointError, FewbitError, OutputError, SchemeError, ShapeError
from fewbit.evaluation.verify import verify
from fewbit.models.load import load
from fewbit.models.quantization.plan import make_plan
from fewbit.models.quantization.quantize import QuantizeOptions, quantize
from fewbit.models.stored import StoredCheckpoint
from fewbit.spec import LinearKey, Rule, Scheme
from fewbit.spec.presets import PRESETS
from fewbit.spec.recipe import Recipe
from tests.hashes import hashes
from tests.tiny_models import save_tiny_model

IDS = torch.arange(16)[None]
GROUPS = {name: 32 for name, scheme in PRESETS.items() if scheme.rules[0].key.weight.granularity.columns == 128}


def group_size(scheme: str) -> int | None:
    """A group size that suits the tiny models, for the schemes that take one."""
    return None if scheme == "FP8_BLOCK" else GROUPS.get(scheme)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("source") / "model")


@pytest.mark.parametrize("scheme", PRESETS)
def test_every_preset_is_written_verified_and_close_to_its_source(source: Path, tmp_path: Path, scheme: str) -> None:
    report = quantize(source, tmp_path / "q", scheme, group_size=group_size(scheme), effort="fast")
    result = verify(tmp_path / "q", source)
    bits = PRESETS[scheme].rules[0].key.weight.element.bits
    weights_ok = [check for check in result.checks if check.name != "weights against source" or bits > 2]
    assert all(check.passed for check in weights_ok), result.checks
    stored = StoredCheckpoint.open(tmp_path / "q")
    assert report["bytes_after"] == stored.folder.nbytes < report["bytes_before"]
    assert len(report["layers"]) == 14
    recipe = Recipe.from_json((tmp_path / "q" / "fewbit_recipe.json").read_text())
    assert recipe.scheme.name == scheme and recipe.source == "model"


@pytest.mark.parametrize("scheme", ["FP8", "FP8_BLOCK", "FP8_DYNAMIC"])
def test_native_fp8_is_written_and_verified(source: Path, tmp_path: Path, scheme: str) -> None:
    quantize(source, tmp_path / "q", scheme, format="fp8", effort="fast")
    assert verify(tmp_path / "q", source).passed
    assert json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]["quant_method"] in (
        "fp8",
        "fbgemm_fp8",
    )


@pytest.mark.parametrize("format", [name for name, found in formats().items() if found.in_safetensors])
def test_every_format_that_holds_a_preset_writes_it(source: Path, tmp_path: Path, format: str) -> None:  # noqa: A002
    """What a format takes it writes, and what it wrote verifies against the source."""
    wrote, held = [], []
    for scheme in ("W4A16", "FP8_DYNAMIC", "NVFP4A16"):
        key = PRESETS[scheme].rules[0].key
        size = 32 if key.weight.element.is_integer else None
        held += [scheme] if formats()[format].refuse(key, (128, 128)) is None else []
        try:
            quantize(source, tmp_path / scheme, scheme, group_size=size, format=format, effort="fast")
        except ShapeError as refused:  # the format says what it cannot hold
            assert format in str(refused)
            continue
        result = verify(tmp_path / scheme, source)
        assert result.passed, result.checks
        wrote.append(scheme)
    assert wrote == held  # nothing, for formats with codebooks, float zero points or stacks only


@pytest.mark.parametrize("family", ["gemma3_text", "phi3", "qwen2", "qwen3_moe", "mixtral", "gpt_neox"])
@pytest.mark.parametrize("scheme", ["FP8", "NVFP4"])
def test_static_activation_scales_of_every_family(tmp_path: Path, family: str, scheme: str) -> None:
    source = save_tiny_model(tmp_path / "model", family, num_hidden_layers=3)
    report = quantize(source, tmp_path / "q", scheme, effort="fast")
    assert report["layers"]
    tensors = load_file(tmp_path / "q" / "model.safetensors")
    scales = [tensor for name, tensor in tensors.items() if name.endswith(("input_scale", "input_global_scale"))]
    assert len(scales) == len(report["layers"])
    assert all(bool(tensor.isfinite().all() and (tensor > 0).all()) for tensor in scales)
    model = load(tmp_path / "q", device="cpu", dtype=torch.float32)
    with torch.no_grad():
        assert bool(model(input_ids=IDS).logits.isfinite().all())


def test_calibrated_scale_is_what_stock_transformers_sees(tmp_path: Path) -> None:
    """The block stream gives each layer the inputs that a whole forward pass gives it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from fewbit.models.quantization.calibration import token_windows
    from fewbit.models.quantization.pipeline import CALIBRATION_LENGTH, CALIBRATION_WINDOWS
    from fewbit.models.quantization.texts import builtin_text

    source = save_tiny_model(tmp_path / "model", max_position_embeddings=1024, dtype=torch.float32)
    quantize(source, tmp_path / "q", "FP8", self_samples=0, effort="fast")
    tokenizer = AutoTokenizer.from_pretrained(source)
    windows = token_windows(tokenizer, builtin_text(), CALIBRATION_LENGTH, CALIBRATION_WINDOWS)
    stock = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    seen: dict[str, float] = {}
    for name, module in stock.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(
                lambda _, x, name=name: seen.update({name: max(seen.get(name, 0.0), x[0].abs().max().item())})
            )
    with torch.no_grad():
        for batch in windows.split(4):
            stock(input_ids=batch)
    tensors = load_file(tmp_path / "q" / "model.safetensors")
    for name in ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"):
        assert tensors[f"{name}.input_scale"].item() == pytest.approx(seen[name] / 448, rel=1e-4)


@pytest.mark.parametrize("scheme", ["FP8", "NVFP4"])
def test_static_activation_scales_can_leave_out_the_largest(source: Path, tmp_path: Path, scheme: str) -> None:
    sizes = {"calibration_windows": 4, "calibration_length": 64, "effort": "fast"}
    quantize(source, tmp_path / "all", scheme, **sizes)
    quantize(source, tmp_path / "most", scheme, activation_percentile=99.0, **sizes)
    largest = load_file(tmp_path / "all" / "model.safetensors")
    most = load_file(tmp_path / "most" / "model.safetensors")
    scales = [name for name in largest if name.endswith(("input_scale", "input_global_scale"))]
    assert len(scales) == 14
    for name in scales:
        ratio = (most[name] / largest[name]).item()
        ratio = 1 / ratio if name.endswith("global_scale") else ratio  # stored as a divisor
        assert 0.2 < ratio < 0.9
    assert Recipe.from_json((tmp_path / "most" / "fewbit_recipe.json").read_text()).activation_percentile == 99.0
    assert verify(tmp_path / "most", source).passed


def test_joined_projections_share_their_global_scale(source: Path, tmp_path: Path) -> None:
    quantize(source, tmp_path / "q", "NVFP4A16", effort="fast")
    tensors = load_file(tmp_path / "q" / "model.safetensors")
    for members in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")):
        scales = {tensors[f"model.layers.0.{name}.weight_global_scale"].item() for name in members}
        assert len(scales) == 1


def test_two_runs_write_equal_bytes(source: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        quantize(source, tmp_path / name, "W4A16", group_size=32, effort="fast")
    for file in ("model.safetensors", "config.json", "fewbit_recipe.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_side_files_are_copied_and_unknown_tensors_carried(source: Path, tmp_path: Path) -> None:
    """B71, B72: what the model class does not build is neither lost nor unmentioned."""
    model = shutil.copytree(source, tmp_path / "model")
    (model / "chat_template.jinja").write_text("{{ messages }}")
    (model / "modeling_own.py").write_text("x = 1\n")
    (model / "hf_quant_config.json.bak").write_text("{}")
    tensors = load_file(model / "model.safetensors") | {"mtp.head.weight": torch.ones(4, 4), "mtp.norm": torch.ones(4)}
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    report = quantize(model, tmp_path / "q", "W4A16", group_size=32, effort="fast")
    assert (tmp_path / "q" / "chat_template.jinja").exists() and (tmp_path / "q" / "tokenizer.json").exists()
    assert torch.equal(load_file(tmp_path / "q" / "model.safetensors")["mtp.head.weight"], torch.ones(4, 4))
    assert report["kept"] == ["mtp.head.weight", "mtp.norm"]
    assert report["plain"]["mtp.head"] == "not built by the model class"


def test_small_shards_hold_the_same_tensors(source: Path, tmp_path: Path) -> None:
    quantize(source, tmp_path / "one", "W4A16", group_size=32, effort="fast")
    quantize(source, tmp_path / "many", "W4A16", group_size=32, max_shard_bytes=30_000, effort="fast")
    one, many = StoredCheckpoint.open(tmp_path / "one").folder, StoredCheckpoint.open(tmp_path / "many").folder
    assert len(set(many.file_of.values())) > 3
    assert one.headers == many.headers
    assert all(torch.equal(one.load(name).view(torch.uint8), many.load(name).view(torch.uint8)) for name in one.headers)


def test_group_size_that_does_not_divide_offers_what_does(tmp_path: Path) -> None:
    """B30: by the plan, before any forward pass, with the layers and the choices."""
    source = save_tiny_model(tmp_path / "model", hidden_size=96, num_attention_heads=6)
    with pytest.raises(ShapeError, match=r"Group size 64 does not divide .* 96 is 1\.5 times 64 \(model") as caught:
        quantize(source, tmp_path / "q", "W4A16", group_size=64, effort="fast")
    for offer in ("--group-size 32", "--group-size -1", "--short-last-group"):
        assert offer in caught.value.hint
    assert not (tmp_path / "q").exists()


@pytest.mark.parametrize("algorithm", ["round_to_nearest", "scale_search", "gptq"])
@pytest.mark.parametrize("scheme", ["W4A16", "W3A16_ASYM"])
def test_short_last_group_is_written_on_request(tmp_path: Path, scheme: str, algorithm: str) -> None:
    source = save_tiny_model(tmp_path / "model", hidden_size=96, num_attention_heads=6)
    asked = {"group_size": 64, "short_last_group": True, "algorithm": algorithm, "self_samples": 0}
    report = quantize(source, tmp_path / "q", scheme, calibration_windows=2, calibration_length=64, **asked)
    assert verify(tmp_path / "q", source).passed
    assert "do not divide K=96: fewbit reads a short last group" in report["cautions"][0]
    if algorithm == "gptq":
        assert {layer["method"] for layer in report["layers"]} == {"gptq"}
        assert all(layer["loss"] < (0.02 if scheme == "W4A16" else 0.06) for layer in report["layers"])


def test_short_last_group_is_not_offered_where_the_format_holds_none(tmp_path: Path) -> None:
    source = save_tiny_model(tmp_path / "model", hidden_size=96, num_attention_heads=6)
    with pytest.raises(ShapeError, match="does not divide") as caught:
        quantize(source, tmp_path / "q", "W4A16", group_size=64, format="humming", effort="fast")
    assert "--group-size 32" in caught.value.hint and "--short-last-group" not in caught.value.hint
    with pytest.raises(ShapeError, match=r"humming cannot hold model\S+ as int4:group64:bf16: .*K=96"):
        quantize(source, tmp_path / "q", "W4A16", group_size=64, format="humming", short_last_group=True, effort="fast")
    assert not (tmp_path / "q").exists()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"scheme": "W4A61"}, SchemeError, "Did you mean 'W4A16'"),
        ({"scheme": "W4A16", "group_size": 32, "ignore": ("q_porj",)}, SchemeError, "'q_porj' matches no layer"),
        ({"scheme": "W4A16", "group_size": 32, "ignore": ("re:(",)}, SchemeError, "regular expression"),
        ({"scheme": "W4A16", "group_size": 32, "ignore": ("*proj",)}, SchemeError, "nothing"),
        ({"scheme": "NVFP4", "group_size": 32}, SchemeError, "fixes its own granularity"),
        ({"scheme": "W4A16", "group_size": 0}, SchemeError, "Group size 0"),
        ({"scheme": "W4A16", "group_size": 32, "format": "gguff"}, SchemeError, "Unknown checkpoint format"),
        ({"scheme": "W4A16", "group_size": 32, "algorithm": "gptqq"}, SchemeError, "Unknown algorithm"),
        ({"scheme": "W4A16", "group_size": 32, "format": "fp8"}, FewbitError, "fp8 cannot hold"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_mistakes_are_named_before_anything_is_written(
    source: Path, tmp_path: Path, options: dict, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message.replace("(", r"\(")):
        quantize(source, tmp_path / "q", **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("checkpoint", "words"),
    [("gptq", "one checkpoint_format"), ("awq", "one key"), ("auto-round", "one packing_format")],
)
def test_layers_that_a_format_cannot_hold_side_by_side_are_named_by_the_plan(
    source: Path, checkpoint: str, words: str
) -> None:
    keys = [LinearKey.parse(f"int4:{zero}group32:f16") for zero in ("asym:", "")]
    scheme = Scheme("MIXED", (Rule(("re:.*q_proj",), keys[0]), Rule(("Linear",), keys[1])))
    with pytest.raises(OutputError, match=words):
        make_plan(source, Recipe(scheme, checkpoint))
    assert make_plan(source, Recipe(scheme, "compressed-tensors")).quantized


def test_existing_output_is_left_alone(source: Path, tmp_path: Path) -> None:
    (tmp_path / "q").mkdir()
    (tmp_path / "q" / "precious.txt").write_text("mine")
    with pytest.raises(OutputError, match="exists"):
        quantize(source, tmp_path / "q", "W4A16", group_size=32, effort="fast")
    assert [path.name for path in (tmp_path / "q").iterdir()] == ["precious.txt"]


def test_disk_that_fills_leaves_nothing(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(OutputError, match="No space left"):
        quantize(source, tmp_path / "q", "W4A16", group_size=32, effort="fast")
    assert list(tmp_path.iterdir()) == []


def test_weight_that_is_not_finite_is_named(source: Path, tmp_path: Path) -> None:
    model = shutil.copytree(source, tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = float("nan")
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.down_proj"):
        quantize(model, tmp_path / "q", "W4A16", group_size=32, effort="fast")
    assert not (tmp_path / "q").exists()


def test_quantized_source_is_refused(source: Path, tmp_path: Path) -> None:
    quantize(source, tmp_path / "q", "W4A16", group_size=32, effort="fast")
    with pytest.raises(CheckpointError, match="quantized already"):
        quantize(tmp_path / "q", tmp_path / "again", "W4A16", group_size=32, effort="fast")


def test_plan_predicts_the_bytes(source: Path, tmp_path: Path) -> None:
    for scheme in ("W4A16", "FP8_DYNAMIC", "NVFP4A16"):
        plan = QuantizeOptions(scheme, group_size(scheme)).plan(source)
        report = quantize(source, tmp_path / scheme, scheme, group_size=group_size(scheme), effort="fast")
        # weight_shape of packed integers, 16 bytes a layer, is all that the plan does not count.
        assert 0 <= report["bytes_after"] - plan.bytes_after <= 16 * len(report["layers"])


RETURNING = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
"""glibc gives freed memory back at once, so that what is measured is what is held, not what the heap has kept."""

MEASURE = """
import sys
from fewbit.models.quantization.quantize import QuantizeOptions
from fewbit.models.quantization.pipeline import quantize_checkpoint
import torch
torch.set_num_threads(1)
def peak():  # the kernel's own high-water mark; getrusage starts from that of the process that started this one
    line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024
plan = QuantizeOptions("W4A16", 64, effort="fast").plan(sys.argv[1])
torch.ones(8, 8) @ torch.ones(8, 8)
before = peak()
quantize_checkpoint(sys.argv[1], sys.argv[2], plan, max_shard_bytes=int(sys.argv[3]))
print(peak() - before, plan.peak_bytes(int(sys.argv[3])), plan.block_bytes, plan.bytes_before)
"""


def test_peak_memory_is_one_block_and_one_shard(tmp_path: Path) -> None:
    """20 blocks of 16 MB in 4 shards: the growth over the interpreter's base stays under a block, a shard and what
    the plan says that the layer at hand needs, far under the model."""
    source = save_tiny_model(
        tmp_path / "model", hidden_size=768, intermediate_size=2560, num_hidden_layers=20, num_attention_heads=12,
        num_key_value_heads=12, head_dim=64, max_shard_size="85MB",
    )  # fmt: skip
    assert len(list(source.glob("*.safetensors"))) == 4
    shard = 20_000_000
    command = [sys.executable, "-c", MEASURE, str(source), str(tmp_path / "q"), str(shard)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, env=RETURNING).stdout
    growth, predicted, block, whole = map(int, printed.split())
    assert block < 17_000_000 and whole > 300_000_000
    imported = 16_000_000  # code that is loaded on the way
    assert growth <= predicted + imported, f"grew {growth}, predicted {predicted}"
    assert growth < whole / 3


CALIBRATED = """
import sys
from pathlib import Path
import torch
from fewbit.models.quantization.memory import Workload, memory_plan
from fewbit.models.quantization.pipeline import quantize_checkpoint
from fewbit.models.quantization.quantize import QuantizeOptions, calibration_for
torch.set_num_threads(1)
def peak():  # the kernel's own high-water mark; getrusage starts from that of the process that started this one
    line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024
source, output, held = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
asked = QuantizeOptions(
    "W4A16", 64, algorithm="gptq", settings={"sweeps": 1}, calibration_windows=64, calibration_length=128
)
plan = asked.plan(source)
calibration = calibration_for(source, plan, asked)
torch.linalg.solve_triangular(torch.linalg.cholesky_ex(torch.eye(600))[0], torch.eye(600), upper=False)
before = peak()
quantize_checkpoint(source, output, plan, calibration=calibration, max_shard_bytes=10**7, calibration_memory=held)
print(peak() - before, memory_plan(source, plan, Workload(64, 128, most_held=held), 10**7).peak)
"""


def test_calibration_stays_in_the_memory_that_was_planned(tmp_path: Path) -> None:
    """Some of what is planned is headroom, but not most of it; and with less to hold, less is used."""
    source = save_tiny_model(
        tmp_path / "model", hidden_size=384, intermediate_size=1152, num_hidden_layers=1, num_attention_heads=6,
        num_key_value_heads=6, head_dim=64,
    )  # fmt: skip
    found = {}
    for held in (10**10, 1):
        command = [sys.executable, "-c", CALIBRATED, str(source), str(tmp_path / f"q{held}"), str(held)]
        printed = subprocess.run(command, check=True, capture_output=True, text=True, env=RETURNING).stdout
        growth, planned = map(int, printed.split())
        assert planned / 4 < growth <= planned
        found[held] = growth
    assert found[1] < found[10**10]
    assert hashes(tmp_path / "q1") == hashes(tmp_path / f"q{10**10}")
