"""The request bodies of the routes in OpenAI's and vLLM's formats."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from msgspec import Meta

from penstock.api_errors import refuse_if
from penstock.serving.openai import unsupported_fields
from penstock.serving.openai.answer_format import BUDGETS, GUIDED, ResponseFormat, StructuredOutputs, asked_grammar
from penstock.serving.openai.messages import Message, Messages, ToolChoice, Tools, check_messages, check_tools
from penstock.serving.openai.unsupported_fields import WITHOUT_EFFECT
from penstock.serving.request_fields import (
    MAX_NAME_CHARS,
    MAX_PROMPTS,
    Body,
    Inputs,
    Prompts,
    SamplingFields,
    ServingFields,
    Token,
    checked_prompts,
    extended,
)
from penstock.validation import MAX_TOKEN

__all__ = [
    "MAX_LABELS", "ChatCompletionRequest", "ClassifyRequest", "CompletionRequest", "DetokenizeRequest", "DocumentText",
    "EmbeddingRequest", "Message", "PoolingRequest", "PredictInput", "PredictParameters",
    "PredictRequest", "RerankRequest", "ScoreRequest", "StreamOptions", "TokenizeRequest",
]  # fmt: skip

_Model = Annotated[
    Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS)] | None,
    Meta(description="A model name from /v1/models. Optional if only one model is served."),
]
BY_ROUTE: Final = ("thinking_format", "kept_special_token_ids")
"""Sampling fields that a chat takes from the chat template instead."""
_Count = Annotated[int, Meta(ge=1, le=MAX_TOKEN)]


class _ActivationFields(ServingFields, kw_only=True):
    """The fields that turn logits into scores, and rows to length 1, by the name of vLLM and by its earlier names."""

    use_activation: Annotated[
        bool | None,
        Meta(
            description="Return scores, or vectors of length 1. false: logits, or vectors as they are. Default: true."
        ),
    ] = None
    activation: Annotated[bool | None, Meta(description="An earlier name of use_activation.")] = None
    softmax: Annotated[bool | None, Meta(description="An earlier name of use_activation.")] = None

    def __post_init__(self) -> None:
        """Refuse names with different values."""
        super().__post_init__()
        for name in _EARLIER_NAMES:
            value = getattr(self, name, None)
            refuse_if(
                value is not None and value is not self.is_activated,
                f"{name}: expected the value of use_activation, of which it is an earlier name, got {value}",
                name,
            )

    @property
    def is_activated(self) -> bool:
        """Return True if scores are wanted, not logits."""
        names = ("use_activation", *_EARLIER_NAMES)
        return next((value for name in names if (value := getattr(self, name, None)) is not None), True)


_EARLIER_NAMES: Final = ("activation", "softmax", "normalize")


if TYPE_CHECKING:
    _CompletionFields = SamplingFields
    _ChatFields = SamplingFields
    _EmbeddingFields = ServingFields
    _RerankFields = _ActivationFields
    _ScoreFields = _ActivationFields
    _ClassifyFields = _ActivationFields
    _PoolingFields = _ActivationFields
    _PredictFields = ServingFields
    _StreamFields = Body
    _TokenizeFields = Body
else:
    _scored = {name: name for name in ("best_of", "echo", "logprobs", *BY_ROUTE)}
    _chat_names = {"top_logprobs": "logprobs"} | GUIDED | dict.fromkeys(BUDGETS, "thinking_token_budget")
    _CompletionFields = extended("CompletionFields", SamplingFields, _scored | GUIDED, unsupported_fields.COMPLETION)
    _ChatFields = extended("ChatFields", SamplingFields, _chat_names, unsupported_fields.CHAT)
    _EmbeddingFields = extended("EmbeddingFields", ServingFields, fields=unsupported_fields.EMBEDDING)
    _RerankFields = extended("RerankFields", _ActivationFields, fields=unsupported_fields.RERANK)
    _ScoreFields = extended("ScoreFields", _ActivationFields, fields=unsupported_fields.SCORE)
    _ClassifyFields = extended("ClassifyFields", _ActivationFields, fields=unsupported_fields.CLASSIFY)
    _PoolingFields = extended("PoolingFields", _ActivationFields, fields=unsupported_fields.POOLING)
    _PredictFields = extended("PredictFields", ServingFields, fields=unsupported_fields.PREDICT)
    _StreamFields = extended("StreamFields", Body, fields=unsupported_fields.STREAM_OPTIONS)
    _TokenizeFields = extended("TokenizeFields", Body, fields=unsupported_fields.TOKENIZE)

_TokenNames = Annotated[
    bool | None, Meta(description="In logprobs, write each token as `token_id:N` instead of its text. Default: false.")
]
_Continue = Annotated[
    bool | None,
    Meta(
        description="Continue the text of the last message instead of beginning an answer. Default: false. "
        "Not together with add_generation_prompt, whose default is then false."
    ),
]


class StreamOptions(_StreamFields):
    """Options of a stream."""

    include_usage: bool | None = None


class CompletionRequest(_CompletionFields, kw_only=True):
    """The body of ``POST /v1/completions``.  ``max_tokens`` 0 needs ``echo``."""

    prompt: Prompts
    model: _Model = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    return_tokens_as_token_ids: _TokenNames = None

    def __post_init__(self) -> None:
        """Check what the types cannot express."""
        super().__post_init__()
        self.prompt = checked_prompts(self.prompt, "prompt")
        n, best_of = self.n or 1, self.best_of or 1
        if self.max_tokens == 0:
            refuse_if(not self.echo, "max_tokens must not be 0 without echo", "max_tokens")
            refuse_if(bool(self.stream), "max_tokens must not be 0 with stream", "max_tokens")
            refuse_if(n > 1, "n must be 1 if max_tokens is 0", "n")
            refuse_if(best_of > 1, "best_of must be 1 if max_tokens is 0", "best_of")
        refuse_if(
            bool(self.echo) and self.truncate_prompt_tokens == -1,
            "truncate_prompt_tokens must not be -1 with echo. Pass a number of tokens.", "truncate_prompt_tokens",
        )  # fmt: skip
        _check_stream_options(self)
        asked_grammar(self)
        refuse_if(bool(self.stream) and best_of > n, "best_of must equal n with stream", "best_of")


_Note = Annotated[str, Meta(max_length=512)]
_Variables = Annotated[
    dict[str, Any] | None, Meta(description="Variables of the chat template, such as enable_thinking.")
]
_Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
_Metadata = Annotated[dict[Annotated[str, Meta(max_length=64)], _Note], Meta(max_length=16)]


class ChatCompletionRequest(_ChatFields, kw_only=True):
    """The body of ``POST /v1/chat/completions``."""

    messages: Messages
    model: _Model = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[_Count | None, Meta(description="Maximum number of tokens to generate.")] = None
    max_completion_tokens: Annotated[_Count | None, Meta(description="OpenAI's newer name of max_tokens.")] = None
    logprobs: Annotated[bool | None, Meta(description="Return the log-probability of each token. Default: false.")] = (
        None
    )
    add_generation_prompt: bool | None = None
    continue_final_message: _Continue = None
    return_tokens_as_token_ids: _TokenNames = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    tools: Annotated[Tools | None, Meta(description="Functions that the model may call.")] = None
    tool_choice: Annotated[
        ToolChoice | None,
        Meta(description="Whether a tool may be called: none, auto, required, or the one tool. Default: auto."),
    ] = None
    parallel_tool_calls: Annotated[
        bool | None, Meta(description="An answer may have more than one call. Default: true.")
    ] = None
    reasoning_effort: Annotated[_Effort | None, Meta(description="The effort that the chat template asks for.")] = None
    reasoning_format: Annotated[
        Literal["", "none", "auto", "deepseek"] | None,
        Meta(description="none leaves thoughts in the content. Default: reasoning_content has them."),
    ] = None
    include_reasoning: Annotated[bool | None, Meta(description="Return reasoning_content. Default: true.")] = None
    chat_template_kwargs: _Variables = None
    verbosity: Annotated[Literal["medium"] | None, WITHOUT_EFFECT] = None
    service_tier: Annotated[Literal["auto", "default"] | None, WITHOUT_EFFECT] = None
    prompt_cache_retention: Annotated[_Note | None, WITHOUT_EFFECT] = None
    metadata: Annotated[_Metadata | None, WITHOUT_EFFECT] = None
    prompt_cache_key: Annotated[
        _Note | None, Meta(description="Requests with the same key prefer the same worker. Default: user.")
    ] = None
    safety_identifier: Annotated[_Note | None, WITHOUT_EFFECT] = None
    store: Annotated[bool | None, Meta(description="Must be false: answers are not stored.")] = None

    def __post_init__(self) -> None:
        """Check what the types cannot express."""
        super().__post_init__()
        most, other = self.max_tokens, self.max_completion_tokens
        refuse_if(
            most is not None and other is not None and most != other,
            "max_completion_tokens must equal max_tokens if both are set", "max_completion_tokens",
        )  # fmt: skip
        refuse_if(bool(self.store), "store must be false: this service does not store answers", "store")
        refuse_if(bool(self.top_logprobs) and not self.logprobs, "top_logprobs requires logprobs", "top_logprobs")
        _check_opening(self)
        _check_stream_options(self)
        check_messages(self.messages)
        check_tools(self.tools, self.tool_choice)
        asked = asked_grammar(self)
        must_call = self.tool_choice not in (None, "none", "auto")
        refuse_if(asked is not None and must_call, "tool_choice: expected auto or none with a format", "tool_choice")


def _check_stream_options(body: CompletionRequest | ChatCompletionRequest) -> None:
    """Refuse options of a stream in a body that asks for none."""
    options = body.stream_options
    is_wanted = options is not None and bool(options.include_usage)
    refuse_if(is_wanted and not body.stream, "stream_options requires stream", "stream_options")


def _check_opening(body: ChatCompletionRequest | TokenizeRequest) -> None:
    """Refuse a conversation that both continues its last message and begins an answer."""
    refuse_if(
        bool(body.continue_final_message) and bool(body.add_generation_prompt),
        "continue_final_message: expected add_generation_prompt false beside it, got both true; omit one",
        "continue_final_message",
    )  # fmt: skip


class EmbeddingRequest(_EmbeddingFields, kw_only=True):
    """The body of ``POST /v1/embeddings``."""

    input: Inputs
    model: _Model = None
    encoding_format: Literal["float", "base64"] | None = None
    pooling: Annotated[
        Literal["mean", "last", "cls", "max"] | None,
        Meta(description="Which rows of the tokens are taken. Default: as the model's files say, or else mean."),
    ] = None
    normalize: Annotated[bool | None, Meta(description="Scale vectors to length 1. Default: true.")] = None
    dimensions: Annotated[
        _Count | None, Meta(description="Return only so many elements of a vector, for models trained for that.")
    ] = None
    prompt_name: Annotated[
        Annotated[str, Meta(max_length=MAX_NAME_CHARS)] | None,
        Meta(description="Which of the model's prompts is put before each text. Default: the model's own choice."),
    ] = None

    def __post_init__(self) -> None:
        """Check what the types cannot express."""
        super().__post_init__()
        self.input = checked_prompts(self.input, "input", allows_empty=False)


class DocumentText(Body):
    """A document as an object."""

    text: str


_Documents = Annotated[list[str | DocumentText], Meta(min_length=1, max_length=MAX_PROMPTS)]
_Instruction = Annotated[
    str | None,
    Meta(description="What is relevant, for a causal reranker. Default: the model's own. Others refuse it."),
]
_Sides = Annotated[list[str], Meta(min_length=1, max_length=MAX_PROMPTS)]


class RerankRequest(_RerankFields, kw_only=True):
    """The body of ``POST /rerank``.  ``truncate_prompt_tokens`` cuts documents, never the query."""

    query: str
    documents: _Documents
    model: _Model = None
    top_n: Annotated[
        Annotated[int, Meta(ge=0, le=MAX_TOKEN)] | None,
        Meta(description="Return only so many documents. Default and 0: all."),
    ] = None
    return_documents: Annotated[bool | None, Meta(description="Repeat the texts. Default: true.")] = None
    instruction: _Instruction = None

    @property
    def texts(self) -> list[str]:
        """The documents as texts."""
        return [document if isinstance(document, str) else document.text for document in self.documents]


class ScoreRequest(_ScoreFields, kw_only=True):
    """The body of ``POST /score``: one text and several, or as many on both sides."""

    text_1: str | _Sides
    text_2: str | _Sides
    model: _Model = None
    instruction: _Instruction = None

    def __post_init__(self) -> None:
        """Check what the types cannot express."""
        super().__post_init__()
        first, second = ([side] if isinstance(side, str) else side for side in (self.text_1, self.text_2))
        refuse_if(
            len(first) not in (1, len(second)),
            f"text_1: expected one text or {len(second)}, as many as text_2 has; got {len(first)}",
            "text_1",
        )

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The pairs of texts."""
        first, second = ([side] if isinstance(side, str) else side for side in (self.text_1, self.text_2))
        return list(zip(first * len(second) if len(first) == 1 else first, second, strict=True))


