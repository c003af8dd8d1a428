"""Translations, summaries and other texts that an encoder with a decoder makes, for ``POST /predict``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

from penstock.api_errors import CombinationError, FieldError, RefusalError, refuse_if
from penstock.checkpoint.generation import GenerationDefaults, read_generation_config
from penstock.checkpoint.tokenizer_frames import WindowRequest
from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.llm.backend import Backend, tokenizer_of
from penstock.llm.generate.options import OPTIONS, GenerateOptions, read_options
from penstock.llm.sampling_keywords import SYNONYMS
from penstock.serving.generation import Generation
from penstock.serving.translation import EngineRequest, options_of, prompts_of
from penstock.text.tasks.options import CUTS, read_cut, windows_of
from penstock.text.tasks.text_to_text import (
    DEFAULTS,
    START_LEN,
    TEXT_TO_TEXT,
    TextToTextOptions,
    TextToTextTasks,
    input_limit,
    is_translation,
    result_key,
)
from penstock.text.tokenizer import Tokenizer
from penstock.text.tokenizer_threads import call_tokenizer
from penstock.validation import MAX_TOKEN

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.engine.params import SamplingParams
    from penstock.llm.backend import Answer, TokenDelta
    from penstock.serving.call import Call
    from penstock.serving.openai.bodies import PredictRequest

__all__ = ["GENERATE_OPTIONS", "texts_of_texts"]

_MAX_TOKENS: Final = 1 << 17
"""The most tokens of the inputs of a request that cuts them."""
_MAX_ANSWERS: Final = 2048
"""The most beams or answers of a request: those of a text times the texts."""
_MAX_BEAMS: Final = 16
_MAX_CANDIDATES: Final = 1024
"""The most continuations that a step of a search compares: for each beam one, and one more for each end token."""
_MAX_BEAM_TOKENS: Final = 1 << 20
"""The most new tokens of all beams of a request."""
GENERATE_OPTIONS: Final = (
    "max_new_tokens", "min_new_tokens", "max_length", "min_length", "do_sample", "temperature", "top_k", "top_p",
    "min_p", "typical_p", "repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "forced_bos_token_id",
    "forced_eos_token_id", "num_beams", "length_penalty", "early_stopping", "num_return_sequences", "seed",
    "eos_token_id", "use_cache",
)  # fmt: skip
"""The options of ``AutoModel.generate`` that a request may name."""


_PREFIX: Final = "parameters.generate_parameters."
_NAMES: Final = {own: option for option, own in SYNONYMS.items()} | {"stop_token_ids": "eos_token_id"}
"""The options by the names of SamplingParams."""
_LENGTHS: Final = {"max_tokens": "max_length", "min_tokens": "min_length"}
_IN_PYTHON: Final = (
    "suppress_tokens", "begin_suppress_tokens", "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn",
)  # fmt: skip
"""Options that change rows in Python, which a service does not."""
_FILES: WeakKeyDictionary[Tokenizer, tuple[TextToTextTasks, GenerationDefaults]] = WeakKeyDictionary()
"""Tasks and defaults of the files of each model."""


def _files_of(tokenizer: Tokenizer) -> tuple[TextToTextTasks, GenerationDefaults]:
    """Return the tasks and the defaults of a model's files, which are read once."""
    if tokenizer not in _FILES:
        files = tokenizer.task_files
        _FILES[tokenizer] = TextToTextTasks.read(files), read_generation_config(files)
    return _FILES[tokenizer]


def _name_of(name: str, options: Mapping[str, Any]) -> str:
    """Return the name that a request has for an option at fault; ``given``: its options of generation."""
    own, bracket, index = name.partition("[")
    option = _NAMES.get(own, own)
    if option not in options and _LENGTHS.get(own) in options:
        return _LENGTHS[own]
    return option + bracket + index if isinstance(options.get(option, ()), (list, tuple)) else option


