"""Compiles grammars for the vocabulary of a model, with limits on time and memory, and keeps the last ones.

The library is llguidance.  Its limits count operations instead of time, so a grammar is refused on every machine or on
none.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakValueDictionary

from penstock.config import show
from penstock.errors import InvalidArgumentError, PenstockError, UnsupportedError
from penstock.text.grammar.matcher import GrammarMatcher, ReplayTime, fill_mask
from penstock.text.grammar.shared_jobs import SharedJobs
from penstock.text.grammar.vocabulary import drops_first_space, make_vocabulary

if TYPE_CHECKING:
    from collections.abc import Iterable

    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    from penstock.text.grammar.source import GrammarSource
    from penstock.text.tokenizer import Tokenizer

__all__ = ["Grammar", "GrammarCompiler", "check_grammar"]

MAX_KEPT: Final = 32
MAX_LEXER_STATES: Final = 20_000
"""A state takes 1 to 2 kB."""
_LIMITS: Final[dict[str, Any]] = {
    "max_items_in_row": 2000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": MAX_LEXER_STATES,
    "max_grammar_size": 500_000,
    "verbose_errors": False,
}
"""About 20 ms for the first mask of a grammar, and 14 ms for any other one."""
MIN_PREPARED: Final = 32_768
"""Vocabularies of fewer tokens are made with the first grammar, in 0.1 s."""


def _limits() -> LLParserLimits:
    from llguidance import LLParserLimits

    return LLParserLimits(**_LIMITS)


class Grammar:
    """A compiled grammar.  ``matcher`` begins an answer; any thread may call it.

    The answers share a lexer, and so the limit on its states.  An answer that finds it full goes on with a lexer of its
    own, so the limit depends on its own tokens only.
    """

    def __init__(
        self, source: GrammarSource, compile_again: Callable[[], LLMatcher], vocab_size: int, forget: Callable[[], None]
    ) -> None:
        self.source = source
        self._compile, self._forget = compile_again, forget
        self._compiled = compile_again()
        self._lock = threading.Lock()
        self._num_answers = 0
        self._replay = ReplayTime()
        self.first_mask = fill_mask(self._compiled, source.field, -(-vocab_size // 32))

    def matcher(self) -> GrammarMatcher:
        """Return the state of a new answer."""
        with self._lock:
            self._num_answers += 1
            matcher = self._compiled.deep_copy()
            return GrammarMatcher(matcher, self._renew, self.source.field, self.first_mask, self._replay)

    def _renew(self) -> LLMatcher | None:
        """Return the grammar with a lexer of its own; None for the only answer, which had one.

        The next request has the grammar compiled anew.  This runs where masks are made, and all requests wait for it,
        at most once for each answer.
        """
        self._forget()
        with self._lock:
            is_alone = self._num_answers == 1
        return None if is_alone else self._compile()


class GrammarCompiler:
    """Compiles the grammars of one model and caches them: the most recent ones, and all that are still in use.

    Any number of threads may use it.  Equal grammars that are asked for at the same time are compiled once.
    """

    def __init__(self, tokenizer: Callable[[], Tokenizer], vocab_size: int, end_ids: Iterable[int]) -> None:
        self._tokenizer, self._vocab_size, self._end_ids = tokenizer, vocab_size, tuple(end_ids)
        self._lock = threading.Lock()
        self._kept: OrderedDict[GrammarSource, Grammar] = OrderedDict()
        self._referenced: WeakValueDictionary[GrammarSource, Grammar] = WeakValueDictionary()
        self._jobs = SharedJobs(self._find_or_compile, "penstock-grammar")
        self._vocabulary_lock = threading.Lock()
        self._made: tuple[LLTokenizer, bool] | None = None

    def prepare(self) -> None:
        """Make a large vocabulary now; no other thread runs meanwhile, 0.7 s for 131,072 tokens."""
        if self._vocab_size >= MIN_PREPARED:
            with suppress(PenstockError):  # which the first grammar raises
                _ = self._vocabulary

    @property
    def _vocabulary(self) -> tuple[LLTokenizer, bool]:
        """The vocabulary, and whether the tokenizer drops the space in front of an answer."""
        with self._vocabulary_lock:
            if self._made is None:
                tokenizer = self._tokenizer()
                made = make_vocabulary(tokenizer, self._vocab_size, self._end_ids)
                self._made = made, drops_first_space(tokenizer)
            return self._made

    def begin(self, source: GrammarSource) -> Future[Grammar]:
        """Compile a grammar in one of two threads of this object, so that it delays nothing else.

        ``compile`` returns the same grammar at once while somebody refers to the result, which has the errors of
        ``compile``.  Cancel it when it is no longer wanted.
        """
        compiled = self._find(source)
        if compiled is None:
            return self._jobs.begin(source)
        done: Future[Grammar] = Future()
        done.set_result(compiled)
        return done

    def compile(self, source: GrammarSource) -> Grammar:
        """Return a grammar.

        Raises InvalidArgumentError or UnsupportedError naming the keyword or the place that is wrong, and
        UnsupportedError for a model whose tokens are not known as bytes.
        """
        return self._find(source) or self._jobs.call(source)

    def close(self) -> None:
        """Compile no grammar that has not begun."""
        self._jobs.close()

    def _find(self, source: GrammarSource) -> Grammar | None:
        with self._lock:
            grammar = self._referenced.get(source)
            if source in self._kept:
                self._kept.move_to_end(source)
            return grammar

    def _find_or_compile(self, source: GrammarSource) -> Grammar:
        compiled = self._find(source)
        if compiled is not None:
            return compiled
        grammar = self._compile(source)
        with self._lock:
            self._kept[source] = self._referenced[source] = grammar
            while len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        return grammar

    def _compile(self, source: GrammarSource) -> Grammar:
        from llguidance import LLMatcher

        try:
            vocabulary, drops_space = self._vocabulary
        except UnsupportedError as error:
            raise UnsupportedError(f"{source.field}: {error}", param=source.field) from None
        text = source.lark(begins_with_space=drops_space)

        def compiled() -> LLMatcher:
            matcher = LLMatcher(vocabulary, text, log_level=0, limits=_limits())  # other threads run meanwhile
            if matcher.is_error():
                raise _refusal(source, matcher.get_error())
            return matcher

        return Grammar(source, compiled, self._vocab_size, lambda: self._forget(source))

    def _forget(self, source: GrammarSource) -> None:
        """Compile a grammar again when it is asked for next."""
        with self._lock:
            self._kept.pop(source, None)
            self._referenced.pop(source, None)


@lru_cache(MAX_KEPT)
def check_grammar(source: GrammarSource) -> None:
    """Raise the errors of a grammar that no vocabulary can help.  Other threads run meanwhile."""
    from llguidance import LLMatcher

    is_error, messages = LLMatcher.validate_grammar_with_warnings(source.lark(), None, limits=_limits())
    if is_error:
        raise _refusal(source, messages[0])


_PLACE: Final = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")
_UNSUPPORTED: Final = re.compile(r"unimplemented|not supported|unknown format|too large|too deeply", re.IGNORECASE)


def _refusal(source: GrammarSource, message: str) -> PenstockError:
    """Return the library's refusal as an error that names the keyword or the place.

    Its message shows lines of the grammar, which the first line that begins with a number ends.
    """
    text = re.split(r"\n *\d+ \| |\n<non-verbose/>", message)[0].strip()
    place = _PLACE.match(text)
    where = ""
    if place is not None:
        text = text[place.end() :]
        where = source.place(int(place[1]), int(place[2]))
    _, is_regex, text = text.rpartition("\nerror: ")  # a regular expression, which stands before its error
    text = " ".join(text.removeprefix("failed to compile JSON schema: ").split())
    if source.field == "json_schema":
        keyword = "pattern" if is_regex else next((k for part, k in _UNNAMED.items() if part in text), "")
        text = f"{keyword}: {text}" if keyword else text
    kind: Any = UnsupportedError if _UNSUPPORTED.search(text) else InvalidArgumentError
    error: PenstockError = kind(
        f"{source.field}: expected {_EXPECTED[source.field]}, got{where}: {show(text)[1:-1]}", param=source.field
    )
    return error


_BOUNDS: Final = "minimum, maximum, exclusiveMinimum, exclusiveMaximum"
_UNNAMED: Final = {
    "Resource '": "$ref or $schema",
    "float range": _BOUNDS,
    "integer range": _BOUNDS,
    "patternProperty": "patternProperties",
}
"""Keywords that the library's messages do not name, by a part of the message."""
_EXPECTED: Final = {
    "json_schema": "a JSON schema that can be enforced",
    "json_object": "an object",
    "regex": "a regular expression that can be enforced",
    "choice": "strings",
    "grammar": "a grammar that can be enforced",
}
