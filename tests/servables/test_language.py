"""A language model as a step gives each instance the same answer alone, in a batch, split and between padded stages.

Bundles run on the native runtime, so that nothing is tolerated: texts are compared as bytes, and the
log-probabilities of their tokens, which a step does not give, number for number: texts alone would hide that last bits
depend on the company.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from penstock.engine.logprobs import TokenLogprobs
from penstock.errors import InvalidArgumentError
from penstock.graph.export import export_bundle
from penstock.runtime.program import ProgramLimits
from penstock.servables.api.manifest import LanguageManifest
from penstock.servables.lifecycle.language_models import LanguageQueue
from penstock.servables.lifecycle.repository import ServableRepository
from penstock.serving.workers.private_models import PrivateModels
from penstock.serving.workers.remote_model import RemoteBackend
from tests.support.command import DEMO, FOLDER
from tests.support.servable_folders import PATIENCE, ask, run, serving, until, write
from tests.support.worker_processes import OPTIONS, service

TEXTS = """
    options = dict(max_tokens=32, temperature=1.0, seed=11, ignore_eos=True, logprobs=5)
    own = servable.language_model("story.psm", max_open=6, **options)
    beside = servable.language_model(served="wide", max_open=6, **options)

    @servable.stage(outputs={"prompt": "TEXT[]", "size": "INT64[]"}, batch_size=8, preferred_sizes=(4,),
                    padded_sizes=(4, 8), max_delay_ms=20)
    def before(name):
        return [f"def {one}(" for one in name], np.full(len(name), len(name))

    @servable.stage(outputs={"code": "TEXT[]"}, batch_size=5, padded_sizes=(5,))
    def after(prompt, text):
        assert len(prompt) == 5
        return [one + two for one, two in zip(prompt, text)]

    @servable.method(inputs={"name": "TEXT[]"}, outputs={"code": "TEXT[]", "size": "INT64[]"})
    def of_its_own(name):
        prompt, size = before(name)
        return after(prompt, own(prompt)), size

    @servable.method(inputs={"name": "TEXT[]"}, outputs={"code": "TEXT[]", "size": "INT64[]"})
    def of_others(name):
        prompt, size = before(name)
        return after(prompt, beside(prompt)), size
"""
NAMES = [
    "add",
    "pop",
    "x",
    "read_all_lines_of_a_file",
    *(f"{word}_{'of_it_' * n}" for n, word in enumerate("abcdefgh")),
]
NUM_TOKENS = 32
METHODS = ("of_its_own", "of_others")


Answers = dict[tuple[int, ...], list[list[TokenLogprobs]]]
"""Of each prompt, the log-probabilities of each answer to it."""


class Heard:
    """A model as a step has it; ``answers`` gets the log-probabilities."""

    def __init__(self, backend: Any, answers: Answers) -> None:
        self._backend, self._answers = backend, answers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    async def submit(self, ids: Sequence[int], *given: Any, **named: Any) -> Any:
        answer = await self._backend.submit(ids, *given, **named)
        return _HeardAnswer(answer, self._answers.setdefault(tuple(ids), []))


class _HeardAnswer:
    def __init__(self, answer: Any, heard: list[list[TokenLogprobs]]) -> None:
        self._answer, self._heard = answer, heard

    async def __aenter__(self) -> _HeardAnswer:
        await self._answer.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._answer.__aexit__(*error)

    async def __aiter__(self) -> AsyncIterator[Any]:
        found: list[TokenLogprobs] = []
        async for delta in self._answer:
            found += delta.logprobs
            yield delta
        self._heard.append(found)


class Models(PrivateModels):
    """Those of a service; what they answer is heard."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.answers: dict[str, Answers] = {}

    async def open(self, manifest: Any, source: Any) -> LanguageQueue:
        queue = await super().open(manifest, source)
        find, heard = queue._find, self.answers.setdefault(METHODS[bool(manifest.served)], {})
        queue._find = lambda: Heard(find(), heard)  # type: ignore[assignment, return-value]
        return queue


class Shop:
    """A servable with the workers of a service, and the backend of each of its language models."""

    def __init__(
        self, servables: ServableRepository, backends: dict[str, RemoteBackend], answers: dict[str, Answers]
    ) -> None:
        self.servables, self._backends, self.answers = servables, backends, answers
        self._num_asked = dict.fromkeys(METHODS, 0)

    async def ask(self, method: str, *names: str) -> list[bytes]:
        self._num_asked[method] += len(names)
        found = await ask(self.servables, f"story.{method}", {"name": names})
        assert set(found["size"].tolist()) <= {4, 8}, "the stages before it were padded"
        texts: list[bytes] = found["code"].tolist()
        return texts

    async def num_steps(self, method: str) -> int:
        """Steps of its model, once that told of all that it was asked."""
        backend = self._backends[method]

        def ended() -> int:
            figures = backend.figures()
            return 0 if figures is None else sum(figures.num_finished.values())

        await until(lambda: ended() == self._num_asked[method])
        figures = backend.figures()
        assert figures is not None
        return figures.num_steps


