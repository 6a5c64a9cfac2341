"""Clipping against its formula, range by range, in float64."""

from __future__ import annotations

import pytest
import torch

from fewbit.algorithms.clip import Clip
from fewbit.errors import SchemeError
from fewbit.numerics import dequantize, quantize
from tests.algorithms.layers import FEATURES, OUTPUTS, keys, statistics, task, weight

KEYS = keys()


@pytest.mark.parametrize("scheme", ["W4A16", "W3A16", "W4A16_ASYM"])
def test_each_group_gets_the_range_with_the_least_error(scheme: str) -> None:
    key = KEYS[scheme].weight
    found = Clip().quantize_layers([task(KEYS[scheme])])[0]
    plain = quantize(weight(), key)
    gram, width = statistics().gram.double(), key.granularity.columns
    assert Clip().ratios[0] == 1 and Clip().ratios[-1] == pytest.approx(0.55)
    clipped = 0
    for group in range(FEATURES // width):
        inside = slice(group * width, (group + 1) * width)
        block, numbers = gram[inside, inside], weight()[:, inside].double()
        zero = plain["zero_point"][:, group].double() if "zero_point" in plain else torch.zeros(OUTPUTS)
        errors = []
        for ratio in Clip().ratios:
            scale = (plain["scale"][:, group].float() * ratio).to(plain["scale"].dtype).double()[:, None]
            codes = torch.round(numbers / scale + zero[:, None]).clamp(key.element.min, key.element.max)
            error = (codes - zero[:, None]) * scale - numbers
            errors.append(((error @ block) * error).sum(dim=1))
        own = dequantize(found.record)[:, inside].double() - numbers
        least = torch.stack(errors).amin(dim=0)
        assert torch.allclose(((own @ block) * own).sum(dim=1), least, rtol=1e-3)
        clipped += int((least < errors[0] * 0.999).sum())
    assert clipped > OUTPUTS // 4


@pytest.mark.parametrize("settings", [{"steps": 0}, {"reach": 1.0}, {"reach": -0.1}])
def test_settings_beyond_their_range_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(SchemeError, match="clip"):
        Clip(settings)
