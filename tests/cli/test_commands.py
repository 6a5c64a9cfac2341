"""The command line as a person and as a program use it, mistakes included."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fewbit.cli.main import COMMANDS, main
from tests.tiny_models import save_tiny_model

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("cli") / "model", max_position_embeddings=1024)


@pytest.fixture(scope="module")
def quantized(model: Path) -> Path:
    from fewbit.models.quantization.quantize import quantize

    quantize(model, model.parent / "w4", "W4A16", group_size=32, effort="fast")
    return model.parent / "w4"


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Runs a command in this process; returns exit code, standard output, standard error."""

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fewbit", *map(str, arguments)])
        capsys.readouterr()
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def loads(output: tuple[int, str, str]) -> Any:
    assert output[0] == 0, output
    return json.loads(output[1])


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(cli: Cli, command: str) -> None:
    code, out, _ = cli(command, "--help")
    assert code == 0 and "--json" in out


def test_installed_command_runs() -> None:
    found = subprocess.run([sys.executable, "-m", "fewbit", "--help"], capture_output=True, text=True, check=True)
    assert all(name in found.stdout for name in COMMANDS)


def test_plan_says_what_quantize_does(cli: Cli, model: Path, tmp_path: Path) -> None:
    arguments = ("--scheme", "w4a16", "--group-size", 32, "--effort", "fast", "--json")
    planned = loads(cli("plan", model, *arguments))
    assert {row["kernel"] for row in planned["layers"] if row["key"]} <= {
        "cpu_weight_only",
        "torch_int4pack",
        "reference",
    }
    assert {row["reason"] for row in planned["layers"] if not row["key"]} == {"embedding", "ignored by the scheme"}
    done = loads(cli("quantize", model, "-o", tmp_path / "q", *arguments))
    assert done["bits_per_weight"] == planned["bits_per_weight"] == 4.5
    assert 0 <= done["bytes_after"] - planned["bytes_after"] <= 16 * len(done["layers"])


def test_plan_for_people_names_layers_and_kernels(cli: Cli, model: Path) -> None:
    _, out, _ = cli("plan", model, "--group-size", 32)
    assert "*.mlp.down_proj" in out and "4.500" in out and "embedding" in out and "Peak memory" in out


def test_underscores_and_dashes_are_one(cli: Cli, model: Path, tmp_path: Path) -> None:
    code, _, err = cli(
        "quantize", model, "-o", tmp_path / "q", "--group_size", 32, "--effort", "fast", "--max_shard_size", "1MB"
    )
    assert code == 0, err
    assert (tmp_path / "q" / "config.json").exists()


def test_what_was_asked_for_is_no_fallback(cli: Cli, model: Path, tmp_path: Path) -> None:
    options = ("--calibration-windows", 2, "--calibration-length", 32, "--self-samples", 0)
    code, out, _ = cli("quantize", model, "-o", tmp_path / "q", "--group-size", 32, *options)
    assert code == 0 and "Remarks on 14 layers" in out and "asymmetric term in" in out
    assert "Note:" not in out


