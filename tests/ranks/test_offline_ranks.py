"""Distributed offline inference: penstock.lite in a process per rank, under each launcher and by hand."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from penstock import lite
from penstock.core.comm import JoinedComm
from penstock.core.library import library
from penstock.core.rank_layout import RankLayout
from penstock.errors import InvalidArgumentError, PenstockError, UnavailableError, UnsupportedError
from penstock.launch.environment import read_rank_environment
from penstock.lite.open_model import OpenModel
from tests.support.builds import run, tool
from tests.support.command import DEMO
from tests.support.errors import raises
from tests.support.marks import mostly_long
from tests.support.ports import free_port
from tests.support.rank_processes import left_in_shared_memory
from tests.support.rank_programs import (
    EXAMPLE,
    PREDICT,
    SHARED_FILES,
    ends_of,
    expected_lines,
    pattern,
    run_ranks,
    start_by_hand,
)
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]
LAUNCHERS = ("penstock launch", "mpiexec", "mpirun.openmpi")


def without_waits(text: str) -> str:
    """The lines of ranks but for those that say that one waits for another, which depends on the load."""
    return "".join(line for line in text.splitlines(keepends=True) if " waits for " not in line)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_example_in_python(launcher: str, demo_ranks: Path) -> None:
    before = set(os.listdir(SHARED_FILES))
    done = run_ranks(launcher, 2, sys.executable, EXAMPLE / "main.py", "--model_path", pattern(demo_ranks))
    assert (done.returncode, without_waits(done.stderr)) == (0, "")
    assert sorted(done.stdout.splitlines()) == sorted(expected_lines() * 2)
    assert not left_in_shared_memory(before)


@pytest.fixture(scope="module")
def example_in_c(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("c")
    for name in ("libpenstock.so", "libpenstock.so.3"):  # the one in a wheel has no version in its name
        shutil.copy(library()._name, folder / name)
    flags = ["-std=c99", "-Wall", "-Wextra", "-Wno-missing-field-initializers", "-Werror"]
    linked = ["-I", ROOT / "core" / "include", folder / "libpenstock.so.3", f"-Wl,-rpath,{folder}"]
    run(tool("cc"), *flags, EXAMPLE / "main.c", *linked, "-o", folder / "main")
    return folder / "main"


def check_c_lines(lines: list[str]) -> None:
    """Check what two ranks of the C example print; C and Python write the same numbers with other digits."""
    names, values = expected_lines()
    assert [line for line in lines if line.startswith("tensor")] == [names, names]
    expected = np.array(values.split()[3:], np.float32)
    for line in (line for line in lines if line.startswith("output")):
        assert np.array_equal(np.array(line.split()[3:], np.float32), expected)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_example_in_c(launcher: str, example_in_c: Path, demo_ranks: Path) -> None:
    done = run_ranks(launcher, 2, example_in_c, pattern(demo_ranks))
    assert (done.returncode, done.stderr) == (0, "")
    check_c_lines(done.stdout.splitlines())


@pytest.mark.parametrize("layout", [RankLayout(pp=2), RankLayout(tp=2, pp=2)], ids=str)
def test_the_example_in_c_refuses_stages(
    layout: RankLayout, example_in_c: Path, parts_of: Callable[[Path, RankLayout], list[Path]]
) -> None:
    source = parts_of(DEMO, layout)[0].with_name("{rank}.psm")
    variables = "RANK={rank}", f"WORLD_SIZE={layout.world}"
    processes = start_by_hand(layout.world, "env", *variables, example_in_c, source)
    for rank, (status, err) in enumerate(ends_of(processes)):
        field = "pipeline_parallel_size: expected 1 without links"
        assert status == 1
        assert re.fullmatch(rf"open: {field}, \w+ rank {rank} of a pipeline of {layout.world} ranks\n", err)


def test_the_example_in_c_divides_contexts(
    example_in_c: Path, parts_of: Callable[[Path, RankLayout], list[Path]]
) -> None:
    source = parts_of(DEMO, RankLayout(cp=2))[0].with_name("{rank}.psm")
    done = run_ranks("penstock launch", 2, example_in_c, source)
    assert (done.returncode, done.stderr) == (0, "")
    check_c_lines(done.stdout.splitlines())


def predict(folder: Path, source: str, options: str, world: int = 2, launcher: str = "penstock launch") -> list[bytes]:
    """The outputs of each rank, as bytes."""
    folder.mkdir()
    if world == 1:
        run(sys.executable, "-c", PREDICT, source, folder / "0.npz", options)
    else:
        done = run_ranks(launcher, world, sys.executable, "-c", PREDICT, source, folder / "{rank}.npz", options)
        assert done.returncode == 0, done.stderr
    outputs = []
    for rank in range(world):
        with np.load(folder / f"{rank}.npz") as arrays:
            outputs.append(b"".join(arrays[name].tobytes() for name in sorted(arrays.files)))
    return outputs


@pytest.mark.parametrize("world", mostly_long([2, 3], 2))
@pytest.mark.parametrize(
    ("scheme", "options"),
    [
        ("w8a8", "{'batch_size': 2, 'context_len': 90}"),
        ("f32", "{'batch_size': 2, 'context_len': 90, 'logits': 'all', 'max_tokens': 16}"),
        ("bf16", "{'batch_size': 2, 'context_len': 90, 'kv_cache': 'int8'}"),
    ],
)
def test_every_rank_has_the_bits_of_one_process(
    world: int,
    scheme: str,
    options: str,
    bundle_of: Callable[[str, str], Path],
    parts_of: Callable[[Path, int], list[Path]],
    tmp_path: Path,
) -> None:
    whole = bundle_of("llama", scheme)
    parts = parts_of(whole, world)
    (expected,) = predict(tmp_path / "one", str(whole), options, 1)
    source = str(parts[0].with_name("{rank}.psm"))
    assert predict(tmp_path / "ranks", source, options, world) == [expected] * world


def build(folder: Path, rank: int, **config: object) -> lite.Model:
    model = lite.Model()
    context = lite.Context(rank_id=rank, thread_num=1)
    model.build_from_file(
        folder / f"rank_{rank}.psm", lite.ModelType.PENSTOCK, context, {"join_timeout_s": 30, **config}
    )
    return model


def in_threads(work: Callable[[int], object], world: int = 2) -> list[object]:
    """The result, or the error, of each rank."""
    results: list[object] = [None] * world

    def call(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except PenstockError as error:
            results[rank] = error

    threads = [threading.Thread(target=call, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def messages(results: list[object]) -> str:
    assert all(isinstance(result, PenstockError) for result in results), results
    return " / ".join(map(str, results))


@pytest.fixture
def meeting(monkeypatch: pytest.MonkeyPatch) -> None:
    """An address of this test's own, for ranks that are threads."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))


