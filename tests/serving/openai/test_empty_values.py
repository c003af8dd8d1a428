"""Values that ask for nothing are no errors: a field is refused for its value, not for its presence."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from penstock.api_errors import FieldError
from penstock.serving.oip.bodies import GenerateRequest
from penstock.serving.openai.bodies import (
    ChatCompletionRequest,
    ClassifyRequest,
    CompletionRequest,
    EmbeddingRequest,
    PoolingRequest,
    PredictRequest,
    RerankRequest,
    ScoreRequest,
    TokenizeRequest,
)
from penstock.serving.request_decoding import converted

USER = [{"role": "user", "content": "the cat"}]
BODIES: dict[type[msgspec.Struct], dict[str, Any]] = {
    CompletionRequest: {"prompt": "x"},
    ChatCompletionRequest: {"messages": USER},
    EmbeddingRequest: {"input": "x"},
    RerankRequest: {"query": "x", "documents": ["y"]},
    ScoreRequest: {"text_1": "x", "text_2": "y"},
    ClassifyRequest: {"input": "x"},
    PoolingRequest: {"input": "x"},
    PredictRequest: {"inputs": "x"},
    TokenizeRequest: {"prompt": "x"},
    GenerateRequest: {"text_input": "x"},
}
LLAMA_CPP: dict[str, Any] = {
    "mirostat": 0, "mirostat_tau": 5.0, "mirostat_eta": 0.1, "dynatemp_range": 0.0, "dynatemp_exponent": 1.0,
    "xtc_probability": 0.0, "xtc_threshold": 0.1, "dry_multiplier": 0.0, "dry_base": 1.75, "dry_allowed_length": 2,
    "dry_penalty_last_n": -1, "dry_sequence_breakers": ["\n", ":"], "top_n_sigma": -1.0, "repeat_penalty": 1.0,
    "repeat_last_n": 64, "grammar": "", "n_probs": 0, "n_keep": 0, "min_keep": 0, "cache_prompt": True, "id_slot": -1,
    "lora": [], "samplers": [], "t_max_predict_ms": 0, "timings_per_token": False, "return_tokens": False,
    "post_sampling_probs": False, "response_fields": [], "tfs_z": 1, "typ_p": 1.0,
}  # fmt: skip
VLLM: dict[str, Any] = {
    "use_beam_search": False, "length_penalty": 1.0, "skip_special_tokens": True, "spaces_between_special_tokens": True,
    "prompt_logprobs": None, "structured_outputs": None, "guided_json": None, "guided_regex": None, "guided_choice": [],
    "guided_grammar": "", "logits_processors": [], "kv_transfer_params": {}, "vllm_xargs": None, "priority": 0,
    "return_token_ids": False, "return_tokens_as_token_ids": False, "ignore_eos": False, "min_tokens": 0, "top_k": -1,
    "bad_words": [], "stop_token_ids": [], "truncate_prompt_tokens": None, "include_stop_str_in_output": False,
    "request_id": "",
}  # fmt: skip
EVERYWHERE: dict[str, Any] = {
    "n": 1, "best_of": 1, "stop": [], "logit_bias": {}, "presence_penalty": 0, "frequency_penalty": 0, "user": "",
    "stream": False, "stream_options": {"include_usage": False, "continuous_usage_stats": False}, "echo": False,
    "response_format": {"type": "text", "json_schema": None}, **VLLM, **LLAMA_CPP,
}  # fmt: skip
COMPLETION = EVERYWHERE | {"suffix": "", "logprobs": None, "prompt_embeds": None, "add_special_tokens": True}
CHAT = EVERYWHERE | {
    "continue_final_message": False, "chat_template": None, "chat_template_kwargs": {}, "documents": [],
    "logprobs": False, "top_logprobs": 0, "function_call": "none", "functions": [], "tools": [], "tool_choice": "auto",
    "parallel_tool_calls": True, "modalities": ["text"], "audio": None, "prediction": None, "store": False,
    "web_search_options": None, "metadata": {}, "service_tier": "auto", "reasoning_effort": None, "verbosity": "medium",
    "prompt_cache_key": "", "safety_identifier": "", "add_special_tokens": False, "mm_processor_kwargs": None,
    "include_reasoning": True, "reasoning_format": "auto", "prompt_cache_retention": "in-memory",
}  # fmt: skip
OTHERS: dict[type[msgspec.Struct], dict[str, Any]] = {
    EmbeddingRequest: {
        "user": "", "dimensions": None, "encoding_format": None, "add_special_tokens": True, "embed_dtype": "float32",
        "endianness": "native", "mm_processor_kwargs": {}, "request_id": None, "chat_template_kwargs": {},
    },
    RerankRequest: {"top_n": 0, "max_tokens_per_doc": 0, "rank_fields": [], "use_activation": True},
    ScoreRequest: {"use_activation": True, "mm_processor_kwargs": None},
    ClassifyRequest: {"use_activation": True, "add_special_tokens": True},
    PoolingRequest: {
        "use_activation": True, "add_special_tokens": True, "embed_dtype": "float32", "endianness": "native",
        "request_id": "", "task": None, "dimensions": None, "softmax": True, "normalize": True,
    },
    PredictRequest: {"raw_scores": False, "truncate": False, "truncation_direction": "Right"},
    TokenizeRequest: {
        "add_generation_prompt": False, "continue_final_message": False, "tools": [], "chat_template_kwargs": {},
    },
    GenerateRequest: {"echo": False, "logprobs": None, "stop": "", "bad_words": [""], "logit_bias": []},
}  # fmt: skip
VALUES = {CompletionRequest: COMPLETION, ChatCompletionRequest: CHAT, **OTHERS}
ASKING: list[tuple[type[msgspec.Struct], str, Any]] = [
    (CompletionRequest, "suffix", "x"),
    (CompletionRequest, "add_special_tokens", False),
    (CompletionRequest, "prompt_logprobs", 0),
    (CompletionRequest, "mirostat", 2),
    (CompletionRequest, "repeat_penalty", 1.1),
    (CompletionRequest, "cache_prompt", False),
    (CompletionRequest, "n_predict", 5),
    (ChatCompletionRequest, "functions", [{"name": "f"}]),
    (ChatCompletionRequest, "function_call", {"name": "f"}),
    (ChatCompletionRequest, "enable_thinking", True),
    (ChatCompletionRequest, "web_search_options", {}),
    (ChatCompletionRequest, "modalities", ["text", "audio"]),
    (ChatCompletionRequest, "echo", True),
    (ChatCompletionRequest, "best_of", True),
    (EmbeddingRequest, "embed_dtype", "float16"),
    (RerankRequest, "max_tokens_per_doc", 5),
    (PoolingRequest, "data", {"x": 1}),
    (PredictRequest, "truncation_direction", "Left"),
    (TokenizeRequest, "chat_template", "x"),
    (GenerateRequest, "echo", True),
]


@pytest.mark.parametrize(
    ("struct", "name"), [(struct, name) for struct in VALUES for name in VALUES[struct]], ids=lambda v: str(v)[-40:]
)
def test_each_is_taken(struct, name):
    converted(BODIES[struct] | {name: VALUES[struct][name]}, struct)


@pytest.mark.parametrize(("struct", "name", "value"), ASKING, ids=lambda v: str(v)[-30:])
def test_values_that_ask_for_something_are_refused(struct, name, value):
    with pytest.raises(FieldError) as raised:
        converted(BODIES[struct] | {name: value}, struct)
    assert (raised.value.param, raised.value.code) == (name, "unsupported_parameter")


@pytest.mark.parametrize("field", ["tool_calls", "annotations", "refusal", "reasoning_content", "function_call"])
def test_messages_may_repeat_empty_fields_of_answers(field):
    for value in (None, [], ""):
        converted({"messages": [{"role": "assistant", "content": "x", field: value}]}, ChatCompletionRequest)
    with pytest.raises(FieldError) as raised:
        converted({"messages": [*USER, {**USER[0], field: [{}]}]}, ChatCompletionRequest)
    assert str(raised.value.param).startswith(f"messages[1].{field}")


def test_they_change_no_answer(demo, serve):
    body = {"prompt": "def add(a, b):", "max_tokens": 5, "temperature": 0}
    expected = demo.post("/v1/completions", **body)["choices"]
    assert demo.post("/v1/completions", **body | COMPLETION)["choices"] == expected
    assert demo.post("/v1/completions", **body, stop=["", ""], bad_words="", logit_bias=[])["choices"] == expected
    service = serve("fake")
    body = {"messages": USER, "max_tokens": 5, "temperature": 0}
    expected = service.post("/v1/chat/completions", **body)["choices"]
    assert service.post("/v1/chat/completions", **body | CHAT)["choices"] == expected
    assert demo.post("/tokenize", prompt="x", **OTHERS[TokenizeRequest]) == demo.post("/tokenize", prompt="x")


def test_a_list_instead_of_an_object_is_named():
    with pytest.raises(FieldError) as raised:
        converted({"prompt": "x", "logit_bias": [[5, 1]]}, CompletionRequest)
    assert (raised.value.param, raised.value.code) == ("logit_bias", "invalid_value")
