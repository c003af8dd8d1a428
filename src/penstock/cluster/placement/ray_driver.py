"""``python -m penstock.cluster.placement.ray_driver``: the process that speaks to Ray for a service.

Ray ends the process of a driver that has lost the head of its cluster, so it is not the service's own.  Commands come
as lines of JSON on standard input, and answers go as lines to standard output.  The first line is the configuration:
{"address": HOST:PORT}.  When standard input ends, the driver ends its groups and exits.

Commands: {"do": "start", "name", "epoch", "command", "config", "num_ranks", "num_cpus", "memory_bytes", "place_s",
"without": [node ids]}, {"do": "watch", "name", "epoch"} and {"do": "kill", "name", "epoch"}.  Answers: {"joined":
true}, {"failed": TEXT}, {"name", "pid", "node", "node_id"}, {"name", "error": TEXT, "node_id"} (of a node that
does not answer, or "") and {"name", "exit": STATUS}.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from penstock.cluster.placement.ray_setup import NAMESPACE, VERSION_LABEL, check_cluster, keep_loopback
from penstock.cluster.placement.ray_supervisor import Supervisor
from penstock.errors import PenstockError, UnavailableError
from penstock.version import __version__

__all__ = ["main"]

_SUPERVISOR_S: Final = 30.0
"""The least time that a node has to start a supervisor, a Python process that Ray starts and that imports Penstock."""
_KILL_S: Final = 5.0
_LOOK_S: Final = 0.25


class _SilentNodeError(UnavailableError):
    """A node on which a group was placed does not answer."""

    def __init__(self, message: str, node_id: str) -> None:
        super().__init__(message)
        self.node_id = node_id


class _Driver:
    """Carries out commands, each in a thread of its own."""

    def __init__(self, answers: Any) -> None:
        self._answers = answers
        self._lock = threading.Lock()
        self._groups: dict[str, tuple[int, Any, Any]] = {}
        self._starting: set[str] = set()
        self._reserved: dict[str, Any] = {}  # the placement groups of groups that are starting
        self._unwanted: set[str] = set()  # groups that were ended while they were starting

    def note(self, command: dict[str, Any]) -> None:
        """Note a command before its thread begins, so that a kill finds the group that is starting."""
        if command["do"] == "start":
            self._starting.add(command["name"])

    def answer(self, **fields: object) -> None:
        with self._lock, suppress(OSError, ValueError):
            print(json.dumps(fields), file=self._answers, flush=True)

    def do(self, command: dict[str, Any]) -> None:
        kind, name = command.pop("do"), command["name"]
        try:
            getattr(self, f"_{kind}")(**command)
        except Exception as error:  # any Ray error; the service decides what to do
            text = " ".join(str(error).split())[:500] or type(error).__name__
            self.answer(name=name, error=text, node_id=error.node_id if isinstance(error, _SilentNodeError) else "")
        finally:
            if kind == "start":
                self._starting.discard(name)
                self._unwanted.discard(name)

    def _start(
        self, name: str, epoch: int, command: list[str], config: str, resources: dict[str, int], options: dict[str, Any]
    ) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        deadline = time.monotonic() + options["place_s"]
        group = _reserve(name, resources, options, lambda: name in self._unwanted)
        self._reserved[name] = group
        try:
            self._check_wanted(name)
            node, node_id, total = _node_of(group)
            share = _memory_share(total, resources)
            actor = (
                ray.remote(Supervisor)
                .options(
                    name=name,
                    lifetime="detached",
                    num_cpus=resources["num_cpus"],
                    max_restarts=0,
                    max_concurrency=8,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
                )
                .remote(epoch)
            )
            limit_s = max(_SUPERVISOR_S, deadline - time.monotonic())
            try:
                pid = ray.get(actor.start.remote(epoch, command, config, share), timeout=limit_s)
            except ray.exceptions.GetTimeoutError:
                text = f"node {node}: Ray started no process there within {limit_s:.0f} s"
                raise _SilentNodeError(text, node_id) from None
            self._groups[name] = (epoch, actor, group)
            self._check_wanted(name)
        except BaseException:
            self._groups.pop(name, None)
            ray.util.remove_placement_group(group)
            raise
        finally:
            del self._reserved[name]
        self._starting.discard(name)
        self.answer(name=name, pid=pid, node=node, node_id=node_id)
        self._watch(name, epoch)

    def _check_wanted(self, name: str) -> None:
        if name in self._unwanted:
            raise UnavailableError("the group was ended while it was starting")

    def _watch(self, name: str, epoch: int) -> None:
        """Answer with the exit status of a group's worker, None if its node is lost, and free what it held."""
        import ray

        try:
            actor = self._groups[name][1] if name in self._groups else ray.get_actor(name, NAMESPACE)
        except ValueError:  # a new head does not know it; its connection shows when it ends
            return
        status = None
        with suppress(ray.exceptions.RayError):
            status = ray.get(actor.wait.remote(epoch))
        self._free(name)
        self.answer(name=name, exit=status)

    def _kill(self, name: str, epoch: int) -> None:
        import ray

        if name in self._starting and name not in self._groups:
            self._unwanted.add(name)
            if (reserved := self._reserved.get(name)) is not None:
                with suppress(Exception):
                    ray.util.remove_placement_group(reserved)  # ends its supervisor, and so its worker
            return
        with suppress(ray.exceptions.RayError, ValueError):
            actor = self._groups[name][1] if name in self._groups else ray.get_actor(name, NAMESPACE)
            ray.get(actor.kill.remote(epoch), timeout=_KILL_S)
            return
        self._free(name)  # its node does not answer

    def _free(self, name: str) -> None:
        import ray

        _, _, group = self._groups.pop(name, (0, None, None))
        if group is None:
            with suppress(ValueError):
                group = ray.util.get_placement_group(name)
        if group is not None:
            with suppress(Exception):
                ray.util.remove_placement_group(group)

    def close(self) -> None:
        """End all groups, those that are starting too."""
        for name in [*self._starting]:
            self._kill(name, 0)
        threads = [
            threading.Thread(target=self._kill, args=(name, epoch), daemon=True)
            for name, (epoch, _, _) in [*self._groups.items()]
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_KILL_S)
        for name in [*self._groups]:
            self._free(name)
        end = time.monotonic() + _KILL_S
        while self._starting and time.monotonic() < end:
            time.sleep(_LOOK_S)


