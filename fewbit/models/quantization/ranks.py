"""The processes of one run, as torchrun starts them: each sees a share of the calibration windows.

    torchrun --nproc-per-node 2 -m fewbit quantize MODEL -o OUT --effort balanced

Statistics are summed over all of them, the layers that read one input are solved by different ones at the same time,
and the first writes. Sums are taken in another order than by one process, so results differ in the last digits; runs of
equally many processes agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fewbit.algorithms.statistics import InputStatistics
from fewbit.errors import FewbitError, ModelError

_FAILURES = "fewbit/failures"
T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """This process among those of the run.

    Attributes:
        rank: its number; 0 writes.
        count: how many there are.
        device: where its blocks run.
    """

    rank: int = 0
    count: int = 1
    device: str = "cpu"

    @property
    def writes(self) -> bool:
        """Whether this is the process that writes."""
        return self.rank == 0

    def share(self, windows: Tensor) -> Tensor:
        """The windows [count, length] that this process sees.

        Raises:
            ModelError: there are fewer windows than processes.
        """
        if len(windows) < self.count:
            raise ModelError(
                f"{self.count} processes cannot share {len(windows)} calibration windows.",
                "Start fewer, or raise --calibration-windows.",
            )
        return windows.tensor_split(self.count)[self.rank]

    def first(self, value: T) -> T:
        """What the first process has."""
        if self.count == 1:
            return value
        box = [value]
        with _peers():
            dist.broadcast_object_list(box, src=0)
        return box[0]

    def everyones(self, value: T) -> list[T]:
        """What each process has, in their order."""
        if self.count == 1:
            return [value]
        found: list[Any] = [None] * self.count
        with _peers():
            dist.all_gather_object(found, value)
        return found

    def earliest(self, number: int | None) -> int | None:
        """The smallest of the numbers that processes have; None where none has any."""
        return min((found for found in self.everyones(number) if found is not None), default=None)

    def totals(self, statistics: dict[str, InputStatistics]) -> dict[str, InputStatistics]:
        """Tokens and largest magnitudes of what all processes saw, by name; on the CPU of several."""
        if self.count == 1:
            return statistics
        found = self.everyones({name: _without_sums(one) for name, one in statistics.items()})
        return {name: _joined([one[name] for one in found]) for name in statistics}

    def total(self, statistics: InputStatistics | None, features: int) -> InputStatistics:
        """Statistics of what all processes saw, with the Gram matrix; the same in each.

        Args:
            statistics: what this one saw; None for nothing.
            features: K.
        """
        own = statistics or InputStatistics.empty(features, self.device)
        if self.count == 1:
            return own
        found = self.everyones(_without_sums(own))
        if own.shift is None and any(one.shifted for one in found):
            own.shift = torch.zeros(features, features, device=self.device)
        whole = _joined(found)
        for name, tensor in _tensors(whole).items():
            setattr(whole, name, tensor.to(self.device))
        own = replace(whole, products=own.products, magnitudes=own.magnitudes, shift=own.shift)
        for sums in (own.products, own.magnitudes, own.shift):
            if sums is not None:
                self.sum_in_place(sums)
        return own

    def sum_in_place(self, numbers: Tensor) -> Tensor:
        """Makes of a tensor its sum over all processes, and returns it."""
        if self.count > 1:
            with _peers():
                dist.all_reduce(numbers)
        return numbers

    def largest(self, magnitudes: dict[str, Tensor]) -> dict[str, Tensor]:
        """The largest that any process has of each tensor."""
        if self.count == 1:
            return magnitudes
        found = self.everyones(magnitudes)
        names = dict.fromkeys(name for one in found for name in one)
        return {name: torch.stack([one[name] for one in found if name in one]).amax(dim=0) for name in names}

    def own(self, sizes: Sequence[int]) -> list[int]:
        """Which of several pieces of work this process does: the largest first, each to whom has least to do."""
        loads = [0] * self.count
        mine = []
        for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
            owner = loads.index(min(loads))
            loads[owner] += sizes[index]
            mine += [index] if owner == self.rank else []
        return sorted(mine)


def _tensors(statistics: InputStatistics) -> dict[str, Tensor]:
    return {name: value for name, value in vars(statistics).items() if isinstance(value, Tensor)}


def _without_sums(statistics: InputStatistics) -> InputStatistics:
    """What is sent from process to process as a whole: all but the sums over tokens that devices add up, on the CPU."""
    small = replace(statistics, products=None, magnitudes=None, shift=None)
    return replace(small, **{name: tensor.cpu() for name, tensor in _tensors(small).items()})


def _joined(parts: Sequence[InputStatistics]) -> InputStatistics:
    """What several saw of one input, without sums."""
    histograms = [one.histogram for one in parts if one.histogram is not None]
    peaks = [one.peaks for one in parts if one.peaks is not None]
    samples = [one.sample for one in parts if one.sample is not None]
    return InputStatistics(
        torch.stack([one.largest for one in parts]).amax(),
        sum(one.tokens for one in parts),
        shifted=sum(one.shifted for one in parts),
        histogram=torch.stack(histograms).sum(dim=0) if histograms else None,
        peaks=torch.stack(peaks).amax(dim=0) if peaks else None,
        sample=torch.cat(samples) if samples else None,
    )


ALONE = Ranks()


@contextmanager
def joined(device: str) -> Iterator[Ranks]:
    """The processes that torchrun started, or this one alone, meanwhile one group.

    An error of one stops all, and is told by the first that has it.

    Args:
        device: `cpu`, or `cuda`: each process of a machine takes another GPU.
    """
    if not dist.is_torchelastic_launched():
        yield Ranks(device=device)
        return
    store, rank, count = next(iter(dist.rendezvous("env://")))
    if device.startswith("cuda"):
        device = f"cuda:{dist.get_node_local_rank()}"
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.startswith("cuda") else "gloo", store=store, rank=rank, world_size=count)
    try:
        yield Ranks(rank, count, device)
    except FewbitError as error:
        if store.add(_FAILURES, 1) > 1:
            raise SystemExit(2) from error  # another process tells
        raise
    finally:
        dist.destroy_process_group()


@contextmanager
def _peers() -> Iterator[None]:
    """A process that waits for one that has failed fails too."""
    try:
        yield
    except RuntimeError as error:
        raise ModelError("Another process of this run has failed.", "See its message.") from error
