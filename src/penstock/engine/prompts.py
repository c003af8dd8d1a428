"""The check of a prompt's token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from operator import index as as_index
from typing import Final

from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.validation import wrong_type

__all__ = ["begin_decoder", "check_token_ids", "longer_than_a_step", "more_rows_than_a_step", "own_start"]

_NO_MASKS: Final[Mapping[int, str]] = {}


def begin_decoder(prompt_ids: Sequence[int], token: int, masks: Mapping[int, str] = _NO_MASKS) -> Sequence[int]:
    """Return the prompt of an encoder-decoder: with ``token``, the first of the decoder, at its end if it lacks it.

    The prompt of another network (``token`` -1) stays as it is.  ``masks``: tokens and their names, by priority.  The
    answer takes the place of the first one that a prompt has; raises UnsupportedError unless ``token`` follows it.
    """
    if token < 0 or isinstance(prompt_ids, (str, bytes, Mapping, Set)) or not hasattr(prompt_ids, "__len__"):
        return prompt_ids
    ids = list(prompt_ids)
    if ids and token not in ids[1:]:
        ids.append(token)
    mask = next((mask for mask in masks if mask in ids), None)
    if mask is not None and ids.index(token, 1) != (place := ids.index(mask)) + 1:
        raise UnsupportedError(
            f"prompt: expected token {mask} ({masks[mask]}) as the last one before the answer, got it at {place} of "
            f"{ids.index(token, 1)}; an answer at another place is not supported",
            param="prompt",
        )
    return ids


def own_start(prompt_ids: Sequence[int], token: int, masks: Mapping[int, str] = _NO_MASKS) -> int:
    """Return how many leading tokens of a prompt only an encoder sees; ``token``: as for begin_decoder.

    The prefix of a network with ``masks`` belongs to its only sequence, so it counts as none.
    """
    if token < 0 or masks:
        return 0
    ids = list(prompt_ids)
    return ids.index(token, 1) if token in ids[1:] else len(ids)


def check_token_ids(prompt_ids: Sequence[int], vocab_size: int, max_len: int, answer_len: int) -> list[int]:
    """Return a prompt as a list of token ids.

    Raises InvalidArgumentError if the prompt is empty, has an id outside of the vocabulary, or leaves fewer than
    ``answer_len`` of ``max_len`` tokens for the answer.
    """
    if isinstance(prompt_ids, (str, bytes, Mapping, Set)) or not hasattr(prompt_ids, "__len__"):
        raise wrong_type("prompt", "a list of token ids", prompt_ids)
    if not len(prompt_ids):
        raise InvalidArgumentError("prompt: expected at least one token, got none", param="prompt")
    if len(prompt_ids) + answer_len > max_len:
        reserved = f", {answer_len} of them for the answer" if answer_len else ""
        raise InvalidArgumentError(
            f"prompt has {len(prompt_ids)} tokens, but the context holds {max_len}{reserved}",
            param="prompt",
            code="context_length_exceeded",
        )
    if set(map(type, prompt_ids)) == {int} and min(prompt_ids) >= 0 and max(prompt_ids) < vocab_size:
        return list(prompt_ids)
    ids = []
    for position, token in enumerate(prompt_ids):
        try:
            ids.append(as_index(token))
        except TypeError:
            raise InvalidArgumentError(
                f"prompt[{position}]: expected a token id, got {token!r:.200}", param="prompt"
            ) from None
        if isinstance(token, bool) or not 0 <= ids[-1] < vocab_size:
            raise InvalidArgumentError(
                f"prompt[{position}]: expected a token id from 0 to {vocab_size - 1}, got {token}", param="prompt"
            )
    return ids


def more_rows_than_a_step(prompt_len: int, max_rows: int) -> InvalidArgumentError:
    """Return the error for a prompt that needs more rows of logits than a step has, where it has to run in one."""
    return InvalidArgumentError(
        f"prompt has {prompt_len} tokens, but a step has {max_rows} rows of logits (max_rows). This network runs a "
        "prompt in one step, because its attention is not causal.",
        param="prompt",
    )


def longer_than_a_step(prompt_len: int, max_len: int) -> InvalidArgumentError:
    """Return the error for a prompt that does not fit into a step, where it has to run in one."""
    return InvalidArgumentError(
        f"prompt has {prompt_len} tokens, but this network runs a prompt in one step, because its attention is not "
        f"causal, and a step holds {max_len} tokens with the answer's (limits: max_tokens, max_chunk)",
        param="prompt",
    )
