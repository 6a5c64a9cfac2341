"""What holds for every algorithm of the registry and every key."""

from __future__ import annotations

import pytest
import torch

from fewbit.algorithms.gptq import Gptq
from fewbit.algorithms.interface import relative_loss
from fewbit.algorithms.registry import algorithm, algorithms
from fewbit.algorithms.statistics import InputStatistics
from fewbit.errors import SchemeError
from fewbit.numerics import dequantize, quantize
from tests.algorithms.layers import FEATURES, keys, statistics, task, weight

KEYS = keys()


@pytest.mark.parametrize("name", algorithms())
@pytest.mark.parametrize("scheme", KEYS)
def test_no_worse_than_round_to_nearest_on_correlated_inputs(name: str, scheme: str) -> None:
    layer = task(KEYS[scheme])
    result = algorithm(name).quantize_layers([layer])[0]
    result.record.validate("layer")
    gram = statistics().gram
    plain = relative_loss(weight().float(), dequantize(quantize(weight(), layer.key.weight)), gram)
    found = relative_loss(weight().float(), dequantize(result.record), gram)
    assert found is not None and plain is not None
    if algorithms()[name].needs_gram:
        assert found <= plain * 1.0001
        assert result.loss == pytest.approx(found, rel=1e-3)
    else:  # it knows nothing of the inputs: its measure is the weights themselves
        own = (dequantize(result.record) - weight().float()).square().sum()
        nearest = (dequantize(quantize(weight(), layer.key.weight)) - weight().float()).square().sum()
        assert own <= nearest * 1.0001


@pytest.mark.parametrize("name", [name for name, found in algorithms().items() if issubclass(found, Gptq)])
def test_half_the_loss_of_round_to_nearest_at_four_bits(name: str) -> None:
    for scheme in ("W4A16", "W4A16_ASYM", "NVFP4A16", "MXFP4A16"):
        layer = task(KEYS[scheme])
        plain = relative_loss(weight().float(), dequantize(quantize(weight(), layer.key.weight)), statistics().gram)
        loss = algorithm(name).quantize_layers([layer])[0].loss
        assert loss is not None and plain is not None
        assert loss < plain / 2


@pytest.mark.parametrize("name", algorithms())
def test_layers_that_share_an_input_come_out_as_they_would_alone(name: str) -> None:
    seen = statistics()
    parts = [weight()[:16], weight()[16:], weight()]
    tasks = [task(KEYS[scheme], part, seen) for scheme, part in zip(("W4A16", "W4A16", "FP8"), parts, strict=True)]
    together = algorithm(name).quantize_layers(tasks)
    for one, result in zip(tasks, together, strict=True):
        alone = algorithm(name).quantize_layers([one])[0]
        assert result.method == alone.method
        same = (dequantize(result.record) == dequantize(alone.record)).float().mean()
        assert same > 0.99  # sums in another order may break a tie


@pytest.mark.parametrize("name", algorithms())
def test_a_layer_that_no_token_reached_is_quantized_all_the_same(name: str) -> None:
    layer = task(KEYS["W4A16"], seen=InputStatistics.empty(FEATURES))
    result = algorithm(name).quantize_layers([layer])[0]
    error = (dequantize(result.record) - weight().float()).square().mean() / weight().float().square().mean()
    assert error < 0.02
    assert result.loss is None
    if algorithms()[name].needs_gram:
        assert "no calibration token" in result.method


@pytest.mark.parametrize("name", algorithms())
def test_weights_that_are_not_finite_are_refused(name: str) -> None:
    broken = weight().clone()
    broken[3, 4] = float("nan")
    with pytest.raises(ValueError, match="finite"):
        algorithm(name).quantize_layers([task(KEYS["W4A16"], broken)])


@pytest.mark.parametrize("name", algorithms())
def test_settings_are_kept_read_from_text_and_refused(name: str) -> None:
    plain = algorithm(name)
    texts = {key: str(value) for key, value in plain.settings_by_name.items()}
    assert algorithm(name, texts).settings == plain.settings
    with pytest.raises(SchemeError, match="no setting 'no_such_thing'"):
        algorithm(name, {"no_such_thing": 1})
    for setting, value in plain.settings_by_name.items():
        if not isinstance(value, str):
            with pytest.raises(SchemeError, match=setting):
                algorithm(name, {setting: "plenty"})


def test_an_unknown_algorithm_is_answered_with_the_closest() -> None:
    with pytest.raises(SchemeError, match="gptq"):
        algorithm("gptqq")


def test_an_all_zero_weight_and_a_silent_input_are_legal() -> None:
    x = torch.randn(64, FEATURES)
    x[:, 7] = 0
    for name in algorithms():
        zeros = algorithm(name).quantize_layers([task(KEYS["W4A16"], torch.zeros_like(weight()))])[0]
        assert not dequantize(zeros.record).any()
        silent = algorithm(name).quantize_layers([task(KEYS["W4A16"], seen=statistics(x))])[0]
        assert dequantize(silent.record).isfinite().all()
