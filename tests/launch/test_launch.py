"""``penstock launch``: ranks of one machine and of several, and what is left when one of them ends."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import AsyncMock, patch

import pytest

from penstock.cli.scale.launch import add_parser
from penstock.cli.scale.launch import run as run_launch
from penstock.errors import PenstockError, UnavailableError
from penstock.launch import rendezvous
from penstock.launch.rendezvous import Rendezvous, host, join
from tests.support.errors import raises
from tests.support.http_service import until
from tests.support.marks import mostly_long
from tests.support.ports import free_port
from tests.support.waiting import eventually
from tests.support.worker_processes import num_files

BASE = [sys.executable, "-m", "penstock", "launch"]


def launch(*arguments: str, script: str, **options) -> subprocess.Popen[str]:
    command = [*BASE, *arguments, "--", sys.executable, "-c", script]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def pids_in(folder: Path, count: int) -> list[int]:
    """The process ids that ranks have written; a rank writes its file in one step."""
    until(lambda: len(list(folder.glob("*.pid"))) == count, "the ranks")
    return [int(one.stem) for one in folder.glob("*.pid")]


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


WRITE_PID = """
import os, pathlib, sys, time
folder = pathlib.Path(os.environ["FOLDER"])
(folder / f"{os.getpid()}.pid").touch()
def wait_for(count):
    while len(list(folder.glob("*.pid"))) < count:
        time.sleep(0.01)
