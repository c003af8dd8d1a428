"""The forms of what ``generate`` takes and returns: lists, arrays of numpy, tensors of PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.errors import InvalidArgumentError
from penstock.llm.generate.callables import as_tensor, is_tensor
from penstock.llm.generate.hooked import HookedAnswer
from penstock.llm.generate.options import GenerateOptions, GenerateOutput
from penstock.llm.prompts import split_prompts
from penstock.validation import refusal

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["output_kind", "output_of", "without_padding", "without_pads"]


def output_kind(return_tensors: object, input_ids: object) -> str | None:
    """Return "np" or "pt", or None for lists."""
    if return_tensors not in (None, "np", "pt"):
        raise refusal("return_tensors", "None, 'np' or 'pt'", return_tensors)
    return "pt" if return_tensors == "pt" or (return_tensors is None and is_tensor(input_ids)) else return_tensors


def without_pads(prompts: list[Any], pad_id: int, start: int) -> list[Any]:
    """Return the prompts without padding where there is no mask, which transformers makes from the padding token.

    ``start``: the first token of a decoder behind an encoder, -1 without one; only padding at the end is removed then.
    """

    def cut(ids: Any) -> Any:
        if isinstance(ids, str):
            return ids
        if start < 0:
            return [token for token in ids if token != pad_id] or ids
        return ids[: max((length for length, token in enumerate(ids, 1) if token != pad_id), default=len(ids))]

    return [cut(ids) for ids in prompts]


def without_padding(prompts: list[Any], attention_mask: Any) -> list[list[int]]:
    """Return the prompts without the tokens whose mask is 0."""
    masks, _ = split_prompts(attention_mask)
    if [len(mask) for mask in masks] != [len(prompt) for prompt in prompts]:
        raise InvalidArgumentError("attention_mask: expected the shape of input_ids", param="attention_mask")
    return [
        [token for token, is_real in zip(*pair, strict=True) if is_real] for pair in zip(prompts, masks, strict=True)
    ]


def output_of(
    prompts: Sequence[Any],
    answers: Sequence[Sequence[HookedAnswer]],
    read: GenerateOptions,
    kind: str | None,
    pad_id: int,
) -> Any:
    """Return the sequences of all answers in a form, or a GenerateOutput with them.

    ``pad_id`` fills the rows of arrays and tensors; lists are filled only with a ``pad_token_id`` of the call.
    """
    flat = [answer for of_prompt in answers for answer in of_prompt]
    sequences = [
        [*map(int, prompt), *answer.token_ids]
        for prompt, of_prompt in zip(prompts, answers, strict=True)
        for answer in of_prompt
    ]
    pad = read.pad_token_id if kind is None else pad_id
    if pad is not None:
        longest = max(map(len, sequences), default=0)
        for ids in sequences:
            ids += [pad] * (longest - len(ids))
    convert: Callable[[Any], Any] = as_tensor if kind == "pt" else np.asarray
    shown: Any = sequences if kind is None else convert(np.array(sequences, np.int64))
    if not read.returns_dict:
        return shown
    fields: dict[str, Any] = {}
    for name, is_wanted in (("scores", read.output_scores), ("logits", read.output_logits)):
        if is_wanted and kind is None:
            fields[name] = [np.stack(getattr(answer, name)) for answer in flat]
        elif is_wanted:
            fields[name] = tuple(map(convert, _by_step(answers, name, read.num_beams)))
    if read.num_beams > 1:
        scores, paths = [answer.score for answer in flat], _paths(answers, read.num_beams)
        fields["sequences_scores"] = scores if kind is None else convert(np.array(scores, np.float32))
        fields["beam_indices"] = paths if kind is None else convert(_padded(paths))
    return GenerateOutput(shown, **fields)


def _by_step(answers: Sequence[Sequence[HookedAnswer]], name: str, num_beams: int) -> list[NDArray[np.float32]]:
    """Return for each step the rows of all sequences, or of all beams."""
    if num_beams > 1:
        rows = [getattr(of_prompt[0], f"step_{name}") for of_prompt in answers]
    else:
        rows = [[row[None] for row in getattr(answer, name)] for of_prompt in answers for answer in of_prompt]
    longest = max(map(len, rows), default=0)
    steps = []
    for step in range(longest):
        of_step = [own[step] if step < len(own) else np.full_like(own[-1], -np.inf) for own in rows]
        steps.append(np.concatenate(of_step))
    return steps


def _paths(answers: Sequence[Sequence[HookedAnswer]], num_beams: int) -> list[list[int]]:
    return [
        [index * num_beams + beam for beam in answer.path]
        for index, of_prompt in enumerate(answers)
        for answer in of_prompt
    ]


def _padded(paths: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    longest = max(map(len, paths), default=0)
    return np.array([[*path, *[-1] * (longest - len(path))] for path in paths], np.int64)
