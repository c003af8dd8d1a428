"""A caller's logits processors and stopping criteria, as transformers calls them: for one sequence at a time.

A function sees numpy arrays, or PyTorch tensors if the call's are tensors or its class is one of transformers'.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.engine.decoding.hook import Callables
from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.validation import wrong_type

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.llm.generate.options import GenerateOptions

    _Process = Callable[[list[int], NDArray[np.float32]], NDArray[np.float32]]

__all__ = ["as_tensor", "callables_of", "is_tensor"]


def is_tensor(value: object) -> bool:
    """Return True for a tensor of PyTorch, without an import of it."""
    return any(f"{kind.__module__}.{kind.__qualname__}" == "torch.Tensor" for kind in type(value).__mro__)


def as_tensor(array: NDArray[Any]) -> Any:
    """Return a tensor of PyTorch with the values of an array; UnsupportedError without PyTorch."""
    from penstock.nn.base import HAS_TORCH, torch

    if not HAS_TORCH:
        raise UnsupportedError(
            "return_tensors: expected 'np' or None, got 'pt': PyTorch is not installed", param="return_tensors"
        )
    tensors: Any = torch
    return tensors.from_numpy(np.ascontiguousarray(array))


def callables_of(read: GenerateOptions, uses_tensors: bool, row: int, prompt_len: int) -> Callables:
    """Return the functions of a call for an answer, each for plain arrays.

    ``row``: the number that ``prefix_allowed_tokens_fn`` gets.  ``prompt_len``: the tokens before the answer.
    """
    own: list[_Process] = []
    if read.prefix_allowed_tokens_fn is not None:
        own.append(_allowing(read.prefix_allowed_tokens_fn, uses_tensors, row))
    if read.suppress_tokens or read.begin_suppress_tokens:
        own.append(_suppressing(read, prompt_len))
    processors = [_processor(function, uses_tensors) for function in _listed("logits_processor", read.logits_processor)]
    criteria = [_criterion(function, uses_tensors) for function in _listed("stopping_criteria", read.stopping_criteria)]
    return Callables([*own, *processors], criteria)


def _allowing(function: object, uses_tensors: bool, row: int) -> _Process:
    """Return a processor that allows the tokens that a function of (row, input_ids) names."""
    name = "prefix_allowed_tokens_fn"
    if not callable(function):
        raise wrong_type(name, "a function of (batch_id, input_ids)", function)
    convert = as_tensor if uses_tensors else np.asarray

    def process(tokens: list[int], row_of_scores: NDArray[np.float32]) -> NDArray[np.float32]:
        if np.isfinite(row_of_scores).sum() == 1:  # a forced token, as in transformers
            return row_of_scores
        allowed = np.asarray(_call(name, function, row, convert(np.array(tokens, np.int64))))
        if (
            not allowed.size
            or allowed.dtype.kind not in "iu"
            or not 0 <= allowed.min() <= allowed.max() < len(row_of_scores)
        ):
            raise InvalidArgumentError(f"{name}: expected some token ids, got {allowed.tolist()!r:.60}", param=name)
        changed = np.full_like(row_of_scores, -np.inf)
        changed[allowed] = row_of_scores[allowed]
        return changed

    return process


def _suppressing(read: GenerateOptions, prompt_len: int) -> _Process:
    """Return a processor that forbids tokens always, and others at the beginning of the answer."""
    always, first = (np.array(ids, np.int64) for ids in (read.suppress_tokens, read.begin_suppress_tokens))
    begin = prompt_len + (prompt_len == 1 and read.forces_first)

    def process(tokens: list[int], row: NDArray[np.float32]) -> NDArray[np.float32]:
        changed = row.copy()
        for ids in (always, first) if len(tokens) == begin else (always,):
            changed[ids[ids < len(row)]] = -np.inf
        return changed

    return process


def _listed(name: str, value: object) -> Sequence[Callable[..., Any]]:
    several = () if value is None else value if isinstance(value, (list, tuple)) else (value,)
    for function in several:
        if not callable(function):
            raise wrong_type(name, "functions of (input_ids, scores), or a list of them", function)
    return several


def _wants_tensors(function: object) -> bool:
    return any(kind.__module__.partition(".")[0] == "transformers" for kind in type(function).__mro__)


def _processor(function: Callable[..., Any], uses_tensors: bool) -> _Process:
    convert = as_tensor if uses_tensors or _wants_tensors(function) else np.asarray
    name = "logits_processor"

    def process(tokens: list[int], row: NDArray[np.float32]) -> NDArray[np.float32]:
        result = _call(name, function, convert(np.array([tokens], np.int64)), convert(row[None].copy()))
        array = np.asarray(result.detach() if is_tensor(result) else result)
        if array.shape != (1, len(row)) or array.dtype.kind != "f":
            raise InvalidArgumentError(
                f"{name}: expected scores of shape [1, {len(row)}] from {function!r:.60}, got "
                f"{array.dtype} {list(array.shape)}",
                param=name,
            )
        changed = np.array(array[0], np.float32)
        if np.isnan(changed).any() or (changed == np.inf).any():
            raise InvalidArgumentError(f"{name}: found NaN or infinity in the scores of {function!r:.60}", param=name)
        return changed

    return process


def _criterion(
    function: Callable[..., Any], uses_tensors: bool
) -> Callable[[list[int], list[NDArray[np.float32]] | None], bool]:
    convert = as_tensor if uses_tensors or _wants_tensors(function) else np.asarray

    def stops(tokens: list[int], scores: list[NDArray[np.float32]] | None) -> bool:
        rows = None if scores is None else tuple(convert(row if row.ndim == 2 else row[None]) for row in scores)
        result = _call("stopping_criteria", function, convert(np.array([tokens], np.int64)), rows)
        return bool(np.asarray(result).all())

    return stops


def _call(name: str, function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except Exception as error:
        message = f"{name}: {function!r:.60} raised {type(error).__name__}: {error}"
        raise InvalidArgumentError(message, param=name) from error