"""
SLEEP = WRITE_PID + "time.sleep(600)"


def test_msruns_options_start_the_same_ranks(tmp_path):
    script = "import os; print(os.environ['RANK'], os.environ['WORLD_SIZE'])"
    options = ["--worker_num=2", "--local_worker_num=2", "--master_addr=127.0.0.1", "--join=True"]
    options += ["--bind_core=False", "--tail_worker_log=-1", "--sim_level=-1", "--sim_rank_id=-1", "--rank_table_file="]
    child = launch(*options, f"--log_dir={tmp_path / 'logs'}", script=script)
    out, err = child.communicate()
    assert (child.returncode, sorted(out.splitlines())) == (0, ["[0] 0 2", "[1] 1 2"]), err
    logs = {path.name: path.read_text() for path in (tmp_path / "logs").iterdir()}
    assert logs == {"worker_0.log": "0 2\n", "worker_1.log": "1 2\n"}


def test_a_script_runs_as_by_msrun(tmp_path, penstock_inline):
    script = tmp_path / "predict.py"
    script.write_text("import os, sys; print(os.environ['RANK'], *sys.argv[1:])")
    options = ["--worker_num=2", "--local_worker_num", "2"]
    done = penstock_inline("launch", *options, str(script), "--config", "a.yaml", "--nproc", "x")
    assert sorted(done.stdout.splitlines()) == ["[0] 0 --config a.yaml --nproc x", "[1] 1 --config a.yaml --nproc x"]
    assert "unknown option --restarts. Put --" in penstock_inline("launch", "--restarts=2", str(script)).stderr


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (["--join=False"], "join"),
        (["--bind_core=True"], "bind_core"),
        (["--sim_level=0"], "sim_level"),
        (["--sim_rank_id=0"], "sim_rank_id"),
        (["--rank_table_file=hccl.json"], "rank_table_file"),
        (["--worker_log_name=my_{rank_id}"], "worker_log_name"),
        (["--tail_worker_log=0"], "tail_worker_log"),
        (["--worker_num=1", "--cluster_time_out=60"], "timeout"),
        (["--worker_num=3", "--local_worker_num=2"], "worker_num"),
        (["--master_addr=10.0.0.1"], "master_addr"),
        (["--worker_num=4", "--local_worker_num=2", "--master_addr=10.0.0.1", "--node_rank=0"], "rdzv"),
    ],
)
def test_msruns_options_are_checked_by_name(options, name):
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    with raises(PenstockError, param=name):
        run_launch(parser.parse_args(["launch", *options, "--", "true"]))


def test_ranks_have_torchruns_variables():
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK ROLE_WORLD_SIZE"
    script = f"import os; print(*[os.environ[n] for n in '{names}'.split()], os.environ['MASTER_ADDR'])"
    outer = {"PMI_RANK": "5", "PMI_SIZE": "9"}  # of the launcher around this one
    child = launch("--nproc", "2", script=script, env=os.environ | outer)
    out, err = child.communicate()
    assert (child.returncode, err) == (0, "")
    lines = sorted(out.splitlines())
    assert lines == ["[0] 0 2 0 2 0 1 0 2 127.0.0.1", "[1] 1 2 1 2 0 1 1 2 127.0.0.1"]


def test_lines_of_ranks_stay_whole():
    script = (
        "import sys\nfor i in range(2000):\n sys.stdout.write(f'{i} ' * 20 + '\\n')\n sys.stderr.write('e\\n')\n"
        "sys.stdout.write('end')"
    )
    child = launch("--nproc", "2", script=script)
    out, err = child.communicate()
    assert child.returncode == 0
    expected = [f"{i} " * 20 for i in range(2000)] + ["end"]
    for rank in ("[0] ", "[1] "):
        assert [line[4:] for line in out.splitlines() if line.startswith(rank)] == expected
    assert err.count("] e\n") == 4000


@pytest.mark.parametrize(
    ("failure", "status", "words"),
    [
        ("sys.exit(7)", 7, "rank 1 exited with status 7"),
        ("raise RuntimeError('no')", 1, "rank 1 exited with status 1"),
        ("os.kill(os.getpid(), 9)", 137, "rank 1 was killed by SIGKILL"),
    ],
)
def test_one_rank_that_fails_ends_all(tmp_path, failure, status, words):
    script = WRITE_PID + f"wait_for(3)\nif os.environ['RANK'] == '1': {failure}\ntime.sleep(600)"
    child = launch("--nproc", "3", script=script, env=os.environ | {"FOLDER": str(tmp_path)})
    pids = pids_in(tmp_path, 3)
    _, err = child.communicate(timeout=300)
    assert child.returncode == status
    assert err.count(words) == 1
    assert all(map(is_gone, pids))


def test_stopped_and_deaf_ranks_are_ended(tmp_path):
    """SIGTERM does not end a rank that ignores it or is stopped, nor a process that left the rank's session."""
    stray = f"subprocess.Popen([sys.executable, '-c', {SLEEP!r}], start_new_session=True)"
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    script = f"import signal, subprocess\n{deaf}\n{WRITE_PID}\n{stray}\ntime.sleep(600)"
    child = launch("--nproc", "2", script=script, env=os.environ | {"FOLDER": str(tmp_path)})
    pids = pids_in(tmp_path, 4)
    os.kill(min(pids), signal.SIGSTOP)
    os.kill(child.pid, signal.SIGTERM)
    child.communicate(timeout=300)
    assert child.returncode == 128 + signal.SIGTERM
    assert all(map(is_gone, pids))


def test_ranks_end_with_a_killed_launcher(tmp_path):
    child = launch("--nproc", "2", script=SLEEP, env=os.environ | {"FOLDER": str(tmp_path)})
    pids = pids_in(tmp_path, 2)
    child.kill()
    until(lambda: all(map(is_gone, pids)), "the end of the ranks")
    child.communicate()


def test_shared_memory_of_killed_ranks_is_removed(tmp_path):
    name = f"/dev/shm/penstock-test-{os.getpid()}"  # noqa: S108
    script = (
        f"import mmap, os, time\nf = open({name!r}, 'a+b'); f.truncate(4096); m = mmap.mmap(f.fileno(), 4096)\n{SLEEP}"
    )
    child = launch("--nproc", "2", script=script, env=os.environ | {"FOLDER": str(tmp_path)})
    os.kill(pids_in(tmp_path, 2)[0], signal.SIGKILL)
    child.communicate(timeout=300)
    assert not Path(name).exists()


def listens(address: str) -> bool:
    with socket.socket() as found:
        return found.connect_ex(("127.0.0.1", int(address.rpartition(":")[2]))) == 0


