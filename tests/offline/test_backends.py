"""The same tokens from the engine, ``penstock.lite`` and PyTorch; from a graph that chooses them, too."""

from __future__ import annotations

import mmap
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from penstock import InferConfig, InferTask, pipeline
from penstock.core import native
from penstock.engine.params import SamplingParams
from penstock.errors import InvalidArgumentError, InvalidFileError, UnsupportedError
from penstock.graph.replace_tail import map_weights, replace_tail
from penstock.llm.llm import LLM
from penstock.llm.result import Result
from tests.offline.conftest import SCHEMES
from tests.support.errors import raises
from tests.support.lite_demo import BUNDLE, FOLDER, build
from tests.support.marks import mostly_long

PROMPTS = ["def add(a, b):", "class Stack:\n    def push(self, item):", "I love Beijing,because"]
WAYS: list[dict[str, Any]] = [
    {"temperature": 0, "max_tokens": 20},
    {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "seed": 11, "max_tokens": 20},
    {"temperature": 1.1, "min_p": 0.02, "repetition_penalty": 1.3, "seed": 12, "max_tokens": 20, "min_tokens": 5,
     "bad_words": ["return"], "stop": ["None"], "n": 2},
]  # fmt: skip


def answers(results: list[Result]) -> list[object]:
    return [(r.text, r.token_ids, r.finish_reason, [c.token_ids for c in r.choices]) for r in results]


@pytest.mark.parametrize("scheme", mostly_long(SCHEMES, "w4a8"))
def test_three_backends_give_the_same_tokens(scheme: str, bundles: dict[str, Path]) -> None:
    found: dict[str, list[object]] = {}
    for backend in ("graph", "lite", "eager"):
        source, options = (FOLDER, {"scheme": scheme}) if backend == "eager" else (bundles[scheme], {})
        with pipeline("text_generation", source, backend=backend, **options) as generate:
            found[backend] = [answers(generate(PROMPTS, **way)) for way in WAYS]
            streamed = list(generate(PROMPTS[0], stream=True, **WAYS[1]))
            assert "".join(delta.text for delta in streamed) == found[backend][1][0][0]
            assert [token for delta in streamed for token in delta.token_ids] == found[backend][1][0][1]
            alone = generate(PROMPTS[1], **WAYS[1])
            assert answers([alone]) == found[backend][1][1:2]
    assert found["graph"] == found["lite"] == found["eager"]


