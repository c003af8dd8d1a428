"""Complete the tokenizer files of a checkpoint folder from all files that transformers reads.

The result is self-contained: ``tokenizer.json`` has every added token, ``tokenizer_config.json`` names every special
token, and ``generation_config.json`` has the end token of the tokenizer beside its own.  Files that need no change keep
their bytes.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from penstock.checkpoint.bert_vocab import bert_tokenizer
from penstock.checkpoint.generation import SPECIAL_ROLES, end_token_ids
from penstock.checkpoint.sentencepiece.tokenizer import sentencepiece_tokenizer
from penstock.checkpoint.tokenizer_files.byte_level import byte_level_tokenizer
from penstock.checkpoint.tokenizer_files.byte_ranks import (
    is_tiktoken,
    needs_code,
    tekken_tokenizer,
    tiktoken_tokenizer,
    vocabulary_of_code,
)
from penstock.checkpoint.tokenizer_files.classes import (
    BEGINNING_CLASSES,
    SPACE_MARK_CLASSES,
    TEKKEN_CLASS,
    default_roles,
    tokenizer_class,
)
from penstock.checkpoint.tokenizer_files.names import SENTENCEPIECE_FILES, TEKKEN, TIKTOKEN_FILE, VOCABULARY_FILES
from penstock.checkpoint.tokenizer_files.options import apply_options
from penstock.checkpoint.tokenizer_files.post_processors import NO_POST_PROCESSOR, post_processor
from penstock.checkpoint.tokenizer_files.side_tokens import (
    SideTokens,
    default_token,
    merge_tokens,
    read_side_tokens,
    token_ids,
)
from penstock.checkpoint.tokenizer_limits import MAX_TOKENIZER_BYTES, MadeJson, check_json_size, check_tokenizer_file
from penstock.config import MAX_CONFIG_BYTES, ConfigReader, parse_object
from penstock.errors import InvalidFileError

__all__ = ["complete_tokenizer"]

_LOG: Final = logging.getLogger("penstock.tokenizer_files")
_TOKENIZER, _CONFIG, _GENERATION = "tokenizer.json", "tokenizer_config.json", "generation_config.json"


def complete_tokenizer(
    files: Mapping[str, bytes], read: Callable[[str], bytes | None], folder: Path
) -> dict[str, bytes]:
    """Return the tokenizer files of a folder that are new or changed.

    ``files``: those that were read already; ``read`` returns another file of the folder, or None.  Raises
    InvalidFileError for a damaged file, and UnsupportedError for a vocabulary whose conversion needs the extra
    ``penstock[sentencepiece]`` when that is missing.
    """

    def reader(name: str) -> ConfigReader:
        data = files[name] if name in files else read(name)
        if data is None:
            return ConfigReader({}, name)
        data = check_json_size(data, name, MAX_TOKENIZER_BYTES)
        if len(data) <= MAX_CONFIG_BYTES:
            return ConfigReader.parse(data, name)
        return ConfigReader(parse_object(data, name, max_bytes=len(data), max_values=len(data), lenient=True), name)

    is_made = _TOKENIZER not in files
    if is_made and all(read(name) is None for name in VOCABULARY_FILES):
        if file := vocabulary_of_code(folder):
            _LOG.warning("penstock: %s: %s", folder, needs_code(file))
        return {}
    config = reader(_CONFIG)
    opening, making = tokenizer_class(config.values, reader("config.json").values)
    if is_made and read(TEKKEN) is not None:
        opening = making = TEKKEN_CLASS
    tokens = read_side_tokens(config, reader("special_tokens_map.json"), reader("added_tokens.json"))
    if is_made:
        made = _Maker((opening, making), config, tokens, read, folder).make()
        if made is None:
            return {}
        tokenizer = made
        if opening is None and _has_prefix(tokenizer):  # transformers looks for added tokens in the text as it is
            tokens.listed = [(token, {**own, "normalized": False}) for token, own in tokens.listed]
    else:
        tokenizer = check_tokenizer_file(files[_TOKENIZER])
    before = _without_model(tokenizer)
    name = making if is_made else opening
    _add_defaults(name, tokens, token_ids(tokenizer))
    if not is_made or opening in SPACE_MARK_CLASSES:
        apply_options(tokenizer, opening, config)
    merge_tokens(tokenizer, tokens)
    ids = token_ids(tokenizer)
    if tokenizer.get("post_processor") == NO_POST_PROCESSOR:
        roles = {role: text for role, text in tokens.texts().items() if text is not None}
        tokenizer["post_processor"] = post_processor(name, ids, roles, config)
    changed: dict[str, bytes] = {}
    if is_made or _without_model(tokenizer) != before:
        changed[_TOKENIZER] = MadeJson.with_value(_to_bytes(tokenizer), tokenizer)
    else:
        changed[_TOKENIZER] = MadeJson.with_value(files[_TOKENIZER], tokenizer)  # the same bytes, parsed
    named = _with_roles(config.values, tokens)
    if named != config.values:
        changed[_CONFIG] = _to_bytes(named)
    eos = tokens.texts().get("eos_token")
    if eos in ids and (generation := _with_end_token(reader, ids[eos])) is not None:
        changed[_GENERATION] = _to_bytes(generation)
    return changed


def _to_bytes(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values, ensure_ascii=False, separators=(",", ":")).encode()


def _without_model(tokenizer: Mapping[str, Any]) -> str:
    return json.dumps({key: value for key, value in tokenizer.items() if key != "model"})


def _has_prefix(tokenizer: Mapping[str, Any]) -> bool:
    """Return True for a tokenizer.json that puts a mark of a space before each text, as SentencePiece does."""
    for key, steps in (("normalizer", "normalizers"), ("pre_tokenizer", "pretokenizers")):
        whole = tokenizer.get(key) or {}
        for step in whole.get(steps) or [whole]:
            if step.get("type") == "Prepend" or step.get("prepend_scheme", "never") != "never":
                return True
    return False


def _add_defaults(name: str | None, tokens: SideTokens, ids: Mapping[str, int]) -> None:
    """Name the special tokens that the class has by default, if the vocabulary has them."""
    known = ids.keys() | {token["content"] for _, token in tokens.listed}
    for role, text in default_roles(name).items():
        if role not in tokens.named and text in known:
            tokens.named[role] = default_token(text, lstrip=(name, role) == ("CamembertTokenizer", "mask_token"))


def _with_roles(config: Mapping[str, Any], tokens: SideTokens) -> dict[str, Any]:
    """Return tokenizer_config.json with the text of every named token that it does not have already."""
    values = dict(config)
    others = config.get("extra_special_tokens")
    others = dict(others) if isinstance(others, dict) else {}
    for name, text in tokens.texts().items():
        own = config.get(name)
        if name in SPECIAL_ROLES or name.endswith("_token"):
            if (own.get("content") if isinstance(own, dict) else own) != text:
                values[name] = text
        elif name not in others:
            others[name] = text
            values["extra_special_tokens"] = others
    return values


def _with_end_token(reader: Callable[[str], ConfigReader], token: int) -> dict[str, Any] | None:
    """Return generation_config.json with the tokenizer's end token; None if it needs no change.

    A text ends at that token too, as in vLLM and llama.cpp: fine-tunes often change only the tokenizer's.
    """
    damage = None
    try:
        generation = reader(_GENERATION)
    except InvalidFileError as error:
        generation, damage = ConfigReader({}, _GENERATION), error
    try:
        ends = end_token_ids(generation, reader("config.json"))
    except InvalidFileError:
        return None  # read_generation_config says what is wrong
    if token in ends:
        return None
    if damage is not None:  # its reader does not see the damaged file any more
        _LOG.warning("penstock: %s; the defaults for generation are not used", damage)
    return {**generation.values, "eos_token_id": [*ends, token]}


class _Maker:
    """Makes the tokenizer.json of a folder that has none."""

    def __init__(
        self,
        classes: tuple[str | None, str | None],
        config: ConfigReader,
        tokens: SideTokens,
        read: Callable[[str], bytes | None],
        folder: Path,
    ) -> None:
        self._name, self._read, self._folder = classes[1], read, folder
        self._config, self._tokens = config, tokens
        self._effective = _to_bytes(_with_roles(config.values, tokens) | self._defaults(classes[0]))

    def _defaults(self, opening: str | None) -> dict[str, Any]:
        """Return the options that the class has where tokenizer_config.json has none."""
        if self._name is None:
            return {}
        values = self._config.values
        adds_bos, legacy = self._name in BEGINNING_CLASSES, opening not in SPACE_MARK_CLASSES
        defaults: dict[str, Any] = {"add_bos_token": adds_bos, "legacy": legacy}
        if opening in SPACE_MARK_CLASSES:
            defaults["add_prefix_space"] = True
        missing = {key: value for key, value in defaults.items() if key not in values}
        missing |= {"legacy": False} if "legacy" in values and values["legacy"] is None else {}
        return {"tokenizer_class": self._name, **missing}

    def make(self) -> dict[str, Any] | None:
        """Return the tokenizer.json, whose post-processor may be ``NO_POST_PROCESSOR``; None without a vocabulary."""
        tekken = self._read(TEKKEN)
        if tekken is not None:
            return tekken_tokenizer(tekken)
        vocab, merges = self._read("vocab.json"), self._read("merges.txt")
        if vocab is not None and merges is not None:
            made = byte_level_tokenizer(vocab, merges, self._name, self._config)
            if made is not None:
                return made
        for file in (*SENTENCEPIECE_FILES, TIKTOKEN_FILE):
            data = self._read(file)
            if data is not None:
                has_ranks = file == TIKTOKEN_FILE or is_tiktoken(data)
                return self._make_ranks(file, data) if has_ranks else self._make_pieces(file, data)
        words = self._read("vocab.txt")
        result = None if words is None else bert_tokenizer(words, self._effective)
        return None if result is None else dict(json.loads(result))

    def _make_ranks(self, file: str, data: bytes) -> dict[str, Any] | None:
        code = self._config.object("auto_map")
        if code is not None and code.has("AutoTokenizer"):
            _LOG.warning("penstock: %s: %s", self._folder, needs_code(file))
            return None
        extra = self._config.values.get("extra_special_tokens")
        texts = [token["content"] for token in self._tokens.extra] if isinstance(extra, list) else []
        return tiktoken_tokenizer(data, file, self._tokens.listed, texts)

    def _make_pieces(self, file: str, data: bytes) -> dict[str, Any]:
        defaults = default_roles(self._name)
        roles = {role: self._tokens.texts().get(role) or text for role, text in defaults.items()}
        made = sentencepiece_tokenizer(data, self._effective, roles, file)
        if made is None:
            from penstock.checkpoint.tokenizer_convert import convert_tokenizer

            made = convert_tokenizer(self._folder)
        return dict(json.loads(made))
