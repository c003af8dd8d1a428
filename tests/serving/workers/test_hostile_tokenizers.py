"""A model with a hostile tokenizer beside a sound one: only its own requests are refused."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.checkpoint import tokenizer_process
from penstock.engine.params import SamplingParams
from penstock.errors import InvalidFileError, TokenizerError
from penstock.llm.llm import LLM
from penstock.serving.request_fields import ServingFields
from penstock.serving.translation import prompts_of
from tests.support.errors import raises
from tests.support.hostile_tokenizers import DEMO, backtracks, bundle_with, grows, replace, words
from tests.support.http_service import Service
from tests.support.worker_processes import pids, service, tokens_of

TEXT = "a" * 60 + "b"
GREEDY = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("hostile")
    files = {
        "growing": words(normalizer=grows(1000, 6)),
        "encoding": words(normalizer=grows(4000, 1), pre_tokenizer=backtracks()),
        "decoding": words(decoder={"type": "Sequence", "decoders": [replace("w4000", TEXT), backtracks("Replace")]}),
        "sound": words(),
    }
    return {name: bundle_with(folder / f"{name}.psm", data) for name, data in files.items()}


@pytest.fixture(scope="module")
def both(bundles: dict[str, Path]) -> Iterator[Service]:
    """The demo, a model whose tokenizer fails on some texts, and one whose tokenizer needs a process."""
    found = Service({"demo": LLM(DEMO), "hostile": LLM(bundles["encoding"]), "words": LLM(bundles["sound"])})
    yield found
    found.close()


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("/v1/completions", "prompt", TEXT),
        ("/v1/completions", "prompt", ["a", TEXT]),
        ("/v1/embeddings", "input", TEXT),
        ("/tokenize", "prompt", TEXT),
        ("/v2/models/hostile/generate", "text_input", TEXT),
    ],
)
def test_text_that_a_tokenizer_fails_on_is_400(both, path, field, value, caplog, capfd) -> None:
    caplog.set_level(logging.INFO)
    status, _, data = both.ask("POST", path, {"model": "hostile", field: value} if "v2" not in path else {field: value})
    error = json.loads(data)["error"]
    message = error if isinstance(error, str) else error["message"]
    assert (status, message.partition(":")[0]) == (400, "tokenizer.json")
    assert "backtracks too often" in message
    if isinstance(error, dict):
        assert error["code"] == "tokenizer_failed"
    assert not [record for record in caplog.records if record.exc_info]
    assert "panicked" not in capfd.readouterr().err
    assert both.post("/v1/completions", model="hostile", prompt=[5], max_tokens=2, ignore_eos=True)["usage"]


def test_an_isolated_tokenizer_answers_like_the_library(both, bundles) -> None:
    """Texts, streams and log-probabilities, which the service writes with the tokenizer's process."""
    with LLM(bundles["sound"]) as llm:
        result = llm.generate("w5 w6 a", SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))
    asked = {
        "model": "words",
        "prompt": "w5 w6 a",
        "max_tokens": 6,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 2,
    }
    whole = both.post("/v1/completions", **asked)["choices"][0]
    assert whole["text"] == result.text
    assert whole["logprobs"]["tokens"] == [f"w{i}" if i > 1 else "a" for i in result.token_ids]
    events = both.events("/v1/completions", **asked)
    assert "".join(event["choices"][0]["text"] for event in events) == result.text
    offsets = [offset for event in events for offset in event["choices"][0]["logprobs"]["text_offset"]]
    assert offsets == whole["logprobs"]["text_offset"]
    echoed = both.post("/v1/completions", **asked | {"echo": True, "max_tokens": 0})["choices"][0]
    assert echoed["text"] == "w5 w6 a"
    assert echoed["logprobs"]["tokens"] == ["w5", "w6", "a"]


def test_other_models_answer_while_a_tokenizer_hangs(both, monkeypatch) -> None:
    """Its calls run in a separate thread, even for short texts: the event loop and other models do not wait."""
    monkeypatch.setattr(tokenizer_process, "CALL_SECONDS", 2.0)
    done: list[int] = []
    slow = " ".join(["a" * 26 + "b"] * 60)

    def attack() -> None:
        done.append(both.refused("/tokenize", model="hostile", prompt=slow)[0])

    attacks = [threading.Thread(target=attack) for _ in range(3)]
    for thread in attacks:
        thread.start()
    for _ in range(5):
        assert both.post("/tokenize", model="demo", prompt="x = 1\n" * 600)["count"] > 100
        assert both.post("/v1/completions", model="demo", prompt="x = 1", max_tokens=2, temperature=0)["choices"]
        assert both.post("/tokenize", model="words", prompt="a")["count"] == 1
    assert not done
    for thread in attacks:
        thread.join(120)
    assert done == [400, 400, 400]


def test_a_growing_tokenizer_is_refused_at_load(bundles) -> None:
    async def main() -> None:
        async with service() as running:
            demo = await running.models.load(str(DEMO))
            with pytest.raises(InvalidFileError, match=r"^tokenizer\.json: normalizer:"):
                await running.models.load(str(bundles["growing"]))
            assert len(await tokens_of(demo, [5, 6], GREEDY)) == 4

    asyncio.run(main())


def test_failing_tokenizers_end_no_primary_and_no_worker(bundles) -> None:
    """Encoding fails in the primary's process, decoding in the worker's: each fails only its own request."""

    async def main() -> None:
        async with service() as running:
            encoding = await running.models.load(str(bundles["encoding"]))
            with pytest.raises(TokenizerError, match="backtracks"):
                await asyncio.to_thread(encoding.tokenizer.encode, TEXT)
            decoding = await running.models.load(str(bundles["decoding"]))
            before = pids(decoding)
            for _ in range(3):
                with raises(TokenizerError, match=r"tokenizer\.json"):
                    await tokens_of(decoding, [5, 6], dataclasses.replace(GREEDY, logit_bias={4000: 100.0}))
            assert len(await tokens_of(decoding, [5, 6], dataclasses.replace(GREEDY, logit_bias={4001: 100.0}))) == 4
            assert pids(decoding) == before
            assert not any(decoding.deaths().values())
            assert len(await tokens_of(encoding, [5, 6], GREEDY)) == 4
            assert (await prompts_of(encoding, "a", "prompt", ServingFields()))[0][0] == [1]

    asyncio.run(main())
