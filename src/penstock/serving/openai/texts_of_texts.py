"""Translations, summaries and other texts that an encoder with a decoder makes, for ``POST /predict``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from penstock.api_errors import FieldError, refuse_if
from penstock.checkpoint.generation import read_generation_config
from penstock.checkpoint.tokenizer_frames import WindowRequest
from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.llm.backend import Backend, tokenizer_of
from penstock.llm.generate.options import OPTIONS, GenerateOptions, read_options
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
from penstock.text.tokenizer_threads import call_tokenizer
from penstock.validation import MAX_TOKEN

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.llm.backend import Answer, TokenDelta
    from penstock.serving.call import Call
    from penstock.serving.openai.bodies import PredictRequest
    from penstock.text.tokenizer import Tokenizer

__all__ = ["GENERATE_OPTIONS", "texts_of_texts"]

_MAX_TOKENS: Final = 1 << 17
"""The most tokens of the inputs of a request that cuts them."""
_MAX_ANSWERS: Final = 2048
"""The most beams or answers of a request: those of a text times the texts."""
GENERATE_OPTIONS: Final = (
    "max_new_tokens", "min_new_tokens", "max_length", "min_length", "do_sample", "temperature", "top_k", "top_p",
    "min_p", "typical_p", "repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "forced_bos_token_id",
    "forced_eos_token_id", "num_beams", "length_penalty", "early_stopping", "num_return_sequences", "seed",
    "eos_token_id", "use_cache",
)  # fmt: skip
"""The options of ``AutoModel.generate`` that a request may name."""


@contextmanager
def _named(prefix: str) -> Iterator[None]:
    """Name an option at fault as the request does."""
    try:
        yield
    except (InvalidArgumentError, UnsupportedError) as error:
        if error.param is None or "." in error.param:
            raise
        path = prefix + error.param
        raise FieldError(path, error.naming(path)) from None


async def texts_of_texts(
    call: Call, backend: Backend, texts: Sequence[str], body: PredictRequest, options: TextToTextOptions
) -> list[Any]:
    """Return the results of each text as the offline pipeline does: a list of ``{"translation_text"}`` or the like."""
    tokenizer = tokenizer_of(backend)
    tasks = TextToTextTasks.read(tokenizer.task_files)
    task = _task(call, tasks, body)
    read = _generation(tokenizer, tasks, task, body)
    num_each = max(read.num_beams, read.params.n)
    refuse_if(
        len(texts) * num_each > _MAX_ANSWERS,
        f"inputs: expected at most {_MAX_ANSWERS // num_each} texts with {num_each} beams or answers each, got "
        f"{len(texts)}",
        "inputs",
    )
    prefix = tasks.prefix_of(task)
    with _named("parameters.generate_parameters."):
        params = read.params_of(START_LEN)
    prompts = await _prompts(backend, [prefix + text for text in texts], body, options, params.max_tokens or 0)
    request = EngineRequest(
        backend, prompts, [None] * len(prompts), params, options_of(call, body),
        beams=read.beams if read.num_beams > 1 else None,
    )  # fmt: skip
    answers: list[list[list[int]]] = [[[] for _ in range(params.n)] for _ in prompts]

    async def take(prompt: int, _answer: Answer, delta: TokenDelta) -> None:
        answers[prompt][delta.index] += delta.token_ids

    with _named("parameters.generate_parameters."):
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
    with _named("parameters."):
        if not name or (name == "translation" and source is not None):
            return tasks.choose(source, target)
    if name not in TEXT_TO_TEXT and not is_translation(name):
        raise FieldError("task", f"task: expected {', '.join(TEXT_TO_TEXT)} or translation_XX_to_YY, got {name!r:.60}")
    if source is not None and name != f"translation_{source}_to_{target}":
        message = f"parameters.src_lang: expected none with the task {name}"
        raise FieldError("parameters.src_lang", message)
    return name


def _generation(tokenizer: Tokenizer, tasks: TextToTextTasks, task: str, body: PredictRequest) -> GenerateOptions:
    """Return the options of generation of a request, over those of the task and of the model's files."""
    given: Mapping[str, Any] = {}
    if body.parameters is not None and body.parameters.generate_parameters is not None:
        given = body.parameters.generate_parameters
    prefix = "parameters.generate_parameters."
    for name in given:
        if name in OPTIONS and name not in GENERATE_OPTIONS:
            raise FieldError(prefix + name, f"{prefix}{name}: expected one of {', '.join(GENERATE_OPTIONS)}")
    own = {name: value for name, value in tasks.options_of(task).items() if name in OPTIONS}
    with _named(prefix):
        return read_options((DEFAULTS, own), given, read_generation_config(tokenizer.task_files))


async def _prompts(
    backend: Backend, texts: list[str], body: PredictRequest, options: TextToTextOptions, answer_len: int
) -> list[list[int]]:
    """Return the token ids of texts, cut to what the model reads if the request asks for that."""
    refuse_if(
        body.truncate_prompt_tokens not in (None, -1),
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
