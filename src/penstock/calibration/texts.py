"""Calibration texts: read from a file, cut into sequences of token ids, or sampled from the model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from penstock.checkpoint.side_files import read_small_file
from penstock.config import is_integer
from penstock.errors import InvalidArgumentError, InvalidFileError, PenstockError
from penstock.validation import MAX_TOKEN, refusal

if TYPE_CHECKING:
    from penstock.llm.llm import LLM

__all__ = [
    "DEFAULT_TOKENS", "MIN_TOKENS", "SEQUENCE_LEN", "CalibrationData", "calibration_data", "check_num_tokens",
    "read_texts",
]  # fmt: skip

DEFAULT_TOKENS: Final = 65_536
"""The number of calibration tokens that is used at most, unless the caller asks for another."""
MIN_TOKENS: Final = 256
SEQUENCE_LEN: Final = 512
_MAX_BYTES: Final = 1 << 30
_SAMPLES_AT_ONCE: Final = 8
_PIECE_CHARS: Final = 1 << 16
_ROLES: Final = {"human": "user", "gpt": "assistant", "system": "system", "user": "user", "assistant": "assistant"}
Text: TypeAlias = str | list[dict[str, str]] | tuple[int, ...]
"""A text, the messages of a conversation, or token ids."""


@dataclass(frozen=True)
class CalibrationData:
    """Sequences of token ids, each computed from its first token.  ``source`` names the file, or "samples"."""

    sequences: list[list[int]]
    source: str

    @property
    def num_tokens(self) -> int:
        """The number of tokens of all sequences."""
        return sum(map(len, self.sequences))

    @property
    def digest(self) -> str:
        """The SHA-256 of the sequences: their lengths and ids."""
        digest = hashlib.sha256()
        for ids in self.sequences:
            digest.update(np.array([len(ids), *ids], "<i4").tobytes())
        return digest.hexdigest()


def read_texts(path: Path) -> list[Text]:
    """Return the texts of a file.

    A ``.jsonl`` file has a JSON value on each line, a ``.json`` file a list of them: a string, an object with ``text``,
    ``prompt`` (and ``completion``), ``messages``, ``conversations`` or ``input_ids`` (token ids), or a list of
    messages.  Any other file is one plain text in UTF-8.  Raises FileAccessError or InvalidFileError, which names the
    line.
    """
    data = read_small_file(path, _MAX_BYTES)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidFileError(
            f"{path}: expected UTF-8 text, got other bytes at {error.start}", param="calibration"
        ) from None
    suffix = path.suffix.lower()
    if suffix not in (".jsonl", ".json"):
        return [text] if text.strip() else []
    lines = text.split("\n") if suffix == ".jsonl" else [text]
    values: list[tuple[str, Any]] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            values.append((f"line {number}", _parse(path, number, line)))
    if suffix == ".json":
        items = values[0][1] if values and isinstance(values[0][1], list) else [value for _, value in values]
        values = [(f"item {number}", item) for number, item in enumerate(items, 1)]
    return [_text_of(value, f"{path}: {where}") for where, value in values]


def _parse(path: Path, number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidFileError(
            f"{path}: line {number}: expected JSON, got {line:.60}: {error}", param="calibration"
        ) from None


def _text_of(value: Any, where: str) -> Text:
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        messages = value.get("messages", value.get("conversations"))
        if messages is not None:
            return _messages(messages, where)
        if "input_ids" in value:
            return _token_ids(value["input_ids"], where)
        if isinstance(value.get("text"), str):
            return str(value["text"])
        if isinstance(value.get("prompt"), str):
            completion = value.get("completion", "")
            return str(value["prompt"]) + (completion if isinstance(completion, str) else "")
    elif isinstance(value, list):
        return _messages(value, where)
    raise InvalidFileError(
        f"{where}: expected a string, or an object with text, prompt, messages, conversations or input_ids",
        param="calibration",
    )


def _token_ids(value: Any, where: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(is_integer(item, 0, MAX_TOKEN) for item in value):
        raise InvalidFileError(f"{where}: input_ids: expected a list of token ids", param="calibration")
    return tuple(value)


def _messages(value: Any, where: str) -> list[dict[str, str]]:
    messages = []
    for message in value if isinstance(value, list) else [None]:
        if isinstance(message, dict):
            role = message.get("role", _ROLES.get(str(message.get("from"))))
            content = message.get("content", message.get("value"))
            if isinstance(role, str) and isinstance(content, str):
                messages.append({"role": role, "content": content})
                continue
        raise InvalidFileError(f"{where}: expected messages with role and content", param="calibration")
    return messages


def calibration_data(
    llm: LLM, calibration: Path | str | None, max_tokens: int = DEFAULT_TOKENS, sequence_len: int = SEQUENCE_LEN
) -> CalibrationData:
    """Return the sequences to calibrate with: those of a file, or the model's own samples without one.

    A text becomes sequences of up to ``sequence_len`` tokens, or as many as the model's context holds; of more than
    ``max_tokens``, evenly spaced sequences are taken.  Raises InvalidArgumentError for less than ``MIN_TOKENS`` tokens.
    """
    if calibration is None:
        return CalibrationData(_samples(llm, max_tokens, sequence_len), "samples")
    path = Path(calibration)
    sequence_len = min(sequence_len, llm.info.context_len)
    sequences = []
    for text in read_texts(path):
        ids = _encode(llm, text, path)
        sequences += [ids[start : start + sequence_len] for start in range(0, len(ids), sequence_len)]
    data = CalibrationData(_evenly(sequences, max_tokens), path.name)
    _check_least(data.num_tokens, path)
    return data


def _check_least(num_tokens: int, path: Path) -> None:
    if num_tokens < MIN_TOKENS:
        raise InvalidArgumentError(
            f"calibration: expected at least {MIN_TOKENS} tokens, got {num_tokens} in {path}; pass more text, "
            "such as 100 kB of what the model will work on",
            param="calibration",
            code="too_few_tokens",
        )


def check_num_tokens(files: Mapping[str, bytes], calibration: Path, enough: int = MIN_TOKENS) -> int:
    """Return the number of tokens of a file of texts, or a number of at least ``enough``, without a model.

    ``files``: the tokenizer and the files beside it, by name.  A long text is encoded in pieces, which may have a few
    tokens more than the whole.  Raises InvalidArgumentError for less than ``MIN_TOKENS`` tokens.
    """
    num_tokens = 0
    for length in _lengths(read_texts(calibration), files, calibration):
        num_tokens += length
        if num_tokens >= enough:
            break
    _check_least(num_tokens, calibration)
    return num_tokens


def _lengths(texts: Sequence[Text], files: Mapping[str, bytes], path: Path) -> Iterator[int]:
    """Yield numbers of tokens; only words need a tokenizer."""
    from penstock.text.chat_template import encode_chat
    from penstock.text.tokenizer import Tokenizer

    words: list[str | list[dict[str, str]]] = []
    for text in texts:
        if isinstance(text, tuple):
            yield len(text)
        else:
            words.append(text)
    if not words:
        return
    with closing(Tokenizer(files)) as tokenizer:
        for text in words:
            if isinstance(text, str):
                for start in range(0, len(text), _PIECE_CHARS):
                    yield len(tokenizer.encode(text[start : start + _PIECE_CHARS]))
                continue
            try:
                yield len(encode_chat(tokenizer, text))
            except PenstockError as error:
                raise error.with_message(f"{path}: {error}") from None


def _encode(llm: LLM, text: Text, path: Path) -> list[int]:
    if isinstance(text, str):
        return list(llm.tokenizer.encode(text))
    if isinstance(text, tuple):
        return _known_ids(list(text), llm.info.vocab_size, path)
    try:
        return llm.chat_prompt(text, continue_final_message=False)
    except PenstockError as error:
        raise error.with_message(f"{path}: {error}") from None


def _known_ids(ids: list[int], vocab_size: int, path: Path) -> list[int]:
    if ids and max(ids) >= vocab_size:
        raise InvalidArgumentError(
            f"calibration: {path}: expected token ids below {vocab_size}, got {max(ids)}", param="calibration"
        )
    return ids


def _evenly(sequences: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
    """Return evenly spaced sequences of ``max_tokens`` tokens together; the last one is cut to that."""
    total = sum(map(len, sequences))
    if total <= max_tokens:
        return list(sequences)
    count = max(1, len(sequences) * max_tokens // total)
    while True:
        taken = [sequences[index * len(sequences) // count] for index in range(count)]
        excess = sum(map(len, taken)) - max_tokens
        if excess >= 0:
            break
        count += 1
    while excess >= len(taken[-1]):
        excess -= len(taken.pop())
    taken[-1] = taken[-1][: len(taken[-1]) - excess]
    return taken


def _samples(llm: LLM, max_tokens: int, sequence_len: int) -> list[list[int]]:
    """Sample texts from the model, from its first token on, with fixed seeds."""
    first = _first_token(llm)
    length = min(sequence_len, llm.info.context_len) - 1
    sequences: list[list[int]] = []
    while sum(map(len, sequences)) < max_tokens:
        seeds = range(len(sequences), len(sequences) + _SAMPLES_AT_ONCE)
        params = [_sampling(seed, length) for seed in seeds]
        results = llm.generate([[first]] * len(params), params)
        sequences += [[first, *result.token_ids] for result in results]
    return sequences


def _sampling(seed: int, length: int) -> Any:
    from penstock.engine.params import SamplingParams

    return SamplingParams(temperature=1.0, top_k=0, top_p=1.0, max_tokens=length, seed=seed, ignore_eos=True)


def _first_token(llm: LLM) -> int:
    """Return the token that texts begin with."""
    ids = llm.tokenizer.encode("") if llm.has_text else []
    return ids[0] if ids else min(llm.generation.eos_token_ids, default=0)


def check_max_tokens(value: object) -> int:
    """Return the number of calibration tokens; InvalidArgumentError for one that is too small."""
    if isinstance(value, bool) or not isinstance(value, int) or value < MIN_TOKENS:
        raise refusal("calibration_tokens", f"an integer of at least {MIN_TOKENS}", value)
    return value
