"""The kernels that people use otherwise, where they are at hand: Humming, torch, vLLM's Marlin, Machete and CUTLASS.

Humming is the package `humming-kernels`. vLLM's library is one file of its wheel, `_C_stable_libtorch.abi3.so` of
vLLM 0.25.1 (built for torch 2.11), beside `scalar_type.py` of the same wheel: `--rivals DIR` names the folder that
holds them as `C.so` and `scalar_type.py`. Operands are random; each call is made as vLLM makes it.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Call = Callable[[], object]
Calls = dict[str, Callable[[Tensor], list[Call]]]
GROUP = 128
BF16 = torch.bfloat16

CODES = {"FP8_DYNAMIC": torch.float8_e4m3fn, "W8A8": torch.int8}
"""Schemes that CUTLASS multiplies -> what its operands are."""
HUMMING: dict[str, tuple[dict[str, Any], str]] = {
    "W4A16": ({"dtype": "int4", "group_size": GROUP, "scale_dtype": "bfloat16"}, "bfloat16"),
    "NVFP4A16": ({"dtype": "float4e2m1", "group_size": 16, "scale_dtype": "float8e4m3"}, "bfloat16"),
    "MXFP4A16": ({"dtype": "float4e2m1", "group_size": 32, "scale_dtype": "float8e8m0"}, "bfloat16"),
    "e2m1:group32:e8m0 * e4m3:token:f32:dynamic": (
        {"dtype": "float4e2m1", "group_size": 32, "scale_dtype": "float8e8m0"},
        "float8e4m3",
    ),
    "int4:group128:bf16 * e4m3:token:f32:dynamic": (
        {"dtype": "int4", "group_size": GROUP, "scale_dtype": "bfloat16"},
        "float8e4m3",
    ),
    "FP8_DYNAMIC": ({"dtype": "float8e4m3", "group_size": 0, "scale_dtype": "bfloat16"}, "float8e4m3"),
}


class Rivals:
    """Calls of other libraries' kernels over `copies` random weights of a layer [rows, columns].

    Args:
        folder: holds vLLM's library, or None.
    """

    def __init__(self, folder: Path | None) -> None:
        self.scalar_types: Any = None
        self.library: Any = None
        if folder is not None:
            torch.ops.load_library(str(folder / "C.so"))
            sys.path.insert(0, str(folder))
            from scalar_type import scalar_types

            self.library, self.scalar_types = torch.ops._C, scalar_types

    def layer(self, name: str, scheme: str, columns: int, rows: int, copies: int) -> Calls:
        """Figure -> a function from x [M, K] to one call for each copy; those of a product alone end in `_product`."""
        if name == "humming":
            return {name: _humming(scheme, columns, rows, copies)}
        if name == "torch":
            return {"torch_product": _torch(columns, rows, copies)}
        if name == "cutlass":
            return self._cutlass(CODES[scheme], columns, rows, copies)
        return {name: getattr(self, f"_{name}")(columns, rows, copies)}

    def _words(self, columns: int, rows: int, copies: int) -> list[Tensor]:
        shape = (columns // 8, rows)
        return [torch.randint(-(2**31), 2**31 - 1, shape, device="cuda", dtype=torch.int32) for _ in range(copies)]

    def _marlin(self, columns: int, rows: int, copies: int) -> Callable[[Tensor], list[Call]]:
        library, kind = self.library, self.scalar_types.uint4b8.id
        order = torch.empty(0, dtype=torch.int32, device="cuda")
        packed = [
            library.gptq_marlin_repack(words, order, columns, rows, 4, False)
            for words in self._words(columns, rows, copies)
        ]
        scale = torch.rand(columns // GROUP, rows, device="cuda", dtype=BF16) * 0.01
        workspace = torch.zeros(132 * 4, dtype=torch.int32, device="cuda")

        def calls(x: Tensor) -> list[Call]:
            return [
                partial(
                    library.marlin_gemm, x, None, one, None, scale, None, None, None, None, None, workspace, kind,
                    x.shape[0], rows, columns, True, False, True, False,
                )
                for one in packed
            ]  # fmt: skip

        return calls

    def _machete(self, columns: int, rows: int, copies: int) -> Callable[[Tensor], list[Call]]:
        library, kind = self.library, self.scalar_types.uint4b8.id
        packed = [
            library.machete_prepack_B(words.t().contiguous().t(), BF16, kind, BF16)
            for words in self._words(columns, rows, copies)
        ]
        scale = torch.rand(columns // GROUP, rows, device="cuda", dtype=BF16) * 0.01

        def calls(x: Tensor) -> list[Call]:
            return [
                partial(library.machete_mm, x, one, kind, None, scale, None, GROUP, None, None, None) for one in packed
            ]

        return calls

    def _cutlass(self, dtype: torch.dtype, columns: int, rows: int, copies: int) -> Calls:
        """The product after vLLM's own rounding by token, and the product alone."""
        library, weights = self.library, _codes(dtype, columns, rows, copies)
        scale = torch.ones(1, rows, device="cuda")

        def rounded(x: Tensor, codes: Tensor, token: Tensor) -> None:
            if dtype == torch.int8:
                library.dynamic_scaled_int8_quant(codes, x, token, None)
            else:
                library.dynamic_per_token_scaled_fp8_quant(codes, x, token, None)

        def product(out: Tensor, codes: Tensor, one: Tensor, token: Tensor) -> None:
            library.cutlass_scaled_mm(out, codes, one, token, scale, None)

        def both(x: Tensor, out: Tensor, codes: Tensor, one: Tensor, token: Tensor) -> None:
            rounded(x, codes, token)
            product(out, codes, one, token)

        def calls(x: Tensor, alone: bool) -> list[Call]:
            codes, token = x.to(dtype), torch.ones(x.shape[0], 1, device="cuda")
            out = x.new_empty(x.shape[0], rows)
            first = partial(product, out, codes) if alone else partial(both, x, out, codes)
            return [partial(first, one, token) for one in weights]

        return {"cutlass": partial(calls, alone=False), "cutlass_product": partial(calls, alone=True)}


