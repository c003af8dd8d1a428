"""``POST /predict``: classes of texts, entities, answers to questions, fillings of masks, and rows of tokens.

The formats are those of text-embeddings-inference and of transformers' pipelines, which Hugging Face's clients know.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.api_errors import FieldError, refuse_if
from penstock.checkpoint.pooling.head import ALL_ROWS, ANSWER_TASK, PoolingHead
from penstock.engine.logprobs import TokenLogprobs
from penstock.engine.prompt_logits import Places
from penstock.errors import InvalidArgumentError
from penstock.llm.backend import Backend, tokenizer_of
from penstock.llm.classify import classifier_head
from penstock.models.families import family_modules
from penstock.serving.call import Call, Reply, json_reply
from penstock.serving.openai.bodies import MAX_LABELS, PredictInput, PredictParameters, PredictRequest
from penstock.serving.openai.embeddings import pooling_head_of
from penstock.serving.openai.texts_of_texts import texts_of_texts
from penstock.serving.request_fields import ServingFields
from penstock.serving.translation import options_of, pair_ids, prompts_of, vector_ids
from penstock.text.tasks.answers import AnswerOptions, answer_prompts
from penstock.text.tasks.classes import ClassificationOptions, classes_of
from penstock.text.tasks.entities import TokenOptions, entity_prompts
from penstock.text.tasks.fillings import FillingOptions, fillings_of, find_mask
from penstock.text.tasks.options import Options, TaskPrompts, changed_options
from penstock.text.tasks.text_to_text import TextToTextOptions
from penstock.text.tasks.zero_shot import ZeroShotOptions, zero_shot_prompts
from penstock.text.tokenizer import Tokenizer
from penstock.text.tokenizer_threads import call_tokenizer
from penstock.validation import MAX_TOKEN

__all__ = ["Parameters", "answers_to", "entities_of", "logits_of", "predict"]

OptionsT = TypeVar("OptionsT", bound=Options)
_MAX_TOKENS: Final = 1 << 17
"""The most tokens of the windows of a request, unless one context is longer."""
_MAX_ROWS: Final = 1 << 13
"""The most tokens of a request whose reply has a row for each, unless the context is longer."""
_MAX_MASKS: Final = 64
"""The most masks of a text: the engine lists the tokens of all of them between two steps."""
_MAX_FILLINGS: Final = 1 << 20
"""The most tokens of the texts of a reply with fillings."""


class Parameters:
    """The options that a request names; ``prefix`` is put before their names in errors."""

    def __init__(self, parameters: PredictParameters | None, prefix: str) -> None:
        values = {} if parameters is None else msgspec.structs.asdict(parameters)
        self._values: Mapping[str, Any] = {
            name: value for name, value in values.items() if value is not None and name != "max_question_len"
        }
        self._prefix = prefix

    def options(self, own: OptionsT, task: str, beside: Sequence[str] = ()) -> OptionsT:
        """Return the options of a task; FieldError for a parameter of another one.

        ``beside``: parameters of the task that are not among its options.
        """
        values = {name: value for name, value in self._values.items() if name not in beside}
        name = "truncation"
        if name in values and not isinstance(own, TextToTextOptions):
            path = self._prefix + name
            raise FieldError(path, f"{path}: expected none for the task {task}; use truncate")
        with self.named():
            return changed_options(own, values, task)

    @contextmanager
    def named(self) -> Iterator[None]:
        """Name an option at fault as the request does."""
        try:
            yield
        except InvalidArgumentError as error:
            if error.param not in PredictParameters.__struct_fields__:
                raise
            path = self._prefix + error.param
            raise FieldError(path, error.naming(path)) from None


async def predict(call: Call) -> Reply:
    """Return what the model is for: classes of texts, entities, answers to questions, fillings, or rows of tokens."""
    body: PredictRequest = call.body
    backend = call.model(body.model)
    head, parameters = pooling_head_of(backend), Parameters(body.parameters, "parameters.")
    inputs: list[Any] = body.inputs if isinstance(body.inputs, list) else [body.inputs]
    run = _task_of(call, head, backend, body)
    if run is not None:
        refuse_if(bool(body.raw_scores), "raw_scores: expected false with this task; use /pooling", "raw_scores")
        read: Callable[[int, Any], Any] = _question if head.task == ANSWER_TASK else _text
        results = await run(call, backend, [read(*item) for item in enumerate(inputs)], body, parameters)
        return json_reply(results if isinstance(body.inputs, list) else results[0])
    classifier_head(head)
    options = parameters.options(ClassificationOptions(top_k=None), "text_classification")
    refuse_if(
        bool(body.raw_scores) and options.function_to_apply is not None,
        "raw_scores: expected false with function_to_apply, got true; omit one", "raw_scores",
    )  # fmt: skip
    is_batch = any(not isinstance(item, str) for item in inputs) and isinstance(body.inputs, list)
    refuse_if(
        not is_batch and len(inputs) > 2,
        f"inputs: expected a text, a pair of texts, or a list of lists of them, got a list of {len(inputs)} "
        "texts; put each text in a list of its own",
        "inputs",
    )
    pairs = [_pair(*item) for item in enumerate(inputs)] if is_batch else [_pair(0, body.inputs)]
    prompts = [ids for i, pair in enumerate(pairs) for ids in await _prompt(backend, pair, body, f"inputs[{i}]")]
    function = "identity" if body.raw_scores else head.score_function
    logits = await logits_of(call, backend, prompts, body)
    results = [classes_of(each, head.labels, function, options) for each in logits]
    return json_reply(results if is_batch else results[0])


_Run = Callable[[Call, Backend, list[Any], PredictRequest, "Parameters"], Awaitable[list[Any]]]


def _task_of(call: Call, head: PoolingHead, backend: Backend, body: PredictRequest) -> _Run | None:
    """Return the task of a request; None for the classes of a classifier of texts, or a model that has none."""
    module = family_modules().get(backend.card.network, "")
    if ".encoder_decoder." in module:
        return _rewritten
    if "task" in call.path_values:
        raise FieldError("task", "task: expected none in the path, because the model has one task; use /predict")
    if head.task:
        return answers_to if head.task == ANSWER_TASK else entities_of
    if len(head.labels) > 1 and body.parameters is not None and body.parameters.candidate_labels is not None:
        return _zero_shot
    return _filled if not head.labels and ".encoders." in module else None


async def _rewritten(
    call: Call, backend: Backend, texts: list[str], body: PredictRequest, parameters: Parameters
) -> list[Any]:
    """Return the translations, summaries or other texts that are made of texts."""
    beside = ("src_lang", "tgt_lang", "generate_parameters")
    options = parameters.options(TextToTextOptions(), "text2text_generation", beside)
    results = await texts_of_texts(call, backend, texts, body, options)
    return [answers[0] if len(answers) == 1 and isinstance(body.inputs, list) else answers for answers in results]


async def _zero_shot(
    call: Call, backend: Backend, texts: Sequence[str], body: ServingFields, parameters: Parameters
) -> list[Any]:
    """Return the candidates of each text with their scores, in the format of Hugging Face's inference service."""
    options = parameters.options(ZeroShotOptions(), "zero_shot_classification")
    refuse_if(
        len(options.candidate_labels) > MAX_LABELS,
        f"parameters.candidate_labels: expected at most {MAX_LABELS}, got {len(options.candidate_labels)}",
        "parameters.candidate_labels",
    )
    max_len, max_tokens = _limits(backend, body)
    labels = pooling_head_of(backend).labels
    make = partial(
        zero_shot_prompts, labels=labels, inputs=texts, options=options, max_len=max_len, max_tokens=max_tokens
    )
    results = await _results(call, backend, body, parameters, make)
    return [
        [{"label": label, "score": score} for label, score in zip(result["labels"], result["scores"], strict=True)]
        for result in results
    ]