def test_verify_passes_and_fails(cli: Cli, model: Path, quantized: Path, tmp_path: Path) -> None:
    found = loads(cli("verify", quantized, "--against", model, "--json"))
    assert found["passed"] and {"decoded weights", "forward pass"} <= {check["name"] for check in found["checks"]}
    import shutil

    from safetensors.torch import load_file, save_file

    broken = shutil.copytree(quantized, tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight_packed"][0, 0] ^= 1
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    code, out, _ = cli("verify", broken)
    assert code == 1 and "FAIL" in out and "model.layers.0.mlp.up_proj" in out


def test_inspect_reads_no_weight(cli: Cli, quantized: Path) -> None:
    found = loads(cli("inspect", quantized, "--json"))
    assert found["format"] == "compressed-tensors" and "config.json" in found["decided_by"]
    keys = {group["key"] for group in found["groups"] if group["key"]}
    assert keys == {"int4:group32:bf16"} and not found["oddities"]
    assert 0 < found["quantized_bytes"] < found["bytes"]


def test_convert_carries_codes_over(cli: Cli, quantized: Path, tmp_path: Path) -> None:
    found = loads(cli("convert", quantized, "--to", "gptq", "-o", tmp_path / "gptq", "--json"))
    assert found["format"] == "gptq" and {layer["sqnr_db"] for layer in found["layers"]} == {None}
    assert loads(cli("verify", tmp_path / "gptq", "--json"))["passed"]
    code, out, err = cli("convert", quantized, "--to", "bf16", "-o", tmp_path / "bf16")
    assert code == 0 and "lowest SQNR" in out and "Reopened and compared" in " ".join(out.split()), err


@pytest.mark.parametrize(
    ("device", "scheme", "kernel"),
    [
        ("sm120", "NVFP4", "torch_scaled_mm_groups"),
        ("sm90", "FP8_DYNAMIC", "triton_fp8"),
        ("arm", "W4A16", "reference"),
    ],
)
def test_explain_answers_for_other_devices(cli: Cli, device: str, scheme: str, kernel: str) -> None:
    found = loads(cli("explain", "--scheme", scheme, "--device", device, "--json"))
    verdicts = found["layers"][0]["verdicts"]
    assert found["hardware"] == device and found["layers"][0]["kernel"] == kernel
    assert all(verdict["chosen"] or verdict["refusal"] or verdict["numerics"] for verdict in verdicts)


def test_explain_of_a_checkpoint_covers_its_kinds_of_layers(cli: Cli, quantized: Path) -> None:
    found = loads(cli("explain", quantized, "--json"))
    assert {tuple(layer["shape"]) for layer in found["layers"]} == {(64, 64), (32, 64), (128, 64), (64, 128)}


def test_eval_against_the_source(cli: Cli, model: Path, quantized: Path) -> None:
    found = loads(cli("eval", quantized, "--against", model, "--windows", 2, "--window-length", 64, "--json"))
    assert found["mean_kl"] > 0 and 0 < found["top1_agreement"] < 1 and found["logit_cosine"] > 0.9
    alone = loads(cli("eval", quantized, "--windows", 2, "--window-length", 64, "--json"))
    assert alone["perplexity"] == pytest.approx(found["perplexity"], rel=1e-3)


def test_eval_on_a_text_file(cli: Cli, model: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox " * 40)
    found = loads(cli("eval", model, "--text", tmp_path / "text.txt", "--window-length", 50, "--json"))
    assert found["text"] == "text.txt" and found["windows"] == 16


def test_run_answers(cli: Cli, quantized: Path) -> None:
    found = loads(cli("run", quantized, "Hello", "--max-new-tokens", 5, "--no-chat", "--json"))
    assert 1 <= found["tokens"] <= 5 and found["prompt_tokens"] == 5
    promised = loads(cli("explain", quantized, "--json"))["decoded_by"]
    assert found["decoded_by"] == promised
    plain = loads(cli("run", quantized, "Hello", "--max-new-tokens", 5, "--no-chat", "--no-compiled-step", "--json"))
    assert plain["decoded_by"].startswith("transformers: ") and plain["tokens"] == found["tokens"]
    code, out, err = cli("run", quantized, "Hello", "--max_new_tokens", 3, "--no-chat")
    assert code == 0 and out and "new ones at" in err


def test_run_joins_members_and_says_what_it_did(cli: Cli, quantized: Path) -> None:
    code, out, err = cli("run", quantized, "Hello", "--max-new-tokens", 3, "--no-chat", "--join-members")
    assert code == 0
    assert out == cli("run", quantized, "Hello", "--max-new-tokens", 3, "--no-chat")[1]
    assert "gate_up_proj and 3 more: rows under one another; no weight moved." in " ".join(err.split())
    found = loads(cli("run", quantized, "Hello", "--max-new-tokens", 1, "--no-chat", "--join-members", "--json"))
    assert len(found["joined"]) == 4


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["quantize", "MODEL", "-o", "OUT", "--scheme", "W4A61"], "Did you mean 'W4A16'?"),
        (["quantize", "MODEL", "-o", "OUT", "--group-size", "48"], "64 is 1.333 times 48"),
        (["quantize", "MODEL", "-o", "OUT", "--group-size", "32", "--ignore", "q_porj"], "matches no layer"),
        (["quantize", "MODEL", "-o", "OUT", "--group-size", "32", "--max-shard-size", "5 potatoes"], "5 potatoes"),
        (["quantize", "MODEL", "-o", "OUT", "--group-size", "32", "--mx-scale-rule", "round"], "scale rule 'round'"),
        (["quantize", "MODEL", "-o", "OUT", "--scheme", "FP8", "--calibration-text", "none.txt"], "none.txt"),
        (["quantize", "NOWHERE", "-o", "OUT"], "does not exist"),
        (["quantize", "MODEL", "-o", "MODEL", "--group-size", "32"], "exists"),
        (["convert", "MODEL", "--to", "gptq", "-o", "OUT"], "not quantized"),
        (["convert", "QUANTIZED", "--to", "gtpq", "-o", "OUT"], "Did you mean 'gptq'?"),
        (["convert", "QUANTIZED", "--to", "fp8", "-o", "OUT"], "--requantize FP8_BLOCK would cost an SQNR of"),
        (["explain", "--device", "sm91"], "Did you mean 'sm9"),
        (["explain", "--shape", "4096"], "Write NxK"),
        (["explain", "--disable-kernel", "marlinn"], "no kernel 'marlinn'"),
        (["explain", "--backend", "nvfp4"], "Write KEY=NAME"),
        (["explain", "--backend", "nvfp5=emulation"], "nvfp5"),
        (["explain", "--scheme", "NVFP4", "--device", "sm90", "--backend", "nvfp4=flashinfer"], "10.0"),
        (["explain", "--scheme", "W8A8", "--device", "sm90", "--backend", "W8A8=torch_scaled_mm"], "e4m3"),
        (["explain", "--scheme", "FP8_DYNAMIC", "--device", "sm86", "--linear-backend", "torch_scaled_mm"], "8.9"),
        (["run", "MODEL", "hi", "--dtype", "int4"], "Unknown dtype"),
        (["run", "MODEL", "hi", "--device", "cuda:x"], "no device 'cuda:x'"),
        (["inspect", "NOWHERE"], "does not exist"),
        (["eval", "MODEL", "--text", "none.txt"], "none.txt"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_gets_one_sentence_and_a_suggestion(
    cli: Cli, model: Path, quantized: Path, tmp_path: Path, arguments: list[str], sentence: str
) -> None:
    places = {"MODEL": model, "QUANTIZED": quantized, "OUT": tmp_path / "out", "NOWHERE": tmp_path / "nowhere"}
    filled = [places.get(argument, argument) for argument in arguments]
    code, out, err = cli(*filled)
    flat = " ".join(err.split())
    assert code == 2 and sentence in flat, (out, err)
    assert "Traceback" not in err and not (tmp_path / "out").exists()
    code, out, _ = cli(*filled, "--json")
    answer = json.loads(out)
    assert code == 2 and sentence in f"{answer['error']} {answer['hint']}"


def test_unknown_option_is_a_usage_error(cli: Cli, model: Path) -> None:
    code, _, err = cli("quantize", model, "--skeme", "W4A16")
    assert code == 2 and "--skeme" in err


def test_verify_of_a_damaged_file_is_a_failed_check(cli: Cli, quantized: Path, tmp_path: Path) -> None:
    import shutil

    broken = shutil.copytree(quantized, tmp_path / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    found = cli("verify", broken, "--json")
    assert found[0] == 1 and not json.loads(found[1])["passed"]


def test_report_measures_and_renders_again(cli: Cli, model: Path, quantized: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(quantized, tmp_path / "q")
    arguments = ("--against", model, "--windows", 2, "--window-length", 64, "--device", "cpu")
    made = loads(cli("report", folder, *arguments, "--base-model", "someone/model", "--json"))
    assert made["quality"]["mean_kl"] > 0 and made["base_model"] == "someone/model"
    code, out, _ = cli("report", folder)
    assert code == 0 and f"mean KL divergence, nats: {made['quality']['mean_kl']:.4f}" in out
    assert "base_model: someone/model" in (folder / "README.md").read_text()
    code, _, err = cli("report", model)
    assert code == 2 and "quantization_report.json" in err


def test_a_budget_and_a_gate_say_what_they_saw(cli: Cli, model: Path, tmp_path: Path) -> None:
    asked = ("--calibration-windows", 4, "--calibration-length", 32, "--self-samples", 0)
    candidates = ("--candidate", "int4:group32:bf16", "--candidate", "int8:channel:bf16")
    code, out, err = cli("quantize", model, "-o", tmp_path / "b", "--bits-per-weight", 6, *candidates, *asked)
    assert code == 0, err
    assert "least predicted KL" in out and "Chosen: 5." in out and "over the whole" in out
    gate = ("--scheme", "W8A16", "--max-kl", 5)
    made = loads(cli("quantize", model, "-o", tmp_path / "g", *gate, *asked, "--json"))
    assert made["gate"]["max_kl"] == 5 and made["quality"]["mean_kl"] < 5
