"""What CUDA C++ sources ask of their launcher."""

from __future__ import annotations

import re
from importlib.resources import files

FOLDER = files("fewbit.kernels.cuda")


def asked(names: list[str]) -> set[str]:
    """The names in capitals that sources use and do not define."""
    text = "".join((FOLDER / name).read_text() for name in names)
    code = re.sub(r'//.*|"[^"]*"', "", text)
    defined = set(
        re.findall(r"(?:constexpr (?:int|u32|bool|float)|#define|template <(?:int|typename)) ([A-Z_0-9]+)", code)
    )
    defined |= set(re.findall(r"(?:, (?:int|bool)|constexpr int [A-Z_0-9]+ = [^;]*,) ([A-Z_]+)(?= =|>)", code))
    return set(re.findall(r"\b[A-Z][A-Z_]{3,}\b", code)) - defined


def fields_of_problem(name: str) -> list[str]:
    """The fields of the struct that a source's kernel takes."""
    text = (FOLDER / name).read_text()
    body = re.sub(r"//.*", "", text[text.index("struct Problem {") :].split("{", 1)[1].split("}")[0])
    return [field for line in body.split(";") for field in re.findall(r"(\w+)(?=,|$)", line.strip())]
