"""Coxswain from Python: what the GPUs hold, what a run will take, and how it is doing.

Every function asks the ``cox`` command that this package installs and returns the JSON that it prints;
sizes are in bytes. Nothing is trained here and nothing of CUDA is loaded into this process. Whatever
``cox`` refuses is raised as :class:`CoxError` with its own words::

    import coxswain

    coxswain.gpu_info()                                             # the GPUs of this machine
    coxswain.recommend_batch_size("my.yaml").recommended            # what fits here
    coxswain.plan("my.yaml", "lora.rank=16", gpus=["A100-40"])      # every byte of it, somewhere else
    coxswain.status("runs/my")["loss"]                              # of a run that is going on
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from ._cox import CoxError, ask, follow

__all__ = [
    "BatchSizes",
    "CoxError",
    "Gpu",
    "Monitor",
    "gpu_info",
    "monitor",
    "plan",
    "recommend_batch_size",
    "status",
    "watch",
]

StrPath = str | os.PathLike[str]


class Gpu(TypedDict, total=False):
    """A GPU as its driver describes it. Fields that the driver does not tell are ``None``."""

    index: int
    name: str
    total: int
    used: int
    free: int
    compute_capability: str | None
    multiprocessors: int | None
    processes: list[dict[str, Any]]
    """``pid``, ``command`` and ``used`` of each process that computes on it."""
    peak: int
    """Only from :func:`monitor`: the largest ``used`` since the last reset."""


@dataclass(frozen=True)
class BatchSizes:
    """Micro-batches of one rank that fit, all powers of two; ``None`` where not even one sample does."""

    maximum: int | None
    """Just fits."""
    recommended: int | None
    """Leaves a tenth of the free memory free."""
    safe: int | None
    """Leaves a quarter free."""
    current: int
    """The run file's own."""
    verdict: str
    """What that means here: ``safe``, ``good``, ``tight`` or ``too_large``."""
    memory: str
    """Where: a GPU, or the host's memory."""


def gpu_info() -> list[Gpu]:
    """The GPUs of this machine, at least one. Raises :class:`CoxError` where there is no driver or no GPU."""
    gpus: list[Gpu] = ask("gpu", "--json")
    return gpus


def plan(
    config: StrPath,
    *overrides: str,
    gpus: Sequence[str] = (),
    all_gpus: bool = False,
    world: int | None = None,
) -> dict[str, Any]:
    """Predicts what a run takes on each rank, from sizes alone: no weights are read and no GPU is needed.

    ``overrides`` are changes to the run file (``"train.micro_batch=4"``). ``gpus`` are GPUs to plan for, by
    memory (``"24GiB"``) or by name (``"A100-40"``); ``all_gpus`` asks for each usual one; with neither it is
    what this machine has. ``world`` is the number of ranks. A run that does not fit has a plan as well: look
    at ``plan["memories"][0]["verdict"]``.
    """
    flags = [f"--gpu={gpu}" for gpu in gpus]
    if all_gpus:
        flags.append("--all-gpus")
    if world is not None:
        flags.append(f"--world={world}")
    answer: dict[str, Any] = ask("plan", os.fspath(config), *overrides, "--json", *flags)
    return answer


def recommend_batch_size(
    config: StrPath, *overrides: str, gpu: str | None = None, world: int | None = None
) -> BatchSizes:
    """The micro-batches that fit a run: on ``gpu``, else on this machine, there on the GPU that holds least.

    Arguments are those of :func:`plan`.
    """
    answer = plan(config, *overrides, gpus=[gpu] if gpu else [], world=world)
    tightest = min(answer["memories"], key=lambda memory: memory["fit"]["maximum"] or 0)
    return BatchSizes(
        **tightest["fit"],
        current=tightest["current"]["micro_batch"],
        verdict=tightest["verdict"],
        memory=tightest["memory"]["name"],
    )


class Monitor:
    """Readings of all GPUs, one list every interval, with the peak of each. Made by :func:`monitor`."""

    def __init__(self, interval: float) -> None:
        self._readings = follow("gpu", "--watch", f"--interval={interval}", "--json")
        self._peaks: dict[int, int] = {}

    def __iter__(self) -> Iterator[list[Gpu]]:
        for gpus in self._readings:
            for gpu in gpus:
                peak = max(gpu["used"], self._peaks.get(gpu["index"], 0))
                self._peaks[gpu["index"]] = gpu["peak"] = peak
            yield gpus

    def reset_peaks(self) -> None:
        """Forgets the peaks: those of the next reading begin there."""
        self._peaks.clear()

    def close(self) -> None:
        """Ends the readings."""
        self._readings.close()

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def monitor(interval: float = 1.0) -> Monitor:
    """Reads the memory of all GPUs every ``interval`` seconds, of all processes together::

        with coxswain.monitor() as readings:
            for gpus in readings:
                print(gpus[0]["used"], gpus[0]["peak"])
    """
    return Monitor(interval)


def status(run: StrPath | None = None, *, endpoint: str | None = None) -> dict[str, Any]:
    """Where a run is: phase, step, loss, speed, every rank with its peak memory, the first failure.

    ``run`` is its output directory, ``endpoint`` its coordinator's ``HOST:PORT``; with neither it is the
    newest run below ``runs/``. Raises :class:`CoxError` where no run is going on.
    """
    answer: dict[str, Any] = ask("status", "--json", *_target(run, endpoint))
    return answer


def watch(run: StrPath | None = None, *, endpoint: str | None = None) -> Iterator[dict[str, Any]]:
    """Follows a run: one event each, ``{"unix_ms": .., "step": {"step": 3, "loss": .., ..}}``, until it ends.

    Arguments are those of :func:`status`. A run that fails raises :class:`CoxError` after its last event.
    """
    return follow("watch", "--json", *_target(run, endpoint))


def _target(run: StrPath | None, endpoint: str | None) -> list[str]:
    flags = {"--run": run, "--endpoint": endpoint}
    return [f"{flag}={os.fspath(value)}" for flag, value in flags.items() if value is not None]