def test_two_launchers_make_one_world(tmp_path):
    token = tmp_path / "token"
    token.write_text("a secret of the two machines")
    rdzv = f"127.0.0.1:{free_port()}"
    options = ("--nnodes", "2", "--rdzv", rdzv, "--rdzv-token-file", str(token), "--rdzv-id", "run")
    names = "RANK WORLD_SIZE GROUP_RANK LOCAL_RANK MASTER_PORT"
    script = f"import os; print(*[os.environ[n] for n in '{names}'.split()])"
    children = [
        launch("--nproc", "2", "--node-rank", "0", *options, script=script),
        launch("--nproc", "1", *options, script=script),
    ]
    outs = [child.communicate(timeout=300)[0] for child in children]
    assert [child.returncode for child in children] == [0, 0]
    lines = sorted(line.split("] ")[1].split() for out in outs for line in out.splitlines())
    assert [line[:4] for line in lines] == [["0", "3", "0", "0"], ["1", "3", "0", "1"], ["2", "3", "1", "0"]]
    assert len({line[4] for line in lines}) == 1


def test_failure_ends_the_ranks_of_other_machines(tmp_path):
    rdzv = f"127.0.0.1:{free_port()}"
    script = WRITE_PID + "wait_for(2)\nif os.environ['RANK'] == '1': sys.exit(3)\ntime.sleep(600)"
    env = os.environ | {"FOLDER": str(tmp_path)}
    options = ("--nnodes", "2", "--rdzv", rdzv)
    children = [launch(*options, "--node-rank", str(node), script=script, env=env) for node in range(2)]
    pids = pids_in(tmp_path, 2)
    errs = [child.communicate(timeout=300)[1] for child in children]
    assert [child.returncode for child in children] == [1, 3]
    assert all("rank 1 exited with status 3" in err for err in errs)
    assert all(map(is_gone, pids))


def test_a_killed_launcher_leaves_no_grandchild(tmp_path):
    """Each rank has a child in a session of its own."""
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SLEEP!r}], start_new_session=True)"
    launcher = launch("--nproc", "2", script=child, env=os.environ | {"FOLDER": str(tmp_path)})
    pids = pids_in(tmp_path, 2)
    launcher.kill()
    launcher.communicate(timeout=300)
    until(lambda: all(map(is_gone, pids)), "the end of the ranks' children")


@pytest.mark.parametrize(
    ("victim", "number"),
    mostly_long(product((0, 1), (signal.SIGKILL, signal.SIGSTOP)), (0, signal.SIGKILL), (1, signal.SIGSTOP)),
)
def test_lost_machine_ends_the_others(tmp_path, victim, number):
    rdzv = f"127.0.0.1:{free_port()}"
    options, env = ("--nnodes", "2", "--rdzv", rdzv), os.environ | {"FOLDER": str(tmp_path)}
    children = [launch(*options, "--node-rank", str(node), script=SLEEP, env=env) for node in range(2)]
    pids = pids_in(tmp_path, 2)
    os.kill(children[victim].pid, number)
    _, err = children[1 - victim].communicate(timeout=300)
    assert children[1 - victim].returncode == 1
    assert "is lost" in err
    children[victim].kill()
    children[victim].communicate()
    until(lambda: all(map(is_gone, pids)), "the end of the ranks")


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (("--rdzv-id", "other"), "--rdzv-id"),
        (("--nnodes", "3"), "--nnodes"),
        (("--node-rank", "0"), "another machine has --node-rank 0"),
        (("--rdzv-token-file", "{}"), "token"),
    ],
)
def test_machines_that_do_not_fit_are_refused(tmp_path, other, words):
    token = tmp_path / "token"
    token.write_text("another secret, not the empty one")
    rdzv = f"127.0.0.1:{free_port()}"
    options = ("--nnodes", "2", "--rdzv", rdzv, "--timeout", "300")
    host = launch(*options, "--node-rank", "0", script="pass")
    until(lambda: listens(rdzv), "the host")
    guest = launch(*options, "--node-rank", "1", *(one.format(token) for one in other), script="pass")
    _, err = guest.communicate(timeout=300)
    assert guest.returncode in (1, 2)
    assert words in err
    host.terminate()
    host.communicate(timeout=300)
    assert host.returncode == 128 + signal.SIGTERM


