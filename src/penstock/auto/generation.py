"""The options of ``AutoModel.generate``: those of SamplingParams, and those that tutorials of transformers use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from penstock.checkpoint.generation import GenerationConfig as ModelDefaults
from penstock.config import check_flag, check_integer
from penstock.engine.params import SamplingParams
from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.llm.sampling_keywords import KEYWORDS, sampling_of_keywords
from penstock.validation import MAX_TOKEN, nearest, wrong_type

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["GenerateOptions", "GenerateOutput", "GenerationConfig", "read_options"]

_LENGTHS: Final = ("max_length", "min_length")
_FLAGS: Final = ("return_dict_in_generate", "output_scores", "output_logits")
_OPTIONS: Final = (*KEYWORDS, *_LENGTHS, *_FLAGS, "pad_token_id", "use_cache")
_WITHOUT_EFFECT: Final = ("transformers_version", "bos_token_id", "_from_model_config")
"""Fields that a GenerationConfig of transformers has and that generation ignores here."""


class GenerationConfig:
    """Options for ``AutoModel.generate``, by the names that it takes: ``GenerationConfig(max_new_tokens=64, top_k=3)``.

    Raises InvalidArgumentError for an unknown name.
    """

    def __init__(self, **options: Any) -> None:
        _check_names(options, "GenerationConfig")
        self.options = options

    def __getattr__(self, name: str) -> Any:
        if name in _OPTIONS:
            return self.__dict__.get("options", {}).get(name)
        raise AttributeError(f"GenerationConfig has no attribute {name!r:.60}")

    def __repr__(self) -> str:
        return f"GenerationConfig({', '.join(f'{name}={value!r}' for name, value in self.options.items())})"


@dataclass(frozen=True)
class GenerateOutput:
    """The result of ``generate`` with ``return_dict_in_generate``; values are attributes and keys.

    ``sequences``: as without it.  ``logits``: for each sequence an array [num_generated, vocab_size] float32, the row
    that each token was chosen from.  ``scores``: the same rows divided by the temperature.
    """

    sequences: list[list[int]]
    scores: list[NDArray[np.float32]] | None = None
    logits: list[NDArray[np.float32]] | None = None

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


@dataclass(frozen=True)
class GenerateOptions:
    """The options of a call after they were checked; ``params`` lacks what depends on the length of a prompt."""

    params: SamplingParams
    max_length: int | None
    min_length: int
    pad_token_id: int | None
    returns_dict: bool
    output_scores: bool
    output_logits: bool

    def params_of(self, num_prompt_tokens: int) -> SamplingParams:
        """Return the sampling of a prompt of this length."""
        params = self.params
        if self.max_length is not None:
            if self.max_length <= num_prompt_tokens:
                raise InvalidArgumentError(
                    f"max_length: expected more than the {num_prompt_tokens} tokens of the prompt, got "
                    f"{self.max_length}; max_new_tokens counts only new tokens",
                    param="max_length",
                )
            params = replace(params, max_tokens=self.max_length - num_prompt_tokens)
        if self.min_length > num_prompt_tokens:
            params = replace(params, min_tokens=self.min_length - num_prompt_tokens)
        return params


def read_options(configs: Sequence[object], options: Mapping[str, Any], defaults: ModelDefaults) -> GenerateOptions:
    """Return the options of a call: ``options``, and what they leave open from ``configs``, the last one first.

    ``defaults``: those of the model.  Raises InvalidArgumentError or UnsupportedError, which names the option.
    """
    _check_names(options, "generate")
    values: dict[str, Any] = {}
    for layer in (*map(_config_options, configs), options):
        values_set = {name: value for name, value in layer.items() if value is not None}
        if {"max_length", "max_new_tokens"} <= values_set.keys():
            raise InvalidArgumentError("max_length and max_new_tokens exclude each other", param="max_length")
        if {"max_length", "max_new_tokens", "max_tokens"} & values_set.keys():  # a later length replaces an earlier one
            values = {k: v for k, v in values.items() if k not in ("max_length", "max_new_tokens", "max_tokens")}
        values |= values_set
    if values.pop("use_cache", True) is not True:
        raise UnsupportedError("use_cache must be True: every graph keeps keys and values", param="use_cache")
    flags = {name: check_flag(name, values.pop(name, False)) for name in _FLAGS}
    lengths = {name: values.pop(name, None) for name in (*_LENGTHS, "pad_token_id")}
    for name, value in lengths.items():
        if value is not None:
            lengths[name] = check_integer(name, value, 0, MAX_TOKEN)
    params = sampling_of_keywords(values, defaults.temperature)
    if flags["output_scores"]:
        _check_scores(params, defaults)
    return GenerateOptions(
        params,
        lengths["max_length"],
        lengths["min_length"] or 0,
        lengths["pad_token_id"],
        any(flags.values()),
        flags["output_scores"],
        flags["output_logits"],
    )


def _check_names(options: Mapping[str, Any], where: str) -> None:
    for name in options:
        if name not in _OPTIONS:
            near = nearest(name, _OPTIONS)
            hint = f"did you mean {near}?" if near else f"it takes {', '.join(_OPTIONS)}"
            raise InvalidArgumentError(f"{where}: unknown option {name!r:.60}: {hint}", param=name)


def _config_options(config: object) -> Mapping[str, Any]:
    """Return the options of a GenerationConfig, ours or that of transformers, or of a dictionary."""
    if config is None:
        return {}
    if isinstance(config, GenerationConfig):
        return config.options
    if callable(getattr(config, "to_diff_dict", None)):  # transformers: only what differs from its defaults
        values: dict[str, Any] = config.to_diff_dict()  # type: ignore[attr-defined]
        config = {name: value for name, value in values.items() if name not in _WITHOUT_EFFECT}
    if not isinstance(config, Mapping):
        raise wrong_type("generation_config", "a GenerationConfig or a dictionary", config)
    _check_names(config, "generation_config")
    return config


def _check_scores(params: SamplingParams, defaults: ModelDefaults) -> None:
    """Refuse scores where a filter or a penalty changes them, because the rows are computed without it."""
    neutral = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0, "repetition_penalty": 1.0}
    is_greedy = (defaults.temperature if params.temperature is None else params.temperature) == 0
    for name, off in neutral.items():
        own = getattr(params, name)
        value = getattr(defaults, name) if own is None else own
        if value != off and (name == "repetition_penalty" or own is not None or not is_greedy):
            raise _no_scores(name, value)
    for name in ("presence_penalty", "frequency_penalty", "logit_bias", "allowed_token_ids", "bad_words", "min_tokens"):
        if getattr(params, name):
            raise _no_scores(name, getattr(params, name))


def _no_scores(name: str, value: object) -> UnsupportedError:
    return UnsupportedError(
        f"output_scores: not supported with {name} {value!r:.60}; output_logits gives the rows before it",
        param="output_scores",
    )