async def _filled(
    call: Call, backend: Backend, texts: list[str], body: ServingFields, parameters: Parameters
) -> list[Any]:
    """Return the fillings of texts with masks, or the rows of the tokens of texts without one."""
    name = "truncate" if getattr(body, "truncate", None) else "truncate_prompt_tokens"
    refuse_if(body.truncate_prompt_tokens is not None, f"{name}: expected none for fillings and rows of tokens", name)
    prompts = [ids for ids, _ in await prompts_of(backend, texts, "inputs", body)]
    call.facts["prompt_tokens"] = sum(map(len, prompts))
    tokenizer = tokenizer_of(backend)
    mask = await call_tokenizer(tokenizer, MAX_TOKEN, find_mask, tokenizer)
    if mask is None or not any(mask[0] in ids for ids in prompts):
        parameters.options(Options(), "feature_extraction")
        return await _token_rows(call, backend, prompts, body)
    options = parameters.options(FillingOptions(), "fill_mask")
    with parameters.named():
        target_ids, _ = await call_tokenizer(tokenizer, MAX_TOKEN, options.target_ids, tokenizer)
    top_k = min(options.top_k, len(target_ids) or backend.card.vocab_size)
    size = sum(ids.count(mask[0]) * top_k * len(ids) for ids in prompts)  # each filling has the whole text
    refuse_if(
        size > _MAX_FILLINGS,
        f"inputs: expected fillings of at most {_MAX_FILLINGS} tokens in all, got {size}; send fewer or shorter texts, "
        "or a smaller top_k",
        "inputs",
    )
    texts_places = [[i for i, token in enumerate(ids) if token == mask[0]] for ids in prompts]
    for index, places in enumerate(texts_places):
        if not 1 <= len(places) <= _MAX_MASKS:
            path, expected = f"inputs[{index}]", f"a text with {mask[1]}, at most {_MAX_MASKS} times"
            raise FieldError(path, f"{path}: expected {expected}, got {len(places)}")
    results = []
    for ids, places in zip(prompts, texts_places, strict=True):
        asked = Places(tuple(places), tuple(target_ids))
        scores = await backend.score(ids, top_k, options_of(call, body), request_id=call.request_id, places=asked)
        best = [(place, _likeliest(row)) for place, row in zip(places, scores.logprobs[1:], strict=True)]
        results.append(await call_tokenizer(tokenizer, MAX_TOKEN, fillings_of, tokenizer, ids, best))
    return results