def test_silent_host_is_given_up_after_the_timeout():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        rdzv = f"127.0.0.1:{silent.getsockname()[1]}"
        child = launch("--nnodes", "2", "--rdzv", rdzv, "--node-rank", "1", "--timeout", "1", script="pass")
        try:
            _, err = child.communicate(timeout=300)
        finally:
            child.kill()
    assert child.returncode == 1
    assert err == f"penstock: --rdzv: the host at {rdzv} did not answer within 1 s\n"


def until_told(launcher: subprocess.Popen[str], text: str) -> None:
    """Read lines of a launcher until one has this text."""
    lines: list[str] = []
    while text not in "".join(lines[-1:]):
        lines.append(launcher.stderr.readline())
        assert lines[-1], lines


@pytest.mark.parametrize(
    ("victim", "number"),
    mostly_long(
        product((0, 1), (signal.SIGKILL, signal.SIGINT, signal.SIGSTOP)), (0, signal.SIGSTOP), (1, signal.SIGINT)
    ),
)
def test_a_place_is_free_again_before_the_group_is_whole(victim, number):
    """The host and one of its guests end while the third machine is missing; the restarted one takes its place."""
    options = ("--nnodes", "3", "--rdzv", f"127.0.0.1:{free_port()}", "--timeout", "300")

    def start(node: int) -> subprocess.Popen[str]:
        return launch(*options, "--node-rank", str(node), script="import os; print(os.environ['RANK'])")

    children = [start(0)]
    until(lambda: listens(options[3]), "the host")
    children.append(start(1))
    until_told(children[0], "2 of 3 machines have joined; missing: --node-rank 2")
    lost, other = children[victim], children[1 - victim]
    os.kill(lost.pid, number)
    until_told(other, "lost")
    lost.kill()
    lost.communicate(timeout=300)
    children = [other, start(victim), start(2)]
    outs = [child.communicate(timeout=300) for child in children]
    assert [child.returncode for child in children] == [0, 0, 0], outs
    assert sorted(out for out, _ in outs) == ["[0] 0\n", "[1] 1\n", "[2] 2\n"]


@pytest.mark.parametrize("listening", [True, False])
def test_a_rendezvous_port_of_another_program_is_named(listening):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        if listening:
            other.listen()
        rdzv = f"127.0.0.1:{other.getsockname()[1]}"
        child = launch("--nnodes", "2", "--rdzv", rdzv, "--node-rank", "0", "--timeout", "300", script="pass")
        _, err = child.communicate(timeout=300)
    assert child.returncode == 1
    assert err == f"penstock: --rdzv: failed to listen at {rdzv}: another program has the port\n"


