"""Random valid keys, for tests that hold for every key."""

from __future__ import annotations

from hypothesis import strategies as st

from fewbit.spec import CHANNEL, ELEMENTS, TENSOR, TOKEN, LinearKey, QuantKey, ScaleSpec, block, group

SCALE_ELEMENTS = [element for element in ELEMENTS.values() if not element.is_integer and element.bits >= 8]
GRANULARITIES = st.one_of(
    st.sampled_from([TENSOR, CHANNEL, TOKEN]),
    st.builds(group, st.integers(1, 4096)),
    st.builds(block, st.integers(1, 512), st.integers(1, 512)),
)
SCALES = st.builds(ScaleSpec, st.sampled_from(SCALE_ELEMENTS), GRANULARITIES, st.booleans())
QUANT_KEYS = st.builds(
    QuantKey, st.sampled_from(list(ELEMENTS.values())), SCALES, st.none() | SCALES, symmetric=st.booleans()
)
LINEAR_KEYS = st.builds(LinearKey, QUANT_KEYS, st.none() | QUANT_KEYS)
