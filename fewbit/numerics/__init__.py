"""The arithmetic that defines every format: casts, scale rules, quantize and dequantize, and the hub record."""

from fewbit.numerics.cast import code_dtype, code_dtype_name, decode, encode, finite_codes, float_element, round_to
from fewbit.numerics.quantize import clipped_share, dequantize, effective_scale, quantize, quantize_with
from fewbit.numerics.tensor import FLOAT_ZERO_POINT, ROLES, QuantizedTensor

__all__ = [
    "FLOAT_ZERO_POINT",
    "ROLES",
    "QuantizedTensor",
    "clipped_share",
    "code_dtype",
    "code_dtype_name",
    "decode",
    "dequantize",
    "effective_scale",
    "encode",
    "finite_codes",
    "float_element",
    "quantize",
    "quantize_with",
    "round_to",
]
