"""A conversation with a model: messages, the answers to them, and the token ids of both."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from penstock.config import check_flag
from penstock.engine.options import check_options
from penstock.engine.params import SamplingParams
from penstock.errors import InvalidArgumentError
from penstock.llm.prompts import split_params
from penstock.llm.result import Delta, Result
from penstock.llm.sampling_keywords import sampling_params
from penstock.text.chat_template import TurnTokens, check_messages
from penstock.validation import wrong_type

if TYPE_CHECKING:
    from penstock.checkpoint.generation import GenerationDefaults
    from penstock.engine.engine import Engine
    from penstock.engine.options import RequestOptions
    from penstock.llm.stream import Stream
    from penstock.text.tokenizer import Tokenizer

__all__ = ["Conversation", "Turn"]

ANSWER_DIVISOR = 4
"""The part of a context that is kept free for an answer: one in so many."""


class ConversationModel(Protocol):
    """The interface that a conversation needs from a model; ``LLM`` implements it."""

    engine: Engine
    generation: GenerationDefaults

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; UnsupportedError if it has none."""

    def stream(
        self, prompt: list[int], params: SamplingParams | None = None, options: RequestOptions | None = None
    ) -> Stream:
        """Continue token ids, piece by piece."""


class Conversation:
    """Messages and their answers.  Each turn continues from the token ids of the one before.

    The tokens of a sampled answer often differ from those that the tokenizer makes of its text.  ``LLM.chat`` encodes
    the whole history again, so everything after such an answer is computed again.  Here the ids stay as they were
    generated, and a turn computes only its new tokens.

    ``messages``: the beginning, for example a system message.  A conversation that no longer fits the context is
    refused. With ``drop_oldest`` its oldest turns are dropped instead, but never system messages or the last message,
    until half of the context is free.  That happens when less than a quarter of the context is left for the answer, or
    less than ``max_tokens`` if that is smaller.

    ``tools``: JSON schemas of functions that the model may call.  ``read_answer`` makes a message of an answer's text,
    with its calls (default: the text is the content).  ``answer_calls`` sends what they return.

    A conversation must not be used by several threads at once.  Raises UnsupportedError if the model has no chat
    template.
    """

    def __init__(
        self,
        llm: ConversationModel,
        messages: Sequence[Mapping[str, Any]] = (),
        *,
        drop_oldest: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
        read_answer: Callable[[str], dict[str, Any]] | None = None,
    ) -> None:
        check_flag("drop_oldest", drop_oldest)
        self._llm = llm
        self._tokens = TurnTokens(llm.tokenizer, tools)
        self._read_answer = read_answer
        self._messages = check_messages(messages) if messages else []
        self._drop_oldest = drop_oldest
        self._num_dropped = 0
        self._open: weakref.ref[Turn] | None = None

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages and answers so far, without those that were dropped."""
        return [dict(message) for message in self._messages]

    @property
    def num_dropped(self) -> int:
        """The number of messages that were dropped because the context was full."""
        return self._num_dropped

    def ask(
        self,
        content: str,
        params: SamplingParams | None = None,
        *,
        options: RequestOptions | None = None,
        **sampling: Any,
    ) -> Result:
        """Send a message and return the complete answer.

        ``sampling``: fields of SamplingParams instead of ``params``, as for ``LLM.generate``: ``max_tokens=32``.
        """
        return self._say("ask", content, params, options, sampling).result()

    def stream(
        self,
        content: str,
        params: SamplingParams | None = None,
        *,
        options: RequestOptions | None = None,
        **sampling: Any,
    ) -> Turn:
        """Send a message and return the answer as a stream; ``sampling`` as for ``ask``.

        A turn that fails leaves the conversation unchanged.
        """
        return self._say("stream", content, params, options, sampling)

    def answer_calls(
        self, results: Sequence[str], params: SamplingParams | None = None, *, options: RequestOptions | None = None
    ) -> Turn:
        """Send what the calls of the last answer returned, in their order, and return the next answer as a stream."""
        calls = self._messages[-1].get("tool_calls") or () if self._messages else ()
        if not calls or len(results) != len(calls):
            raise InvalidArgumentError(
                f"results: expected one for each call of the last answer, which has {len(calls)}, got {len(results)}",
                param="results",
            )
        params = sampling_params(params, {}, self._llm.generation.temperature, "answer_calls")
        returned = [
            {"role": "tool", "tool_call_id": call.get("id", ""), "name": call["function"]["name"], "content": result}
            for call, result in zip(calls, results, strict=True)
        ]
        return self._begin([*self._messages, *returned], params, options)

    def retry(
        self, params: SamplingParams | None = None, *, options: RequestOptions | None = None, **sampling: Any
    ) -> Turn:
        """Answer the last message again; ``sampling`` as for ``ask``.

        The new answer replaces the old one when it is complete.
        """
        params = sampling_params(params, sampling, self._llm.generation.temperature, "retry")
        if not self._messages or self._messages[-1]["role"] != "assistant":
            raise InvalidArgumentError("retry: the conversation has no answer yet", code="no_answer")
        return self._begin(self._messages[:-1], params, options)

    def _say(
        self,
        call: str,
        content: str,
        params: SamplingParams | None,
        options: RequestOptions | None,
        sampling: Mapping[str, Any],
    ) -> Turn:
        params = sampling_params(params, sampling, self._llm.generation.temperature, call)
        if not isinstance(content, str):
            raise wrong_type("content", "a string", content)
        return self._begin([*self._messages, {"role": "user", "content": content}], params, options)

    def _begin(
        self, messages: list[dict[str, Any]], params: SamplingParams | None, options: RequestOptions | None
    ) -> Turn:
        last = self._open() if self._open is not None else None
        if last is not None and not last.is_finished:
            raise InvalidArgumentError(
                "The last answer has not ended. Read it to its end or abort it.", code="not_ended"
            )
        if check_options(options).truncate_prompt:
            raise InvalidArgumentError(
                "truncate_prompt: expected False, got True. Use drop_oldest, which drops whole turns.",
                param="truncate_prompt",
            )
        sampling = split_params(params, 1)[0]
        if sampling.echo:
            raise InvalidArgumentError(
                "echo: expected False, got True. Each answer of a conversation is a message.", param="echo"
            )
        prompt_messages, ids = self._fit(messages, sampling)
        turn = Turn(
            self, self._llm.stream(ids, sampling, options), prompt_messages, len(messages) - len(prompt_messages)
        )
        self._open = weakref.ref(turn)
        return turn

    def _fit(self, messages: list[dict[str, Any]], params: SamplingParams) -> tuple[list[dict[str, Any]], list[int]]:
        """Return the messages that fit, and their token ids."""
        ids, max_len = self._tokens.prompt(messages), self._llm.engine.max_len
        room = (
            max_len // ANSWER_DIVISOR
            if params.max_tokens is None
            else min(params.max_tokens, max_len // ANSWER_DIVISOR)
        )
        if not self._drop_oldest or len(ids) + room <= max_len:
            return messages, ids
        while len(ids) > max_len // 2 and (fewer := _without_oldest(messages)) is not None:
            messages, ids = fewer, self._tokens.prompt(fewer)
        return messages, ids

    def _answered(self, turn: Turn, result: Result) -> None:
        read = self._read_answer
        answer = {"role": "assistant", "content": result.text} if read is None else read(result.text)
        self._messages = [*turn.messages, answer]
        self._num_dropped += turn.num_dropped
        self._tokens.answered(result.token_ids)


class Turn:
    """An answer in a conversation as it grows: iterate for Deltas.  When it ends, it is added to the conversation."""

    def __init__(
        self, conversation: Conversation, stream: Stream, messages: list[dict[str, Any]], num_dropped: int
    ) -> None:
        self._conversation = conversation
        self._stream = stream
        self._result: Result | None = None
        self.messages = messages
        self.num_dropped = num_dropped

    def __iter__(self) -> Iterator[Delta]:
        return self

    def __next__(self) -> Delta:
        """Return the next Delta: one token or more, or the end."""
        delta = next(self._stream)
        if delta.finish_reason is not None:
            self._keep()
        return delta

    @property
    def is_finished(self) -> bool:
        """True if no more will come."""
        return self._stream.is_finished

    def abort(self) -> None:
        """End the answer here.  The conversation keeps the text so far."""
        self._stream.abort()
        self.result()

    def result(self) -> Result:
        """Wait for the whole answer and return it.  Raises the error that it ended with."""
        for _ in self:
            pass
        return self._keep()

    def _keep(self) -> Result:
        if self._result is None:
            self._result = self._stream.result()
            self._conversation._answered(self, self._result)
        return self._result


def _without_oldest(messages: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """Return the messages without the oldest turn: a message and those after it up to the user's next message.

    System messages stay.  Returns None if only the last message could be dropped.
    """
    first = next((i for i, message in enumerate(messages) if message["role"] not in ("system", "developer")), None)
    if first is None or first == len(messages) - 1:
        return None
    behind = range(first + 1, len(messages))
    following = next((i for i in behind if messages[i]["role"] == "user"), len(messages) - 1)
    return [*messages[:first], *messages[following:]]
