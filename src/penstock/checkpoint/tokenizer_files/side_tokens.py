"""The tokens that files beside a ``tokenizer.json`` add to it, by the rules of transformers 5.

These are ``added_tokens_decoder`` and the special tokens of ``tokenizer_config.json``.  Without
``added_tokens_decoder`` the older files count too: ``special_tokens_map.json`` and ``added_tokens.json``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from penstock.checkpoint.generation import SPECIAL_ROLES, named_tokens
from penstock.checkpoint.tokenizer_limits import MAX_ADDED_TOKENS
from penstock.config import ConfigReader, show

__all__ = ["SideTokens", "default_token", "merge_tokens", "read_side_tokens", "token_ids"]

_LOG: Final = logging.getLogger("penstock.tokenizer_files")
_FLAGS: Final = ("single_word", "lstrip", "rstrip", "normalized", "special")
_MAX_CHARS: Final = 1024

Token = dict[str, Any]
"""A token as ``added_tokens`` of tokenizer.json has it, without "id"."""


@dataclass
class SideTokens:
    """``named``: special tokens by role or name; None takes a role away.  ``extra``: further special tokens.

    ``listed``: the tokens with the ids that their file gives them; None if the older files count.
    """

    named: dict[str, Token | None] = field(default_factory=dict)
    extra: list[Token] = field(default_factory=list)
    listed: list[tuple[int, Token]] = field(default_factory=list)
    is_complete: bool = False

    def texts(self) -> dict[str, str | None]:
        """Return the text of each named token."""
        return {name: None if token is None else token["content"] for name, token in self.named.items()}


def read_side_tokens(config: ConfigReader, special: ConfigReader, added: ConfigReader) -> SideTokens:
    """Return the tokens of tokenizer_config.json, special_tokens_map.json and added_tokens.json.

    Raises InvalidFileError, which names the file and the key.
    """
    tokens = SideTokens(is_complete=config.has("added_tokens_decoder"))
    tokens.named |= _read_named(config)
    key = "extra_special_tokens" if config.values.get("extra_special_tokens") else "additional_special_tokens"
    _read_extra(config, key, tokens)
    if tokens.is_complete:
        section = config.object("added_tokens_decoder")
        tokens.listed = [] if section is None else list(_listed(config, section))
        return tokens
    tokens.named |= _read_named(special)
    _read_extra(special, "extra_special_tokens", tokens)
    if not tokens.extra:
        _read_extra(special, "additional_special_tokens", tokens)
    specials = {text for role, text in tokens.texts().items() if role in SPECIAL_ROLES}
    specials |= {token["content"] for token in tokens.extra}
    _check_count(added, added.values)
    for text, token in added.values.items():
        if type(token) is not int or token < 0:
            raise added.error(text, "an id", token)
        is_special = text in specials
        tokens.listed.append((token, _token(text, special=is_special, normalized=not is_special)))
    tokens.listed.sort(key=lambda entry: entry[0])
    return tokens


def default_token(text: str, *, lstrip: bool = False) -> Token:
    """Return a special token that no file describes."""
    return _token(text, special=True, lstrip=lstrip)


def _token(text: str, **flags: bool) -> Token:
    return {"content": text} | dict.fromkeys(_FLAGS, False) | flags


def _check_count(reader: ConfigReader, values: Mapping[str, Any]) -> None:
    if len(values) > MAX_ADDED_TOKENS:
        raise reader.error("added_tokens_decoder", f"at most {MAX_ADDED_TOKENS} tokens", values)


def _listed(config: ConfigReader, section: ConfigReader) -> Iterator[tuple[int, Token]]:
    _check_count(config, section.values)
    for key in sorted(section.values, key=lambda key: (len(key), key)):
        own = section.object(key)
        if own is None or not (key.isascii() and key.isdecimal()) or len(key) > 9:
            raise config.error("added_tokens_decoder", "tokens by their id", key)
        yield int(key), _read_token(own, is_special=False)


def _read_token(own: ConfigReader, *, is_special: bool) -> Token:
    """Return a token that is an object; without the key, "normalized" is the contrary of "special"."""
    special = is_special or own.bool("special", False)
    flags = {flag: own.bool(flag, False) for flag in ("single_word", "lstrip", "rstrip")}
    normalized = own.bool("normalized", not special)
    return {"content": own.str("content"), **flags, "normalized": normalized, "special": special}


def _named_token(reader: ConfigReader, key: str, value: object) -> Token | None:
    if value is None:
        return None
    if isinstance(value, str) and len(value) <= _MAX_CHARS:
        return _token(value, special=True)
    if isinstance(value, dict) and isinstance(value.get("content"), str):
        return _read_token(ConfigReader(value, f"{reader.file}: {key}"), is_special=True)
    raise reader.error(key, f"a string of at most {_MAX_CHARS} characters, or an object with content", value)


def _read_named(reader: ConfigReader) -> dict[str, Token | None]:
    return {name: _named_token(reader, key, value) for name, (key, value) in named_tokens(reader).items()}


def _read_extra(reader: ConfigReader, key: str, tokens: SideTokens) -> None:
    values = reader.values.get(key)
    if isinstance(values, dict) and key == "extra_special_tokens":
        return  # names, which _read_named reads
    if values is not None and not isinstance(values, list):
        raise reader.error(key, "a list of tokens", values)
    known = {token["content"] for token in tokens.extra}
    for value in values or ():
        token = _named_token(reader, key, value)
        if token is not None and token["content"] not in known:
            known.add(token["content"])
            tokens.extra.append(token)


def merge_tokens(tokenizer: dict[str, Any], tokens: SideTokens) -> bool:
    """Add tokens to the ``added_tokens`` of a tokenizer.json in place; return True if that changes them.

    A token of the vocabulary keeps its id, another one has the next free id, whatever its file says.
    """
    stored = tokenizer.get("added_tokens") or []
    if not isinstance(stored, list) or not all(map(_is_stored, stored)):
        return False  # the library says what is wrong
    own: dict[str, Token] = {token["content"]: dict(token) for token in stored}
    ids, names = token_ids(tokenizer), {text for text in tokens.texts().values() if text is not None}
    free = max([len(_vocab(tokenizer)), *(token["id"] + 1 for token in own.values())])
    for number, token in _wanted(tokens, own):
        text = token["content"]
        before = own.get(text, {"id": ids.get(text, free)})
        special = token["special"] or before.get("special", False)
        own[text] = {**before, **token, "special": special}
        free = max(free, before["id"] + 1)
        if number is not None and before["id"] != number:
            _LOG.warning("penstock: the token %s has the id %d instead of %d", show(text), before["id"], number)
    for text in names & own.keys():
        own[text]["special"] = True
    merged = sorted(own.values(), key=lambda token: token["id"])
    if merged == stored:
        return False
    tokenizer["added_tokens"] = merged
    return True


def _is_stored(token: object) -> bool:
    return isinstance(token, dict) and isinstance(token.get("content"), str) and type(token.get("id")) is int


def _vocab(tokenizer: Mapping[str, Any]) -> dict[str, Any] | list[Any]:
    model = tokenizer.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    return vocab if isinstance(vocab, (dict, list)) else {}


def _wanted(tokens: SideTokens, own: Mapping[str, Token]) -> Iterator[tuple[int | None, Token]]:
    """Yield the tokens to add in order, each with the id that its file gives it."""
    listed = tokens.listed
    if not tokens.is_complete:  # tokenizer.json counts more than the older files
        numbers = {token["id"] for token in own.values()}
        listed = [(number, token) for number, token in listed if token["content"] not in own and number not in numbers]
    yield from ((number, token) for number, token in listed if token["content"])
    seen = own.keys() | {token["content"] for _, token in listed} | {""}
    roles = [*SPECIAL_ROLES, *(name for name in tokens.named if name not in SPECIAL_ROLES)]
    for token in (*filter(None, map(tokens.named.get, roles)), *tokens.extra):
        if token["content"] not in seen:
            seen.add(token["content"])
            yield None, token


def token_ids(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    """Return the ids of the model's vocabulary and of the added tokens of a tokenizer.json, by text."""
    vocab = _vocab(tokenizer)
    if isinstance(vocab, list):  # Unigram: pairs of a token and its score
        ids = {
            pair[0]: i for i, pair in enumerate(vocab) if isinstance(pair, list) and pair and isinstance(pair[0], str)
        }
    elif set(map(type, vocab.values())) == {int}:
        ids = vocab
    else:
        ids = {text: token for text, token in vocab.items() if type(token) is int}
    added = tokenizer.get("added_tokens")
    stored = filter(_is_stored, added if isinstance(added, list) else ())
    return ids | {token["content"]: token["id"] for token in stored}