@pytest.mark.usefixtures("meeting")
def test_ranks_with_other_inputs_name_what_differs(demo_ranks: Path) -> None:
    def work(rank: int) -> None:
        with build(demo_ranks, rank) as model:
            inputs = model.get_inputs()
            inputs[0].set_data_from_numpy(np.array([[5 + rank]], np.int32))
            model.predict(inputs)

    text = messages(in_threads(work))
    assert re.search(r"batch: expected equal batches on all ranks, \w+ other token_ids on rank 1 than on rank 0", text)


@pytest.mark.usefixtures("meeting")
@pytest.mark.parametrize(
    ("config", "named"),
    [({"kv_cache": "f32"}, "kv_cache"), ({"context_len": 64}, "context_len"), ({"logits": "all"}, "logits")],
)
def test_ranks_with_other_settings_name_what_differs(config: dict[str, object], named: str, demo_ranks: Path) -> None:
    text = messages(in_threads(lambda rank: build(demo_ranks, rank, **(config if rank else {}))))
    assert f"{named}: expected equal values on all ranks, " in text or "part_bytes" in text


@pytest.mark.long
@pytest.mark.usefixtures("meeting")
def test_bundles_of_other_weights_do_not_meet(
    demo_ranks: Path, tmp_path: Path, parts_of: Callable[[Path, int], list[Path]]
) -> None:
    other = tmp_path / "other"
    shutil.copytree(demo_ranks, other)
    changed = tmp_path / "changed.psm"
    run(sys.executable, "-m", "penstock", "export", ROOT / "demo" / "model", changed, "--scheme", "w4a8", "--yes")
    shutil.copy(parts_of(changed, 2)[1], other / "rank_1.psm")
    text = messages(in_threads(lambda rank: build(other if rank else demo_ranks, rank)))
    assert re.search(r"bundle: expected equal values on all ranks, \w+ \w+ on rank [01] and \w+ on rank [01]", text)