def _likeliest(row: TokenLogprobs | None) -> list[tuple[int, float]]:
    return [] if row is None else [(token, math.exp(logprob)) for token, logprob in row.top]


async def _token_rows(call: Call, backend: Backend, prompts: Sequence[Sequence[int]], body: ServingFields) -> list[Any]:
    """Return the hidden rows of each prompt, [1, len, hidden_size], as the pipeline feature_extraction does."""
    num_tokens, limit = sum(map(len, prompts)), max(_MAX_ROWS, backend.card.max_len)
    refuse_if(
        num_tokens > limit, f"inputs: expected at most {limit} tokens, got {num_tokens}; send fewer texts", "inputs"
    )
    embeddings = await backend.embed(prompts, ALL_ROWS, False, options_of(call, body), request_id=call.request_id)
    return await asyncio.to_thread(lambda: [[embedding.vector.tolist()] for embedding in embeddings])


async def _prompt(backend: Backend, texts: tuple[str, str | None], body: PredictRequest, field: str) -> list[list[int]]:
    """Return the prompt of a text or of a pair, in a list."""
    text, pair = texts
    if pair is not None:
        return [await pair_ids(backend, text, pair, body, field)]
    if body.truncate:
        return [await vector_ids(backend, text, PoolingHead(max_text_len=backend.card.max_len))]
    return [ids for ids, _ in await prompts_of(backend, text, "inputs", body)]