@contextmanager
def _named(prefix: str, options: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Name an option at fault as the request does; ``given``: its options of generation."""
    try:
        yield
    except (InvalidArgumentError, UnsupportedError) as error:
        if error.param is None or "." in error.param:
            raise
        path = "inputs" if error.param == "prompt" else prefix + _name_of(error.param, options or {})
        raise RefusalError(400, error.naming(path), param=path, code=error.code) from None


async def texts_of_texts(
    call: Call, backend: Backend, texts: Sequence[str], body: PredictRequest, options: TextToTextOptions
) -> list[Any]:
    """Return the results of each text as the offline pipeline does: a list of ``{"translation_text"}`` or the like."""
    tokenizer = tokenizer_of(backend)
    tasks, defaults = _files_of(tokenizer)
    task = _task(call, tasks, body)
    parameters: Mapping[str, Any] = (body.parameters and body.parameters.generate_parameters) or {}
    with _named(_PREFIX, parameters):
        read = _generation(tasks.options_of(task), parameters, defaults)
        params = read.params_of(START_LEN)
    _check_size(len(texts), read, params, parameters, backend.card.max_len)
    prefix = tasks.prefix_of(task)
    prompts = await _prompts(backend, [prefix + text for text in texts], body, options, params.max_tokens or 0)
    request = EngineRequest(
        backend, prompts, [None] * len(prompts), params, options_of(call, body),
        beams=read.beams if read.num_beams > 1 else None,
    )  # fmt: skip
    answers: list[list[list[int]]] = [[[] for _ in range(params.n)] for _ in prompts]

    async def take(prompt: int, _answer: Answer, delta: TokenDelta) -> None:
        answers[prompt][delta.index] += delta.token_ids

    with _named(_PREFIX, parameters):
        await Generation(call, request).run(take)
    key = f"{result_key(task)}_text"
    results = []
    for each in answers:
        made = await call_tokenizer(tokenizer, sum(map(len, each)), tokenizer.decode_each, each)
        results.append([{key: text} for text in made])
    return results


def _task(call: Call, tasks: TextToTextTasks, body: PredictRequest) -> str:
    """Return the task of a request: that of its path, or that of the languages that it names, or the model's own."""
    source, target = (None, None) if body.parameters is None else (body.parameters.src_lang, body.parameters.tgt_lang)
    name = call.path_values.get("task", "").replace("-", "_")
    has_languages = source is not None or target is not None
    if not name or (name == "translation" and has_languages):
        with _named("parameters."):
            return tasks.choose(source, target)
    if name == "translation" and name not in tasks.prefixes:
        return _only_translation(tasks)
    if name not in TEXT_TO_TEXT and not is_translation(name):
        raise FieldError("task", f"task: expected {', '.join(TEXT_TO_TEXT)} or translation_XX_to_YY, got {name!r:.60}")
    if is_translation(name) and name not in tasks.prefixes:
        raise FieldError("task", f"task: expected {tasks.pairs}, got {name!r:.60}; or use the task translation")
    words = name.split("_") if is_translation(name) else [""] * 4
    for field, language, own in (("src_lang", source, words[1]), ("tgt_lang", target, words[3])):
        if language not in (None, own):
            path = f"parameters.{field}"
            raise FieldError(path, f"{path}: expected {own or 'none'} with the task {name}, got {language!r:.40}")
    return name


def _only_translation(tasks: TextToTextTasks) -> str:
    """Return the task of a translation without languages: without any task in config.json a text as it is."""
    translations = tasks.translations
    if len(translations) > 1:
        path = "parameters.tgt_lang"
        raise FieldError(path, f"{path}: expected {tasks.pairs}, got none")
    if not translations and "summarization" in tasks.prefixes:
        raise FieldError("task", "task: expected summarization, which config.json names, got translation")
    return translations[0] if translations else "translation"


def _generation(
    of_task: Mapping[str, Any], options: Mapping[str, Any], defaults: GenerationDefaults
) -> GenerateOptions:
    """Return the options of generation of a request, over those of the task and of the model's files."""
    for name in options:
        if name in OPTIONS and name not in GENERATE_OPTIONS:
            raise FieldError(_PREFIX + name, f"{_PREFIX}{name}: expected one of {', '.join(GENERATE_OPTIONS)}")
    own = {name: value for name, value in of_task.items() if name in OPTIONS}
    read = read_options((DEFAULTS, own), options, defaults)
    for name in _IN_PYTHON:
        if getattr(read, name):  # flags such as output_scores change no text
            message = f"task: config.json has {name} for this task, which only the offline pipeline supports"
            raise FieldError("task", message, "unsupported")
    return read


def _check_size(
    num_texts: int, read: GenerateOptions, params: SamplingParams, options: Mapping[str, Any], context_len: int
) -> None:
    """Refuse more answers than a request may have, and a search that would take the engine's thread for long."""
    num_beams, num_each = read.num_beams, max(read.num_beams, params.n)
    if num_beams > _MAX_BEAMS:
        path = _PREFIX + "num_beams"
        raise FieldError(path, f"{path}: expected at most {_MAX_BEAMS}, got {num_beams}")
    refuse_if(
        num_texts * num_each > _MAX_ANSWERS,
        f"inputs: expected at most {_MAX_ANSWERS // num_each} texts with {num_each} beams or answers each, got "
        f"{num_texts}",
        "inputs",
    )
    if num_beams == 1:
        return
    num_ends, most_ends = len(params.stop_token_ids), _MAX_CANDIDATES // num_beams - 1
    if num_ends > most_ends:
        path = _PREFIX + "eos_token_id"
        raise CombinationError(path, f"{path}: expected at most {most_ends} with {num_beams} beams, got {num_ends}")
    num_new = min(params.max_tokens or context_len, context_len)
    if num_texts * num_beams * num_new > _MAX_BEAM_TOKENS:
        path = "inputs" if num_beams * num_new <= _MAX_BEAM_TOKENS else _PREFIX + _name_of("max_tokens", options)
        message = f"expected at most {_MAX_BEAM_TOKENS} new tokens in all beams, got {num_texts * num_beams * num_new}"
        raise CombinationError(path, f"{path}: {message}; send fewer texts, or ask for fewer beams or tokens")


async def _prompts(
    backend: Backend, texts: list[str], body: PredictRequest, options: TextToTextOptions, answer_len: int
) -> list[list[int]]:
    """Return the token ids of texts, cut to what the model reads if the request asks for that."""
    refuse_if(
        body.truncate_prompt_tokens is not None and not body.truncate,  # truncate sets it
        "truncate_prompt_tokens: expected none for this task; use truncate", "truncate_prompt_tokens",
    )  # fmt: skip
    cut = read_cut(options.truncation) or (CUTS[0] if body.truncate else "")
    if not cut:
        return [ids for ids, _ in await prompts_of(backend, texts, "inputs", body)]
    tokenizer, context_len = tokenizer_of(backend), backend.card.max_len
    max_len = input_limit(tokenizer.max_len or 0, context_len, answer_len)
    requests = [WindowRequest(text, max_len=max_len, cut=cut, first_only=True) for text in texts]
    windows = await call_tokenizer(tokenizer, MAX_TOKEN, windows_of, tokenizer, requests, max(_MAX_TOKENS, context_len))
    return [list(each[0].ids) for each in windows]
