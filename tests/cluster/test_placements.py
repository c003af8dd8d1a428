"""What each placement promises: it starts a command with its configuration, watches it, ends it, and leaves nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from penstock.cluster.placement.placement import Placement, Resources
from penstock.errors import UnavailableError
from tests.support.placements import RAY
from tests.support.ray_cluster import ADDRESS
from tests.support.worker_processes import until

pytestmark = pytest.mark.parametrize("kind", ["local", RAY])
ENDS = "import sys; sys.exit(int(sys.stdin.readline()))"
STAYS = "import sys, time; sys.stdin.readline(); open(sys.argv[1], 'w').close(); sys.stdin.read(); sys.exit(9)"
"""It makes a file once it has its configuration, and ends with its standard input."""


@pytest.fixture
def opened(placed) -> Callable[..., AsyncIterator[Placement]]:
    """Open a placement by name whose groups run a Python program, and close it."""

    @asynccontextmanager
    async def opened(kind: str, program: str, *arguments: object) -> AsyncIterator[Placement]:
        placement = placed(kind, (sys.executable, "-c", program, *map(str, arguments)))["placement"]
        await placement.open()
        try:
            yield placement
        finally:
            await placement.close()

    return opened


def test_the_exit_status_is_that_of_the_command(opened, kind: str) -> None:
    async def main() -> None:
        async with opened(kind, ENDS) as placement:
            assert placement.is_local == (kind == "local")
            groups = [await placement.start(status, Resources()) for status in ("0", "7")]
            assert [group.node for group in groups] == ["" if placement.is_local else ADDRESS] * 2
            assert [await group.wait() for group in groups] == [0, 7]
            assert [await group.wait() for group in groups] == [0, 7], "as often as it is asked for"
            for group in groups:
                group.kill()
                group.release()

    asyncio.run(main())


def test_a_group_runs_until_it_is_killed(opened, tmp_path: Path, kind: str) -> None:
    """Its standard input stays open.  A group beside it goes on."""
    file = tmp_path / "started"

    async def main() -> None:
        async with opened(kind, STAYS, file) as placement:
            victim, other = [await placement.start("{}", Resources()) for _ in range(2)]
            waiting = asyncio.ensure_future(victim.wait())
            await until(file.exists)
            assert {psutil.Process(group.pid).cmdline()[-1] for group in (victim, other)} == {str(file)}
            await asyncio.sleep(0.3)
            assert not waiting.done()
            victim.kill()
            victim.kill()
            assert await waiting == -signal.SIGKILL
            victim.release()
            assert not psutil.pid_exists(victim.pid), "it is no zombie"
            os.kill(other.pid, signal.SIGTERM)
            assert await other.wait() == -signal.SIGTERM, "as if the machine had ended it"
            other.release()

    asyncio.run(main())


def test_closing_ends_the_groups_that_are_left(opened, tmp_path: Path, kind: str) -> None:
    async def main() -> None:
        async with opened(kind, STAYS, tmp_path / "started") as placement:
            group = await placement.start("{}", Resources())
        assert await asyncio.wait_for(group.wait(), 300) in (None, -signal.SIGKILL)
        await until(lambda: not psutil.pid_exists(group.pid))

    asyncio.run(main())


def test_a_start_that_is_given_up_leaves_no_group(opened, tmp_path: Path, kind: str) -> None:
    """Whether it waits for a node, for a supervisor or for the command; the cores are free for others at once."""

    async def main() -> None:
        async with opened(kind, STAYS, tmp_path / "started") as placement:
            for pause_s in (0.0, 0.05, 0.5, 1.5, 2.5):
                starting = asyncio.ensure_future(placement.start("{}", Resources(num_cpus=2)))
                await asyncio.sleep(pause_s)
                if starting.done():  # it was quicker
                    (await starting).kill()
                starting.cancel()
                await asyncio.gather(starting, return_exceptions=True)
            groups = [await asyncio.wait_for(placement.start("{}", Resources(num_cpus=2)), 300) for _ in range(2)]
            await until(lambda: num_running(tmp_path / "started") == len(groups))

    asyncio.run(main())
    assert num_running(tmp_path / "started") == 0


def num_running(file: Path) -> int:
    """Return how many processes run ``STAYS`` with this file."""
    lines = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    return sum(STAYS in line and line[-1] == str(file) for line in lines)


def test_a_command_that_is_not_there_is_an_error(placed, tmp_path: Path, kind: str) -> None:
    async def main() -> None:
        placement = placed(kind, (str(tmp_path / "none"),))["placement"]
        await placement.open()
        try:
            for _ in range(5):  # more often than there are cores: a failed start keeps none
                with pytest.raises((OSError, UnavailableError), match="No such file"):
                    await placement.start("{}", Resources())
        finally:
            await placement.close()

    asyncio.run(main())
