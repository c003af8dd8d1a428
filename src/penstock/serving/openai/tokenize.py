"""``POST /tokenize`` and ``/detokenize`` in vLLM's format."""

from __future__ import annotations

from typing import Any, Final

from penstock.api_errors import RefusalError
from penstock.json_schema import Items, Members, Text, Whole, optional
from penstock.serving.call import Call, Reply, json_reply
from penstock.serving.generation import refuse_together
from penstock.serving.request_parsing import chat_ids, text_ids, tokenizer_of
from penstock.text.tokenizer_threads import call_tokenizer

__all__ = ["DETOKENIZE_ANSWER", "TOKENIZE_ANSWER", "detokenize", "tokenize"]

_COUNT: Final = Whole(0, 2**53)
TOKENIZE_ANSWER: Final = Members(
    "TokenizeResponse",
    {
        "count": _COUNT,
        "max_model_len": _COUNT,
        "tokens": Items(_COUNT, 0, None),
        "token_strs": optional(Items(Text(), 0, None)),
    },
    ("count", "max_model_len", "tokens", "token_strs"),
)
DETOKENIZE_ANSWER: Final = Members("DetokenizeResponse", {"prompt": Text()}, ("prompt",))


async def tokenize(call: Call) -> Reply:
    """Return the token ids of a text, or of a conversation rendered by the chat template."""
    body, backend = call.body, call.model()
    tokenizer = tokenizer_of(backend)
    refuse_together(("prompt" in body) == ("messages" in body), "prompt: set either prompt or messages", "prompt")
    is_text = "prompt" in body
    refuse_together(
        is_text and "add_generation_prompt" in body, "add_generation_prompt requires messages", "add_generation_prompt"
    )
    refuse_together(
        not is_text and "add_special_tokens" in body, "add_special_tokens requires prompt", "add_special_tokens"
    )
    if is_text:
        text, special = body["prompt"], body.get("add_special_tokens", True)
        ids = await text_ids(backend, text, body, add_special_tokens=special)
    else:
        ids = await chat_ids(backend, body["messages"], body.get("add_generation_prompt", True))
    strings: Any = None
    if body.get("return_token_strs", False):
        strings = await call_tokenizer(
            tokenizer, len(ids), lambda: [tokenizer.decode([i], skip_special_tokens=False) for i in ids]
        )
    return json_reply({"count": len(ids), "max_model_len": backend.card.max_len, "tokens": ids, "token_strs": strings})


async def detokenize(call: Call) -> Reply:
    """Return the text of token ids, including special tokens."""
    ids, backend = call.body["tokens"], call.model()
    if ids and max(ids) >= backend.card.vocab_size:
        message = f"tokens: token id {max(ids)} is out of range. The model has {backend.card.vocab_size} tokens."
        raise RefusalError(400, message, param="tokens", code="invalid_value")
    tokenizer = tokenizer_of(backend)
    text: str = await call_tokenizer(tokenizer, len(ids), tokenizer.decode, ids, skip_special_tokens=False)
    return json_reply({"prompt": text})
