"""Choosing a kernel: one pure function for every family, which explains itself.

Order of preference, always in this order:

1. the class of numerics: kernels that honour the whole key, then kernels that drop the activation key, then emulation,
   then the reference, which accepts everything, so that nothing that can be stored cannot be run;
2. inside a class, measured cost if *every* admissible candidate of the class has been measured on this hardware;
3. otherwise the family's declared order for the platform, then the kernel's name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from fewbit.errors import KernelError, closest
from fewbit.kernels.interface import Kernel, KernelRequest, Numerics, Refusal
from fewbit.kernels.oracles.family import Family
from fewbit.spec.hardware import Hardware

K = TypeVar("K", bound=Kernel)

DEFAULT_MIX: Mapping[int, float] = {1: 1.0, 64: 1.0, 256: 0.1, 4096: 0.01}
"""Steps of one sequence and of a batch of 64 alike; to ten of each a prompt of 256 rows, to a hundred one of 4,096."""


@dataclass(frozen=True)
class Preference:
    """What the user asked of the choice.

    Attributes:
        backend: use this backend or kernel and no other, None for the best.
        backends: the same for some layers only, by the name of their family or the text of their key.
        disabled: kernels that must not be used, by name.
        strict: refuse a kernel that changes the numbers the checkpoint asks for.
        costs: kernel name -> measured microseconds for this request on this hardware.
        cost_source: where the costs come from, for people.
        mix: rows of x -> how much they count, where costs are taken from a table; see `DEFAULT_MIX`.
        batch_invariant: a row gets the same bits whatever the number of rows is.
    """

    backend: str | None = None
    backends: Mapping[str, str] = field(default_factory=dict, hash=False)
    disabled: frozenset[str] = frozenset()
    strict: bool = False
    costs: Mapping[str, float] = field(default_factory=dict, hash=False)
    cost_source: str = ""
    mix: Mapping[int, float] = field(default_factory=lambda: DEFAULT_MIX, hash=False)
    batch_invariant: bool = False

    def backend_of(self, request: KernelRequest, family: Family) -> str | None:
        """What was asked for this request: for its key, for its family, or for all."""
        return self.backends.get(str(request.key)) or self.backends.get(family.name) or self.backend


@dataclass(frozen=True)
class Verdict(Generic[K]):
    """What was found of one candidate: its class, why it was refused (None: admissible), its measured cost."""

    kernel: K
    numerics: Numerics
    refusal: Refusal | None
    cost_us: float | None


@dataclass(frozen=True)
class Choice(Generic[K]):
    """The kernel that will run, every candidate's verdict, best first, and where their costs come from."""

    kernel: K
    verdicts: tuple[Verdict[K], ...]
    cost_source: str = ""

    @property
    def numerics(self) -> Numerics:
        return self.verdicts[0].numerics

    @property
    def note(self) -> str:
        """One sentence where the choice changes numbers or is slow on purpose, else an empty text."""
        note = _NOTES[self.numerics]
        emulating = next((one for one in self.verdicts if not one.refusal and one.numerics is Numerics.EMULATES), None)
        if self.numerics is Numerics.DROPS_ACTIVATION and emulating is not None:
            kernel = emulating.kernel
            note += f"; strict, or asking for {kernel.backend}, runs {kernel.name}, which emulates them"
        return "; ".join(part for part in (note, self.kernel.untested) if part)


_NOTES = {
    Numerics.KEEPS: "",
    Numerics.DROPS_ACTIVATION: "activations stay unquantized: no kernel here honours the activation key",
    Numerics.EMULATES: "quantized activations are emulated in software",
    Numerics.REFERENCE: "the dequantizing reference runs: no faster kernel here takes this layer",
}


def choose(
    request: KernelRequest,
    hardware: Hardware,
    candidates: Iterable[K],
    family: Family,
    preference: Preference = Preference(),
) -> Choice[K]:
    """The kernel for a request on a device.

    Args:
        request: the layer.
        hardware: the device, with the software that is installed or assumed.
        candidates: kernels to consider.
        family: gives the declared order.
        preference: what the user asked for.

    Raises:
        KernelError: the forced backend does not exist or refuses, or strict mode leaves no kernel; the message lists
            every candidate's reason.
    """
    preference = replace(preference, backend=preference.backend_of(request, family))
    verdicts = [_judge(kernel, request, hardware, preference) for kernel in candidates]
    admissible = [verdict for verdict in verdicts if verdict.refusal is None]
    measured = {
        numerics: all(verdict.cost_us is not None for verdict in admissible if verdict.numerics is numerics)
        for numerics in Numerics
    }

    def rank(verdict: Verdict[K]) -> tuple[bool, int, float, int, str]:
        position = family.position(verdict.kernel.backend, hardware.platform)
        cost = verdict.cost_us if measured[verdict.numerics] and verdict.cost_us is not None else 0.0
        return verdict.refusal is not None, verdict.numerics, cost, position, verdict.kernel.name

    verdicts.sort(key=rank)
    if not admissible:
        raise _no_kernel(request, hardware, verdicts, preference)
    return Choice(verdicts[0].kernel, tuple(verdicts), preference.cost_source)


def _judge(kernel: K, request: KernelRequest, hardware: Hardware, preference: Preference) -> Verdict[K]:
    numerics = kernel.numerics(request)
    return Verdict(
        kernel,
        numerics,
        _refused_by_user(kernel, numerics, preference) or kernel.refuse(request, hardware),
        preference.costs.get(kernel.name),
    )


def _refused_by_user(kernel: Kernel, numerics: Numerics, preference: Preference) -> Refusal | None:
    if kernel.name in preference.disabled:
        return Refusal("disabled by request")
    if preference.backend and preference.backend not in (kernel.backend, kernel.name):
        return Refusal(f"{preference.backend} was asked for")
    if preference.strict and numerics is Numerics.DROPS_ACTIVATION:
        return Refusal("strict: it would drop the activation key")
    return None


def _no_kernel(
    request: KernelRequest, hardware: Hardware, verdicts: list[Verdict[Any]], preference: Preference
) -> KernelError:
    known = {name for verdict in verdicts for name in (verdict.kernel.backend, verdict.kernel.name)}
    if preference.backend and preference.backend not in known:
        return KernelError(f"Unknown backend {preference.backend!r}.", closest(preference.backend, known))
    forced = [verdict for verdict in verdicts if preference.backend in (verdict.kernel.backend, verdict.kernel.name)]
    reasons = "; ".join(
        f"{verdict.kernel.name}: {verdict.refusal.reason}" for verdict in forced or verdicts if verdict.refusal
    )
    return KernelError(
        f"No kernel runs {request.key} [{request.rows}, {request.columns}] on {hardware.name}: {reasons}.",
        "Drop the forced backend, or allow the reference.",
    )
