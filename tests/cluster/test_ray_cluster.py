"""A service whose workers Ray places on several nodes: answers, lost workers and nodes, refusals, and what is left."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from openai import OpenAI

from penstock.cluster.placement.certificate import OwnCertificate
from penstock.cluster.placement.ray_placement import RayPlacement
from penstock.engine.params import SamplingParams
from penstock.errors import UnavailableError
from penstock.serving.workers.machines.remote_worker_server import RemoteWorkerSettings
from tests.support.command import environment
from tests.support.ray_cluster import ADDRESS, RayCluster, skip_reason, unused_range
from tests.support.serve_command import ask, serving
from tests.support.waiting import until as until_true
from tests.support.worker_processes import DEMO, HASTY, pids, service, tokens_of, until

pytestmark = [pytest.mark.skipif(bool(skip_reason()), reason=skip_reason()), pytest.mark.long]
SERVE = ("-m", "penstock", "serve")
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
wait_until = partial(until_true, pause_s=0.05, num_looks=2_400)  # a look asks the service


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    made = RayCluster()
    try:
        made.join()
        yield made
    finally:
        made.close()


def arguments(cluster: RayCluster, own: OwnCertificate) -> dict[str, object]:
    """The arguments of ``service`` for workers on the cluster."""
    return {
        "placement": RayPlacement(cluster.address, cluster.token_file, place_s=600.0),
        "remote": RemoteWorkerSettings(ADDRESS, 0, own.certificate, own.key, "0123456789abcdef" * 3),
    }


@pytest.fixture
def placed(cluster: RayCluster) -> Iterator[dict[str, object]]:
    """The arguments of one service."""
    own = OwnCertificate(ADDRESS)
    yield arguments(cluster, own)
    own.close()


def complete(client: OpenAI, **options: object) -> str:
    return (
        client.completions.create(model="demo", prompt="def f(", max_tokens=8, temperature=0, **options).choices[0].text
    )


def options_of(cluster: RayCluster, *number: object) -> list[object]:
    options: list[object] = [DEMO, "--cluster", cluster.address, "--cluster-token-file", cluster.token_file]
    return [*options, *(number or ("--workers", 2)), "--threads", "1", "--place-seconds", "600"]


def workers_of(url: str) -> list[dict[str, object]]:
    return ask(url, "/status")["models"][0]["workers"]


def num_ready(url: str) -> int:
    return sum(worker["status"] == "ready" for worker in workers_of(url))


def test_killed_workers_are_placed_again(placed, caplog) -> None:
    caplog.set_level("INFO", "penstock.serving")

    async def main() -> None:
        async with service(num_workers=2, supervision=HASTY, **placed) as running:
            backend = await running.models.load(str(DEMO))
            expected = await tokens_of(backend, [5, 6], GREEDY)
            victim = pids(backend)[0]
            os.kill(victim, signal.SIGKILL)
            await until(lambda: victim not in pids(backend))
            assert await tokens_of(backend, [5, 6], GREEDY) == expected
            await until(lambda: len(pids(backend)) == 2)
            assert await asyncio.gather(*(tokens_of(backend, [5, 6], GREEDY) for _ in range(8))) == [expected] * 8
            assert backend.deaths()["signal"] == 1

    asyncio.run(main())
    facts = [getattr(record, "facts", {}) for record in caplog.records]
    told = [(fact["event"], fact["node"]) for fact in facts if fact.get("event") in ("worker_ready", "worker_gone")]
    assert sorted(told) == [("worker_gone", ADDRESS), *[("worker_ready", ADDRESS)] * 3]


def test_a_killed_driver_leaves_its_workers_running(placed) -> None:
    async def main() -> None:
        async with service(supervision=HASTY, **placed) as running:
            backend = await running.models.load(str(DEMO))
            before, driver = pids(backend), placed["placement"]._driver
            driver.kill()
            await driver.wait()
            assert await tokens_of(backend, [5, 6], GREEDY)
            assert pids(backend) == before
            os.kill(before[0], signal.SIGKILL)  # the next one is placed by a new driver
            await until(lambda: pids(backend) not in (before, []))
            assert await tokens_of(backend, [5, 6], GREEDY)

    asyncio.run(main())


def test_two_services_share_a_cluster(cluster, placed) -> None:
    """Each has its own workers, and one of them stays when the other one ends."""
    own = OwnCertificate(ADDRESS)

    async def main() -> None:
        async with service(supervision=HASTY, **placed) as first:
            stays = await first.models.load(str(DEMO))
            expected = await tokens_of(stays, [5, 6], GREEDY)
            async with service(supervision=HASTY, **arguments(cluster, own)) as second:
                ends = await second.models.load(str(DEMO))
                assert not set(pids(stays)) & set(pids(ends))
                assert await tokens_of(ends, [5, 6], GREEDY) == expected
            assert await tokens_of(stays, [5, 6], GREEDY) == expected
            assert stays.deaths()["signal"] == 0

    try:
        asyncio.run(main())
    finally:
        own.close()


def test_a_group_without_room_is_refused_with_what_is_free(cluster, placed) -> None:
    async def main() -> None:
        placed["placement"] = RayPlacement(cluster.address, cluster.token_file, place_s=2.0)
        async with service(num_workers=3, supervision=HASTY, **placed) as running:
            with pytest.raises(
                UnavailableError, match=rf"no node has 1 x 1 cores .* Free: {ADDRESS}: \d cores, .* GB; "
            ):
                await running.models.load(str(DEMO))

    asyncio.run(main())


def test_an_update_without_free_cores_changes_nothing(cluster, placed, tmp_path) -> None:
    """Both cores have a worker.  The refusal says what is free, and the old workers go on meanwhile."""
    new = tmp_path / "new.psm"
    new.write_bytes(DEMO.read_bytes())

    async def main() -> None:
        placed["placement"] = RayPlacement(cluster.address, cluster.token_file, place_s=3.0)
        async with service(num_workers=2, supervision=HASTY, **placed) as running:
            backend = await running.models.load(str(DEMO), "demo")
            expected, before = await tokens_of(backend, [5, 6], GREEDY), pids(backend)
            updating = asyncio.ensure_future(running.models.update("demo", str(new)))
            while not updating.done():
                assert await tokens_of(backend, [5, 6], GREEDY) == expected
                await asyncio.sleep(0.1)
            with pytest.raises(UnavailableError, match=r"no node has 1 x 1 cores .* Free: .*: 0 cores"):
                await updating
            assert (pids(backend), sum(backend.deaths().values())) == (before, 0)
            assert await tokens_of(backend, [5, 6], GREEDY) == expected

    asyncio.run(main())


def test_a_killed_service_leaves_nothing_in_the_cluster(cluster, tmp_path) -> None:
    """SIGKILL: the workers lose their connection and end, and their supervisors give the cores back."""
    for _ in range(2):  # the second one gets the cores of the first
        with serving(*options_of(cluster), cwd=tmp_path, program=SERVE) as (process, url, _):
            workers = [worker["pid"] for worker in workers_of(url)]
            process.kill()
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))  # noqa: B023


def test_workers_are_placed_and_removed_with_the_load(cluster, tmp_path) -> None:
    """Twice: the second time the cores of the removed worker are free again."""
    number = ("--replicas", "1..2", "--scale-down-seconds", 3, "--max-requests", 2)
    with serving(*options_of(cluster, *number), cwd=tmp_path, program=SERVE) as (process, url, _):
        client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        expected = complete(client)
        seen = {worker["pid"] for worker in workers_of(url)}
        assert {worker["node"] for worker in workers_of(url)} == {ADDRESS}
        for _ in range(2):
            streams = [
                client.completions.create(
                    model="demo", prompt=f"x{n}", max_tokens=3000, stream=True, extra_body={"ignore_eos": True}
                )
                for n in range(6)
            ]
            wait_until(lambda: num_ready(url) == 2)
            assert {complete(client) for _ in range(4)} == {expected}
            seen |= {worker["pid"] for worker in workers_of(url)}
            for stream in streams:
                stream.close()
            wait_until(lambda: len(workers_of(url)) == 1)
        assert len(seen) == 3, "one stayed, and two came and went"
        assert complete(client) == expected
        left = {worker["pid"] for worker in workers_of(url)}
        wait_until(lambda: {pid for pid in seen if Path(f"/proc/{pid}").exists()} == left)
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0


def test_a_batch_that_was_killed_continues(cluster, tmp_path) -> None:
    """Each request has one answer, the one of a process without workers."""
    requests, answers, alone = (tmp_path / name for name in ("requests.jsonl", "answers.jsonl", "alone.jsonl"))
    bodies = [{"prompt": f"def f{n}(", "max_tokens": 40, "temperature": 0} for n in range(200)]
    lines = [{"custom_id": f"{n}", "url": "/v1/completions", "body": body} for n, body in enumerate(bodies)]
    requests.write_text("".join(json.dumps(line) + "\n" for line in lines))
    batch = [sys.executable, "-m", "penstock", "batch", str(DEMO), str(requests)]
    placed = [*map(str, options_of(cluster)[1:]), "--max-requests", "4"]

    def texts(path: Path) -> dict[str, str]:
        results = [json.loads(line) for line in path.read_text().splitlines()]
        assert len({result["custom_id"] for result in results}) == len(results)
        return {result["custom_id"]: result["response"]["body"]["choices"][0]["text"] for result in results}

    process = subprocess.Popen([*batch, str(answers), *placed], stderr=subprocess.DEVNULL, env=environment())
    wait_until(lambda: answers.exists() and answers.read_bytes().count(b"\n") >= 8)
    process.kill()
    process.wait()
    assert answers.read_bytes().count(b"\n") < len(lines), "it was killed in the middle"
    done = subprocess.run([*batch, str(answers), *placed], capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr
    assert "have a result already" in done.stderr
    subprocess.run([*batch, str(alone), "--threads", "1"], check=True, stderr=subprocess.DEVNULL, env=environment())
    assert texts(answers) == texts(alone)
    assert len(texts(answers)) == len(lines)


def test_a_lost_node_fails_no_request(cluster, tmp_path) -> None:
    with serving(*options_of(cluster), "--route-policy", "round-robin", cwd=tmp_path, program=SERVE) as running:
        process, url, _ = running
        client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        expected = complete(client)
        streams = [
            client.completions.create(
                model="demo", prompt=f"x{n}", max_tokens=900, stream=True, extra_body={"ignore_eos": True}
            )
            for n in range(4)
        ]
        for stream in streams:
            next(stream)
        cluster.cut(cluster.nodes[-1])
        for stream in streams:
            assert [*stream][-1].choices[0].finish_reason == "length", "another worker goes on"
        assert complete(client) == expected, "the other worker serves"
        cluster.join()
        wait_until(lambda: num_ready(url) == 2)
        assert {complete(client) for _ in range(8)} == {expected}
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0


def test_a_wrong_token_is_refused_in_a_line(cluster, tmp_path) -> None:
    other = tmp_path / "token"
    other.write_text("f" * 64 + "\n")
    other.chmod(0o600)
    command = [sys.executable, "-m", "penstock", "node", "--join", cluster.address, "--address", ADDRESS]
    command += ["--token-file", str(other), "--first-port", str(unused_range())]
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert done.returncode == 1, done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "token" in done.stderr
    assert "f" * 64 not in done.stderr


def test_a_lost_head_leaves_other_nodes_serving(caplog) -> None:
    """The last test: it needs a cluster of its own.  A new head at the same address gets the workers placed again."""
    caplog.set_level("INFO", "penstock.serving")
    own, lone = OwnCertificate(ADDRESS), RayCluster()

    def events() -> list[str]:
        facts = [getattr(record, "facts", {}) for record in caplog.records]
        return [fact["event"] for fact in facts if fact.get("event", "").startswith("cluster")]

    async def main() -> None:
        placement = RayPlacement(lone.address, lone.token_file, place_s=600.0)
        remote = RemoteWorkerSettings(ADDRESS, 0, own.certificate, own.key, "0123456789abcdef" * 3)
        async with service(num_workers=2, supervision=HASTY, placement=placement, remote=remote) as running:
            backend = await running.models.load(str(DEMO))
            expected = await tokens_of(backend, [5, 6], GREEDY)
            before = pids(backend)
            await asyncio.to_thread(lone.cut, lone.nodes[0])
            await until(lambda: events() == ["cluster_lost"])
            await until(lambda: len(pids(backend)) == 1)
            assert pids(backend)[0] in before
            assert await tokens_of(backend, [5, 6], GREEDY) == expected
            await asyncio.to_thread(lone.start_head)
            await until(lambda: any(pid not in before for pid in pids(backend)), 300.0)
            # On a busy machine the new head may seem lost once more while its nodes start.
            assert events() == ["cluster_lost", "cluster_back"] * (len(events()) // 2)
            assert await tokens_of(backend, [5, 6], GREEDY) == expected
            await asyncio.to_thread(lone.cut, lone.nodes[0])  # the service ends without a head

    try:
        lone.join()
        asyncio.run(main())
    finally:
        own.close()
        lone.close()