@asynccontextmanager
async def shop(tmp_path: Path) -> AsyncIterator[Shop]:
    """``of_its_own`` asks a bundle of integers, ``of_others`` one of floats, where sums depend on their order."""
    folder = write(tmp_path / "root", "story", TEXTS)
    shutil.copy(DEMO, folder / "1" / "story.psm")
    export_bundle(FOLDER, tmp_path / "wide.psm", scheme="f32")
    options = replace(OPTIONS, limits=ProgramLimits(context_len=256, max_requests=8, num_pages=256))
    backends = {}
    async with service(options=options) as running:

        def make(name: str, scheme: str | None) -> RemoteBackend:
            backends["of_its_own"] = RemoteBackend(name, running.primary, options)
            return backends["of_its_own"]

        backends["of_others"] = await running.models.load(str(tmp_path / "wide.psm"))
        models = Models(running.models, make)
        async with serving(tmp_path / "root", PATIENCE, languages=models) as servables:
            yield Shop(servables, backends, models.answers)


@pytest.mark.long
def test_batch_split_and_padded_match_single(tmp_path: Path) -> None:
    """Each prompt alone, with the stages before and after it padded; all at once as requests of their own; all in one
    request, of which six are open at a time, in either order; and some of them between others of both methods.
    """

    async def alone(it: Shop, method: str) -> tuple[dict[str, bytes], int]:
        found = {name: (await it.ask(method, name))[0] for name in NAMES}
        steps = await it.num_steps(method)
        assert steps == len(NAMES) * NUM_TOKENS, "steps of their own"
        return found, steps

    async def work() -> None:
        async with shop(tmp_path) as it:
            texts = {}
            for method in METHODS:
                wanted, steps = await alone(it, method)
                texts[method] = wanted
                assert len(set(wanted.values())) == len(NAMES)
                together = await asyncio.gather(*(it.ask(method, name) for name in NAMES))
                assert together == [[one] for one in wanted.values()], "batched"
                assert await it.num_steps(method) < 1.75 * steps, "they shared steps"
                assert await it.ask(method, *NAMES) == [*wanted.values()], "split"
                assert await it.ask(method, *NAMES[::-1]) == [*wanted.values()][::-1], "split"
                assert await it.num_steps(method) < 2.5 * steps, "they shared steps"
            both = [(method, NAMES[n : n + 5]) for n in range(4) for method in METHODS]
            found = await asyncio.gather(*(it.ask(method, *names) for method, names in both))
            assert found == [[texts[method][name] for name in names] for method, names in both]
            for answers in it.answers.values():
                assert min(len(ones) for ones in answers.values()) >= 4
                for prompt, ones in answers.items():
                    assert [one == ones[0] for one in ones] == [True] * len(ones), prompt

    run(work)


def test_a_slow_tokenizer_leaves_threads_to_others() -> None:
    """An untrusted tokenizer may take seconds for a text; the event loop's own threads serve every request."""
    entered, go_on, num_calls = threading.Event(), threading.Event(), 2 * (os.cpu_count() or 1) + 8

    class Slow:
        is_isolated = True

        def encode(self, text: str) -> list[int]:
            entered.set()
            go_on.wait(300)
            raise InvalidArgumentError(text)

    async def work() -> None:
        failed = asyncio.Event()
        manifest = LanguageManifest("", "m", None, {}, num_calls, 1)
        backend: Any = SimpleNamespace(tokenizer=Slow())
        queue = LanguageQueue("m", manifest, lambda: backend, lambda: asyncio.sleep(0))

        class Asked:
            arrays, count = (np.array([b"p"] * num_calls, object),), num_calls
            run = SimpleNamespace(priority=0, request_id="", first=0)

            def fail(self, error: Exception) -> None:
                failed.set()

        job: Any = Asked()
        try:
            queue.add(job)
            await until(entered.is_set)
            assert await asyncio.wait_for(asyncio.to_thread(lambda: 1), 300) == 1
        finally:
            go_on.set()
        await asyncio.wait_for(failed.wait(), 300)

    asyncio.run(work())
