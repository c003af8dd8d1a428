"""The settings of a servable: ``servable.settings(...)`` in servable.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from penstock.config import check_integer, check_number, is_integer
from penstock.errors import InvalidArgumentError
from penstock.servables.api.version_policy import VersionPolicy, WantedVersions
from penstock.validation import refusal

__all__ = ["MAX_PROCESSES", "Settings", "check_cores"]

MAX_PROCESSES: Final = 256
_MAX_CORES: Final = 1 << 16
"""Numbers of cores are below this."""


@dataclass(frozen=True)
class Settings:
    """The settings of a servable.

    ``workers``: the number of processes that run its Python stages.
    ``timeout_s``: the longest time in seconds that a process may take for one batch.
    ``memory_limit_mib``: a process that uses more memory (MiB) is replaced between batches.
    ``model_threads``: the number of threads of each process that runs a model.
    ``max_waiting``: the maximum number of instances that wait for one stage or model; more are refused with 429.
    ``max_batch_mib``: the maximum size (MiB) of a batch's inputs; a larger instance runs in a separate batch.
    ``versions`` and ``labels``: which versions are served.
    ``default_method``: the method that requests for the bare name of the servable call.

    Raises InvalidArgumentError; its message starts with the name of the field.
    """

    workers: int = 1
    timeout_s: float = 30.0
    memory_limit_mib: int | None = None
    model_threads: int = 1
    max_waiting: int = 4096
    max_batch_mib: int = 64
    versions: str = "latest:1"
    labels: dict[str, int] = field(default_factory=dict)
    default_method: str = ""

    def __post_init__(self) -> None:
        check_integer("workers", self.workers, 1, MAX_PROCESSES)
        check_integer("model_threads", self.model_threads, 1, 1024)
        check_integer("max_waiting", self.max_waiting, 1, 1 << 30)
        check_integer("max_batch_mib", self.max_batch_mib, 1, 512)
        check_number("timeout_s", self.timeout_s, 86_400)
        if self.memory_limit_mib is not None:
            check_integer("memory_limit_mib", self.memory_limit_mib, 16, 1 << 24)
        if not isinstance(self.versions, str):
            raise InvalidArgumentError(
                f'versions: expected a string like "latest:2", "all" or "1,3", got {self.versions!r:.100}',
                param="versions",
            )
        if not isinstance(self.labels, dict):
            raise InvalidArgumentError(
                f'labels: expected a mapping like {{"stable": 1}}, got {self.labels!r:.100}', param="labels"
            )
        self.wanted_versions()
        if not isinstance(self.default_method, str):
            raise refusal("default_method", "a name", self.default_method)

    def wanted_versions(self) -> WantedVersions:
        """Return the versions that servable.py asks for; raise InvalidArgumentError if it cannot be parsed."""
        return WantedVersions(VersionPolicy.parse(self.versions), self.labels)


def check_cores(instances: object) -> tuple[tuple[int, ...], ...]:
    """Return the cores of each process of a model; InvalidArgumentError if they are not lists of different numbers."""
    expected = "a number of processes, or the different cores of each as [(0, 1), (2, 3)]"
    if not isinstance(instances, list | tuple) or not instances:
        raise refusal("instances", expected, instances)
    for cores in instances:
        is_list = (
            isinstance(cores, list | tuple) and cores and all(is_integer(core, 0, _MAX_CORES - 1) for core in cores)
        )
        if not is_list or len(set(cores)) < len(cores):
            raise refusal("instances", expected, instances)
    return tuple(tuple(cores) for cores in instances)
