"""penstock-lite: what ends a text, how it is guessed ahead and where weights lie; and text in JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers

from penstock import LLM, SamplingParams
from penstock.checkpoint.tokenizer_file import BYTE_ALPHABET
from penstock.core.tokenizer import TOKENIZER_SEGMENT
from tests.devices.conftest import DEMO
from tests.support.tiny_graph import VOCAB, tiny_graph, write_bundle
from tests.support.tokenizer_kinds import segment_of

pytestmark = pytest.mark.long

BUNDLE = DEMO / "demo.psm"
PROMPT = "class Stack:\n    def push(self, item):"

Command = Callable[..., str]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(BUNDLE)


STOPS = [
    (["self."], "in"),
    (["\n\n", "\n    def"], "over"),
    (["_", "__"], "prefix"),
    (["never there"], "none"),
    (["item)", "(item)", "tem"], "same end"),
]


@pytest.mark.parametrize("guesses", [0, 7])
@pytest.mark.parametrize("stops", [stops for stops, _ in STOPS], ids=[name for _, name in STOPS])
def test_stop_strings_end_where_graph_modes_end(
    stops: list[str], guesses: int, llm: LLM, lite: Path, command: Command
) -> None:
    options = [word for stop in stops for word in ("--stop", stop)]
    for temperature in (0.0, 0.9):
        params = SamplingParams(temperature=temperature, top_k=0, seed=5, max_tokens=60, stop=stops)
        wanted = llm.generate(PROMPT, params)
        words = ["--max-tokens", 60, "--temperature", temperature, "--seed", 5, "--top-k", 0]
        words += ["--prompt-lookup", guesses]
        found = json.loads(command(lite, BUNDLE, PROMPT, "--json", *words, *options))
        assert found["token_ids"] == list(wanted.token_ids)
        assert (found["text"], found["finish_reason"]) == (wanted.text, wanted.finish_reason)
        assert command(lite, BUNDLE, PROMPT, *words, *options) == wanted.text + "\n"


def test_penalties_and_guesses(tmp_path: Path, lite: Path, command: Command) -> None:
    """A guess is drawn with the text before it as its history."""
    defaults = b'{"do_sample": true, "temperature": 0.7, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.05}'
    path = write_bundle(tmp_path / "tiny.psm", tiny_graph(), segments={"generation_config.json": defaults})
    words = [path, "5 6 7 8 5 6 7 8 5 6", "--ids", "--seed", 3, "--max-tokens", 200, "--json"]
    alone, ahead = (json.loads(command(lite, *words, "--prompt-lookup", n)) for n in (0, 9))
    assert ahead["num_guessed_tokens"] > 0
    assert ahead["token_ids"] == alone["token_ids"]
    with LLM(path) as llm:
        wanted = llm.generate([5, 6, 7, 8, 5, 6, 7, 8, 5, 6], SamplingParams(seed=3, max_tokens=200))
    assert alone["token_ids"] == list(wanted.token_ids)


def test_weights_in_huge_pages(lite: Path, command: Command) -> None:
    mapped, copied = (
        json.loads(command(lite, BUNDLE, PROMPT, "--json", "--bench", "--max-tokens", 20, "--weights", how))
        for how in ("mmap", "huge")
    )
    assert copied["memory"]["private_dirty_bytes"] > mapped["memory"]["private_dirty_bytes"] + 5_000_000


def test_json_names_every_control_character(tmp_path: Path, lite: Path, command: Command) -> None:
    """DEL and C1 too, which JSON allows and a terminal obeys."""
    spelled = {byte: char for char, byte in BYTE_ALPHABET.items()}
    said = '\x7f\u0080\x1b\u009b\u00a0é"'
    base = "".join(spelled[byte] for byte in said.encode())
    vocab = {"a": 0, **{base + "b" * token: token for token in range(1, VOCAB)}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = tokenizers.decoders.ByteLevel()  # type: ignore[assignment]
    path = write_bundle(tmp_path / "tiny.psm", tiny_graph(), segments={TOKENIZER_SEGMENT: segment_of(tokenizer)})
    shown = command(lite, path, "a", "--temperature", 0, "--max-tokens", 3, "--json")
    assert '\\u007f\\u0080\\u001b\\u009b\u00a0é\\"b' in shown
    assert said + "b" in json.loads(shown)["text"]
