"""A machine of a stage needs only the part of its rank: of a sharded folder, or of the bundles of all ranks."""

from __future__ import annotations

import select
import shutil
from pathlib import Path

import pytest

from penstock.core.rank_layout import RankLayout
from penstock.engine.params import SamplingParams
from penstock.errors import FileAccessError, InvalidArgumentError, InvalidFileError
from penstock.llm.llm import LLM
from penstock.runtime.export_ranks import export_ranks
from penstock.runtime.ranks.open_ranks import graph_of_rank
from penstock.runtime.ranks.stage_bundle import StageBundle, find_bundle
from penstock.sharding.write import shard_folder
from tests.support.errors import raises
from tests.support.rank_processes import DEMO, LIMITS, PROMPTS, tokens_of
from tests.support.services import certificate
from tests.support.sharded_folders import DEMO as FOLDER
from tests.support.sharded_folders import strategy_of
from tests.support.stage_processes import Stages, stages

__all__ = ["certificate", "stages"]

GREEDY = SamplingParams(max_tokens=30, temperature=0.0)
PAIR = RankLayout(pp=2)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundles of rank 0 and of two stages."""
    out = tmp_path_factory.mktemp("bundles") / "demo"
    export_ranks(DEMO, out, PAIR)
    return out


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "cache"))


def split(folder: Path, out: Path) -> list[Path]:
    """Give rank 0 and each stage a folder with its own part, and the files beside the parts."""
    parts = []
    for rank in range(PAIR.world):
        parts.append(out / f"machine{rank}")
        parts[-1].mkdir()
        for path in folder.iterdir():
            name = path.name.removesuffix(".psm")
            if name == f"rank_{rank}" or not name.startswith("rank_"):
                (shutil.copytree if path.is_dir() else shutil.copy)(path, parts[-1] / path.name)
    return parts


def tokens_over(stages: Stages, machines: list[Path]) -> list:
    def start() -> None:
        stages.start(model=machines[2])  # the order in which they join does not matter
        stages.start(model=machines[1])

    server = stages.server(start)
    with LLM(machines[0], threads=1, limits=LIMITS, pipeline_parallel_size=2, stage_server=server) as llm:
        return tokens_of(llm, PROMPTS, GREEDY)


def test_each_machine_has_the_bundle_of_its_rank(stages: Stages, bundles: Path, tmp_path: Path) -> None:
    with LLM(DEMO, threads=1, limits=LIMITS) as llm:
        expected = tokens_of(llm, PROMPTS, GREEDY)
    assert tokens_over(stages, split(bundles, tmp_path)) == expected


@pytest.mark.long
def test_each_machine_has_its_part_of_a_folder(stages: Stages, cache: None, tmp_path: Path) -> None:
    with LLM(FOLDER, threads=1, limits=LIMITS) as llm:
        expected = tokens_of(llm, PROMPTS, GREEDY)
    shard_folder(FOLDER, tmp_path / "cut", strategy_of(FOLDER, PAIR))
    machines = split(tmp_path / "cut", tmp_path)
    assert tokens_over(stages, machines) == expected
    (machines[1] / "rank_1" / "model.safetensors").unlink()
    with pytest.raises(InvalidFileError, match=r"expected rank_1/model\.safetensors"), find_bundle(machines[1]):
        pass


@pytest.mark.long
def test_parts_join_a_rank_0_with_the_whole_bundle(stages: Stages, bundles: Path) -> None:
    """The machine of rank 0 has the whole bundle, that of rank 2 its part, and that of rank 1 cuts its own."""

    def start() -> None:
        stages.start("--rank", 2, model=bundles)
        stages.start()

    with LLM(DEMO, threads=1, limits=LIMITS) as llm:
        expected = tokens_of(llm, PROMPTS, GREEDY)
    with stages.open_llm(on_listen=start) as llm:
        assert tokens_of(llm, PROMPTS, GREEDY) == expected


def test_the_part_of_a_stage_is_found(bundles: Path, tmp_path: Path) -> None:
    with find_bundle(bundles, 2) as second, find_bundle(DEMO, 1) as whole:
        assert (second.path, second.rank, second.is_part) == (bundles / "rank_2.psm", 2, True)
        assert (whole.rank, whole.is_part, whole.checksum) == (1, False, second.checksum)
        assert len(second.parts(PAIR)) == 3
        cut, own = (graph_of_rank(bundle.metadata, 2, PAIR) for bundle in (whole, second))
        assert [node.op for node in cut.nodes] == [node.op for node in own.nodes]
    machines = split(bundles, tmp_path)
    with find_bundle(machines[1]) as only:
        assert only.rank == 1
    for model, rank, kind, reason in (
        (bundles, 0, InvalidArgumentError, "rank: expected one of 1, 2, the parts in"),
        (bundles, 3, FileAccessError, "expected rank_3.psm, got no file"),
        (machines[0], 0, FileAccessError, "expected rank_1.psm, got no file"),
        (tmp_path / "nowhere", 0, FileAccessError, "no such file"),
        (bundles / "rank_0.psm", 0, InvalidArgumentError, "rank: expected the part of a stage in .* of rank 0"),
        (bundles / "rank_1.psm", 2, InvalidArgumentError, "rank: expected 2 in .* got that of rank 1"),
    ):
        with pytest.raises(kind, match=reason), find_bundle(model, rank):
            pass
    with raises(InvalidArgumentError, param="scheme"), find_bundle(DEMO, scheme="w8a8"):
        pass
    assert StageBundle.read(DEMO).rank == 0


def test_a_rank_that_the_pipeline_has_waits(stages: Stages) -> None:
    def start() -> None:
        refused = stages.start("--once", "--rank", 3)
        assert "rank: expected one from 1 to 2" in refused.communicate(timeout=300)[1]
        pair = [stages.start("--rank", 1), stages.start("--rank", 1)]
        ready, _, _ = select.select([process.stderr for process in pair], [], [], 300)
        assert "the group has its rank 1; trying again" in ready[0].readline()
        stages.start("--rank", 2)

    with stages.open_llm(on_listen=start) as llm:
        assert len(llm.generate(PROMPTS[0], GREEDY).token_ids) == 30
