"""The rank of a process, from the variables of each launcher."""

from __future__ import annotations

import pytest

from penstock.errors import InvalidArgumentError
from penstock.launch.environment import RankEnvironment, read_rank_environment
from tests.support.errors import raises

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_STEP_ID": "0",
}


@pytest.mark.parametrize(
    ("environ", "source"),
    [
        (TORCHRUN, "torchrun"),
        (MPICH, "MPICH"),
        (OPEN_MPI, "Open MPI"),
        (SLURM, "Slurm"),
        (MPICH | TORCHRUN, "torchrun"),
    ],
)
def test_each_launcher_is_read(environ, source):
    assert read_rank_environment(environ) == RankEnvironment(3, 4, 1, 2, source)


@pytest.mark.parametrize(
    ("node", "tasks", "local_world"),
    [
        ("0", "2(x2)", 2),
        ("1", "3,1", 1),
        ("2", "2(x2),4", 4),
        ("3", "2(x2),4", 5),
        ("0", "2(x", 5),
        ("0", "6", 5),
        ("x", "2", 5),
    ],
)
def test_slurm_says_the_tasks_of_each_node(node: str, tasks: str, local_world: int) -> None:
    """Without --ntasks-per-node, which srun needs not be called with."""
    environ = {"SLURM_PROCID": "4", "SLURM_NTASKS": "5", "SLURM_LOCALID": "0", "SLURM_STEP_ID": "0"}
    environ |= {"SLURM_NODEID": node, "SLURM_STEP_TASKS_PER_NODE": tasks}
    assert read_rank_environment(environ) == RankEnvironment(4, 5, 0, local_world, "Slurm")


def test_no_launcher_is_no_rank():
    assert read_rank_environment({"HOME": "/"}) is None
    assert read_rank_environment({**SLURM, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}) is None
    batch = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"}
    assert read_rank_environment(batch) is None


def test_local_ranks_may_be_missing():
    assert read_rank_environment({"PMI_RANK": "1", "PMI_SIZE": "2"}) == RankEnvironment(1, 2, 1, 2, "MPICH")


def test_sources_that_disagree_are_both_named():
    with raises(InvalidArgumentError, param="torchrun", match=r"torchrun .* 3 of 4, .*MPICH .* 0 of 4"):
        read_rank_environment(TORCHRUN | MPICH | {"PMI_RANK": "0"})
    with raises(InvalidArgumentError, param="PENSTOCK_RANK", match=r"PENSTOCK_RANK .* 0 of 2, .*torchrun"):
        read_rank_environment(TORCHRUN | {"PENSTOCK_RANK": "0", "PENSTOCK_WORLD_SIZE": "2"})


def test_inner_launcher_hides_the_outer_one():
    outer = SLURM | {"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}
    assert read_rank_environment(outer | TORCHRUN | {"TORCHELASTIC_RUN_ID": "x"}) == RankEnvironment(
        3, 4, 1, 2, "torchrun"
    )


@pytest.mark.parametrize(
    ("changed", "param"),
    [
        ({"RANK": "4"}, "RANK"),
        ({"RANK": "-1"}, "RANK"),
        ({"RANK": "x"}, "RANK"),
        ({"RANK": "\u0663"}, "RANK"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "9" * 50}, "WORLD_SIZE"),
        ({"LOCAL_RANK": "1.0"}, "LOCAL_RANK"),
    ],
)
def test_bad_values_name_the_variable(changed, param):
    with pytest.raises(InvalidArgumentError) as caught:
        read_rank_environment(TORCHRUN | changed)
    assert caught.value.param == param
    assert str(caught.value).startswith(param)


def test_half_a_pair_names_what_is_missing():
    with raises(InvalidArgumentError, param="WORLD_SIZE") as caught:
        read_rank_environment({"RANK": "0"})
    assert caught.value.param == "WORLD_SIZE"
