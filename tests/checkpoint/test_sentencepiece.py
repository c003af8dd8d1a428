"""SentencePiece models: the tokens are those of the package ``sentencepiece`` 0.2.3, and damage is refused.

``data/pieces.model`` is byte pair encoding with 460 pieces, trained on this project's documents; ``data/pieces.json``
has texts and the ids that the package gives them.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from penstock.checkpoint.sentencepiece import merges
from penstock.checkpoint.sentencepiece.model import read_sentencepiece
from penstock.checkpoint.sentencepiece.tokenizer import sentencepiece_tokenizer
from penstock.checkpoint.side_files import read_folder_files
from penstock.core import tokenizer as core_tokenizer
from penstock.errors import InvalidFileError
from penstock.graph.tokenizer.compiler import compile_tokenizer
from tests.support.errors import raises

DATA = Path(__file__).parent / "data"
MODEL = (DATA / "pieces.model").read_bytes()
PAIRS: list[tuple[str, list[int]]] = json.loads((DATA / "pieces.json").read_text())


def made(**config: Any) -> Tokenizer:
    found = sentencepiece_tokenizer(MODEL, json.dumps(config).encode())
    assert found is not None
    return Tokenizer.from_str(found.decode())


def message(*fields: tuple[int, bytes | int]) -> bytes:
    """Return a protobuf message; all numbers and lengths are below 128."""
    parts = [
        bytes([number << 3, value]) if isinstance(value, int) else bytes([number << 3 | 2, len(value)]) + value
        for number, value in fields
    ]
    return b"".join(parts)


def test_tokens_are_those_of_the_package(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(MODEL)
    files = read_folder_files(tmp_path)  # without the extra
    library = Tokenizer.from_str(files["tokenizer.json"].decode())
    data, note = compile_tokenizer(files)
    compiled = core_tokenizer.NativeTokenizer.of_segment(data)
    assert (note, compiled.info.unsupported) == ("", "")
    for text, ids in PAIRS:
        assert library.encode(text, add_special_tokens=False).ids == ids
        assert compiled.encode(text, add_special_tokens=False) == ids
        assert compiled.encode(text) == [1, *ids]
        assert library.decode(ids) == compiled.decode(ids) == text.replace("\u2581", " ")


def test_the_config_says_what_is_added() -> None:
    token = {"content": "<extra>", "special": True, "rstrip": True}  # takes the spaces behind it
    end = {"content": "</s>", "special": True}
    tokenizer = made(add_bos_token=False, add_eos_token=True, added_tokens_decoder={"2": end, "460": token})
    assert tokenizer.encode("a<extra>  b").ids[-1] == 2
    assert tokenizer.encode("a<extra>  b", add_special_tokens=False).ids == [
        *PAIRS[4][1],
        460,
        *made().encode("b").ids[1:],
    ]
    assert made(add_prefix_space=False).encode("a", add_special_tokens=False).ids == [made().token_to_id("a")]


def test_the_newer_form_has_no_mark_behind_a_special_token() -> None:
    mark, a = made().token_to_id("\u2581"), made().token_to_id("a")
    older, newer = (made(legacy=legacy).encode("a<s>a", add_special_tokens=False).ids for legacy in (True, False))
    assert newer == [*PAIRS[4][1], 1, a]
    assert older == [*PAIRS[4][1], 1, *PAIRS[4][1]]
    assert made(legacy=False).encode(" ", add_special_tokens=False).ids == [mark]


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "flag": ({"legacy": 1}, "legacy"),
    "gap": ({"added_tokens_decoder": {"461": {"content": "x!"}}}, "added_tokens_decoder"),
    "other": ({"added_tokens_decoder": {"5": {"content": "x!"}}}, "added_tokens_decoder"),
    "twice": ({"added_tokens_decoder": {"460": {"content": "</s>"}}}, "added_tokens_decoder"),
    "bos": ({"bos_token": "<begin>"}, "bos_token"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_wrong_configs_are_refused_by_name(case: str) -> None:
    config, param = CONFIGS[case]
    with raises(InvalidFileError, param=param):
        made(**config)


def test_other_kinds_are_left_to_transformers() -> None:
    assert sentencepiece_tokenizer(MODEL, b'{"tokenizer_class": "GemmaTokenizer"}') is None
    piece = (1, message((1, b"<unk>"), (3, 2)))
    exact = (3, message((4, 0)))
    assert sentencepiece_tokenizer(message(piece, exact), b"{}") is None  # Unigram
    byte_pairs = (2, message((3, 2)))
    assert sentencepiece_tokenizer(message(piece, byte_pairs), b"{}") is None  # removes spaces
    charsmap = (3, message((4, 0), (2, b"map")))
    assert sentencepiece_tokenizer(message(piece, byte_pairs, charsmap), b"{}") is None
    assert sentencepiece_tokenizer(message(piece, byte_pairs, exact), b'{"add_bos_token": false}') is not None


def test_merges_are_all_pairs_of_pieces() -> None:
    source = random.Random(2)
    texts = list(dict.fromkeys("".join(source.choices("ab\u2581", k=source.randint(1, 6))) for _ in range(400)))
    scores = {text: float(source.randint(-3, 0)) for text in texts}
    ids = {text: token for token, text in enumerate(texts)}
    pairs = [(text[:at], text[at:]) for text in texts for at in range(1, len(text))]
    found = [[left, right] for left, right in pairs if left in ids and right in ids]
    found.sort(key=lambda pair: (-scores["".join(pair)], ids["".join(pair)], ids[pair[0]], ids[pair[1]]))
    assert len(found) > 300
    assert merges.merges_by_score(scores, ids, "pieces", "m.model") == found


def test_long_pieces_and_many_merges_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"{number:04}" + "a" * 4000 for number in range(1000)]  # 4 million places to split a piece
    ids = {text: token for token, text in enumerate(texts)}
    assert merges.merges_by_score(dict.fromkeys(texts, 0.0), ids, "pieces", "m.model") == []
    chain = {"a" * num_chars: 0.0 for num_chars in range(1, 300)}
    monkeypatch.setattr(merges, "MAX_MERGES", 40_000)
    with raises(InvalidFileError, param="pieces", match="expected pieces with at most 40000 merges"):
        merges.merges_by_score(chain, dict.fromkeys(chain, 0), "pieces", "m.model")
    monkeypatch.setattr(merges, "MAX_CHARS", 44_849)
    with raises(InvalidFileError, param="pieces", match="44849 characters, got 44850"):
        merges.merges_by_score(chain, dict.fromkeys(chain, 0), "pieces", "m.model")


DAMAGED = {
    "empty": b"",
    "key": b"\x00",
    "group": b"\x0b",
    "varint": b"\x08" + b"\xff" * 11,
    "length": b"\x0a\x7f",
    "text": message((1, message((1, b"\xff")))),
    "no_text": message((1, message((3, 1)))),
    "long": b"\x0a\x84\x01\x0a\x81\x01" + b"a" * 129,
    "kind": message((1, message((1, b"a"), (3, 7)))),
    "score": message((1, message((1, b"a"), (2, b"abcde")))),
    "nan": message((1, message((1, b"a")) + b"\x15\x00\x00\xc0\x7f")),
    "twice": message((1, message((1, b"a"))), (1, message((1, b"a")))),
    "no_message": message((1, 5)),
    "trainer": message((1, message((1, b"a"))), (2, message((3, b"x")))),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_models_are_refused(case: str) -> None:
    with raises(InvalidFileError, match=r"tokenizer\.model"):
        read_sentencepiece(DAMAGED[case])


def test_mutated_models_are_read_or_refused() -> None:
    source = random.Random(1)
    for _ in range(300):
        data = bytearray(MODEL)
        for _ in range(source.randint(1, 4)):
            data[source.randrange(len(data))] = source.randrange(256)
        cut = source.randrange(len(data)) if source.random() < 0.3 else len(data)
        try:
            model = read_sentencepiece(bytes(data[:cut]))
        except InvalidFileError:
            continue
        assert len(model.texts) == len(model.scores) == len(model.kinds) > 0