class ClassifyRequest(_ClassifyFields, kw_only=True):
    """The body of ``POST /classify``."""

    input: Inputs
    model: _Model = None

    def __post_init__(self) -> None:
        """Check what the types cannot express."""
        super().__post_init__()
        self.input = checked_prompts(self.input, "input", allows_empty=False)


class PoolingRequest(_PoolingFields, kw_only=True):
    """The body of ``POST /pooling``."""

    input: Inputs
    model: _Model = None
    encoding_format: Literal["float", "base64"] | None = None
    task: Annotated[
        Literal["embed", "token_embed", "classify", "score", "token_classify", "encode"] | None,
        Meta(
            description="A vector for a text or for each token, or the classes of a text or of each token; score and "
            "encode are earlier names. Default: what the model is for."
        ),
    ] = None
    dimensions: Annotated[
        _Count | None, Meta(description="With the task embed, return only so many elements of a vector.")
    ] = None
    normalize: Annotated[bool | None, Meta(description="An earlier name of use_activation.")] = None

    def __post_init__(self) -> None:
        """Check what the types cannot express."""
        super().__post_init__()
        self.input = checked_prompts(self.input, "input", allows_empty=False)


class PredictInput(Body, kw_only=True):
    """An input with named texts: a question and its context, or a text and the second text of its pair."""

    question: str | None = None
    context: str | None = None
    text: str | None = None
    text_pair: str | None = None


