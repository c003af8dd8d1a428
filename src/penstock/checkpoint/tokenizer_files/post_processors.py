"""The special tokens around a text, as the classes of transformers 5 put them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from penstock.checkpoint.tokenizer_files.classes import BEGINNING_CLASSES
from penstock.config import ConfigReader, show
from penstock.errors import InvalidFileError

__all__ = ["NO_POST_PROCESSOR", "post_processor"]

NO_POST_PROCESSOR: Final = {"type": ""}
"""The placeholder for the post-processor of a class until the ids of all tokens are known."""

_A, _B = {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}
_XLM_ROBERTA_CLASSES: Final = ("XLMRobertaTokenizer", "CamembertTokenizer")


def post_processor(
    name: str | None, ids: Mapping[str, int], roles: Mapping[str, str], config: ConfigReader
) -> dict[str, Any] | None:
    """Return the post_processor of a tokenizer.json; None if nothing is put around a text.

    ``name``: the class.  ``ids``: those of all tokens.  ``roles``: the texts of the special tokens.  Raises
    InvalidFileError for a special token that is needed and that no file has.
    """
    if name == "RobertaTokenizer":
        sep, cls = ([text, ids[text]] for text in (_text(role, ids, roles) for role in ("sep_token", "cls_token")))
        return {
            "type": "RobertaProcessing",
            "sep": sep,
            "cls": cls,
            "trim_offsets": config.bool("trim_offsets", True),
            "add_prefix_space": config.bool("add_prefix_space", False),
        }
    if name in _XLM_ROBERTA_CLASSES:
        bos, eos = (_text(role, ids, roles) for role in ("bos_token", "eos_token"))
        begin, end = _special(bos, 0), _special(eos, 0)
        return _template([begin, _A, end], [begin, _A, end, end, _zero(_B), end], ids)
    if name == "DebertaV2Tokenizer":
        first, last = (_text(role, ids, roles) for role in ("cls_token", "sep_token"))
        around = [_special(first, 0), _A, _special(last, 0)]
        return _template(around, [*around, _B, _special(last, 1)], ids)
    if name == "T5Tokenizer":
        end = _special(_text("eos_token", ids, roles), 0)
        return _template([_A, end], [_A, end, _zero(_B), end], ids)
    added = {
        "bos_token": config.bool("add_bos_token", name in BEGINNING_CLASSES),
        "eos_token": config.bool("add_eos_token", False),
    }
    single, second = [_A], [_B]
    for role, at in (("bos_token", 0), ("eos_token", 2)):
        if added[role] and role in roles:
            text = _text(role, ids, roles)
            single.insert(at, _special(text, 0))
            second.insert(at, _special(text, 1))
    return _template(single, [*single, *second], ids) if len(single) > 1 else None


def _special(text: str, segment: int) -> dict[str, Any]:
    return {"SpecialToken": {"id": text, "type_id": segment}}


def _zero(item: dict[str, Any]) -> dict[str, Any]:
    """Return the second text, whose tokens have the segment of the first."""
    return {"Sequence": {**item["Sequence"], "type_id": 0}}


def _template(single: list[dict[str, Any]], pair: list[dict[str, Any]], ids: Mapping[str, int]) -> dict[str, Any]:
    texts = {item["SpecialToken"]["id"] for item in pair if "SpecialToken" in item}
    special = {text: {"id": text, "ids": [ids[text]], "tokens": [text]} for text in sorted(texts)}
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}


def _text(role: str, ids: Mapping[str, int], roles: Mapping[str, str]) -> str:
    """Return the text of a special token that the tokenizer has."""
    text = roles.get(role)
    if text is None or text not in ids:
        raise InvalidFileError(f"{role}: expected a token of the vocabulary, got {show(text)}", param=role)
    return text