async def logits_of(
    call: Call, backend: Backend, prompts: Sequence[Sequence[int]], body: ServingFields
) -> list[NDArray[np.float32]]:
    """Return the logits of the classes of each prompt."""
    embeddings = await backend.embed(prompts, "auto", False, options_of(call, body), request_id=call.request_id)
    call.facts["prompt_tokens"] = sum(len(embedding.token_ids) for embedding in embeddings)
    return [embedding.vector for embedding in embeddings]


async def entities_of(
    call: Call, backend: Backend, texts: Sequence[str], body: ServingFields, parameters: Parameters
) -> list[Any]:
    """Return the entities of each text, as the pipeline token_classification does."""
    head, (max_len, max_tokens) = pooling_head_of(backend), _limits(backend, body)
    options = parameters.options(TokenOptions(), head.task)
    make = partial(
        entity_prompts, labels=head.labels, inputs=texts, options=options, max_len=max_len, max_tokens=max_tokens
    )
    return await _results(call, backend, body, parameters, make)


async def answers_to(
    call: Call, backend: Backend, pairs: Sequence[tuple[str, str]], body: ServingFields, parameters: Parameters
) -> list[Any]:
    """Return the answer to each question with its context, as the pipeline question_answering does."""
    options = parameters.options(AnswerOptions(), ANSWER_TASK)
    max_len, max_tokens = _limits(backend, body)
    make = partial(answer_prompts, inputs=pairs, options=options, max_len=max_len, max_tokens=max_tokens)
    return await _results(call, backend, body, parameters, make)


def _limits(backend: Backend, body: ServingFields) -> tuple[int, int]:
    """Return the most tokens of a prompt, and those of all prompts."""
    refuse_if(
        body.truncate_prompt_tokens not in (None, -1),
        "truncate_prompt_tokens: expected none for this task; entities take stride, answers max_seq_len",
        "truncate_prompt_tokens",
    )
    context_len = backend.card.max_len
    max_len = min(tokenizer_of(backend).max_len or context_len, context_len)
    return max_len, max(_MAX_TOKENS, context_len)


async def _results(
    call: Call,
    backend: Backend,
    body: ServingFields,
    parameters: Parameters,
    make: Callable[[Tokenizer], TaskPrompts],
) -> list[Any]:
    tokenizer = tokenizer_of(backend)
    with parameters.named():
        asked: TaskPrompts = await call_tokenizer(tokenizer, MAX_TOKEN, make, tokenizer)
    embeddings = await backend.embed(asked.prompts, "auto", False, options_of(call, body), request_id=call.request_id)
    call.facts["prompt_tokens"] = sum(len(embedding.token_ids) for embedding in embeddings)
    results: list[Any] = await call_tokenizer(
        tokenizer, MAX_TOKEN, asked.results, [embedding.vector for embedding in embeddings]
    )
    return results


def _text(index: int, value: Any) -> str:
    """Return an input that is one text."""
    (value,) = value if isinstance(value, list) and len(value) == 1 else (value,)
    if isinstance(value, PredictInput) and value.text is not None and value.text_pair is None:
        value = value.text
    if not isinstance(value, str):
        raise FieldError(f"inputs[{index}]", f"inputs[{index}]: expected one text for this task")
    return value


def _question(index: int, value: Any) -> tuple[str, str]:
    """Return a question and its context."""
    for name in ("question", "context"):
        if not isinstance(value, PredictInput) or not getattr(value, name):
            path = f"inputs[{index}].{name}"
            raise FieldError(path, f"{path}: expected a text that is not empty: the model reads question and context")
    return value.question, value.context


def _pair(index: int, value: Any) -> tuple[str, str | None]:
    """Return a text, and the second text of its pair, if it has one."""
    if isinstance(value, PredictInput):
        if value.text is None:
            path = f"inputs[{index}].text"
            raise FieldError(path, f"{path}: expected a text, because this model classifies texts")
        return value.text, value.text_pair
    texts = [value] if isinstance(value, str) else value
    return texts[0], texts[1] if len(texts) > 1 else None
