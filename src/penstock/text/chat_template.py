"""Chat templates: turn messages into a prompt, and keep the token ids of a conversation from turn to turn.

A template comes with the model and is treated as hostile: it runs in jinja2's immutable sandbox, with limits on its
size, on every value that it builds, and on its time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import jinja2
from jinja2.exceptions import SecurityError

from penstock.errors import InvalidArgumentError, InvalidFileError, UnsupportedError
from penstock.text.template_sandbox import compiled_template, deadline, template_environment, template_error

if TYPE_CHECKING:
    from penstock.text.tokenizer import Tokenizer

__all__ = ["TurnTokens", "check_messages", "encode_chat", "find_template", "render_chat"]

_REASONING: Final = ("reasoning_content", "thinking", "reasoning")
"""The names of a message's reasoning; the first one is what most templates read."""
_CONTENTS: Final = ("content", "tool_calls", "function_call", *_REASONING)
"""A message has at least one of these fields."""
_TAIL_MARK: Final = "CONTINUE_FINAL_MESSAGE_TAG "
_UNUSABLE: Final = "invalid_chat_template"


def check_messages(messages: object) -> list[dict[str, Any]]:
    """Return messages as plain dicts with a role, without fields that are None.

    A message may be an object of OpenAI's client or a dataclass.  An InvalidArgumentError names the message that is
    wrong.
    """
    messages = getattr(messages, "messages", messages)
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise InvalidArgumentError(
            "messages must be a list of {'role': ..., 'content': ...} and not empty", param="messages"
        )
    checked = []
    for index, original in enumerate(messages):
        message = plain_value(original)
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise InvalidArgumentError(
                f"messages[{index}] must be an object with a role, not {original!r}", param="messages"
            )
        if not any(name in message for name in _CONTENTS):
            raise InvalidArgumentError(
                f"messages[{index}] has no content: it has {', '.join(map(repr, message))}", param="messages"
            )
        if not isinstance(message.get("content"), (str, list, tuple, dict, type(None))):
            raise InvalidArgumentError(
                f"messages[{index}]: content must be a string, not {message['content']!r}", param="messages"
            )
        checked.append({name: value for name, value in message.items() if value is not None})
    return checked


