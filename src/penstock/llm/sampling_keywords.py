"""Sampling given as keyword arguments: the fields of SamplingParams, and the names that transformers uses."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

from penstock.checkpoint.generation import GenerationDefaults
from penstock.engine.params import SamplingParams
from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.sampling_fields import FIELD_NAMES
from penstock.validation import nearest, refusal, wrong_type

__all__ = ["KEYWORDS", "SYNONYMS", "sampling_of_keywords", "sampling_params", "with_sampled_defaults"]

SYNONYMS: Final = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "num_return_sequences": "n",
    "stop_strings": "stop",
}
KEYWORDS: Final = (*FIELD_NAMES, *SYNONYMS, "do_sample", "eos_token_id", "num_beams")


def sampling_params(params: object, keywords: Mapping[str, Any], temperature: float, where: str) -> Any:
    """Return ``params``, or SamplingParams made from keywords.

    ``temperature``: the model's default, with which ``do_sample`` samples if it is above 0.  ``where``: the name of the
    call, for the error about an unknown keyword.  Raises InvalidArgumentError or UnsupportedError, which names it.
    """
    values = dict(keywords)
    if "sampling_params" in values:  # vLLM's name
        if params is not None:
            raise InvalidArgumentError(
                "params and sampling_params are the same option: give only one of them", param="params"
            )
        params = values.pop("sampling_params")
    for name in values:
        if name not in KEYWORDS:
            near = nearest(name, [*KEYWORDS, "params", "options", "streamer", "progress"])
            hint = f"did you mean {near}?" if near else f"it takes {', '.join(KEYWORDS)}"
            raise InvalidArgumentError(f"{where} has no option {name!r}: {hint}", param=name)
    if not values:
        return params
    if params is not None:
        name = next(iter(values))
        raise InvalidArgumentError(f"{name}: set it in params", param=name)
    return sampling_of_keywords(values, temperature)


def sampling_of_keywords(keywords: Mapping[str, Any], temperature: float) -> SamplingParams:
    """Return SamplingParams made from keywords of KEYWORDS; a keyword that is None is not given."""
    values: dict[str, Any] = {}
    for keyword, value in keywords.items():
        name = SYNONYMS.get(keyword, keyword)
        if value is None:
            continue
        if name in values:
            raise InvalidArgumentError(f"{keyword} is given twice, under two names", param=keyword)
        values[name] = value
    if (num_beams := values.pop("num_beams", 1)) != 1:
        raise UnsupportedError(
            f"num_beams={num_beams!r:.20} is not supported here: AutoModel(llm).generate has beam search. n=N and "
            "best_of=M give the N likeliest of M sampled answers.",
            param="num_beams",
        )
    if (ends := values.pop("eos_token_id", None)) is not None:  # as in transformers, instead of the model's own
        own = values.pop("stop_token_ids", ())
        if not isinstance(own, (list, tuple)):
            raise wrong_type("stop_token_ids", "a list of token ids", own)
        values["stop_token_ids"] = [*(ends if isinstance(ends, (list, tuple)) else [ends]), *own]
        values["ignore_eos"] = True
    _apply_do_sample(values, temperature)
    return SamplingParams(**values)


def with_sampled_defaults(keywords: Mapping[str, Any], defaults: GenerationDefaults) -> dict[str, Any]:
    """Return keywords of transformers' ``generate``, which fills the filters of a call with ``do_sample``.

    Their values are those of generation_config.json, or else transformers' own: the 50 likeliest tokens.
    """
    values = {name: value for name, value in keywords.items() if value is not None}
    if not values.get("do_sample"):
        return values
    sampled = asdict(defaults.sampled)
    sampled["temperature"] = sampled["temperature"] or 1.0
    return sampled | values


def _apply_do_sample(values: dict[str, Any], temperature: float) -> None:
    """Replace ``do_sample`` by a temperature: False is greedy, True samples, None follows the model."""
    do_sample = values.pop("do_sample", None)
    if do_sample not in (None, True, False):
        raise refusal("do_sample", "True or False", do_sample)
    requested = values.get("temperature")
    if do_sample is False:
        if requested and requested != 1:  # 1 is the default of transformers, which warns of other values
            warnings.warn(f"temperature: {requested!r:.40} is not used, because do_sample is False", stacklevel=4)
        values["temperature"] = 0.0
    elif do_sample and requested is None:
        values["temperature"] = temperature or 1.0
    elif do_sample and requested == 0:
        raise InvalidArgumentError("do_sample=True requires a temperature above 0", param="temperature")
