"""A model that writes given texts: which one, and how far it is, it reads from the tokens of the conversation."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import tokenizers
from numpy.typing import NDArray

from penstock.core.tokenizer import TOKENIZER_SEGMENT
from penstock.engine.options import EngineOptions
from penstock.graph.tokenizer.compiler import compile_tokenizer
from penstock.llm.llm import LLM
from penstock.runtime.open import Opened
from penstock.runtime.program import PAGE_TOKENS, ProgramLimits
from penstock.text.answer.budget import REASON
from penstock.text.tokenizer import Tokenizer
from tests.support.fake_model import FILES
from tests.support.fake_program import FakeProgram

__all__ = ["TEMPLATE", "scripted_llm"]

TEMPLATE = (
    "{% if tools %}[{% for t in tools %}{{ t.function | tojson }}{% endfor %}]{% endif %}{% for m in messages %}"
    "<{{ m.role }}>{{ m.reasoning_content }}{{ m.content }}{% for c in m.tool_calls or [] %}={{ c.function.name }}"
    "{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}{% if add_generation_prompt %}<answer>{{ opening }}"
    "{% endif %}"
)
END = 1
WORDS = ['"name": "', '"arguments": ', '"parameters": ', "weather", "parameter", "function", "channel", "message",
         "arg_value", "commentary", "tool", "call", "null", "near", '"city": "', REASON]  # fmt: skip
"""Tokens beside the bytes, so that scripts are short."""


class ScriptedProgram(FakeProgram):
    """Writes ``scripts[n]`` after a prompt with ``n`` messages of tools, and then the end token."""

    scripts: dict[int, list[int]]
    opening: list[int]
    """The tokens at the end of a prompt; the first is that of <answer>."""
    tool: int

    def _hash_logits(self, tables: NDArray[np.int32], position: int) -> NDArray[np.float32]:
        places = np.arange(position + 1)
        ids = self._pages[0, tables[0][places // PAGE_TOKENS], places % PAGE_TOKENS, 0]
        begin = int(np.flatnonzero(ids == self.opening[0])[-1])
        num_tools = int((ids == self.tool).sum())
        script, at = self.scripts[num_tools], position + 1 - begin - len(self.opening)
        logits = np.zeros(self._info.vocab_size, np.float32)
        logits[script[at] if at < len(script) else END] = 30.0
        return logits


def scripted_llm(
    scripts: dict[int, str],
    signs: str,
    specials: list[str] | None = None,
    opening: str = "",
    template: str = TEMPLATE,
) -> LLM:
    """Return a model that writes the script of the number of tool messages.

    ``signs``: a comment of its chat template.  ``specials``: texts that are special tokens.  ``opening``: what the
    template begins an answer with.  ``template`` follows both.
    """
    tokenizer = tokenizers.Tokenizer.from_str(FILES["tokenizer.json"].decode())
    tokenizer.add_special_tokens(["<answer>", "<tool>", *(specials or [])])
    tokenizer.add_tokens(WORDS)
    written = "{#" + signs + "#}{% set opening = " + json.dumps(opening) + " %}" + template
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": written}
    files = FILES | {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
    }
    files[TOKENIZER_SEGMENT], _ = compile_tokenizer(files)
    own = Tokenizer(files)
    limits = ProgramLimits(max_tokens=256, max_requests=4, num_pages=512)
    program = ScriptedProgram(vocab_size=320, context_len=4096, limits=limits)
    program.scripts = {count: own.encode(text) for count, text in scripts.items()}
    program.opening, program.tool = own.encode("<answer>" + opening), own.encode("<tool>")[0]
    return LLM.of_program(Opened(program, files, Path("scripted"), []), EngineOptions())
