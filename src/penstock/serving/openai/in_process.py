"""OpenAI request bodies answered in this process: the service's checks and handlers, without HTTP."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from penstock.api_errors import RefusalError, refusal_of
from penstock.engine.options import MAX_DEADLINE_S
from penstock.errors import DeadlineError, InvalidArgumentError, UnavailableError
from penstock.serving.call import Call
from penstock.serving.metrics import Metrics
from penstock.serving.openai import embeddings, handlers
from penstock.serving.openai.bodies import ChatCompletionRequest, CompletionRequest, EmbeddingRequest
from penstock.serving.operations import Handler
from penstock.serving.request_decoding import converted
from penstock.serving.request_fields import Body
from penstock.serving.settings import GatewayLimits, GatewaySettings

if TYPE_CHECKING:
    from penstock.llm.backend import Models

__all__ = ["CHAT", "COMPLETIONS", "EMBEDDINGS", "InProcessApi"]

COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"
EMBEDDINGS: Final = "/v1/embeddings"
_ENDPOINTS: Final[dict[str, tuple[type[Body], Handler]]] = {
    COMPLETIONS: (CompletionRequest, handlers.complete),
    CHAT: (ChatCompletionRequest, handlers.chat),
    EMBEDDINGS: (EmbeddingRequest, embeddings.embeddings),
}


class InProcessApi:
    """Answers the bodies of OpenAI requests with the models of this process.

    A request has no time limit unless its body has ``timeout``.  Streams are refused.
    """

    def __init__(self, models: Models) -> None:
        self._models = models
        self._metrics = Metrics(models)
        self._settings = GatewaySettings(limits=GatewayLimits(request_s=MAX_DEADLINE_S))

    async def answer(self, url: str, body: object, request_id: str) -> dict[str, Any]:
        """Return the body of the response to ``body``, a decoded JSON value that was sent to ``url``.

        A PenstockError has the message that a client of the service would get.
        """
        if url not in _ENDPOINTS:
            raise InvalidArgumentError(f"url: expected one of {', '.join(_ENDPOINTS)}, got {url!r:.100}", param="url")
        struct, handler = _ENDPOINTS[url]
        try:
            decoded = converted(body, struct)
            if getattr(decoded, "stream", None):
                raise InvalidArgumentError("stream must be false: the response is a single object", param="stream")
            call = Call(request_id, {}, decoded, self._models, self._settings, self._metrics)
            reply = await handler(call)
        except DeadlineError as error:
            raise DeadlineError(str(refusal_of(error, request_id)), param="timeout") from None
        except RefusalError as error:
            if error.status == 400:
                raise InvalidArgumentError(str(error), param=error.param, code=error.code) from None
            raise UnavailableError(str(error)) from None
        if reply is None:
            raise RuntimeError(f"the handler of {url} returned no response")
        answer: dict[str, Any] = json.loads(reply.body)
        return answer
