"""One side of check.py: a process that keeps a GGUF file open, and answers a line of JSON with a line of JSON.

    python -m benchmarks.real.sides penstock|llama.cpp|ik_llama.cpp FILE.gguf THREADS [SCHEME]

``ids`` encodes texts; ``greedy`` continues token ids and returns those of the answer and its text; ``logits`` writes
the logits at all positions of token ids to a file.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from benchmarks import gguf_sides


class Side(Protocol):
    """A program with an open file."""

    def ids(self, text: str) -> list[int]:
        """Encode a prompt."""

    def greedy(self, ids: list[int], num_tokens: int) -> list[int]:
        """Return the likeliest continuation."""

    def text(self, ids: list[int]) -> str:
        """Decode an answer."""

    def logits(self, ids: list[int]) -> NDArray[np.float32]:
        """Return logits [len, vocabulary]."""


class Penstock:
    """An LLM, in process."""

    def __init__(self, file: str, threads: int, scheme: str) -> None:
        import penstock

        self.llm = penstock.LLM(file, threads=threads, scheme=scheme or None, use_cache=not scheme)

    def ids(self, text: str) -> list[int]:
        return list(self.llm.prompt_ids(text))

    def greedy(self, ids: list[int], num_tokens: int) -> list[int]:
        return list(self.llm.generate(ids, temperature=0.0, max_tokens=num_tokens, ignore_eos=True).token_ids)

    def text(self, ids: list[int]) -> str:
        return self.llm.tokenizer.decode(ids)

    def logits(self, ids: list[int]) -> NDArray[np.float32]:
        return self.llm.logits(ids)


class LlamaCpp:
    """llama.cpp's functions, by llama-cpp-python."""

    kind = gguf_sides.LlamaCpp

    def __init__(self, file: str, threads: int, _scheme: str) -> None:
        self.side = self.kind(file, threads, 1)
        self.lib = self.side.lib
        self.vocab = self.lib.llama_model_get_vocab(self.side.model)
        self.vocab_size = int(self.lib.llama_vocab_n_tokens(self.vocab))

    def ids(self, text: str) -> list[int]:
        data = text.encode()
        tokens = (ctypes.c_int32 * (len(data) + 8))()
        count = self.lib.llama_tokenize(self.vocab, data, len(data), tokens, len(tokens), True, True)
        return list(tokens[:count])

    def text(self, ids: list[int]) -> str:
        buffer, data = ctypes.create_string_buffer(256), b""
        for token in ids:
            count = self.lib.llama_token_to_piece(self.vocab, token, buffer, len(buffer), 0, True)
            data += buffer.raw[: max(count, 0)]
        return data.decode(errors="replace")

    def row(self, number: int) -> NDArray[np.float32]:
        pointer = self.lib.llama_get_logits_ith(self.side.context, number)
        return np.ctypeslib.as_array(pointer, (self.vocab_size,)).astype(np.float32)

    def greedy(self, ids: list[int], num_tokens: int) -> list[int]:
        self.side.decode([(0, position, token) for position, token in enumerate(ids)], 1)
        answer: list[int] = []
        while len(answer) < num_tokens:
            answer.append(int(self.row(-1).argmax()))
            self.side.decode([(0, len(ids) + len(answer) - 1, answer[-1])], 1)
        self.side.end()
        return answer

    def logits(self, ids: list[int]) -> NDArray[np.float32]:
        self.side.decode([(0, position, token) for position, token in enumerate(ids)], len(ids))
        rows = np.stack([self.row(number) for number in range(len(ids))])
        self.side.end()
        return rows


class IkLlamaCpp(LlamaCpp):
    """The same of ik_llama.cpp, by ik-llama-cpp-python."""

    kind = gguf_sides.IkLlamaCpp


def answer(side: Side, request: dict[str, Any]) -> dict[str, Any]:
    if request["do"] == "ids":
        return {"ids": [side.ids(text) for text in request["texts"]]}
    if request["do"] == "greedy":
        ids = side.greedy(request["ids"], request["num_tokens"])
        return {"ids": ids, "text": side.text(ids)}
    np.save(request["out"], np.concatenate([side.logits(ids) for ids in request["ids"]]))
    return {"out": request["out"]}


def main() -> None:
    name, file, threads, *scheme = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w", buffering=1)  # what libraries print goes to standard error
    os.dup2(2, 1)
    kinds: dict[str, Any] = {"penstock": Penstock, "llama.cpp": LlamaCpp, "ik_llama.cpp": IkLlamaCpp}
    side: Side = kinds[name](file, int(threads), scheme[0] if scheme else "")
    print(json.dumps({"ready": name}), file=answers)
    for line in sys.stdin:
        print(json.dumps(answer(side, json.loads(line))), file=answers)


if __name__ == "__main__":
    main()
