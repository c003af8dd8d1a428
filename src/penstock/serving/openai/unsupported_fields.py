"""The fields of OpenAI, vLLM and llama.cpp that this service does not support, and those without an effect here.

A client may send such a field with a value that asks for nothing: an empty one, or the default of the other server.
Every other value is refused by the name of the field.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

from msgspec import Meta

from penstock.serving.request_decoding import EMPTY, refused

__all__ = [
    "CHAT", "CLASSIFY", "COMPLETION", "CONTENT_PART", "EMBEDDING", "MESSAGE", "POOLING", "PREDICT", "RERANK", "SCORE",
    "STREAM_OPTIONS", "STRUCTURED", "TOKENIZE", "WITHOUT_EFFECT",
]  # fmt: skip

WITHOUT_EFFECT: Final = Meta(description="Accepted for other servers' clients; it has no effect.")
_NUMBER: Final = Annotated[float | None, WITHOUT_EFFECT]
_FLAG: Final = Annotated[bool | None, WITHOUT_EFFECT]
_TEXTS: Final = Annotated[list[str] | None, WITHOUT_EFFECT]
_NOTHING: Final = refused()
_OWN_TEMPLATE: Final = refused("the model's own template is always used")

Fields = dict[str, Any]
"""The types of fields by their names, separated by spaces."""

_LLAMA_CPP: Final[Fields] = {
    "mirostat dynatemp_range xtc_probability dry_multiplier": _NOTHING,
    "mirostat_tau mirostat_eta dynatemp_exponent xtc_threshold dry_base": _NUMBER,
    "dry_allowed_length dry_penalty_last_n repeat_last_n": _NUMBER,
    "dry_sequence_breakers": _TEXTS,
    "penalize_nl": _FLAG,
    "samplers grammar_lazy grammar_triggers preserved_tokens": _NOTHING,
    "n_probs post_sampling_probs": refused("use logprobs", EMPTY),
    "n_keep n_discard n_indent min_keep n_cache_reuse lora image_data": _NOTHING,
    "return_tokens return_progress timings_per_token response_fields": _NOTHING,
    "top_n_sigma t_max_predict_ms t_max_prompt_ms": refused("", [*EMPTY, -1]),
    "tfs_z typ_p": refused("use typical_p", [1]),
    "repeat_penalty": refused("use repetition_penalty", [1]),
    "n_predict": refused("use max_tokens", []),
    "id_slot": refused("", [-1]),
    "cache_prompt": refused("use cache_salt to keep a prompt apart", [True]),
}
_VLLM: Final[Fields] = {
    "structural_tag guided_whitespace_pattern": _NOTHING,
    "guided_decoding_backend": Annotated[str | None, WITHOUT_EFFECT],
    "prompt_logprobs": refused("use echo with logprobs in /v1/completions", []),
    "use_beam_search logits_processors kv_transfer_params vllm_xargs request_id return_token_ids": _NOTHING,
    "length_penalty": refused("", [*EMPTY, 1]),
    "spaces_between_special_tokens": _FLAG,
}
_TEXT: Final = _VLLM | _LLAMA_CPP

COMPLETION: Final[Fields] = {
    "suffix": refused("text can only be appended to the prompt"),
    "prompt_embeds": _NOTHING,
    "add_special_tokens": refused("pass token ids", [True]),
    **_TEXT,
}
CHAT: Final[Fields] = {
    "chat_template": _OWN_TEMPLATE,
    "documents": _OWN_TEMPLATE,
    "functions": refused("use tools"),
    "function_call": refused("use tool_choice", [*EMPTY, "none", "auto"]),
    "modalities": refused("", [*EMPTY, ["text"]]),
    "audio prediction": _NOTHING,
    "web_search_options": refused("", []),
    "best_of": refused("use n", [*EMPTY, 1]),
    "echo add_special_tokens media_io_kwargs mm_processor_kwargs": _NOTHING,
    "thinking enable_thinking": refused("use chat_template_kwargs"),
    "thinking_forced_open reasoning_budget_message thinking_budget_message": _NOTHING,
    "parse_tool_calls": _FLAG,
    **_TEXT,
}
MESSAGE: Final[Fields] = {
    "function_call refusal audio thinking annotations": _NOTHING,
    "parsed": Annotated[Any, WITHOUT_EFFECT],
    "prefix": refused("use continue_final_message"),
}
CONTENT_PART: Final[Fields] = {
    "image_url input_audio audio_url video_url file": refused("only text input is supported", []),
}
STRUCTURED: Final[Fields] = {
    "structural_tag whitespace_pattern disable_any_whitespace disable_additional_properties": _NOTHING,
    "disable_fallback": _FLAG,
}
STREAM_OPTIONS: Final[Fields] = {"continuous_usage_stats include_obfuscation": _NOTHING}

_POOLING: Final[Fields] = {
    "request_id mm_processor_kwargs": _NOTHING,
    "add_special_tokens": refused("pass token ids", [True]),
}
EMBEDDING: Final[Fields] = {
    **_POOLING,
    "messages chat_template chat_template_kwargs": refused("use input"),
    "embed_dtype": refused("", ["float32"]),
    "endianness": refused("", ["native", "little"]),
    "embd_normalize": refused("use normalize", [2]),
}
SCORE: Final[Fields] = {"request_id mm_processor_kwargs": _NOTHING}
RERANK: Final[Fields] = {**SCORE, "max_tokens_per_doc max_chunks_per_doc rank_fields": _NOTHING}
CLASSIFY: Final = _POOLING
POOLING: Final[Fields] = {
    **_POOLING,
    "messages chat_template chat_template_kwargs data": refused("use input"),
    "embed_dtype": refused("", ["float32"]),
    "endianness": refused("", ["native", "little"]),
}
PREDICT: Final[Fields] = {"truncation_direction": refused("the end of a text is cut", [*EMPTY, "Right", "right"])}
TOKENIZE: Final[Fields] = {
    "chat_template": _OWN_TEMPLATE,
    "mm_processor_kwargs media_io_kwargs": _NOTHING,
}
