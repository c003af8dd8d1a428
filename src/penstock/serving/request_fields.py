"""The fields of all request bodies in one table, which both the checks and ``/openapi.json`` are made from."""

from __future__ import annotations

from typing import Final

from penstock.engine.options import MAX_PRIORITY, MAX_SALT_CHARS
from penstock.json_schema import Choice, Either, Entries, Flag, Items, Members, Nothing, Number, Shape, Text, Whole
from penstock.sampling_fields import SAMPLING_FIELDS, SamplingField
from penstock.validation import MAX_BIASES, MAX_STRING_CHARS, MAX_STRINGS, MAX_TOKEN

__all__ = ["CHAT", "COMPLETION", "DETOKENIZE", "EMBEDDING", "MAX_PROMPTS", "OPTIONS", "SAMPLING", "TOKENIZE"]

MAX_PROMPTS: Final = 256
MAX_NAME_CHARS: Final = 256
MAX_MESSAGES: Final = 4096
MAX_TIMEOUT_S: Final = 86400.0

TOKEN: Final = Whole(0, MAX_TOKEN)
TOKENS: Final = Items(TOKEN, 1, None)
STRINGS: Final = Either(
    (Text(1, MAX_STRING_CHARS), Items(Text(1, MAX_STRING_CHARS), 0, MAX_STRINGS)), "a string or a list of strings"
)
PROMPTS: Final = Either(
    (Text(), Items(Text(), 1, MAX_PROMPTS), TOKENS, Items(TOKENS, 1, MAX_PROMPTS)),
    "a text, a list of token ids, or a list of those",
)
INPUTS: Final = Either(
    (Text(1), Items(Text(1), 1, MAX_PROMPTS), TOKENS, Items(TOKENS, 1, MAX_PROMPTS)),
    "a text, a list of token ids, or a list of those",
)


def _shape_of(row: SamplingField) -> Shape:
    low, high = row.json_bounds or row.bounds
    shapes: dict[str, Shape] = {
        "integer": Whole(int(low), int(high)),
        "number": Number(low, high),
        "boolean": Flag(),
        "strings": STRINGS,
        "token_ids": Items(TOKEN, row.min_items, None),
        "biases": Entries(r"[0-9]{1,10}", Number(low, high), MAX_BIASES),
    }
    return shapes[row.kind]


SAMPLING_SHAPES: Final = {row.name: _shape_of(row) for row in SAMPLING_FIELDS}
SAMPLING: Final = {row.name: SAMPLING_SHAPES[row.name] for row in SAMPLING_FIELDS if row.is_common}
"""The fields of SamplingParams, under the same names; ``top_k`` -1 means 0, as in vLLM."""

OPTIONS: Final[dict[str, Shape]] = {
    "priority": Whole(-MAX_PRIORITY, MAX_PRIORITY),
    "cache_salt": Text(0, MAX_SALT_CHARS),
    "timeout": Number(0.001, MAX_TIMEOUT_S),
    "truncate_prompt_tokens": Either((Whole(-1, -1), Whole(1, MAX_TOKEN)), "-1 or a whole number above 0"),
}
"""Fields that control how a request is served."""

_NOTES: Final = {
    "model": "A model name from /v1/models. Optional if only one model is served.",
    **{row.name: row.help for row in SAMPLING_FIELDS if row.is_common},
    "priority": "Requests with a lower number go first. Default: 0.",
    "cache_salt": "Only requests with the same salt share cached prefixes.",
    "timeout": "Time limit in seconds, after which the request ends with status 504.",
    "truncate_prompt_tokens": "Keep only this many tokens from the end of the prompt; -1 keeps as many as fit.",
    "user": "An identifier of the end user, written to the log.",
}

_COMMON: Final[dict[str, Shape]] = {
    "model": Text(1, MAX_NAME_CHARS),
    "user": Text(0, MAX_NAME_CHARS),
    "stream": Flag(),
    "stream_options": Members("StreamOptions", {"include_usage": Flag()}),
}


def _refused(*names: str, why: str = "") -> dict[str, Shape]:
    return {name: Nothing(why) for name in names}


