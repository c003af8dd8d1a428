"""A fake model with a byte-level tokenizer, as a factory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import tokenizers

from penstock.core.tokenizer import TOKENIZER_SEGMENT
from penstock.engine import engine as engine_module
from penstock.engine.options import EngineOptions
from penstock.graph.tokenizer.compiler import compile_tokenizer
from penstock.llm.llm import LLM
from penstock.runtime.open import Opened
from penstock.runtime.program import ProgramLimits
from penstock.text.text_stream import TextStream
from penstock.text.tokenizer import Tokenizer
from tests.support.engine_requests import Later
from tests.support.fake_program import FakeProgram

WORDS = ["the", "cat", "sat", "on", "mat", "Ġthe", "Ġcat", "Ġsat", "END", "ĠEND"]


def byte_level_json() -> bytes:
    """A byte-level BPE tokenizer: two special tokens, all bytes, a few words as added merges."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i + 2 for i, token in enumerate(alphabet)}
    model = tokenizers.models.BPE(vocab={"<s>": 0, "</s>": 1, **vocab}, merges=[])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.add_tokens(["plain"])
    return tokenizer.to_str().encode()


def byte_fallback_json() -> bytes:
    """A sentencepiece-style tokenizer: words with the underscore mark, and a token per byte."""
    words = ["<unk>", "<s>", "</s>"]
    words += [f"<0x{byte:02X}>" for byte in range(256)]
    words += ["▁", "▁the", "▁cat", "a", "b", "c", "t", "h", "e", "s", "日"]
    pieces = {word: index for index, word in enumerate(words)}
    model = tokenizers.models.BPE(vocab=pieces, merges=[], byte_fallback=True, unk_token=words[0], fuse_unk=True)
    tokenizer = tokenizers.Tokenizer(model)
    replace = tokenizers.decoders.Replace("▁", " ")
    steps = [replace, tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    tokenizer.decoder = tokenizers.decoders.Sequence([*steps, tokenizers.decoders.Strip(" ", 1, 0)])
    tokenizer.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer.to_str().encode()


FILES = {
    "tokenizer.json": byte_level_json(),
    "tokenizer_config.json": json.dumps({"bos_token": "<s>", "eos_token": {"content": "</s>"}}).encode(),
    "generation_config.json": json.dumps({"eos_token_id": [1, 258]}).encode(),
}


def stream_of(tokenizer: Tokenizer, ids: list[int]) -> tuple[str, list[str]]:
    """The text of ids as it streams, and its pieces."""
    stream = TextStream(tokenizer)
    pieces = []
    for token in ids:
        stream.push(token)
        pieces.append(stream.take())
    stream.finish()
    return stream.text, [*pieces, stream.take()]


@pytest.fixture(params=["byte_level", "byte_fallback", "byte_level compiled", "byte_fallback compiled"])
def any_tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    kind, _, is_compiled = request.param.partition(" ")
    files = {"tokenizer.json": byte_level_json() if kind == "byte_level" else byte_fallback_json()}
    if is_compiled:
        segment, refused = compile_tokenizer(files)
        assert refused == ""
        files[TOKENIZER_SEGMENT] = segment
    return Tokenizer(files)


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> type[Later]:
    """The clock of engines, by which deadlines are over; ``ahead`` seconds of it are added to the time."""
    monkeypatch.setattr(Later, "ahead", 0.0)
    monkeypatch.setattr(engine_module, "time", Later)
    return Later


@contextmanager
def llms_over_fakes() -> Iterator[Callable[..., LLM]]:
    """LLMs over the fake program; each is closed at the end, after every page was seen to be free."""
    made: list[LLM] = []

    def make(*, windows=(0,), files=None, context_len=512, vocab_size=259, options=None, max_chunk=0, **limits) -> LLM:
        sizes = {"max_tokens": 64, "max_requests": 8, "num_pages": 128} | limits
        program = FakeProgram(
            vocab_size=vocab_size, context_len=context_len, windows=windows, limits=ProgramLimits(**sizes)
        )
        opened = Opened(program, FILES if files is None else files, Path("fake"), [])
        made.append(LLM.of_program(opened, options or EngineOptions(max_chunk=max_chunk)))
        return made[-1]

    yield make
    for llm in made:
        if not llm.engine.program.closed:
            assert not llm.engine.scheduler.has_work, "requests are left"
            for pool in llm.engine.scheduler.ledger.pools:
                assert pool.num_free == pool.num_pages, "pages are left"
            llm.close()
        assert llm.engine.program.closed


@pytest.fixture
def make_llm():
    """LLMs over the fake program, closed at the end of the test."""
    with llms_over_fakes() as make:
        yield make
