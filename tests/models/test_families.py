"""Every family against transformers in float32, and against itself in other steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from penstock.graph.export import export_bundle
from penstock.runtime.eager import EagerProgram
from penstock.runtime.native import NativeProgram
from penstock.runtime.program import ProgramLimits
from tests.models.steps import relative_error, run_whole
from tests.support.families import FAMILY_PARAMS, expected_logits, prompt, save
from tests.support.marks import mostly_exhaustive

LIMITS = ProgramLimits(max_tokens=128, max_requests=4, max_rows=128, num_pages=12, context_len=256)
LENGTHS = (31, 33, 70)


class Network:
    """A row of the table: its folder, its eager program, and the logits of prompts that run whole."""

    def __init__(self, family: str, folder: Path) -> None:
        self.family = family
        self.folder = save(family, folder / family)
        self.eager = EagerProgram(self.folder, threads=1, limits=LIMITS)
        self._whole: dict[int, np.ndarray] = {}

    def whole(self, num_tokens: int) -> np.ndarray:
        if num_tokens not in self._whole:
            self._whole[num_tokens] = run_whole(self.eager, prompt(num_tokens))
        return self._whole[num_tokens]


@pytest.fixture(scope="module", params=FAMILY_PARAMS)
def network(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    network = Network(request.param, tmp_path_factory.mktemp("models"))
    yield network
    network.eager.close()


@pytest.mark.parametrize("num_tokens", mostly_exhaustive(LENGTHS, (70,), ()))
def test_native_kernels_match_transformers(network: Network, num_tokens: int) -> None:
    expected = expected_logits(network.family, prompt(num_tokens))
    assert relative_error(network.whole(num_tokens), expected) < 1e-4


@pytest.mark.exhaustive
def test_references_match_transformers(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_REFERENCE", "1")
    token_ids = prompt(70)
    error = relative_error(run_whole(network.eager, token_ids), expected_logits(network.family, token_ids))
    assert error < 1e-4


@pytest.mark.parametrize("chunk", mostly_exhaustive([1, 7, 32], (7,), ()))
def test_cached_matches_uncached(network: Network, chunk: int) -> None:
    assert network.whole(70).tobytes() == run_whole(network.eager, prompt(70), chunk).tobytes()


def test_graph_equals_eager(network: Network, tmp_path: Path) -> None:
    export_bundle(network.folder, tmp_path / "model.psm", scheme="f32")
    graph, _ = NativeProgram.open(tmp_path / "model.psm", threads=2, limits=LIMITS)
    try:
        assert graph.info.page_windows == network.eager.info.page_windows
        assert (graph.info.scheme, graph.info.vocab_size) == (network.eager.info.scheme, network.eager.info.vocab_size)
        for num_tokens, chunk in ((1, None), (70, None), (70, 7), (70, 1)):
            assert run_whole(graph, prompt(num_tokens), chunk).tobytes() == network.whole(num_tokens).tobytes()
    finally:
        graph.close()


@pytest.mark.parametrize("family", ["llama_tied_one_kv_head", "qwen2_windows"])
@pytest.mark.parametrize("kv_layout", ["bf16", "int8"])
def test_small_kv_pages_stay_close(family: str, kv_layout: str, tmp_path: Path) -> None:
    limits = ProgramLimits(128, 4, max_rows=128, num_pages=12, context_len=256, kv_layout=kv_layout)
    program = EagerProgram(save(family, tmp_path / family), threads=1, limits=limits)
    token_ids = prompt(70)
    whole = run_whole(program, token_ids)
    assert 1e-6 < relative_error(whole, expected_logits(family, token_ids)) < 5e-2
    assert whole.tobytes() == run_whole(program, token_ids, 7).tobytes()
    program.close()


@pytest.mark.parametrize("scheme", ["bf16", "w8a8", "w4a8"])
def test_experts_do_not_depend_on_chunks(scheme: str, tmp_path: Path) -> None:
    program = EagerProgram(save("mixtral", tmp_path / "mixtral"), scheme=scheme, threads=1, limits=LIMITS)
    token_ids = prompt(70)
    whole = run_whole(program, token_ids)
    assert relative_error(whole, expected_logits("mixtral", token_ids)) > 1e-6  # the scheme rounds
    assert whole.tobytes() == run_whole(program, token_ids, 7).tobytes()
    program.close()