def test_the_rank_must_be_that_of_the_bundle(demo_ranks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(expected: str, path: Path = demo_ranks / "rank_1.psm", **options: object) -> None:
        with pytest.raises(InvalidArgumentError, match=expected):
            lite.Model().build_from_file(path, lite.ModelType.PENSTOCK, lite.Context(**options))

    refused("rank_id: .*bundle of rank 1 of 2; start each rank with penstock launch, or set rank_id")
    refused("rank_id: .*expected the bundle of rank 0, got that of rank 1", rank_id=0)
    refused("rank_id: .*expected 0, because this is a whole bundle, got 1", DEMO, rank_id=1)
    refused("device_id: expected -1 to 1, one per process of this host, got 2", rank_id=1, device_id=2)
    refused("device_id: expected no thread affinity", rank_id=1, device_id=1, thread_affinity_mode=1)
    refused("rank_id: expected an integer from 0 to 63", rank_id=64)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    refused("group_size: .*: expected 2 processes, the ranks that the bundle was cut for, got 3, as the launcher says")
    refused("rank_id: expected 1, as the launcher of this process says, got 0", rank_id=0)
    with lite.Model() as model:  # each process of a launcher may have a whole bundle
        model.build_from_file(DEMO, lite.ModelType.PENSTOCK, lite.Context(device_id=1))
    assert (lite.Context().cpu.rank_id, lite.Context().cpu.group_size) == (1, 3)
    context = lite.Context()
    context.cpu.provider = ""
    with raises(UnsupportedError, param="provider"):
        context.cpu.provider = "ge"


@pytest.mark.parametrize(
    ("layout", "field"),
    [(RankLayout(pp=2), "pipeline_parallel_size"), (RankLayout(cp=2), "context_parallel_size")],
)
def test_bundles_of_stages_and_contexts_are_refused(
    layout: RankLayout, field: str, parts_of: Callable[[Path, RankLayout], list[Path]]
) -> None:
    for rank, part in enumerate(parts_of(DEMO, layout)):
        with pytest.raises(UnsupportedError, match=f"^{field}: .*: expected 1, .* --tp only, got 2;") as caught:
            lite.Model().build_from_file(
                part, lite.ModelType.PENSTOCK, lite.Context(rank_id=rank), {"join_timeout_s": 1}
            )
        assert caught.value.param == field


@pytest.mark.usefixtures("meeting")
def test_what_a_rank_cannot_do(demo_ranks: Path) -> None:
    def work(rank: int) -> list[str]:
        refusals = []
        with build(demo_ranks, rank) as model:
            for call in (
                lambda: model.update_weights([lite.Tensor(np.ones(256, np.float32), name="model.norm.weight")]),
                lambda: model.resize(model.get_inputs(), [[2, 1], [2], [2]]),
            ):
                with pytest.raises(UnsupportedError) as refusal:
                    call()
                refusals.append(str(refusal.value))
        context, runner = lite.Context(rank_id=rank, thread_num=1), lite.ModelParallelRunner()
        with pytest.raises(UnsupportedError) as refusal:
            runner.build_from_file(demo_ranks / f"rank_{rank}.psm", lite.ModelType.PENSTOCK, context)
        return [*refusals, str(refusal.value)]

    for update, resize, runner in in_threads(work):
        assert update.startswith("update_weights: expected a whole bundle")
        assert resize.startswith("dims: expected at most 1 sequences")
        assert runner.endswith("got that of a rank; use a Model")


@pytest.mark.usefixtures("meeting")
def test_models_of_one_rank_share_weights(demo_ranks: Path, tmp_path: Path) -> None:
    shutil.copytree(demo_ranks, tmp_path / "copy")

    def work(rank: int) -> tuple[int, int, bytes, bytes]:
        group = lite.ModelGroup()
        with build(demo_ranks, rank) as first, build(tmp_path / "copy", rank) as second:
            group.add_model([first, second])
            outputs = [model.predict(model.get_inputs())[0].get_data_to_numpy().tobytes() for model in (second, first)]
            return group.shared_bytes, second.get_model_info("weight_bytes"), *outputs

    for shared, weight_bytes, second, first in in_threads(work):
        assert 0.9 * weight_bytes < shared <= weight_bytes
        assert first == second


WAIT = """
import os, sys, time
from penstock import lite
rank, folder, what = int(sys.argv[1]), sys.argv[2], sys.argv[3]
context = lite.Context(rank_id=rank, thread_num=1)
model = lite.Model()
model.build_from_file(f"{folder}/rank_{rank}.psm", lite.ModelType.PENSTOCK, context)
model.predict(model.get_inputs())
print("ready", flush=True)
if rank == 1 and what == "raise":
    raise ValueError("a fault of the program")
if rank == 1 and what == "close":
    model.close()
if rank == 1 and what in ("kill", "close"):
    time.sleep(600)
while True:
    model.predict(model.get_inputs())
"""


@pytest.mark.parametrize("what", ["kill", "kill in a step", "raise", "close", "kill rank 0"])
def test_a_rank_that_ends_ends_the_others(what: str, demo_ranks: Path) -> None:
    command = [sys.executable, "-c", WAIT, "{rank}", demo_ranks, what]
    processes = start_by_hand(2, *command)
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", process.communicate()
    ended = 0 if what == "kill rank 0" else 1
    if what.startswith("kill"):
        processes[ended].send_signal(signal.SIGKILL)
    if what == "close":
        ((status, err),) = ends_of(processes[:1])
        processes[1].kill()
        processes[1].communicate()
    else:
        status, err = ends_of(processes)[1 - ended]
    assert status == 1
    assert f"UnavailableError: ranks: the group was ended: rank {ended} ended" in err


def test_a_stopped_rank_ends_the_others(demo_ranks: Path) -> None:
    """Rank 0 notices that rank 1 is stopped.  Rank 1 waits for the next input of rank 0 as long as that may take."""
    processes = start_by_hand(2, sys.executable, "-c", WAIT, "{rank}", demo_ranks, "stop")
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", process.communicate()
    processes[1].send_signal(signal.SIGSTOP)
    time.sleep(0.2)
    processes[1].send_signal(signal.SIGCONT)  # a short pause is no loss
    time.sleep(1.0)
    assert [process.poll() for process in processes] == [None, None]
    processes[1].send_signal(signal.SIGSTOP)
    ((status, err),) = ends_of([processes[0]])
    assert status == 1
    assert "UnavailableError: ranks: the group was ended: rank 1 is stopped by a signal" in err
    processes[1].send_signal(signal.SIGCONT)
    ((status, err),) = ends_of([processes[1]])
    assert status == 1


def test_ranks_wait_for_each_other_no_longer_than_asked(demo_ranks: Path, meeting: None) -> None:
    with raises(UnavailableError, param="ranks", match="1 of 2 ranks came within 1000 ms"):
        build(demo_ranks, 0, join_timeout_s=1)
    with raises(UnavailableError, param="ranks", match="rank 0 did not come within 1000 ms"):
        build(demo_ranks, 1, join_timeout_s=1)


def test_ranks_wait_for_a_slow_one_no_longer_than_asked(
    demo_ranks: Path, meeting: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have come, and one of them then takes too long to open its part."""
    agree, abort, is_ended = OpenModel.agree, OpenModel.abort, threading.Event()

    def agree_late(opened: OpenModel) -> None:
        if opened.rank.rank == 1:
            is_ended.wait(300)
        opened.config = replace(opened.config, join_timeout_s=1)  # from here on
        agree(opened)

    def noted_abort(opened: OpenModel, reason: str) -> None:
        abort(opened, reason)
        is_ended.set()

    monkeypatch.setattr(OpenModel, "agree", agree_late)
    monkeypatch.setattr(OpenModel, "abort", noted_abort)
    for error in in_threads(lambda rank: build(demo_ranks, rank, rank_timeout_s=1)):
        assert isinstance(error, UnavailableError)
        assert "rank 0: the other ranks did not open within 1 s" in str(error)


@pytest.mark.usefixtures("meeting")
@pytest.mark.parametrize(
    ("changes", "join_timeout_s", "expected"),
    [
        ({"world": 3}, 1.0, "world: rank 0 has 2, rank 1 has 3"),
        ({"part_bytes": 8192}, 20.0, "part_bytes: rank 0 has 4096, rank 1 has 8192"),
    ],
)
def test_ranks_that_do_not_fit_are_named(changes: dict[str, int], join_timeout_s: float, expected: str) -> None:
    def work(rank: int) -> JoinedComm:
        options = {"rank": rank, "world": 2, "part_bytes": 4096, "join_timeout_s": join_timeout_s}
        return JoinedComm(**{**options, **(changes if rank else {})})

    results = in_threads(work)
    assert messages(results).count(expected) == 2


@pytest.mark.usefixtures("meeting")
def test_ranks_of_another_group_do_not_end_a_meeting() -> None:
    ranks = ((0, 3), (1, 3), (1, 3), (1, 2))  # the second rank 1 that comes is the one too many
    refused = threading.Semaphore(0)

    def work(number: int) -> JoinedComm:
        if number == len(ranks):  # the last rank comes when the others have been answered
            for _ in range(2):
                assert refused.acquire(timeout=300.0)
            return JoinedComm(2, 3, 4096, join_timeout_s=300.0)
        try:
            return JoinedComm(*ranks[number], 4096, join_timeout_s=300.0)
        except PenstockError:
            refused.release()
            raise

    results = in_threads(work, len(ranks) + 1)
    joined = [result for result in results if isinstance(result, JoinedComm)]
    assert len(joined) == 3, results
    text = messages([result for result in results if not isinstance(result, JoinedComm)])
    assert "world: rank 0 has 3, rank 1 has 2" in text
    assert re.search(r"rank: expected each of 0 to 2 once, \w+ a second 1", text)
    for comm in joined:
        comm.close()


@pytest.mark.usefixtures("meeting")
def test_a_second_group_does_not_take_the_place_of_the_first() -> None:
    results = in_threads(lambda rank: JoinedComm(0, 2, 4096, join_timeout_s=1.0))
    assert f"taken by another group (process {os.getpid()}): expected another MASTER_PORT" in messages(results)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
@pytest.mark.usefixtures("meeting")
def test_another_user_at_the_meeting_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    key = 0xCBF29CE484222325  # FNV-1a, as rendezvous.cpp names a meeting
    for byte in f"master {os.environ['MASTER_ADDR']} {os.environ['MASTER_PORT']}  ".encode():
        key = (key ^ byte) * 0x100000001B3 % 2**64
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0penstock-ranks-0-{key:016x}")
        os.seteuid(65534)
        try:
            listener.listen()  # the kernel tells the user of this call
        finally:
            os.seteuid(0)
        with raises(
            PenstockError, param="ranks", match=rf"taken by process {os.getpid()} of user 65534: expected another"
        ):
            JoinedComm(0, 2, 4096, join_timeout_s=1.0)
        with raises(PenstockError, param="ranks", match="another user's process listens where rank 0 should"):
            JoinedComm(1, 2, 4096, join_timeout_s=1.0)


@pytest.mark.usefixtures("meeting")
def test_groups_follow_each_other() -> None:
    def work(rank: int) -> int:
        for round_ in range(50):
            comm = JoinedComm(rank, 3, 4096, join_timeout_s=60.0, oversubscribed=True)
            comm.struct.barrier(comm.struct.self, round_)
            comm.close()
        return len(os.listdir("/proc/self/fd"))

    before = len(os.listdir("/proc/self/fd"))
    assert in_threads(work, 3)[0] <= before + 9
    assert len(os.listdir("/proc/self/fd")) <= before


def abstract_names() -> list[str]:
    lines = Path("/proc/net/unix").read_text().splitlines()
    return [line.rpartition("@")[2] for line in lines if "@penstock-ranks-" in line]


@pytest.mark.usefixtures("meeting")
def test_a_stranger_at_the_meeting_changes_nothing() -> None:
    before = set(abstract_names())
    results: list[object] = []
    first = threading.Thread(target=lambda: results.append(JoinedComm(0, 2, 4096, join_timeout_s=60.0)))
    first.start()
    until(lambda: set(abstract_names()) - before, "a name of the meeting")
    (name,) = set(abstract_names()) - before
    with ExitStack() as opened:
        for data in (b"", b"GET / HTTP/1.1", b"psranks1" + bytes(200), bytes(48)):
            stranger = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            stranger.connect("\0" + name)
            if data:
                stranger.send(data)
        other = JoinedComm(1, 2, 4096, join_timeout_s=60.0)
        first.join()
        assert isinstance(results[0], JoinedComm)
        for comm in (other, results[0]):
            comm.close()


class Place(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint32) for name in ("struct_size", "rank", "world", "local_rank", "local_world")]


ENVIRONMENTS = [
    {},
    {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
    {"RANK": "3", "WORLD_SIZE": "4"},
    {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
    {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"},
    {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"},
    {"SLURM_PROCID": "2", "SLURM_NTASKS": "8", "SLURM_STEP_ID": "0", "SLURM_NTASKS_PER_NODE": "2(x4)"},
    *(
        {"SLURM_PROCID": "4", "SLURM_NTASKS": "5", "SLURM_LOCALID": "0", "SLURM_STEP_ID": "0", "SLURM_NODEID": node}
        | {"SLURM_STEP_TASKS_PER_NODE": tasks}
        for node, tasks in (("1", "3,1"), ("2", "2(x2),4"), ("3", "2(x2),4"), ("0", "2(x"), ("0", "6"), ("x", "2"))
    ),
    {"RANK": "0", "WORLD_SIZE": "2", "PMI_RANK": "1", "PMI_SIZE": "2"},
    {"RANK": "0", "WORLD_SIZE": "2", "PMI_RANK": "1", "PMI_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"},
    {"PENSTOCK_RANK": "1", "PENSTOCK_WORLD_SIZE": "2", "RANK": "1", "WORLD_SIZE": "2"},
    {"RANK": "2", "WORLD_SIZE": "2"},
    {"RANK": "-1", "WORLD_SIZE": "2"},
    {"RANK": "1x", "WORLD_SIZE": "2"},
    {"RANK": "1"},
    {"PMI_SIZE": "2"},
]


@pytest.mark.parametrize("environ", ENVIRONMENTS, ids=lambda environ: " ".join(environ) or "none")
def test_the_core_reads_launchers_variables_as_the_package_does(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for names in ENVIRONMENTS:
        for name in names:
            monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    try:
        place = read_rank_environment()
        expected = None if place is None else (place.rank, place.world, place.local_rank, place.local_world)
    except InvalidArgumentError:
        expected = None
    found = Place(struct_size=ctypes.sizeof(Place))
    function = ctypes.CDLL(library()._name).ps_rank_from_environment
    status = function(ctypes.byref(found))
    assert (None if status else (found.rank, found.world, found.local_rank, found.local_world)) == expected


def test_open_mpi_only_starts_ranks(demo_ranks: Path, tmp_path: Path) -> None:
    (tmp_path / "mpi.ini").write_text("[model]\ntransport = mpi\ntrusted_network = true\n")
    words = [EXAMPLE / "main.py", "--model_path", pattern(demo_ranks), "--config_file", tmp_path / "mpi.ini"]
    done = run_ranks("mpirun.openmpi", 2, sys.executable, *words)
    assert done.returncode != 0
    assert "transport: expected 'shared' under Open MPI, which only starts the ranks" in done.stderr


@pytest.mark.long
def test_the_example_under_torchrun(demo_ranks: Path) -> None:
    command = [tool("torchrun"), "--standalone", "--nproc-per-node", "2", "--no-python", sys.executable]
    words = [*command, EXAMPLE / "main.py", "--model_path", pattern(demo_ranks), "--device_id", "0"]
    out = run(*words)
    assert [out.count(line) for line in expected_lines()] == [2, 2]
