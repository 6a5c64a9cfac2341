"""Tables of measurements: which one serves a device, what they say of a layer, and measuring one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fewbit.errors import CheckpointError
from fewbit.kernels.interface import LinearRequest
from fewbit.kernels.linear.fragment_cuts import Cut, cut_by_rule, cut_for, cut_in
from fewbit.kernels.linear.fragment_layout import FragmentLayout
from fewbit.kernels.linear.product_layout import ProductLayout, product_layout_of
from fewbit.kernels.linear.tile_plans import Plan, is_possible, plan_by_rule, plan_by_table, plan_for
from fewbit.kernels.linear.weight_tiles import TileLayout, layout_of
from fewbit.kernels.probe import this_machine
from fewbit.kernels.registry import choose_kernel, linear_kernels
from fewbit.kernels.select import Preference
from fewbit.kernels.tuned.candidates import candidates
from fewbit.kernels.tuned.choice import Chosen
from fewbit.kernels.tuned.cuts import cut_candidates
from fewbit.kernels.tuned.layouts import layout_costs
from fewbit.kernels.tuned.session import tune_layers
from fewbit.kernels.tuned.table import SHIPPED, Table, file_name, tables_for, tables_of
from fewbit.spec import DEVICES
from tests.kernels.layers import KEYS

H200 = DEVICES["sm90"]
SHIPPED_TABLES = sorted(SHIPPED.glob("*.json"))


@pytest.mark.parametrize("path", SHIPPED_TABLES, ids=lambda path: path.stem)
def test_shipped_tables_hold_possible_plans_and_known_kernels(path: Path) -> None:
    table = Table.read(path)
    assert table.costs
    for entry in table.costs:
        assert set(entry["us"]) <= set(linear_kernels())
        assert all(cost > 0 for cost in entry["us"].values())
    for entry in table.plans:
        kind = ProductLayout if "operand" in entry["layout"] else TileLayout
        assert is_possible(Plan(**entry["plan"]), kind(**entry["layout"]))
    for entry in table.cuts:
        layout, cut = FragmentLayout(**entry["layout"]), Cut(**entry["cut"])
        assert cut.fitted(layout) == cut
        assert cut_in(table, layout, entry["M"]) == cut


def test_the_h200_has_a_table_and_choices_say_where_costs_come_from() -> None:
    choice = choose_kernel(LinearRequest(KEYS["W4A16"], 4096, 4096), H200)
    assert choice.kernel.name == "triton_tiles"
    assert choice.verdicts[0].cost_us is not None
    assert "NVIDIA H200" in choice.cost_source
    elsewhere = choose_kernel(LinearRequest(KEYS["W4A16"], 4096, 4096), DEVICES["sm80"])
    assert (elsewhere.verdicts[0].cost_us, elsewhere.cost_source) == (None, "")


def test_the_mix_decides_between_measured_kernels() -> None:
    request = LinearRequest(KEYS["FP8_DYNAMIC"], 4096, 14336)
    rest = frozenset({"triton_fp8"})  # which is best at every M
    decode = Preference(disabled=rest, mix={1: 1})
    assert choose_kernel(request, H200, decode).kernel.name == "triton_tiles_quantized"
    assert choose_kernel(request, H200, replace(decode, mix={4096: 1})).kernel.name == "torch_scaled_mm"
    assert choose_kernel(request, H200, replace(decode, mix={1: 1000, 4096: 1})).kernel.name == "triton_tiles_quantized"


def test_kernels_compiled_by_nvrtc_are_chosen_for_batches_where_they_can_be_compiled() -> None:
    many = Preference(mix={64: 1})
    for key, compiled, without in (
        ("W4A16", "cuda_wgmma", "triton_tiles"),
        ("W4AF8 g128", "cuda_wgmma_fp8", "triton_fp8"),
        ("NVFP4A16", "cuda_wgmma", "triton_tiles"),
        ("MXFP4A16", "cuda_wgmma", "triton_tiles"),
        ("W8A16", "cuda_wgmma", "triton_tiles"),
        ("MXFP4 AF8", "cuda_wgmma_fp8", "triton_fp8"),
        ("FP8_DYNAMIC", "cuda_fp8", "triton_fp8"),
        ("W8A8", "cuda_int8", "triton_int8"),
    ):
        request = LinearRequest(KEYS[key], 28672, 4096)
        assert choose_kernel(request, H200.with_software("cuda-core"), many).kernel.name == compiled
        assert choose_kernel(request, H200, many).kernel.name == without


def test_another_version_or_device_is_not_served() -> None:
    assert tables_for(H200)
    assert not tables_for(replace(H200, software={"torch": "2.12", "triton": "3.6"}))
    assert not tables_for(replace(H200, model="NVIDIA H100"))


def test_a_table_of_the_users_own_comes_first_and_hides_no_other_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, shipped = LinearRequest(KEYS["W4A16"], 64, 256), LinearRequest(KEYS["W4A16"], 4096, 4096)
    layer = {"key": str(own.key), "dtype": "bf16", "N": 64, "K": 256}
    costs = ({**layer, "M": 4096, "us": {"triton_tiles": 3.0}},)
    before = choose_kernel(own, H200)
    assert (before.verdicts[0].cost_us, before.cost_source) == (None, "")
    monkeypatch.setattr("fewbit.kernels.tuned.table.user_folder", lambda: tmp_path)
    Table(H200.model, "", {"torch": "2.11"}, costs).write(tmp_path / file_name(H200.model))
    tables_of.cache_clear()
    try:
        after = choose_kernel(own, H200)
        assert (after.kernel.name, after.verdicts[0].cost_us) == ("triton_tiles", 3.0)
        assert after.cost_source == "measured on NVIDIA H200 with torch 2.11, nvidia-h200.json"
        assert choose_kernel(shipped, H200).verdicts[0].cost_us is not None
    finally:
        tables_of.cache_clear()


def test_costs_are_averaged_over_the_mix_at_the_next_larger_m() -> None:
    request = LinearRequest(KEYS["W4A16"], 64, 256)
    layer = {"key": str(request.key), "dtype": "bf16", "N": 64, "K": 256}
    costs = ({**layer, "M": 1, "us": {"a": 1.0, "b": 3.0}}, {**layer, "M": 16, "us": {"a": 5.0}})
    table = Table("x", "", {}, costs)
    assert table.costs_of(request, {1: 1}) == {"a": 1.0, "b": 3.0}
    assert table.costs_of(request, {1: 3, 7: 1}) == {"a": 2.0}
    assert table.costs_of(request, {17: 1}) == {}
    assert table.costs_of(replace(request, rows=128), {1: 1}) == {}


def test_what_one_layout_costs_is_told_against_the_fastest_kernel_at_each_m() -> None:
    key = KEYS["W4AF8 g128"]
    layer = {"key": str(key), "dtype": "bf16", "N": 4096, "K": 4096}
    costs = (
        {**layer, "M": 1, "us": {"triton_fp8": 9.0, "triton_tiles_quantized": 6.0, "triton_tiles": 1.0}},
        {**layer, "M": 4096, "us": {"triton_fp8": 150.0, "triton_tiles_quantized": 180.0, "triton_tiles": 170.0}},
    )
    table = Table(H200.model, "", {}, costs)
    (cost,) = layout_costs(table, H200, {1: 1, 4096: 0.01})
    assert cost.request == LinearRequest(key, 4096, 4096)
    assert cost.at == {1: (6.0, "triton_tiles_quantized", 6.0), 4096: (180.0, "triton_fp8", 150.0)}
    assert str(cost).endswith("triton_tiles_quantized; a free choice saves 20% at 4096 rows (triton_fp8)")
    (other,) = layout_costs(table, H200, {4096: 1})
    assert str(other).endswith("triton_fp8; a free choice saves 50% at 1 rows (triton_tiles_quantized)")


def test_a_table_survives_writing_and_a_broken_one_is_an_error(tmp_path: Path) -> None:
    table = Table("Some GPU", "1.2", {"torch": "2.11"}, ({"key": "k", "us": {}},), ())
    table.write(tmp_path / "folder" / "t.json")
    assert Table.read(tmp_path / "folder" / "t.json") == table
    for text in ("", "[]", json.dumps({"device": "x"})):
        (tmp_path / "broken.json").write_text(text)
        with pytest.raises(CheckpointError, match="no table of measurements"):
            Table.read(tmp_path / "broken.json")


def test_plans_come_from_the_table_where_the_shape_was_measured() -> None:
    layout = layout_of(LinearRequest(KEYS["W4A16"], 4096, 4096))
    assert layout is not None
    measured = plan_by_table(layout, 1, "NVIDIA H200")
    assert plan_by_table(layout, 3, "NVIDIA H200") == plan_by_table(layout, 4, "NVIDIA H200")
    assert plan_by_table(layout, 100_000, "NVIDIA H200").decodes_first
    assert plan_by_table(layout, 1, "another device") == plan_by_rule(layout, 1)
    same_width = layout_of(LinearRequest(KEYS["W4A16_ASYM"], 4096, 4096))
    assert same_width is not None
    assert plan_by_table(same_width, 1, "NVIDIA H200") == measured


@pytest.mark.parametrize("tokens", [1, 8, 16, 33, 128, 256, 512, 4096])
def test_candidates_are_possible(tokens: int) -> None:
    layouts = (
        layout_of(LinearRequest(KEYS["W4A16"], 192, 512)),
        product_layout_of(LinearRequest(KEYS["W8A8"], 192, 512), "int8"),
        product_layout_of(LinearRequest(KEYS["FP8_DYNAMIC"], 192, 512), "e4m3"),
        product_layout_of(LinearRequest(KEYS["W4AF8 g128"], 192, 512), "e4m3"),
    )
    for layout in layouts:
        assert layout is not None
        plans = list(candidates(layout, tokens, 132))
        assert plans
        assert len(set(plans)) == len(plans)
        assert all(is_possible(plan, layout) for plan in plans)


@pytest.mark.parametrize("tokens", [1, 8, 16, 33, 128, 256, 512, 4096])
@pytest.mark.parametrize("rows", [64, 6144, 28672])
@pytest.mark.parametrize(
    "stored",
    [
        (32, "bf16", "integers"),
        (32, "e4m3", "integers"),
        (16, "bf16", "e2m1"),
        (32, "e4m3", "e2m1"),
        (0, "bf16", "int8"),
    ],
    ids=str,
)
def test_candidate_cuts_fit(tokens: int, rows: int, stored: tuple[int, str, str]) -> None:
    group, operand, element = stored
    layout = FragmentLayout(rows, 4096, group, "bf16", 0, False, operand, element, element == "e2m1")
    cuts = list(cut_candidates(layout, tokens))
    assert len(set(cuts)) == len(cuts)
    assert cuts
    for cut in cuts:
        assert cut.fitted(layout) == cut
        assert cut.blocks <= cut.residents


def test_cuts_come_from_the_table_where_the_shape_was_measured() -> None:
    layout = FragmentLayout(28672, 4096, 128, "bf16", 8, False, "bf16")
    assert cut_for(layout, 3, "NVIDIA H200") == cut_for(layout, 4, "NVIDIA H200")
    assert cut_for(layout, 100_000, "NVIDIA H200").decodes_first
    assert cut_for(layout, 1, "another device") == cut_by_rule(layout, 1).fitted(layout)
    only = Cut(64, stages=3)
    with cut_for.by(lambda *_: only):
        assert cut_for(layout, 1, "NVIDIA H200") == only
    assert cut_for(layout, 1, "NVIDIA H200") != only


def test_cuts_of_integers_serve_every_group_and_those_of_e2m1_their_own() -> None:
    def cut(group: int, element: str, dtype: str = "bf16") -> Cut:
        layout = FragmentLayout(28672, 4096, group, dtype, 0, False, dtype, element, element == "e2m1")
        return cut_for(layout, 64, "NVIDIA H200")

    entries = Table.read(SHIPPED / "nvidia-h200.json").cuts
    for element, group in (("integers", 128), ("e2m1", 16), ("e2m1", 32), ("int8", 0)):
        layouts = [(FragmentLayout(**entry["layout"]), entry) for entry in entries if entry["M"] == 64]
        found = [
            Cut(**entry["cut"])
            for layout, entry in layouts
            if (layout.rows, layout.columns, layout.operand) == (28672, 4096, "bf16")
            and (layout.element, layout.group) == (element, group)
        ]
        assert found == [cut(group, element)]
    assert cut(32, "integers") == cut(128, "integers").fitted(FragmentLayout(28672, 4096, 32, "bf16", 0, False, "bf16"))
    assert cut(16, "e2m1", "f16") == cut(16, "e2m1")


@pytest.mark.skipif(torch.cuda.is_available(), reason="On a GPU this would compile a hundred plans.")
def test_a_session_writes_what_it_measured_and_keeps_the_rest(tmp_path: Path) -> None:
    path, said = tmp_path / "cpu.json", []
    hardware = this_machine("cpu")
    if not hardware.has("avx2"):
        pytest.skip("This machine's CPU has no AVX2, so no kernel would be measured.")
    first = tune_layers([LinearRequest(KEYS["W4A16 g32"], 32, 64)], hardware, [1, 2], path, said.append)
    assert [entry["M"] for entry in first.costs] == [1, 2]
    second = tune_layers([LinearRequest(KEYS["W8A16"], 32, 64)], hardware, [1], path, said.append)
    assert Table.read(path) == second
    assert len(second.costs) == 3
    assert len(said) == 3


def test_every_choice_is_known_by_what_it_usually_chooses() -> None:
    layout = layout_of(LinearRequest(KEYS["W4A16"], 4096, 4096))
    assert layout is not None
    assert {plan_for, cut_for} <= {*Chosen.every}
    assert plan_for.usual(layout, 1, "NVIDIA H200") == plan_by_table(layout, 1, "NVIDIA H200")
    with plan_for.by(lambda *_: Plan()):
        assert plan_for(layout, 1, "NVIDIA H200") == Plan()
        assert plan_for.usual(layout, 1, "NVIDIA H200") != Plan()
