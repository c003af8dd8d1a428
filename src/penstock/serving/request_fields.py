"""The fields of all request bodies in one table, which both the checks and ``/openapi.json`` are made from."""

from __future__ import annotations

from typing import Final

from penstock.engine.options import MAX_PRIORITY, MAX_SALT_CHARS
from penstock.engine.params import MAX_ANSWERS, MAX_LOGPROBS
from penstock.json_schema import Choice, Either, Entries, Flag, Items, Members, Nothing, Number, Shape, Text, Whole
from penstock.validation import MAX_BIASES, MAX_STRING_CHARS, MAX_STRINGS, MAX_TOKEN

__all__ = ["CHAT", "COMPLETION", "DETOKENIZE", "EMBEDDING", "MAX_PROMPTS", "OPTIONS", "SAMPLING", "TOKENIZE"]

MAX_PROMPTS: Final = 256
MAX_NAME_CHARS: Final = 256
MAX_MESSAGES: Final = 4096
MAX_TIMEOUT_S: Final = 86400.0
_LEAST: Final = 1e-6

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

SAMPLING: Final[dict[str, Shape]] = {
    "max_tokens": Whole(0, MAX_TOKEN),
    "min_tokens": Whole(0, MAX_TOKEN),
    "temperature": Number(0, 100),
    "top_p": Number(_LEAST, 1),
    "top_k": Whole(-1, MAX_TOKEN),
    "min_p": Number(0, 1),
    "typical_p": Number(_LEAST, 1),
    "repetition_penalty": Number(0.01, 100),
    "presence_penalty": Number(-2, 2),
    "frequency_penalty": Number(-2, 2),
    "logit_bias": Entries(r"[0-9]{1,10}", Number(-100, 100), MAX_BIASES),
    "allowed_token_ids": TOKENS,
    "bad_words": STRINGS,
    "seed": Whole(0, 2**63 - 1),
    "n": Whole(1, MAX_ANSWERS),
    "stop": STRINGS,
    "stop_token_ids": Items(TOKEN, 0, None),
    "include_stop_str_in_output": Flag(),
    "ignore_eos": Flag(),
}
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
    "max_tokens": "Maximum number of tokens to generate. Default: the model's, else 256. 0 requires echo.",
    "temperature": "0 samples greedily. Default: the model's, else 0.",
    "top_k": "Sample from the k most likely tokens; 0 or -1 means all.",
    "seed": "The same seed gives the same tokens, regardless of other requests.",
    "priority": "Requests with a lower number go first. Default: 0.",
    "cache_salt": "Only requests with the same salt share cached prefixes.",
    "timeout": "Time limit in seconds, after which the request ends with status 504.",
    "truncate_prompt_tokens": "Keep only this many tokens from the end of the prompt; -1 keeps as many as fit.",
    "user": "An identifier of the end user, written to the log.",
    "best_of": "Generate this many answers and return the n with the highest log-probability per token.",
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
        "best_of": Whole(1, MAX_ANSWERS),
        "echo": Flag(),
        "logprobs": Whole(0, MAX_LOGPROBS),
        **OPTIONS,
        **_refused("suffix", why="text can only be appended to the prompt"),
        **_refused("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice"),
        **_refused("prompt_logprobs", why="use echo with logprobs"),
        **_refused("use_beam_search", "length_penalty", "prompt_embeds"),
    },
    ("prompt",),
    _NOTES,
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
        "top_logprobs": Whole(0, MAX_LOGPROBS),
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
    {**_NOTES, "max_tokens": "Maximum number of tokens to generate. Default: the model's, else 256."},
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