def names_at_hand(scheme: str, folder: Path | None) -> list[str]:
    """The rivals of a scheme that can be tried here."""
    found = ["humming"] if scheme in HUMMING and importlib.util.find_spec("humming") else []
    found += ["torch"] if scheme == "FP8_DYNAMIC" else []
    if folder is not None:
        found += ["marlin", "machete"] if scheme == "W4A16" else []
        found += ["cutlass"] if scheme in CODES else []
    return found


def _codes(dtype: torch.dtype, columns: int, rows: int, copies: int) -> list[Tensor]:
    """Weights [K, N], the features of an output beside each other."""
    shape = (rows, columns)
    return [(torch.randn(shape, device="cuda") * 4).to(dtype).t() for _ in range(copies)]


def _torch(columns: int, rows: int, copies: int) -> Callable[[Tensor], list[Call]]:
    """torch's product with scales of rows, the fast way to sum."""
    weights, scale = _codes(torch.float8_e4m3fn, columns, rows, copies), torch.ones(1, rows, device="cuda")

    def calls(x: Tensor) -> list[Call]:
        codes, token = x.to(torch.float8_e4m3fn), torch.ones(x.shape[0], 1, device="cuda")
        product = partial(torch._scaled_mm, out_dtype=x.dtype, use_fast_accum=True)
        return [partial(product, codes, one, token, scale) for one in weights]

    return calls


def _humming(scheme: str, columns: int, rows: int, copies: int) -> Callable[[Tensor], list[Call]]:
    from humming import testing
    from humming.layer import HummingLayer

    weight, element = HUMMING[scheme]
    layers = []
    for _ in range(copies):
        layer = HummingLayer(
            shape_n=rows, shape_k=columns, weight_config=weight, input_config={"dtype": element}, torch_dtype=BF16
        ).to("cuda")
        for parameter in layer.parameters():
            testing.random_fill_tensor(parameter)
        layer.transform()
        layers.append(layer)
    return lambda x: [partial(layer, inputs=x) for layer in layers]
