"""The options of ``AutoModel.generate``: those of SamplingParams, and those that tutorials of transformers use."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final

from penstock.checkpoint.generation import GenerationDefaults as ModelDefaults
from penstock.config import check_flag, check_integer
from penstock.engine.options import BeamSettings
from penstock.engine.params import SamplingParams
from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.llm.sampling_keywords import KEYWORDS, sampling_of_keywords, with_sampled_defaults
from penstock.validation import MAX_TOKEN, nearest, token_ids, wrong_type

__all__ = ["OPTIONS", "GenerateOptions", "GenerateOutput", "GenerationConfig", "read_options"]

_LOG: Final = logging.getLogger("penstock.generate")
_LENGTHS: Final = ("max_length", "min_length")
_FLAGS: Final = ("return_dict_in_generate", "output_scores", "output_logits")
_BEAMS: Final = ("num_beams", "length_penalty", "early_stopping")
_CALLABLES: Final = ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn")
_SUPPRESSED: Final = ("suppress_tokens", "begin_suppress_tokens")
OPTIONS: Final = (*KEYWORDS, *_LENGTHS, *_FLAGS, *_BEAMS[1:], *_CALLABLES, *_SUPPRESSED, "pad_token_id", "use_cache")
"""The names of all options."""
_OF_FILES: Final = ("transformers_version", "bos_token_id", "_from_model_config")
"""Fields of generation_config.json that do nothing in transformers either, where a call has ``input_ids``."""
_CACHES: Final = (
    "dynamic", "static", "offloaded", "offloaded_static", "paged", "sliding_window", "hybrid", "hybrid_chunked",
    "offloaded_hybrid", "offloaded_hybrid_chunked",
)  # fmt: skip
_WITHOUT_EFFECT: Final[dict[str, tuple[tuple[object, ...], str]]] = {
    "cache_implementation": (_CACHES, "keys and values are always in pages; kv_cache of LLM chooses their type"),
    "disable_compile": ((False, True), "no call compiles anything"),
    "tokenizer": ((), "stop_strings are found with the tokenizer of the model"),
}
"""Options of transformers that change no token here: their values, () for any, and what there is instead."""
_OFF: Final[dict[str, tuple[object, ...]]] = {
    "assistant_model": (),
    "constraints": (),
    "custom_generate": (),
    "decoder_start_token_id": (),
    "diversity_penalty": (0,),
    "dola_layers": (),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "exponential_decay_length_penalty": (),
    "force_words_ids": (),
    "guidance_scale": (1,),
    "low_memory": (False,),
    "max_time": (),
    "negative_prompt_attention_mask": (),
    "negative_prompt_ids": (),
    "num_beam_groups": (1,),
    "output_attentions": (False,),
    "output_hidden_states": (False,),
    "penalty_alpha": (0,),
    "prompt_lookup_num_tokens": (),
    "remove_invalid_values": (False,),
    "renormalize_logits": (False,),
    "return_legacy_cache": (False,),
    "sequence_bias": ([], {}),
    "synced_gpus": (False,),
    "token_healing": (False,),
    "watermarking_config": (),
}
"""Options of transformers that are not here, and the values, beside None, that leave them off."""


class GenerationConfig:
    """Options for ``AutoModel.generate``, by the names that it takes: ``GenerationConfig(max_new_tokens=64, top_k=3)``.

    Raises InvalidArgumentError for an unknown name.
    """

    def __init__(self, **options: Any) -> None:
        self.options = _known(options, "GenerationConfig")

    def __getattr__(self, name: str) -> Any:
        if name in OPTIONS:
            return self.__dict__.get("options", {}).get(name)
        raise AttributeError(f"GenerationConfig has no attribute {name!r:.60}")

    def __repr__(self) -> str:
        return f"GenerationConfig({', '.join(f'{name}={value!r}' for name, value in self.options.items())})"


@dataclass(frozen=True)
class GenerateOutput:
    """The result of ``generate`` with ``return_dict_in_generate``; values are attributes and keys.

    ``sequences``: as without it.  ``logits``: for each sequence an array [num_generated, vocab_size] float32, the row
    that each token was chosen from.  ``scores``: the same rows after the processors, the temperature and the filters;
    minus infinity stands for tokens that could not be drawn.  Of a beam search they are log-probabilities,
    ``sequences_scores`` has the score of each sequence, and ``beam_indices`` the beam of each of its tokens.

    With arrays or tensors ``scores`` and ``logits`` are as in transformers: for each step a row for each sequence, or
    each beam of each prompt.  A sequence that has ended has minus infinity there, and -1 in ``beam_indices``.
    """

    sequences: Any
    scores: Any = None
    logits: Any = None
    sequences_scores: Any = None
    beam_indices: Any = None

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
    beams: BeamSettings = BeamSettings()  # noqa: RUF009
    logits_processor: Any = None
    stopping_criteria: Any = None
    prefix_allowed_tokens_fn: Any = None
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    forces_first: bool = False
    """True if the call or the model has a token that must follow a prompt of one token."""

    @property
    def num_beams(self) -> int:
        """The beams of a search.  With 1 beam there is no search."""
        return self.beams.num_beams

    @property
    def num_rows(self) -> int:
        """The rows that functions see of each prompt: its answers, or 1 for a search, as in transformers."""
        return self.params.n if self.num_beams == 1 else 1

    @property
    def needs_rows(self) -> bool:
        """True if the tokens depend on what is done in Python with their rows."""
        functions = self.logits_processor, self.stopping_criteria, self.prefix_allowed_tokens_fn
        return self.num_beams > 1 or any(functions) or bool(self.suppress_tokens or self.begin_suppress_tokens)

    @property
    def needs_hook(self) -> bool:
        """True if rows are seen or changed in Python."""
        return self.output_scores or self.output_logits or self.needs_rows

    def pad_token(self, defaults: ModelDefaults) -> int:
        """Return the token that fills the rows of arrays: that of the call, of the model, or the first end token."""
        own = self.pad_token_id if self.pad_token_id is not None else defaults.pad_token_id
        ends = self.params.stop_token_ids if self.params.ignore_eos else ()
        return next(iter((*ends, *defaults.eos_token_ids)), 0) if own is None else own

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

    ``defaults``: those of the model, with which ``do_sample`` samples as in transformers.  Raises InvalidArgumentError
    or UnsupportedError, which names the option.
    """
    values: dict[str, Any] = {}
    for layer in (*map(_config_options, configs), _known(options, "generate")):
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
    beams: dict[str, Any] = {name: values.pop(name) for name in _BEAMS if name in values}
    callables = {name: values.pop(name, None) for name in _CALLABLES}
    for name in ("forced_bos_token_id", "forced_eos_token_id"):
        if isinstance(values.get(name), (list, tuple)) and len(values[name]) == 1:
            values[name] = values[name][0]
    suppressed: dict[str, Any] = {name: token_ids(name, values.pop(name, None) or ()) for name in _SUPPRESSED}
    params = sampling_of_keywords(with_sampled_defaults(values, defaults), defaults.temperature)
    forced = defaults.forced_bos_token_id if params.forced_bos_token_id is None else params.forced_bos_token_id
    return GenerateOptions(
        params,
        lengths["max_length"],
        lengths["min_length"] or 0,
        lengths["pad_token_id"],
        any(flags.values()),
        flags["output_scores"],
        flags["output_logits"],
        beams=BeamSettings(**beams),
        **callables,
        **suppressed,
        forces_first=forced >= 0,
    )


