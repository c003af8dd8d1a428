"""The rank of a process, from the environment that its launcher set: torchrun, ``penstock launch``, mpirun or Slurm.

The variables are those of https://docs.pytorch.org/docs/stable/elastic/run.html, of MPICH's Hydra, of Open MPI and of
Slurm's srun.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from penstock.config import show
from penstock.errors import InvalidArgumentError

__all__ = ["LAUNCHER_VARIABLES", "RankEnvironment", "read_rank_environment", "variables_of"]

MAX_WORLD: Final = 1 << 16


@dataclass(frozen=True)
class RankEnvironment:
    """The place of a process among those of its program.

    ``source``: the launcher that set it.  ``local_rank`` and ``local_world`` count the processes of this machine.
    """

    rank: int
    world: int
    local_rank: int
    local_world: int
    source: str = "penstock launch"


@dataclass(frozen=True)
class _Source:
    """The variables of a launcher: rank, world, local rank, local world; and ``needs``, which must be set as well."""

    name: str
    names: tuple[str, str, str, str]
    needs: str = ""


_OWN: Final = _Source(
    "PENSTOCK_RANK", ("PENSTOCK_RANK", "PENSTOCK_WORLD_SIZE", "PENSTOCK_LOCAL_RANK", "PENSTOCK_LOCAL_WORLD_SIZE")
)
_TORCHRUN: Final = _Source("torchrun", ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
# A batch script of Slurm has SLURM_PROCID, too, though nothing started it as a rank; a step has SLURM_STEP_ID.
_OTHERS: Final = (
    _Source("MPICH", ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")),
    _Source(
        "Open MPI",
        (
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_LOCAL_SIZE",
        ),
    ),
    _Source("Slurm", ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"), "SLURM_STEP_ID"),
)
_RUN_ID: Final = "TORCHELASTIC_RUN_ID"
_SLURM_TASKS: Final = "SLURM_STEP_TASKS_PER_NODE"
_TASKS: Final = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")
LAUNCHER_VARIABLES: Final = frozenset(name for source in (_OWN, _TORCHRUN, *_OTHERS) for name in source.names) | {
    _RUN_ID
}
"""The variables that say a rank; a launcher removes those of the launcher that started it."""


def read_rank_environment(environ: Mapping[str, str] | None = None) -> RankEnvironment | None:
    """Return the rank that the environment gives this process, or None if no launcher started it.

    Launchers may be nested (``srun torchrun ...``): TORCHELASTIC_RUN_ID marks a process of torchrun or ``penstock
    launch``, which set all variables that they know anew.  InvalidArgumentError for a variable that is missing or no
    number, and for two sources that disagree.
    """
    environ = os.environ if environ is None else environ
    nested = environ.get(_RUN_ID) is not None and "RANK" in environ
    sources = (_OWN, _TORCHRUN) if nested else (_OWN, _TORCHRUN, *_OTHERS)
    environments = [
        environment for environment in (_read(source, environ) for source in sources) if environment is not None
    ]
    for other in environments[1:]:
        first = environments[0]
        if (other.rank, other.world) != (first.rank, first.world):
            raise InvalidArgumentError(
                f"{first.source} says rank {first.rank} of {first.world}, but {other.source} says rank "
                f"{other.rank} of {other.world}. Unset the variables of one of them.",
                param=first.source,
            )
    return environments[0] if environments else None


def _read(source: _Source, environ: Mapping[str, str]) -> RankEnvironment | None:
    rank_name, world_name, local_rank_name, local_world_name = source.names
    if source.needs and source.needs not in environ:
        return None
    if rank_name not in environ and world_name not in environ:
        return None
    if source.needs and environ.get(world_name) == "1":
        return None  # an interactive step of Slurm
    for name, other in ((rank_name, world_name), (world_name, rank_name)):
        if name not in environ:
            raise InvalidArgumentError(f"{other} is set, but {name} is not. A launcher sets both.", param=name)
    world = _number(environ, world_name, 1, MAX_WORLD)
    rank = _number(environ, rank_name, 0, world - 1)
    local_world = _number(environ, local_world_name, 1, world) if environ.get(local_world_name, "").isdigit() else world
    if source.needs and 1 <= (tasks := _slurm_tasks(environ)) <= world:
        local_world = tasks
    local_rank = _number(environ, local_rank_name, 0, world - 1) if local_rank_name in environ else rank % local_world
    return RankEnvironment(rank, world, local_rank, max(local_world, local_rank + 1), source.name)


def _slurm_tasks(environ: Mapping[str, str]) -> int:
    """Return the tasks of this step on this machine, or 0 where the variables do not say.

    Of ``2(x3),1`` the nodes 0 to 2 have 2 tasks each, and node 3 has 1.  SLURM_NTASKS_PER_NODE is only set where srun
    was called with it.
    """
    node = environ.get("SLURM_NODEID", "")
    if not (node.isascii() and node.isdigit() and len(node) < 10):
        return 0
    left = int(node)
    for piece in environ.get(_SLURM_TASKS, "").split(","):
        match = _TASKS.fullmatch(piece)
        if match is None:
            return 0
        count = int(match[2] or 1)
        if left < count:
            return int(match[1])
        left -= count
    return 0


def _number(environ: Mapping[str, str], name: str, low: int, high: int) -> int:
    text = environ[name]
    if not (text.isascii() and text.isdigit() and low <= int(text[:9]) <= high and len(text) < 10):
        raise InvalidArgumentError(f"{name}: expected an integer from {low} to {high}, got {show(text)}", param=name)
    return int(text)


def variables_of(place: RankEnvironment, node_rank: int, num_nodes: int, run_id: str) -> dict[str, str]:
    """Return torchrun's variables for a rank, apart from MASTER_ADDR and MASTER_PORT."""
    return {
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.world),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.local_world),
        "GROUP_RANK": str(node_rank),
        "GROUP_WORLD_SIZE": str(num_nodes),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(place.rank),
        "ROLE_WORLD_SIZE": str(place.world),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        _RUN_ID: run_id,
    }
