"""Turn the prompts and sampling parameters of a call into lists."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, TypeAlias, TypeVar

from penstock.engine.options import RequestOptions, check_options
from penstock.engine.params import SamplingParams
from penstock.errors import InvalidArgumentError, PenstockError
from penstock.validation import wrong_type

__all__ = [
    "Prompt",
    "check_each",
    "check_items",
    "of_prompt",
    "split_item",
    "split_params",
    "split_prompts",
]

Prompt: TypeAlias = str | Sequence[int]
_Item = TypeVar("_Item")
_Checked = TypeVar("_Checked")


def split_prompts(prompts: object) -> tuple[list[Any], bool]:
    """Return prompts as a list, and whether it was a single prompt.  An empty list is no prompt, not an empty one."""
    if isinstance(prompts, str):
        return [prompts], True
    if hasattr(prompts, "tolist"):  # a numpy array
        prompts = prompts.tolist()
    if isinstance(prompts, (bytes, Mapping, Set)) or not isinstance(prompts, Iterable):
        raise wrong_type(
            "prompts", "a string, a list of strings, a list of token ids, or a list of such lists", prompts
        )
    several = list(prompts)
    if all(isinstance(item, (str, list, tuple)) or hasattr(item, "__len__") for item in several):
        return several, False
    return [several], True


def check_items(items: object) -> Iterable[object]:
    """Return an iterable of prompts with their parameters.  Raises InvalidArgumentError for another type."""
    if isinstance(items, (str, bytes, Mapping)) or not isinstance(items, Iterable):
        raise wrong_type("items", "pairs of a prompt and SamplingParams", items)
    return items


def split_item(item: object, options: RequestOptions) -> tuple[Any, SamplingParams, RequestOptions]:
    """Return a prompt, its parameters and its options

    ``options`` if it has none.  An item that is an error is raised.
    """
    if isinstance(item, PenstockError):
        raise item
    if not isinstance(item, (list, tuple)) or not 2 <= len(item) <= 3:
        raise InvalidArgumentError(
            f"items: expected (prompt, SamplingParams) or (prompt, SamplingParams, RequestOptions), got {item!r:.60}",
            param="items",
        )
    prompt, params, *own = item
    return prompt, split_params(params, 1)[0], check_options(own[0]) if own and own[0] is not None else options


def of_prompt(index: int, is_one: bool, error: PenstockError, note: str = "") -> PenstockError:
    """Return the error with the index of its prompt among several; unchanged for a single prompt."""
    if is_one:
        return error
    renamed = error.with_message(f"prompts[{index}]: {error}{note}")
    renamed.__cause__ = error
    return renamed


def check_each(items: Iterable[_Item], is_one: bool, check: Callable[[_Item], _Checked]) -> list[_Checked]:
    """Apply ``check`` to each prompt and return the results.  An InvalidArgumentError names the prompt."""
    checked = []
    for index, item in enumerate(items):
        try:
            checked.append(check(item))
        except InvalidArgumentError as error:
            raise of_prompt(index, is_one, error) from None
    return checked


def split_params(params: object, num_prompts: int) -> list[SamplingParams]:
    """Return sampling parameters for each prompt."""
    if params is None:
        return [SamplingParams()] * num_prompts
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    if not isinstance(params, Sequence) or not all(isinstance(item, SamplingParams) for item in params):
        raise wrong_type("params", "SamplingParams or a list of them", params)
    if len(params) != num_prompts:
        raise InvalidArgumentError(f"params has {len(params)} entries for {num_prompts} prompts", param="params")
    return list(params)