def _known(options: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the options without those of transformers that change nothing.  Raises an error for other names."""
    others = {*_OF_FILES, *_WITHOUT_EFFECT, *_OFF}
    for name, value in options.items():
        if value is None:
            continue
        if name in _WITHOUT_EFFECT:
            values, instead = _WITHOUT_EFFECT[name]
            if values:
                _check_value(where, name, value, values)
            _tell(name, instead)
        elif name in _OFF:
            _check_value(where, name, value, _OFF[name])
    known = {name: value for name, value in options.items() if name not in others}
    _check_names(known, where)
    return known


def _check_value(where: str, name: str, value: object, values: tuple[object, ...]) -> None:
    """Raise UnsupportedError for a value that would compute something else."""
    if not (isinstance(value, (int, float, str, list, dict)) and value in values):
        expected = " or ".join(["None", *map(repr, values)])
        raise UnsupportedError(f"{where}: {name}: expected {expected}, got {value!r:.60}", param=name)


@cache
def _tell(name: str, instead: str) -> None:
    """Log once that an option has no effect."""
    _LOG.warning("penstock: generate: %s is not used: %s", name, instead)


def _check_names(options: Mapping[str, Any], where: str) -> None:
    for name in options:
        if name not in OPTIONS:
            near = nearest(name, OPTIONS)
            hint = f"did you mean {near}?" if near else "help(penstock.AutoModel.generate) lists them"
            raise InvalidArgumentError(f"{where}: unknown option {name!r:.60}: {hint}", param=name)


def _config_options(config: object) -> Mapping[str, Any]:
    """Return the options of a GenerationConfig, ours or that of transformers, or of a dictionary."""
    if config is None:
        return {}
    if isinstance(config, GenerationConfig):
        return config.options
    if callable(getattr(config, "to_diff_dict", None)):  # transformers: only what differs from its defaults
        values: dict[str, Any] = config.to_diff_dict()  # type: ignore[attr-defined]
        config = values
    if not isinstance(config, Mapping):
        raise wrong_type("generation_config", "a GenerationConfig or a dictionary", config)
    return _known(config, "generation_config")
