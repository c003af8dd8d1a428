"""The response bodies of the routes in OpenAI's and vLLM's formats."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, UnsetType

from penstock.serving.openai.bodies import DocumentText
from penstock.serving.request_fields import Body

__all__ = [
    "ChatCompletionEvent",
    "ChatCompletionResponse",
    "ClassifyResponse",
    "CompletionEvent",
    "CompletionResponse",
    "DetokenizeResponse",
    "EmbeddingResponse",
    "PoolingResponse",
    "PredictResponse",
    "PredictResult",
    "RerankResponse",
    "ScoreResponse",
    "TokenizeResponse",
]  # fmt: skip

Count = Annotated[int, Meta(ge=0)]
_FinishReason = Literal["stop", "length"]
_ChatFinishReason = Literal["stop", "length", "tool_calls"]
_Logprob = Annotated[float, Meta(ge=-9999, le=0.001)]


class PromptTokensDetails(Body):
    """``cached_tokens``: tokens of the prompt whose keys and values were in the cache."""

    cached_tokens: Count


class Usage(Body):
    """The token counts of a request."""

    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: PromptTokensDetails


class TextLogprobs(Body):
    """The log-probabilities of a text's tokens, one item per token; offsets count characters."""

    tokens: list[str]
    token_logprobs: list[_Logprob | None]
    top_logprobs: list[dict[str, _Logprob] | None]
    text_offset: list[Count]


class CompletionChoice(Body):
    """An answer to a prompt."""

    index: Count
    text: str
    logprobs: TextLogprobs | None
    finish_reason: _FinishReason


class CompletionPiece(Body):
    """The next part of an answer to a prompt."""

    index: Count
    text: str
    logprobs: TextLogprobs | None
    finish_reason: _FinishReason | None


class CompletionResponse(Body):
    """The response of ``POST /v1/completions``."""

    id: str
    object: Literal["text_completion"]
    created: Count
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage


class CompletionEvent(Body):
    """An event of the stream of ``POST /v1/completions``."""

    id: str
    object: Literal["text_completion"]
    created: Count
    model: str
    system_fingerprint: str
    choices: list[CompletionPiece]
    usage: Usage | UnsetType | None = UNSET


class TopLogprob(Body):
    """One of the likeliest tokens at a position, its log-probability and its bytes."""

    token: str
    logprob: _Logprob
    bytes: list[Annotated[int, Meta(ge=0, le=255)]] | None


class TokenLogprob(TopLogprob):
    """A token, its log-probability and the likeliest tokens in its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Body):
    """The log-probabilities of a message's tokens."""

    content: list[TokenLogprob]


class CalledFunction(Body):
    """The function that a call names, and its arguments as the text of an object of JSON."""

    name: str
    arguments: str


class ChatToolCall(Body):
    """A tool call."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(Body):
    """The message that was generated.  ``reasoning_content``: its thoughts."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ChatToolCall] | UnsetType = UNSET


class ChatChoice(Body):
    """An answer to a conversation."""

    index: Count
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: _ChatFinishReason


class FunctionPiece(Body):
    """The name of a function, or the next part of its arguments."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCallPiece(Body):
    """The next part of the tool call ``index``; the first has its id and its name."""

    index: Count
    function: FunctionPiece
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatDelta(Body):
    """The next part of a message; the first has only the role."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallPiece] | UnsetType = UNSET


class ChatPiece(Body):
    """The next part of an answer to a conversation."""

    index: Count
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: _ChatFinishReason | None


class ChatCompletionResponse(Body):
    """The response of ``POST /v1/chat/completions``."""

    id: str
    object: Literal["chat.completion"]
    created: Count
    model: str
    system_fingerprint: str
    choices: Annotated[list[ChatChoice], Meta(min_length=1)]
    usage: Usage


class ChatCompletionEvent(Body):
    """An event of the stream of ``POST /v1/chat/completions``."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: Count
    model: str
    system_fingerprint: str
    choices: list[ChatPiece]
    usage: Usage | UnsetType | None = UNSET


class EmbeddingObject(Body):
    """A vector: numbers, or base64 of little-endian float32."""

    object: Literal["embedding"]
    index: Count
    embedding: Annotated[list[float], Meta(min_length=1)] | str


class EmbeddingUsage(Body):
    """The token counts of a request for embeddings."""

    prompt_tokens: Count
    total_tokens: Count


class EmbeddingResponse(Body):
    """The response of ``POST /v1/embeddings``."""

    object: Literal["list"]
    model: str
    data: Annotated[list[EmbeddingObject], Meta(min_length=1)]
    usage: EmbeddingUsage


class RankedDocument(Body):
    """A document: its place in the request, its score, and its text if texts are repeated."""

    index: Count
    relevance_score: float
    document: DocumentText | UnsetType = UNSET


class RerankResponse(Body):
    """The response of ``POST /rerank``: documents by descending score."""

    id: str
    model: str
    usage: EmbeddingUsage
    results: list[RankedDocument]


class PairScore(Body):
    """The score of a pair of texts."""

    object: Literal["score"]
    index: Count
    score: float


class ScoreResponse(Body):
    """The response of ``POST /score``."""

    id: str
    object: Literal["list"]
    model: str
    data: list[PairScore]
    usage: EmbeddingUsage


class TextClasses(Body):
    """The likeliest class of a text, and the score of each in the order of the model's labels."""

    index: Count
    label: str
    probs: list[float]
    num_classes: Count


class ClassifyResponse(Body):
    """The response of ``POST /classify``."""

    id: str
    object: Literal["list"]
    model: str
    data: list[TextClasses]
    usage: EmbeddingUsage


class PooledText(Body):
    """A vector, a row for each token, or either as base64 of little-endian float32."""

    index: Count
    object: Literal["pooling"]
    data: Annotated[list[float | Annotated[list[float], Meta(min_length=1)]], Meta(min_length=1)] | str


class PoolingResponse(Body):
    """The response of ``POST /pooling``."""

    id: str
    object: Literal["list"]
    created: Count
    model: str
    data: list[PooledText]
    usage: EmbeddingUsage


class PredictResult(Body, kw_only=True):
    """A class of a text or a filling of its mask, with its score; or an entity or an answer, with its place, too.

    For a translation or a summary it has the text, under the key of its task.
    """

    score: float | UnsetType = UNSET
    label: str | UnsetType = UNSET
    entity: str | UnsetType = UNSET
    entity_group: str | UnsetType = UNSET
    index: Count | UnsetType = UNSET
    word: str | UnsetType = UNSET
    answer: str | UnsetType = UNSET
    token: Count | UnsetType = UNSET
    token_str: str | UnsetType = UNSET
    sequence: str | UnsetType = UNSET
    start: Count | UnsetType = UNSET
    end: Count | UnsetType = UNSET
    translation_text: str | UnsetType = UNSET
    summary_text: str | UnsetType = UNSET
    generated_text: str | UnsetType = UNSET


_Rows = list[PredictResult | float | list[float]]
PredictResponse = list[PredictResult | list[PredictResult | _Rows]] | PredictResult
"""Results, or a list for each input; rows of tokens are lists of numbers."""


class TokenizeResponse(Body):
    """The response of ``POST /tokenize``."""

    count: Count
    max_model_len: Count
    tokens: list[Count]
    token_strs: list[str] | None


class DetokenizeResponse(Body):
    """The response of ``POST /detokenize``."""

    prompt: str
