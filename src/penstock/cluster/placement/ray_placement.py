"""Workers on the nodes of a Ray cluster.

Ray reserves cores and memory and starts a supervisor on the node that has them; the supervisor starts the worker, which
joins the service over TLS.  No request goes through Ray.  A driver process (``ray_driver``) speaks to Ray.  If the head
of the cluster is lost, its death leaves the groups running: only new ones cannot be placed until the head is back.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock.cluster.placement.local import COMMAND
from penstock.cluster.placement.ray_setup import check_ray, environment, split_address
from penstock.errors import UnavailableError
from penstock.logs import tell

if TYPE_CHECKING:
    from penstock.cluster.placement.placement import Placement, Resources

    def _fits(placement: RayPlacement) -> Placement:
        return placement


__all__ = ["RayGroup", "RayPlacement"]

_JOIN_S: Final = 60.0
_CLOSE_S: Final = 20.0
_KILL_S: Final = 3.0
"""A node that does not end a worker within this time is taken as lost."""
_AVOID_S: Final = 30.0
"""A node that lost a group gets no new one for this long: Ray notices a lost node after 15 s."""
_PROBE_S: Final = 0.5
_PROBE_TIMEOUT_S: Final = 0.5
_SECOND_PROBE_S: Final = 0.1
"""The pause before a second look at a head that does not answer.  With it a loss is reported within 1.6 s."""
_DRIVER: Final = (sys.executable, "-P", "-m", "penstock.cluster.placement.ray_driver")


class RayGroup:
    """A group on a node."""

    def __init__(self, placement: RayPlacement, name: str, epoch: int) -> None:
        self.name, self.epoch = name, epoch
        self.pid, self.node, self.node_id = 0, "", ""
        self.started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ended: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self._placement = placement
        self._giving_up: asyncio.TimerHandle | None = None

    async def wait(self) -> int | None:
        """Wait for the end; the exit status, or None if the node is lost."""
        return await asyncio.shield(self.ended)

    def kill(self) -> None:
        """Have the worker ended; ``wait`` returns within seconds even if the node does not answer."""
        if not self.ended.done() and self._giving_up is None:
            self._placement.send({"do": "kill", "name": self.name, "epoch": self.epoch})
            self._giving_up = asyncio.get_running_loop().call_later(_KILL_S, self._give_up)

    def _give_up(self) -> None:
        self._placement.avoid(self.node_id)
        self.end(None)

    def release(self) -> None:
        """Do nothing: the cluster frees what the group held."""

    def end(self, status: int | None) -> None:
        """Note that the group has ended."""
        if self._giving_up is not None:
            self._giving_up.cancel()
        if not self.ended.done():
            self.ended.set_result(status)
        self._placement.forget(self)


class RayPlacement:
    """Starts groups on the nodes of the cluster whose head is at ``address``, HOST:PORT.

    ``token_file`` has the token of the cluster.  ``place_s``: how long a group waits for a node with its resources.
    ``command`` starts a worker on a node; "python" is the node's interpreter.
    """

    is_local = False

    def __init__(
        self,
        address: str,
        token_file: Path,
        place_s: float = 30.0,
        command: Sequence[str] = ("python", *COMMAND[1:]),
    ) -> None:
        self._address, self._token_file, self._place_s, self._command = address, token_file, place_s, command
        self._service = secrets.token_hex(4)
        self._epochs = count(1)
        self._groups: dict[str, RayGroup] = {}
        self._avoided: dict[str, float] = {}
        self._driver: asyncio.subprocess.Process | None = None
        self._joining = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []
        self._is_head_there = True

    async def open(self) -> None:
        """Join the cluster; UnavailableError if that fails, or if versions differ."""
        check_ray()
        await self._join()
        self._tasks.append(asyncio.ensure_future(self._watch_head()))

    async def _join(self) -> None:
        """Start the driver unless it runs, and watch the groups that a previous one started."""
        async with self._joining:
            if self._driver is not None and self._driver.returncode is None:
                return
            driver = await asyncio.create_subprocess_exec(
                *_DRIVER,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env=environment(self._token_file),
                start_new_session=True,  # Ctrl-C is for the service, which then ends the driver
                limit=1 << 20,
            )
            try:
                _write(driver, {"address": self._address})
                async with asyncio.timeout(_JOIN_S):
                    answer = await _read(driver)
                if answer is None or "joined" not in answer:
                    reason = "the driver ended" if answer is None else str(answer.get("failed"))
                    raise UnavailableError(f"failed to join the cluster: {reason}")
            except BaseException as error:
                if driver.returncode is None:
                    driver.kill()
                await driver.wait()
                if isinstance(error, TimeoutError):
                    raise UnavailableError(f"{self._address}: joining took longer than {_JOIN_S:g} s") from None
                raise
            self._driver = driver
            self._tasks.append(asyncio.ensure_future(self._listen(driver)))
            for group in self._groups.values():
                if group.started.done():
                    self.send({"do": "watch", "name": group.name, "epoch": group.epoch})

    async def start(self, config: str, resources: Resources) -> RayGroup:
        """Place a group; UnavailableError names what each node has free."""
        if not self._is_head_there:
            raise UnavailableError(f"{self._address}: the head of the cluster does not answer")
        await self._join()
        epoch = next(self._epochs)
        group = RayGroup(self, f"penstock-{self._service}-{epoch}", epoch)
        self._groups[group.name] = group
        now = asyncio.get_running_loop().time()
        options = {"place_s": self._place_s, "without": [node for node, end in self._avoided.items() if end > now]}
        self.send({
            "do": "start", "name": group.name, "epoch": epoch, "command": [*self._command], "config": config,
            "resources": asdict(resources), "options": options,
        })  # fmt: skip
        try:
            await group.started
        except asyncio.CancelledError:
            group.kill()
            raise
        except BaseException:
            self.forget(group)
            raise
        return group

    def send(self, command: dict[str, Any]) -> None:
        """Send a command to the driver; nothing if it has ended."""
        if self._driver is not None and self._driver.returncode is None:
            _write(self._driver, command)

    def forget(self, group: RayGroup) -> None:
        """Forget a group that has ended."""
        self._groups.pop(group.name, None)

    def avoid(self, node_id: str) -> None:
        """Place no group on a node for a while, because it does not answer."""
        if node_id:
            self._avoided[node_id] = asyncio.get_running_loop().time() + _AVOID_S

    async def _listen(self, driver: asyncio.subprocess.Process) -> None:
        while (answer := await _read(driver)) is not None:
            self._on_message(answer)
        await driver.wait()
        for group in [*self._groups.values()]:  # those that run go on; their connections show when they end
            if not group.started.done():
                group.started.set_exception(UnavailableError("the driver of the cluster ended"))

    def _on_message(self, answer: dict[str, Any]) -> None:
        group = self._groups.get(answer["name"])
        if group is None:
            return
        if "pid" in answer:
            group.pid, group.node, group.node_id = answer["pid"], answer["node"], answer["node_id"]
            if not group.started.done():
                group.started.set_result(None)
        elif "error" in answer and not group.started.done():
            self.avoid(answer.get("node_id", ""))
            group.started.set_exception(UnavailableError(answer["error"]))
        elif "exit" in answer:
            if answer["exit"] is None:
                self.avoid(group.node_id)
            group.end(answer["exit"])

    async def _watch_head(self) -> None:
        """Report within 2 s that the head of the cluster is lost, and that it is back."""
        host, port = split_address(self._address, "cluster")
        num_failed = 0
        while True:
            try:
                async with asyncio.timeout(_PROBE_TIMEOUT_S):
                    _, writer = await asyncio.open_connection(host.strip("[]"), port)
                writer.close()
                num_failed = 0
            except OSError:  # TimeoutError is one
                num_failed += 1
            is_there = num_failed < 2
            if is_there != self._is_head_there:
                self._is_head_there = is_there
                state = "answers again" if is_there else "does not answer; running workers go on, none can be placed"
                event = "cluster_back" if is_there else "cluster_lost"
                text = f"The head of the cluster at {self._address} {state}."
                tell(event, text, logging.WARNING, address=self._address)
                if not is_there and self._driver is not None and self._driver.returncode is None:
                    self._driver.kill()  # Ray would end it within a minute; the next head gets another one
            await asyncio.sleep(_SECOND_PROBE_S if num_failed == 1 else _PROBE_S)

    async def close(self) -> None:
        """End all groups and the driver."""
        driver = self._driver
        if driver is not None and driver.returncode is None and driver.stdin is not None:
            driver.stdin.close()
            try:
                await asyncio.wait_for(driver.wait(), _CLOSE_S)
            except TimeoutError:
                driver.kill()
                await driver.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        for group in [*self._groups.values()]:
            group.end(None)


def _write(driver: asyncio.subprocess.Process, message: dict[str, Any]) -> None:
    if driver.stdin is not None:
        with suppress(OSError, RuntimeError):
            driver.stdin.write(json.dumps(message).encode() + b"\n")


async def _read(driver: asyncio.subprocess.Process) -> dict[str, Any] | None:
    """Return the driver's next answer, None at its end."""
    if driver.stdout is None:
        return None
    line = await driver.stdout.readline()
    answer: dict[str, Any] | None = json.loads(line) if line.endswith(b"\n") else None
    return answer