_Several = Annotated[
    list[str | PredictInput | Annotated[list[str], Meta(min_length=1, max_length=2)]],
    Meta(min_length=1, max_length=MAX_PROMPTS),
]
_Tokens = Annotated[int, Meta(ge=1, le=1024)]
_Label = Annotated[str, Meta(min_length=1, max_length=4096)]
_Language = Annotated[str, Meta(min_length=1, max_length=32)]
MAX_LABELS: Final = 256
"""The most labels of a zero-shot request."""


class PredictParameters(Body, kw_only=True):
    """The options of a task, by the names of transformers' pipelines and of Hugging Face's inference service."""

    top_k: Annotated[
        Annotated[int, Meta(ge=1, le=1000)] | None,
        Meta(description="The number of classes, answers or fillings. Default: all classes, one answer, 5 fillings."),
    ] = None
    function_to_apply: Annotated[
        Literal["softmax", "sigmoid", "none"] | None,
        Meta(description="What makes scores of a text's logits. Default: as the model's files say."),
    ] = None
    aggregation_strategy: Annotated[
        Literal["none", "simple", "first", "average", "max"] | None,
        Meta(description="none: each token; simple: groups of equal classes; others: words have one class."),
    ] = None
    ignore_labels: Annotated[
        Annotated[list[Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS)]], Meta(max_length=1024)] | None,
        Meta(description='Classes of tokens that are left out. Default: ["O"].'),
    ] = None
    stride: Annotated[
        Annotated[int, Meta(ge=0, le=MAX_TOKEN)] | None,
        Meta(description="Entities: compute a long text in windows that share so many tokens. Default: cut its end."),
    ] = None
    doc_stride: Annotated[
        Annotated[int, Meta(ge=0, le=MAX_TOKEN)] | None,
        Meta(description="The tokens that the windows of a long context share. Default: 128."),
    ] = None
    max_seq_len: Annotated[
        _Tokens | None, Meta(description="The tokens of a window, question included. Default: 384.")
    ] = None
    max_answer_len: Annotated[_Tokens | None, Meta(description="The most tokens of an answer. Default: 15.")] = None
    handle_impossible_answer: Annotated[bool | None, Meta(description='"" may be the answer. Default: false.')] = None
    align_to_words: Annotated[bool | None, Meta(description="Answers begin and end with a word. Default: true.")] = None
    max_question_len: Annotated[_Count | None, WITHOUT_EFFECT] = None
    candidate_labels: Annotated[
        Annotated[list[_Label], Meta(min_length=1, max_length=MAX_LABELS)] | _Label | None,
        Meta(description="Zero-shot: the classes, a list or one string with commas. The model infers which are right."),
    ] = None
    hypothesis_template: Annotated[
        Annotated[str, Meta(min_length=1, max_length=4096)] | None,
        Meta(description='Zero-shot: the text that a label is right. Default: "This example is {}."'),
    ] = None
    multi_label: Annotated[
        bool | None, Meta(description="Zero-shot: each label has its own probability. Default: false.")
    ] = None
    targets: Annotated[
        _Label | Annotated[list[_Label], Meta(min_length=1, max_length=MAX_LABELS)] | None,
        Meta(description="Fillings: the only tokens that are considered. Default: all."),
    ] = None
    src_lang: Annotated[_Language | None, Meta(description="The language of the texts, with tgt_lang.")] = None
    tgt_lang: Annotated[
        _Language | None, Meta(description="The language to translate to, of those that config.json names.")
    ] = None
    truncation: Annotated[
        bool | Literal["do_not_truncate", "longest_first", "only_first"] | None,
        Meta(description="Translations and summaries: cut texts that are too long. Default: false."),
    ] = None
    clean_up_tokenization_spaces: Annotated[
        Literal[False] | None, Meta(description="Expected false: texts are those of the tokenizer's decoder.")
    ] = None
    generate_parameters: Annotated[
        Annotated[dict[str, Any], Meta(max_length=64)] | None,
        Meta(description="Translations and summaries: options of generate, such as max_new_tokens and num_beams."),
    ] = None


