"""The process that has the GPU, replaced when it fails or hangs, and processes that compile before it begins."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

Job = tuple[Any, ...]


@dataclass(frozen=True)
class Failed:
    """Why there is no result."""

    reason: str


class Worker:
    """Calls functions one after the other in a process of its own."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None

    def __call__(self, limit_s: float, function: Callable[..., Any], *arguments: Any) -> Any:
        """What the function returns, or `Failed`: it raised, hung or took the process with it.

        A device that one call left in disorder is of no use to the next, so the process is replaced, but after an
        assertion that failed.
        """
        self._pool = self._pool or _processes(1)
        future = self._pool.submit(function, *arguments)
        if not wait([future], limit_s).done:
            self.stop()
            return Failed(f"no answer within {limit_s:.0f} s")
        error = future.exception()
        if error is None:
            return future.result()
        if not isinstance(error, AssertionError):
            self.stop()
        return Failed(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")

    def stop(self) -> None:
        """Ends the process."""
        if self._pool is not None:
            _stop(self._pool)
            self._pool = None


def ahead(function: Callable[..., Any], jobs: Iterable[Job], limit_s: float) -> dict[Job, Failed]:
    """Runs jobs in a process to each core, as many as end in time; which failed or did not end, and why."""
    distinct = list(dict.fromkeys(jobs))
    count = min(len(os.sched_getaffinity(0)), len(distinct))
    if not count:
        return {}
    end, pool = time.monotonic() + limit_s, _processes(count)
    futures: dict[Job, Future[Any]] = {job: pool.submit(function, *job) for job in distinct}
    wait(futures.values(), end - time.monotonic())
    failed = {job: reason for job, future in futures.items() if (reason := _reason(future)) is not None}
    _stop(pool)
    return failed


def _reason(future: Future[Any]) -> Failed | None:
    if not future.done():
        return Failed("not in time")
    error = future.exception()
    return None if error is None else Failed(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")


def _processes(count: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn"))


def _stop(pool: ProcessPoolExecutor) -> None:
    """Ends a pool's processes, whatever they are doing."""
    pool.shutdown(wait=False, cancel_futures=True)
    for child in multiprocessing.active_children():
        child.kill()
        child.join()
