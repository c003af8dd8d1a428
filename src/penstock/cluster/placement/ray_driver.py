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
from contextlib import suppress
from typing import Any, Final

from penstock.cluster.placement.ray_setup import NAMESPACE, VERSION_LABEL, check_cluster
from penstock.cluster.placement.ray_supervisor import Supervisor
from penstock.errors import PenstockError, UnavailableError
from penstock.version import __version__

__all__ = ["main"]

_SUPERVISOR_S: Final = 30.0
"""The least time that a node has to start a supervisor, a Python process that Ray starts and that imports Penstock."""
_KILL_S: Final = 5.0


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

    def answer(self, **fields: object) -> None:
        with self._lock, suppress(OSError, ValueError):
            print(json.dumps(fields), file=self._answers, flush=True)

    def do(self, command: dict[str, Any]) -> None:
        kind, name = command.pop("do"), command["name"]
        try:
            getattr(self, f"_{kind}")(**command)
        except Exception as error:  # of Ray, of any kind; the service decides what to do
            text = " ".join(str(error).split())[:500] or type(error).__name__
            self.answer(name=name, error=text, node_id=error.node_id if isinstance(error, _SilentNodeError) else "")

    def _start(
        self, name: str, epoch: int, command: list[str], config: str, resources: dict[str, int], options: dict[str, Any]
    ) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        deadline = time.monotonic() + options["place_s"]
        group = _reserve(name, resources, options["place_s"], options["without"])
        try:
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
                pid = ray.get(actor.start.remote(epoch, command, config), timeout=limit_s)
            except ray.exceptions.GetTimeoutError:
                node, node_id = _node_of(group)
                text = f"node {node}: Ray started no process there within {limit_s:.0f} s"
                raise _SilentNodeError(text, node_id) from None
        except BaseException:
            ray.util.remove_placement_group(group)
            raise
        self._groups[name] = (epoch, actor, group)
        node, node_id = _node_of(group)
        self.answer(name=name, pid=pid, node=node, node_id=node_id)
        self._watch(name, epoch)

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
        """End all groups."""
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


def _reserve(name: str, resources: dict[str, int], place_s: float, without: list[str]) -> Any:
    """Return a placement group with one bundle per rank, all on one node; UnavailableError after ``place_s`` s."""
    import ray

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
    if group.wait(place_s):
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
        text = f"{node['NodeManagerAddress']}: {own.get('CPU', 0):g} cores, {own.get('memory', 0) / 1e9:.2f} GB"
        found = node.get("Labels", {}).get(VERSION_LABEL, "none")
        if found != __version__.replace("+", "_"):
            text += f" (not usable: Penstock {found} there, {__version__} here)"
        parts.append(text)
    return "; ".join(parts) or "no node"


def _node_of(group: Any) -> tuple[str, str]:
    """Return the address and the id of the node that a placement group is on."""
    import ray

    node_id = str(ray.util.placement_group_table(group)["bundles_to_node_id"].get(0, ""))
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    return str(addresses.get(node_id, "")), node_id


def main() -> int:
    """Serve until standard input ends and return the exit status."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what Ray prints is no answer
    driver = _Driver(answers)
    address = json.loads(sys.stdin.readline())["address"]
    try:
        check_cluster(address)
        import ray

        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
    except (PenstockError, Exception) as error:
        text = " ".join(str(error).split())[:500]
        if "node_ip_address" in text or "raylet" in text.lower():
            text = f"{address}: this machine is no node of the cluster: run `penstock node --join {address}` on it"
        driver.answer(failed=text or type(error).__name__)
        return 1
    driver.answer(joined=True)
    for line in sys.stdin:
        threading.Thread(target=driver.do, args=(json.loads(line),), daemon=True).start()
    driver.close()
    ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