def plain_value(value: Any) -> Any:
    """Return a value as JSON has it, as transformers does: a template gets no objects with methods of their own."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    for kind in (str, int, float):  # of a subclass, such as an enumeration, only the value
        if isinstance(value, kind):
            return kind.__str__(value) if kind is str else kind(value)
    if isinstance(value, Mapping):
        return {plain_value(name): plain_value(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [plain_value(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain_value(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if callable(dump := getattr(value, "model_dump", None)):
        return plain_value(dump())
    if callable(item := getattr(value, "item", None)) and type(value).__module__ == "numpy":
        return plain_value(item())
    return f"<{type(value).__name__}>"


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose reasoning has every name by which templates read it."""
    reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    special_tokens: Mapping[str, str],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool | str = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Return the prompt that a template makes of messages, the same as transformers' ``apply_chat_template``.

    ``special_tokens`` maps "bos_token", "eos_token" and so on to their text.  ``continue_final_message`` leaves the
    last message open, so that its content is continued; the name of another field instead of True continues that one.
    ``tools`` are JSON schemas, ``documents`` have a title and a text, and ``variables`` are what else the template
    reads.  Raises InvalidFileError if the template does not compile, and InvalidArgumentError if it refuses the
    messages, cannot render them, or exceeds a limit.
    """
    checked = [_with_reasoning(message) for message in check_messages(messages)]
    field = "content" if continue_final_message is True else continue_final_message
    tail = _mark_tail(checked, template, field, add_generation_prompt) if field else ""
    values: dict[str, Any] = {**special_tokens, **plain_value(variables or {})}
    values |= {
        "messages": checked,
        "tools": _checked_objects("tools", tools),
        "documents": _checked_objects("documents", documents),
        "add_generation_prompt": add_generation_prompt,
    }
    if reason := template_error(template):
        raise InvalidFileError(reason, param="messages", code=_UNUSABLE)
    environment = template_environment()
    try:
        with deadline():
            code, names = compiled_template(template), environment.make_globals(None)
            text = environment.template_class.from_code(environment, code, names).render(values)
    except SecurityError as error:
        raise InvalidArgumentError(
            f"messages: the chat template exceeds a limit with them: {error}", param="messages"
        ) from error
    except jinja2.TemplateError as error:
        raise InvalidArgumentError(f"messages: the chat template refuses them: {error}", param="messages") from error
    except Exception as error:  # the code of a template may raise any exception
        raise InvalidArgumentError(
            f"messages: the chat template cannot render them: {type(error).__name__}: {error}", param="messages"
        ) from error
    return _cut_at_tail(text, tail) if field else text


def _checked_objects(name: str, values: Any) -> Any:
    """Return tools or documents as plain dicts; None stays None."""
    if values is None:
        return None
    plain = plain_value(values)
    if not isinstance(plain, (list, tuple)) or not all(isinstance(value, dict) for value in plain):
        raise InvalidArgumentError(f"{name}: expected a list of objects, got {values!r:.100}", param=name)
    return plain


def _mark_tail(messages: list[dict[str, Any]], template: str, field: str, add_generation_prompt: bool) -> str:
    """Put a mark behind the text to continue in the last message, and return that text."""
    if add_generation_prompt:
        raise InvalidArgumentError(
            "continue_final_message: expected false with add_generation_prompt, got true. Either an answer begins, or "
            "the last message goes on.",
            param="continue_final_message",
        )
    last = messages[-1]
    value = last.get(field)
    fields = [name for name in _REASONING if last.get(name) == value] if field in _REASONING else [field]
    if not any(name in template for name in fields):
        raise _cannot_continue(f"the chat template does not read {field!r:.40}")
    if isinstance(value, list):
        part = next((part for part in reversed(value) if isinstance(part, dict) and "text" in part), None)
        if part is None or not isinstance(part["text"], str):
            raise _cannot_continue("the last message has no text")
        text = part["text"]
        part["text"] = text + _TAIL_MARK
        return str(text)
    if not isinstance(value, str):
        raise _cannot_continue(f"the last message has no {field!r:.40}")
    for name in fields:
        last[name] = value + _TAIL_MARK
    return value


def _cut_at_tail(text: str, tail: str) -> str:
    """Return a rendered conversation up to the mark; white space before it goes if the template trims the message."""
    mark = _TAIL_MARK.strip()
    if tail.strip() not in text or mark not in text:
        raise _cannot_continue("the chat template does not write the whole last message")
    at = text.rindex(mark)
    return text[:at] if text.startswith(_TAIL_MARK, at) else text[:at].rstrip()


def _cannot_continue(reason: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"continue_final_message: expected a last message that can be continued: {reason}",
        param="continue_final_message",
    )


def find_template(tokenizer: Tokenizer, *, has_tools: bool = False) -> str:
    """Return the template for a conversation; with tools it is "tool_use" if the model has one of that name.

    Raises UnsupportedError, with ``param`` "messages", if the model has none that can be used.
    """
    named = tokenizer.chat_templates
    if has_tools and "tool_use" in named:
        template: str | None = named["tool_use"]
        reason = template_error(named["tool_use"])
    else:
        template, reason = tokenizer.chat_template, tokenizer.chat_template_error
    if reason:
        raise UnsupportedError(
            f"messages: the model's chat template cannot be used ({reason}). Pass a plain prompt instead of messages.",
            param="messages",
            code=_UNUSABLE,
        )
    if template is None:
        raise UnsupportedError(
            "messages: this model has no chat template. Pass a plain prompt instead of messages.", param="messages"
        )
    return template


def encode_chat(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], *, continue_final_message: bool = False
) -> list[int]:
    """Return the token ids of messages and of the opening of an answer, or up to the end of the last message's text.

    Raises UnsupportedError if the model has no template, and the errors of ``render_chat``.
    """
    text = render_chat(
        find_template(tokenizer),
        messages,
        tokenizer.special_tokens,
        add_generation_prompt=not continue_final_message,
        continue_final_message=continue_final_message,
    )
    return tokenizer.encode(text, add_special_tokens=False)


class TurnTokens:
    """The token ids of a conversation, kept from turn to turn.

    The tokens of a sampled answer often differ from those that the tokenizer makes of its text, and pages are shared
    only for equal tokens.  So the ids of the last prompt and of its answer are kept as far as the text of the next
    prompt begins with theirs, and only the rest is encoded::

        prompt = tokens.prompt(messages)
        result = llm.generate(prompt, params)
        tokens.answered(result.token_ids)

    ``tools``: those that the template gets.  Raises UnsupportedError if the model has no chat template.
    """

    def __init__(self, tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self._tokenizer = tokenizer
        self._tools = [*tools] or None
        self._template = find_template(tokenizer, has_tools=bool(tools))
        self._last_prompt: tuple[str, list[int]] = ("", [])
        self._known: tuple[str, list[int], list[int]] = ("", [], [])  # text of a prompt, its ids, ids of the answer

    def prompt(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the ids of the messages, including the opening of the answer.

        Raises the errors of ``render_chat``.
        """
        text = render_chat(self._template, messages, self._tokenizer.special_tokens, tools=self._tools)
        whole = self._tokenizer.encode(text, add_special_tokens=False)
        ids = self._extend_known(text)
        # Some tokenizers encode the beginning of a text differently.
        if self._decode(ids) != self._decode(whole):
            ids = whole
        self._last_prompt = text, ids
        return list(ids)

    def answered(self, token_ids: Sequence[int]) -> None:
        """Note the answer to the last ``prompt``, including an end token.  A turn without an answer needs no call."""
        self._known = (*self._last_prompt, list(token_ids))

    def _extend_known(self, text: str) -> list[int]:
        """Return the known ids of the beginning of ``text``, and the rest encoded."""
        start, prompt_ids, answer_ids = self._known
        if not text.startswith(start):
            return self._tokenizer.encode(text, add_special_tokens=False)
        num_answer, num_chars = self._match(answer_ids, text[len(start) :])
        new_ids = self._tokenizer.encode(text[len(start) + num_chars :], add_special_tokens=False)
        return [*prompt_ids, *answer_ids[:num_answer], *new_ids]

    def _match(self, ids: Sequence[int], text: str) -> tuple[int, int]:
        """Return how many of ``ids`` write the beginning of ``text`` in whole characters, and how many characters."""
        detokenizer, num_chars, ends = self._tokenizer.detokenizer(), 0, [0]
        for token in ids:
            piece = detokenizer.push(token)
            if self._tokenizer.is_special(token) or not text.startswith(piece, num_chars):
                break
            num_chars += len(piece)
            ends.append(num_chars)
        while len(ends) > 1 and self._ends_within_character(ids[: len(ends) - 1]):
            ends.pop()
        return len(ends) - 1, ends[-1]

    def _ends_within_character(self, ids: Sequence[int]) -> bool:
        """Return True if the ids end within a character that the next token may complete."""
        detokenizer = self._tokenizer.detokenizer()
        for token in ids:
            detokenizer.push(token)
        return detokenizer.flush() != ""

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)