class PredictRequest(_PredictFields, kw_only=True):
    """The body of ``POST /predict``, in the formats of text-embeddings-inference and of Hugging Face's pipelines."""

    inputs: Annotated[
        str | PredictInput | _Several,
        Meta(
            description="A text, a list of one text or of a pair, or a list of such lists; for a model that answers "
            "questions, a question with its context, or a list of them."
        ),
    ]
    model: _Model = None
    parameters: PredictParameters | None = None
    raw_scores: Annotated[bool | None, Meta(description="Return logits of classes. Default: false.")] = None
    truncate: Annotated[
        bool | None, Meta(description="Cut the end of a text, or of the second text, that is too long. Default: false.")
    ] = None

    def __post_init__(self) -> None:
        """Check what the types cannot express."""
        super().__post_init__()
        if self.truncate:
            refuse_if(
                self.truncate_prompt_tokens not in (None, -1),
                "truncate_prompt_tokens: expected none with truncate; omit one of them", "truncate_prompt_tokens",
            )  # fmt: skip
            self.truncate_prompt_tokens = -1


_OF_MESSAGES: Final = ("add_generation_prompt", "continue_final_message", "tools", "chat_template_kwargs")


class TokenizeRequest(_TokenizeFields):
    """The body of ``POST /tokenize``.  Either ``prompt`` or ``messages`` is required."""

    model: _Model = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: _Continue = None
    return_token_strs: bool | None = None
    tools: Tools | None = None
    chat_template_kwargs: _Variables = None

    def __post_init__(self) -> None:
        """Check what the types cannot express."""
        super().__post_init__()
        has_prompt = self.prompt is not None
        refuse_if(has_prompt is (self.messages is not None), "prompt: set either prompt or messages", "prompt")
        others = _OF_MESSAGES if has_prompt else ("add_special_tokens",)
        for name in others:
            needed = "messages" if has_prompt else "prompt"
            refuse_if(bool(getattr(self, name)), f"{name} requires {needed}", name)
        _check_opening(self)
        check_messages(self.messages or ())
        check_tools(self.tools, None)


class DetokenizeRequest(Body, kw_only=True):
    """The body of ``POST /detokenize``."""

    tokens: list[Token]
    model: _Model = None