def _reserve(name: str, resources: dict[str, int], options: dict[str, Any], is_unwanted: Callable[[], bool]) -> Any:
    """Return a placement group with one bundle per rank, all on one node.

    Raises UnavailableError after the option ``place_s`` seconds, or when ``is_unwanted`` returns True.
    """
    import ray

    place_s, without = options["place_s"], options["without"]
    bundle: dict[str, float] = {"CPU": resources["num_cpus"]}
    bundles = [{**bundle} for _ in range(resources["num_ranks"])]
    if resources["memory_bytes"]:
        bundles[0]["memory"] = resources["memory_bytes"]
    selector = {VERSION_LABEL: __version__.replace("+", "_")}
    if without:
        selector["ray.io/node-id"] = f"!in({','.join(without)})"
    group = ray.util.placement_group(
        bundles,
        strategy="STRICT_PACK",
        name=name,
        lifetime="detached",
        bundle_label_selector=[selector] * len(bundles),
    )
    end = time.monotonic() + place_s
    while not group.wait(1):  # Ray takes whole seconds
        if is_unwanted() or time.monotonic() >= end:
            break
    else:
        return group
    ray.util.remove_placement_group(group)
    wanted = f"{resources['num_ranks']} x {resources['num_cpus']} cores"
    if resources["memory_bytes"]:
        wanted += f" and {resources['memory_bytes'] / 1e9:.2f} GB"
    raise UnavailableError(f"no node has {wanted} free within {place_s:g} s. Free: {_free_resources()}")


def _free_resources() -> str:
    """Return what each node has free, with the versions of those that have another one."""
    import ray
    from ray._private.state import available_resources_per_node

    free, parts = available_resources_per_node(), []
    for node in sorted(ray.nodes(), key=lambda node: str(node["NodeManagerAddress"])):
        if not node["Alive"]:
            continue
        own = free.get(node["NodeID"], {})
        num_cpus = own.get("CPU", 0)
        text = f"{node['NodeManagerAddress']}: {num_cpus:g} core{'s' if num_cpus != 1 else ''}, "
        text += f"{own.get('memory', 0) / 1e9:.2f} GB"
        node_version = node.get("Labels", {}).get(VERSION_LABEL, "none")
        if node_version != __version__.replace("+", "_"):
            text += f" (not usable: Penstock {node_version} there, {__version__} here)"
        parts.append(text)
    return "; ".join(parts) or "no node"


def _memory_share(total: dict[str, float], resources: dict[str, int]) -> int:
    """Return how much memory a group may plan on a node with these resources; 0 if what it needs at least is not known.

    It is what the group needs, and three times what that leaves of its part of the node, the part of its cores: a
    worker takes a quarter of the rest for pages, so the pages of groups that fill the node take three quarters of what
    all of them leave.  A group that needs its part for itself has a small rest.
    """
    least, num_bytes = resources["memory_bytes"], total.get("memory", 0.0)
    if not least or not total.get("CPU"):
        return 0
    cores = resources["num_ranks"] * resources["num_cpus"] / total["CPU"]
    left = max(0.0, num_bytes - least)
    return int(least + min(left, max(3 * (cores * num_bytes - least), cores * left)))


def _node_of(group: Any) -> tuple[str, str, dict[str, float]]:
    """Return the address, the id and the resources of the node that a placement group is on."""
    import ray

    node_id = str(ray.util.placement_group_table(group)["bundles_to_node_id"].get(0, ""))
    nodes = {node["NodeID"]: node for node in ray.nodes()}
    if node_id not in nodes:  # it was lost at once
        return "", node_id, {}
    return str(nodes[node_id]["NodeManagerAddress"]), node_id, nodes[node_id]["Resources"]


def main() -> int:
    """Serve until standard input ends and return the exit status."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what Ray prints is no answer
    driver = _Driver(answers)
    address = json.loads(sys.stdin.readline())["address"]
    try:
        check_cluster(address)
        import ray

        keep_loopback(address)
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
    except (PenstockError, Exception) as error:
        text = " ".join(str(error).split())[:500]
        if "node_ip_address" in text or "raylet" in text.lower():
            text = f"{address}: this machine is no node of the cluster: run `penstock node --join {address}` on it"
        driver.answer(failed=text or type(error).__name__)
        return 1
    driver.answer(joined=True)
    for line in sys.stdin:
        command = json.loads(line)
        driver.note(command)
        threading.Thread(target=driver.do, args=(command,), daemon=True).start()
    driver.close()
    ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
