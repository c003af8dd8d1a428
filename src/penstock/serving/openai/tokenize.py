"""``POST /tokenize`` and ``/detokenize`` in vLLM's format."""

from __future__ import annotations

from typing import Any

from penstock.api_errors import RefusalError
from penstock.llm.backend import tokenizer_of
from penstock.serving.call import Call, Reply, json_reply
from penstock.serving.openai.bodies import DetokenizeRequest, TokenizeRequest
from penstock.serving.translation import chat_prompt, text_ids
from penstock.text.tokenizer_threads import call_tokenizer

__all__ = ["detokenize", "tokenize"]


async def tokenize(call: Call) -> Reply:
    """Return the token ids of a text, or of a conversation rendered by the chat template."""
    body: TokenizeRequest = call.body
    backend = call.model(body.model)
    tokenizer = tokenizer_of(backend)
    if body.prompt is not None:
        ids = await text_ids(backend, body.prompt, add_special_tokens=body.add_special_tokens is not False)
    else:
        ids = (await chat_prompt(backend, body.messages or [], body, call.settings)).ids
    strings: Any = None
    if body.return_token_strs:
        strings = await call_tokenizer(
            tokenizer, len(ids), lambda: [tokenizer.decode([i], skip_special_tokens=False) for i in ids]
        )
    return json_reply({"count": len(ids), "max_model_len": backend.card.max_len, "tokens": ids, "token_strs": strings})


async def detokenize(call: Call) -> Reply:
    """Return the text of token ids, including special tokens."""
    body: DetokenizeRequest = call.body
    ids, backend = body.tokens, call.model(body.model)
    if ids and max(ids) >= backend.card.vocab_size:
        message = f"tokens: token id {max(ids)} is out of range. The model has {backend.card.vocab_size} tokens."
        raise RefusalError(400, message, param="tokens", code="invalid_value")
    tokenizer = tokenizer_of(backend)
    text: str = await call_tokenizer(tokenizer, len(ids), tokenizer.decode, ids, skip_special_tokens=False)
    return json_reply({"prompt": text})