COMPLETION: Final = Members(
    "CompletionRequest",
    {
        "prompt": PROMPTS,
        **_COMMON,
        **SAMPLING,
        **{name: SAMPLING_SHAPES[name] for name in ("best_of", "echo", "logprobs")},
        **OPTIONS,
        **_refused("suffix", why="text can only be appended to the prompt"),
        **_refused("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice"),
        **_refused("prompt_logprobs", why="use echo with logprobs"),
        **_refused("use_beam_search", "length_penalty", "prompt_embeds"),
    },
    ("prompt",),
    {
        **_NOTES,
        **{row.name: row.help for row in SAMPLING_FIELDS if row.name in ("best_of", "echo", "logprobs")},
        "max_tokens": f"{_NOTES['max_tokens']} 0 needs echo.",
    },
)

_PART: Final = Members(
    "ContentPart",
    {
        "text": Text(),
        **_refused("image_url", "input_audio", "audio_url", "video_url", "file", why="only text input is supported"),
        "type": Choice(("text",)),
    },
    ("type", "text"),
)
_MESSAGE: Final = Members(
    "Message",
    {
        "role": Choice(("system", "developer", "user", "assistant")),
        "content": Either((Text(), Items(_PART, 1, MAX_MESSAGES)), "a string or a list of text parts"),
        "name": Text(0, MAX_NAME_CHARS),
        **_refused(
            "tool_calls", "tool_call_id", "function_call", "refusal", "audio", "reasoning_content", "annotations"
        ),
    },
    ("role", "content"),
)

CHAT: Final = Members(
    "ChatCompletionRequest",
    {
        "messages": Items(_MESSAGE, 1, MAX_MESSAGES),
        **_COMMON,
        **SAMPLING,
        "max_tokens": Whole(1, MAX_TOKEN),
        "max_completion_tokens": Whole(1, MAX_TOKEN),
        "logprobs": Flag(),
        "top_logprobs": SAMPLING_SHAPES["logprobs"],
        "add_generation_prompt": Flag(),
        **OPTIONS,
        "response_format": Members("ResponseFormat", {"type": Choice(("text",))}, ("type",)),
        "modalities": Items(Choice(("text",)), 1, 1),
        **_refused("tools", "tool_choice", "parallel_tool_calls", "functions", "function_call"),
        **_refused("structured_outputs", "guided_json", "guided_regex", "guided_choice"),
        **_refused("chat_template", "chat_template_kwargs", why="the model's own template is always used"),
        **_refused("continue_final_message", "audio", "prediction", "store", "metadata", "reasoning_effort"),
        **_refused("service_tier", "web_search_options", "verbosity", "prompt_cache_key", "safety_identifier"),
        **_refused("best_of", "echo", "prompt_logprobs", "use_beam_search", "length_penalty"),
    },
    ("messages",),
    {**_NOTES, "logprobs": "Return the log-probability of each token. Default: false."},
)

EMBEDDING: Final = Members(
    "EmbeddingRequest",
    {
        "input": INPUTS,
        "model": _COMMON["model"],
        "user": _COMMON["user"],
        "encoding_format": Choice(("float", "base64")),
        "pooling": Choice(("mean", "last")),
        "normalize": Flag(),
        **OPTIONS,
        **_refused("dimensions", why="the model determines the length of its vectors"),
    },
    ("input",),
    {
        **_NOTES,
        "pooling": "mean averages the rows of all tokens, last takes the row of the last token.",
        "normalize": "Scale vectors to length 1. Default: true.",
    },
)

TOKENIZE: Final = Members(
    "TokenizeRequest",
    {
        "model": _COMMON["model"],
        "prompt": Text(),
        "messages": Items(_MESSAGE, 1, MAX_MESSAGES),
        "add_special_tokens": Flag(),
        "add_generation_prompt": Flag(),
        "return_token_strs": Flag(),
    },
    (),
    {"model": _NOTES["model"], "prompt": "Either prompt or messages is required."},
)

DETOKENIZE: Final = Members(
    "DetokenizeRequest",
    {"model": _COMMON["model"], "tokens": Items(TOKEN, 0, None)},
    ("tokens",),
    {"model": _NOTES["model"]},
)