def meet(num_nodes: int, numbers: list[int | None], monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The results of the host and of guests with these --node-rank; the time is up when these have come."""
    ahead = [0.0]
    monkeypatch.setattr(rendezvous, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + ahead[-1]))
    monkeypatch.setattr(rendezvous, "_SAY_S", 0.0)

    def tell(text: str) -> None:
        if text.startswith(f"{len(numbers)} of {num_nodes} machines have joined"):
            ahead.append(60.5)  # the guests wait a second longer than the host

    async def run() -> list[object]:
        listener = socket.create_server(("127.0.0.1", 0))
        before = num_files()
        places = [Rendezvous("", b"", num_nodes, 1, number, 1000, 60.0) for number in numbers]
        joining = [join(listener.getsockname(), place) for place in places[1:]]
        results = await asyncio.gather(host(listener, places[0], "127.0.0.1", tell), *joining, return_exceptions=True)
        await eventually(lambda: num_files() < before, "the ends of connections")
        return results

    return asyncio.run(run())


def test_machines_that_do_not_come_are_named(monkeypatch):
    joined = "--nnodes: 2 of 4 machines joined within 60 s; "
    for numbers, words in (([0, 2], "missing: --node-rank 1, 3"), ([0, None], "only these came: 127.0.0.1, 127.0.0.1")):
        found = meet(4, numbers, monkeypatch)
        assert [type(one) for one in found] == [UnavailableError] * 2
        assert [str(one) for one in found] == [joined + words] * 2


def test_machines_that_come_late_are_refused():
    """One of them comes while the last one joins, the other one later."""

    async def run() -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        address, place = listener.getsockname(), Rendezvous("", b"", 2, 1, None, 1000, 60.0)
        guests = [asyncio.ensure_future(join(address, place)) for _ in range(2)]
        _, link = await host(listener, place, "127.0.0.1")
        guests.append(asyncio.ensure_future(join(address, place)))
        outcomes = await asyncio.gather(*guests, return_exceptions=True)
        assert sorted(type(outcome).__name__ for outcome in outcomes) == ["InvalidArgumentError"] * 2 + ["tuple"]
        (guest,) = [outcome[1] for outcome in outcomes if isinstance(outcome, tuple)]
        assert await asyncio.gather(link.finish(), guest.finish()) == ["", ""]

    asyncio.run(run())


def test_a_port_connected_to_itself_is_no_host():
    """TCP connects a free port of this machine to itself if the kernel chooses it as the source."""

    async def run() -> None:
        with socket.socket() as own:
            own.bind(("127.0.0.1", 0))
            own.connect(own.getsockname())
            opened = await asyncio.open_connection(sock=own)
            with patch.object(asyncio, "open_connection", AsyncMock(return_value=opened)):
                await join(own.getsockname(), Rendezvous("", b"", 2, 1, 1, 1000, 0.1))

    with raises(UnavailableError, param="rdzv"):
        asyncio.run(run())


def test_host_that_drops_packets_is_given_up_in_time():
    """A queue of connections that is full drops the next ones, as a firewall does."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        held = [socket.socket() for _ in range(4)]
        for one in held:
            one.setblocking(False)
            one.connect_ex(full.getsockname())
        with raises(UnavailableError, param="rdzv", match=r"^--rdzv: no host at .* within 0.5 s \(no answer\)$"):
            asyncio.run(join(full.getsockname(), Rendezvous("", b"", 2, 1, 1, 1000, 0.5)))
        for one in held:
            one.close()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--nproc", "0"), "--nproc: expected an integer from 1"),
        (("--nnodes", "2"), "--rdzv (or --master-addr): expected"),
        (("--nnodes", "2", "--rdzv", "host"), "--rdzv: expected HOST:PORT, got 'host'"),
        (("--nnodes", "2", "--rdzv", "10.0.0.1:29400"), "--rdzv: 10.0.0.1 may be reached by others. Pass"),
        (
            ("--nnodes", "2", "--rdzv", "127.0.0.1:1", "--node-rank", "2"),
            "--node-rank: expected an integer from 0 to 1",
        ),
        (("--nnodes", "1", "--rdzv-token-file", "/none"), "--rdzv-token-file: /none: No such file"),
        (("--master-port", "70000"), "--master-port: expected an integer from 0 to 65535"),
    ],
)
def test_wrong_options_are_named(arguments, words):
    child = launch(*arguments, script="pass")
    _, err = child.communicate(timeout=300)
    assert child.returncode == (1 if "/none" in arguments else 2)
    assert err.startswith(f"penstock: {words.split(':')[0]}:")
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("--rdzv", "127.0.0.1:29400"),
        ("--rdzv-token-file", "token"),
        ("--trusted-network",),
        ("--node-rank", "0"),
        ("--timeout", "5"),
    ],
)
def test_options_without_effect_on_one_machine_are_refused(arguments):
    done = subprocess.run([*BASE, *arguments, "--", "true"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, f"penstock: {arguments[0]} requires --nnodes\n")


def test_command_that_does_not_exist_is_named():
    done = subprocess.run([*BASE, "--nproc", "2", "--", "/no/such"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "penstock: /no/such: cannot be run: No such file or directory\n"
    with socket.create_server(("", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [*BASE, "--master-port", port, "--", "true"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode in (1, 2)
    assert f"--master-port: failed to bind port {port}: Address already in use" in done.stderr


def test_an_option_of_the_command_is_told_from_one_of_launch(penstock_inline):
    done = penstock_inline("launch", "--nproc", "2", "python", "-c", "pass")
    assert done.returncode == 2
    assert "unknown option -c. Put -- before the command" in done.stderr
    assert "Did you mean --nproc?" in penstock_inline("launch", "--nprocs", "2", "--", "true").stderr
