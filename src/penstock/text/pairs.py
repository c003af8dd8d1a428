"""Two texts as one sequence of token ids, for cross-encoders: the post-processor of ``tokenizer.json`` says how."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from penstock.config import ConfigReader, parse_object, show
from penstock.errors import InvalidArgumentError, InvalidFileError, UnsupportedError

__all__ = ["PairTemplate", "read_pair_template"]

_FILE: Final = "tokenizer.json: post_processor"
_MAX_BYTES: Final = 256 << 20
_MAX_VALUES: Final = 1 << 23
"""Room for the largest vocabularies, 262,144 tokens with their merges."""


@dataclass(frozen=True)
class PairTemplate:
    """The parts of a pair in their order: "A", "B" or the ids of special tokens; each with its segment, 0 or 1."""

    parts: tuple[tuple[str | tuple[int, ...], int], ...]

    def fill(
        self, first: Sequence[int], second: Sequence[int], segment_offset: int = 0, max_len: int | None = None
    ) -> list[int]:
        """Return the ids of a pair; those of segment 1 are raised by ``segment_offset``.

        ``max_len`` cuts the end of ``second``.  InvalidArgumentError when that leaves nothing of it.
        """
        if max_len is not None:
            num_special = sum(len(part) for part, _ in self.parts if not isinstance(part, str))
            room = max_len - num_special - len(first)
            if room < min(1, len(second)):
                raise InvalidArgumentError(
                    f"the first text of the pair has {len(first)} tokens, which leaves no room for the second in "
                    f"{max_len} tokens",
                    param="query",
                )
            second = second[:room]
        texts = {"A": first, "B": second}
        ids: list[int] = []
        for part, segment in self.parts:
            own = texts[part] if isinstance(part, str) else part
            ids += [token + segment * segment_offset for token in own]
        return ids


def read_pair_template(data: bytes | memoryview) -> PairTemplate:
    """Return the template of pairs of a tokenizer.json.

    Knows TemplateProcessing, BertProcessing and RobertaProcessing of the library ``tokenizers``.  Raises
    UnsupportedError for a file without one of them.
    """
    values = parse_object(data, "tokenizer.json", max_bytes=_MAX_BYTES, max_values=_MAX_VALUES, lenient=True)
    for step in _steps(values.get("post_processor")):
        kind = step.get("type")
        if kind == "TemplateProcessing":
            return _of_template(step)
        if kind == "BertProcessing":
            cls, sep = _special(step, "cls"), _special(step, "sep")
            return PairTemplate(((cls, 0), ("A", 0), (sep, 0), ("B", 1), (sep, 1)))
        if kind == "RobertaProcessing":
            cls, sep = _special(step, "cls"), _special(step, "sep")
            return PairTemplate(((cls, 0), ("A", 0), (sep, 0), (sep, 0), ("B", 0), (sep, 0)))
    raise UnsupportedError(f"{_FILE}: expected TemplateProcessing, BertProcessing or RobertaProcessing, got none")


def _steps(processor: object) -> list[dict[str, Any]]:
    if not isinstance(processor, dict):
        return []
    if processor.get("type") != "Sequence":
        return [processor]
    steps = processor.get("processors")
    return [step for step in steps if isinstance(step, dict)] if isinstance(steps, list) else []


def _special(step: dict[str, Any], key: str) -> tuple[int, ...]:
    """Return the token under a key of BertProcessing or RobertaProcessing, [text, id]."""
    value = step.get(key)
    if not isinstance(value, list) or len(value) != 2 or type(value[1]) is not int or value[1] < 0:
        raise InvalidFileError(f"{_FILE}: {key}: expected a token and its id, got {show(value)}", param=key)
    return (value[1],)


def _of_template(step: dict[str, Any]) -> PairTemplate:
    reader = ConfigReader(step, _FILE)
    specials, pieces = reader.object("special_tokens"), step.get("pair")
    if not isinstance(pieces, list) or len(pieces) > 64:
        raise reader.error("pair", "a list of pieces", pieces)
    parts: list[tuple[str | tuple[int, ...], int]] = []
    for piece in pieces:
        kind, values = next(iter(piece.items()), ("", None)) if isinstance(piece, dict) else ("", None)
        if not isinstance(values, dict):
            raise reader.error("pair", "pieces Sequence and SpecialToken", piece)
        own = ConfigReader(values, f"{_FILE}: pair")
        name, segment = own.str("id"), own.int("type_id", 0, min=0, max=1)
        if kind == "Sequence" and name in ("A", "B"):
            parts.append((name, segment))
            continue
        token = None if specials is None or kind != "SpecialToken" else specials.object(name)
        if token is None:
            raise reader.error("pair", "A, B and tokens of special_tokens", name)
        parts.append((token.int_or_list("ids"), segment))
    if sorted(part for part, _ in parts if isinstance(part, str)) != ["A", "B"]:
        raise reader.error("pair", "A and B once each", pieces)
    return PairTemplate(tuple(parts))
