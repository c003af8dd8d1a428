"""Models of a version under switches and unloads: ONNX Runtime's processes and a language model's workers come and go
with it under the traffic over both protocols.

One client makes the changes, so that it is known what each request may be told: while a version is served nobody is
refused, and while none is nobody is answered.  ``PENSTOCK_CHAOS=n`` makes n times as many.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from penstock import Client
from penstock.engine.params import SamplingParams
from penstock.llm.llm import LLM
from tests.support.command import DEMO
from tests.support.http_service import SECONDS, until
from tests.support.onnx_models import save
from tests.support.servable_folders import write
from tests.support.servable_storms import CHAOS, KEY, TWICE, Ask, Traffic, service, told_by

pytestmark = pytest.mark.long

MODELS = """
    number = int(servable.version())
    servable.settings(timeout_s=3600)
    plus = servable.model("plus.onnx", inputs={"x": "FP32[]"}, outputs={"second": "FP32[]"}, batch_size=4)
    words = servable.language_model("words.psm", max_tokens=1 + number % 8, temperature=0.0, ignore_eos=True)

    @servable.stage(outputs={"first": "INT64[]", "prompt": "TEXT[]"})
    def before(x):
        return number, "def add("

    @servable.method(inputs={"x": "FP32[]"}, outputs={"first": "INT64[]", "second": "FP32[]", "text": "TEXT[]"})
    def which(x):
        first, prompt = before(x)
        return first, plus(x), words(prompt)
"""
"""Each of its steps tells the version: the stage, the model, and the language model by the length of its text."""
CHANGES = 8 * CHAOS
EVERY = 4
"""Of so many changes one is an unload."""
SERVED, UNLOADED = 0, 2


def version(folder: Path, words: Path, number: int) -> None:
    """One whose model adds its number."""
    made = folder / f"{number}.tmp"
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "own"], ["second"])], "plus",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n"])],
        [helper.make_tensor_value_info("second", TensorProto.FLOAT, ["n"])],
        [numpy_helper.from_array(np.array(number, np.float32), "own")],
    )  # fmt: skip
    save(graph, made / "plus.onnx")
    os.link(words, made / "words.psm")
    made.rename(folder / str(number))


@pytest.fixture(scope="module")
def texts() -> list[bytes]:
    """What the language model says after so many tokens."""
    params = [SamplingParams(max_tokens=1 + n, temperature=0.0, ignore_eos=True) for n in range(8)]
    with LLM(DEMO) as llm:
        found = [llm.generate(["def add("], one)[0].text.encode() for one in params]
    assert len({*found}) == 8
    return found


class Clients:
    """The clients, and whether their responses are right in the ``phase`` of each request: four phases for each unload,
    in which versions are served, one is being unloaded, none is loaded, and one is being loaded.
    """

    def __init__(self, texts: list[bytes]) -> None:
        self.phase = SERVED
        self.newest = [0] * 4
        self.told: Counter[tuple[int, int]] = Counter()
        self._texts = texts

    def work(self, one: Ask, way: int) -> None:
        """Ask once."""
        assert one("steady") == ("1", 1, 1)
        before = self.phase
        found, told = told_by(one, "models")
        if before == self.phase:
            assert (before % 4, told) not in ((SERVED, "models is not loaded"), (UNLOADED, "")), found
        assert told in ("", "models is not loaded")
        if told:
            self.told[way, before] += 1
        else:
            self.check(found, way)

    def check(self, found: tuple[object, ...], way: int) -> None:
        """An answer is of one version, which is no older than the last."""
        number, first, second, text = found
        assert number == str(first) == f"{second:g}"
        assert text == self._texts[int(first) % 8]
        assert int(first) >= self.newest[way]
        self.newest[way] = int(first)


def test_models_are_switched_and_unloaded_under_traffic(tmp_path: Path, texts: list[bytes]) -> None:
    """No request fails while a version is served, each is answered by one version, and what is unloaded says so."""
    write(tmp_path / "root", "steady", TWICE)
    folder = write(tmp_path / "root", "models", MODELS, versions=())
    words = tmp_path / "root" / "_words.psm"
    words.write_bytes(DEMO.read_bytes())
    version(folder, words, 1)
    clients = Clients(texts)
    args = ("--max-requests", "4", "--threads", "1")
    with service(tmp_path, *args) as (process, url, grpc), Client(url, api_key=KEY, timeout_s=SECONDS) as admin:
        traffic = Traffic(url, grpc, clients.work)

        def each(what: str, condition: Callable[[int], object]) -> None:
            until(lambda: traffic.errors or all(condition(way) for way in range(4)), what)
            assert not traffic.errors

        try:
            number = 1
            for change in range(CHANGES):
                is_unload = change % EVERY == EVERY - 1
                if is_unload:
                    clients.phase += 1
                    admin.servables.unload("models")
                    clients.phase += 1
                    each("a refusal of each", lambda way: clients.told[way, clients.phase])
                    clients.phase += 1
                else:
                    number += 1
                    version(folder, words, number)
                admin.servables.load("models")
                clients.phase += is_unload
            each("an answer of the last", lambda way: clients.newest[way] == number)
        finally:
            traffic.end()
        until(lambda: len(process.children(recursive=True)) == 4, "the end of old versions' processes")