@pytest.mark.parametrize("backend", ["graph", "lite"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_graph_that_chooses_gives_the_same_tokens(scheme: str, backend: str, bundles: dict[str, Path]) -> None:
    with pipeline("text_generation", bundles[scheme], backend=backend) as generate:
        expected = answers(generate(PROMPTS, **WAYS[0]))
        assert answers(generate(PROMPTS, is_sample_acceleration=True, max_tokens=20)) == expected
        assert answers(generate(PROMPTS, is_sample_acceleration=False, **WAYS[0])) == expected
        with raises(UnsupportedError, param="temperature", match="argmax"):
            generate(PROMPTS[0], is_sample_acceleration=True, temperature=0.5)


@pytest.mark.parametrize("backend", ["graph", "lite"])
def test_it_chooses_in_huge_pages_too(backend: str, tmp_path: Path) -> None:
    file = tmp_path / "config.ini"
    file.write_text("[model]\nweights = huge\nbatch_size = 2\nverify = true\n")
    with pipeline("text_generation", BUNDLE, backend=backend, config_path=file) as generate:
        expected = answers(generate(PROMPTS, **WAYS[0]))
        assert answers(generate(PROMPTS, is_sample_acceleration=True, max_tokens=20)) == expected


@pytest.mark.parametrize("backend", ["graph", "lite"])
def test_it_chooses_from_a_whole_file_where_pages_are_large(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mapping of whole pages would put what lies around the weights in the place of other segments."""
    monkeypatch.setattr("penstock.offline.backends.map_weights", lambda *_: pytest.fail("mapped"))
    with pipeline("text_generation", BUNDLE, backend=backend) as generate:
        expected = answers(generate(PROMPTS, **WAYS[0]))
        monkeypatch.setattr(mmap, "PAGESIZE", 65536)
        assert answers(generate(PROMPTS, is_sample_acceleration=True, max_tokens=20)) == expected
    with native.Model.open(BUNDLE) as model, raises(UnsupportedError, param="source", match="got 65536"):
        map_weights(model, BUNDLE, model.stamp)


def test_weights_of_a_replaced_file_are_not_mapped(tmp_path: Path) -> None:
    """Between the making of the hollow bundle and its filling another bundle came: its weights are others."""
    source, other, hollow = tmp_path / "source.psm", tmp_path / "other.psm", tmp_path / "hollow.psm"
    shutil.copy(BUNDLE, source)
    shutil.copy(BUNDLE, other)
    stamp = replace_tail(source, hollow, "argmax", without_weights=True)
    with native.Model.open(hollow) as model:
        map_weights(model, source, stamp)
        os.replace(other, source)
        with raises(InvalidFileError, param="file", match=f"{source}: file: "):
            map_weights(model, source, stamp)


def test_eager_has_no_graph() -> None:
    with (
        pipeline("text_generation", FOLDER, backend="eager") as generate,
        raises(UnsupportedError, param="is_sample_acceleration", match="eager"),
    ):
        generate("a", is_sample_acceleration=True)


def test_streams_of_lite_that_take_turns() -> None:
    """Two streams, a list between them and threads: each gets what it would get alone."""
    with pipeline("text_generation", BUNDLE, backend="lite") as generate:
        alone = [generate(prompt, **WAYS[1]).token_ids for prompt in PROMPTS[:2]]
        streams = [generate(prompt, stream=True, **WAYS[1]) for prompt in PROMPTS[:2]]
        found: list[list[int]] = [[], []]
        for turn in range(20):
            for stream, ids in zip(streams, found, strict=True):
                ids += next(stream).token_ids
            if turn == 7:
                assert [one.token_ids for one in generate(PROMPTS[:2], **WAYS[1])] == alone
        assert found == alone
        assert [stream.result().token_ids for stream in streams] == alone
        outcomes: dict[int, list[int]] = {}

        def work(index: int) -> None:
            outcomes[index] = generate(PROMPTS[index % 2], **WAYS[1]).token_ids

        threads = [threading.Thread(target=work, args=(index,)) for index in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [outcomes[index] for index in range(6)] == alone * 3


def test_more_prompts_than_lite_takes_at_once(tmp_path: Path) -> None:
    file = tmp_path / "config.ini"
    file.write_text("[model]\nbatch_size = 2\nmax_tokens = 5\n")
    prompts = [f"def f{index}(x):" for index in range(7)]
    with pipeline(model=BUNDLE, backend="lite", config_path=file) as one, pipeline(model=BUNDLE) as other:
        assert answers(one(prompts, **WAYS[0])) == answers(other(prompts, **WAYS[0]))


def test_models_that_are_open_already() -> None:
    with LLM(BUNDLE) as llm, build() as model:
        with pipeline(model=llm) as one, pipeline("text_generation", model) as other:
            expected = answers([one(PROMPTS[0], **WAYS[1])])
            assert answers([other(PROMPTS[0], **WAYS[1])]) == expected
            assert (one.backend, other.backend) == ("graph", "lite")
            with raises(UnsupportedError, param="is_sample_acceleration", match="open"):
                one(PROMPTS[0], is_sample_acceleration=True)
        assert llm.generate(PROMPTS[0], SamplingParams(max_tokens=1)).token_ids  # closing the pipeline left it open
        assert model.get_model_info("scheme") == "w8a8"
        with raises(InvalidArgumentError, param="backend", match="'graph'"):
            pipeline(model=llm, backend="lite")
        with raises(InvalidArgumentError, param="backend", match="'lite' .*'graph'"):
            pipeline(model=model, backend="ms")
        with raises(InvalidArgumentError, param="device_id"):
            pipeline(model=llm, device_id=0)
        for running, backend in ((llm, "graph"), (model, "lite")):
            for name, value in (("threads", 2), ("scheme", "w4a8"), ("network", "a.py:Net"), ("search_path", "/")):
                with pytest.raises(InvalidArgumentError, match=rf"^{name}: .*already open"):
                    pipeline(model=running, backend=backend, **{name: value})


def test_lengths_and_ends() -> None:
    for backend in ("graph", "lite"):
        with pipeline(model=BUNDLE, backend=backend, infer_seq_length=16) as generate:
            result = generate(list(range(5, 15)), temperature=0, ignore_eos=True)
            assert (len(result.token_ids), result.finish_reason) == (6, "length")
            with raises(InvalidArgumentError, param="prompt", match=r"^prompts\[1\]: .*holds 16"):
                generate([[1], [1] * 16])
            with raises(InvalidArgumentError, param="stream"):
                generate(["a", "b"], stream=True)
            with raises(InvalidArgumentError, param="max_length", match="max_tokens"):
                generate("a", max_length=3)
            with raises(InvalidArgumentError, param="add_special_tokens"):
                generate("a", add_special_tokens=1)
            assert generate([]) == []
        with raises(InvalidArgumentError, code="closed"):
            generate("a")


class Words:
    """A tokenizer as transformers has them, of ids and nothing else."""

    all_special_ids = (0,)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + [int(word) for word in text.split()]

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(f" {one}" for one in ids if one not in self.all_special_ids)


@pytest.mark.parametrize("backend", ["graph", "lite"])
def test_tokenizers(backend: str, tmp_path: Path) -> None:
    with pipeline(model=BUNDLE, backend=backend, tokenizer=Words()) as generate:
        result = generate("40 50 60", temperature=0, max_tokens=8)
        assert result.prompt_token_ids == [1, 40, 50, 60]
        assert result.text == "".join(f" {one}" for one in result.token_ids)
        assert str(result) == result.text
        cut = generate("40 50 60", add_special_tokens=False, temperature=0, max_tokens=8)
        assert cut.prompt_token_ids == [40, 50, 60]
        pieces = [delta.text for delta in generate("40 50 60", stream=True, temperature=0, max_tokens=8)]
        assert "".join(pieces) == result.text
        assert len([*generate("40 50 60", stream=True, temperature=0, max_tokens=100)]) > 1
        stop = generate("40 50 60", temperature=0, max_tokens=8, stop=f" {result.token_ids[3]}")
        assert stop.text == "".join(f" {one}" for one in result.token_ids[:3])
    for path in (FOLDER, FOLDER / "tokenizer.json", BUNDLE):
        with pipeline(model=BUNDLE, backend=backend, tokenizer=path) as generate:
            assert generate(PROMPTS[0], **WAYS[0]).prompt_token_ids == LLM(BUNDLE).tokenizer.encode(PROMPTS[0])
    with raises(InvalidArgumentError, param="tokenizer"):
        pipeline(model=BUNDLE, tokenizer=object())


def test_a_tokenizer_of_transformers() -> None:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(tokenizer_file=str(FOLDER / "tokenizer.json"))
    with pipeline(model=BUNDLE, tokenizer=theirs) as one, pipeline(model=BUNDLE) as other:
        assert answers(one(PROMPTS, **WAYS[0])) == answers(other(PROMPTS, **WAYS[0]))


def test_tasks() -> None:
    assert {"text_generation", "fill_mask", "translation"} <= {*InferTask.support_list()}
    assert InferTask.check_task_valid("text_generation")
    assert not InferTask.check_task_valid("image_to_text")
    with raises(InvalidArgumentError, param="task", match="'image_to_text'"):
        pipeline("image_to_text", BUNDLE)
    for name in ("image_processor", "audio_processor"):
        with raises(UnsupportedError, param=name):
            pipeline("text_generation", BUNDLE, **{name: object()})
    with raises(InvalidArgumentError, param="batch"):
        pipeline("text_generation", BUNDLE, batch=3)
    with raises(InvalidArgumentError, param="backend", match="graph, lite, eager .*'ascend'"):
        pipeline("text_generation", BUNDLE, backend="ascend")
    for name, backend in (("ms", "graph"), ("mslite", "lite")):
        with pipeline("text_generation", BUNDLE, backend=name) as generate:
            assert generate.backend == backend


def test_a_task_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InferTask, "_tasks", dict(InferTask._tasks))
    made: list[Any] = []

    def shout(config: InferConfig, *, backend: str, tokenizer: object = None, image_processor: object = None) -> Any:
        made.append((config.bundle, backend, tokenizer, image_processor))
        return str.upper

    InferTask.register("shout", shout, uses=("tokenizer", "image_processor"))
    eye = object()
    assert pipeline("shout", BUNDLE, image_processor=eye)("a") == "A"
    assert made == [(BUNDLE, "graph", None, eye)]
    with raises(UnsupportedError, param="audio_processor"):
        pipeline("shout", BUNDLE, audio_processor=eye)
    with raises(InvalidArgumentError, param="task_type", match="'shout'"):
        InferTask.register("shout", shout)
    assert "shout" in InferTask.support_list()
