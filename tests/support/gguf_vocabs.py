"""``python -m tests.support.gguf_vocabs FOLDER``: compare tokenizers of GGUF files with texts and ids of llama.cpp.

FOLDER has ``ggml-vocab-NAME.gguf`` beside ``.gguf.inp`` (texts) and ``.gguf.out`` (a line of ids for each), as the
folder vendor/llama.cpp/models of llama-cpp-python's source distribution has.  Both the tokenizers library and the core
encode the texts.  The exit status is 1 if ids differ.
"""

from __future__ import annotations

import sys
import unicodedata
from pathlib import Path

import tokenizers

from penstock.checkpoint.gguf.metadata import Metadata
from penstock.checkpoint.gguf.reader import read_header
from penstock.checkpoint.gguf.tokenizer import tokenizer_files
from penstock.core.tokenizer import NativeTokenizer
from penstock.errors import UnsupportedError
from penstock.graph.tokenizer.compiler import compile_tokenizer

__all__ = ["compare"]

SEPARATOR = "\n__ggml_vocab_test__\n"
NORMALIZED = ("qwen2", "qwen35")
"""Vocabularies whose texts the original models normalize to NFC, which llama.cpp does not do."""


def compare(path: Path) -> tuple[str, int]:
    """Return the result for a file as a line of text, and the number of texts whose ids differ."""
    metadata = Metadata(read_header(memoryview(path.read_bytes()), path.name).metadata, path.name)
    texts, lines = (Path(f"{path}.{end}") for end in ("inp", "out"))
    if not texts.exists():
        return "no pair of texts and ids", 0
    try:
        files = tokenizer_files(metadata, len(metadata.values["tokenizer.ggml.tokens"]))  # type: ignore[arg-type]
    except UnsupportedError as error:
        return f"refused: {error}", 0
    library = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
    segment, unsupported = compile_tokenizer(files)
    core = None if unsupported else NativeTokenizer.of_segment(segment)
    is_normalized = any(path.name == f"ggml-vocab-{name}.gguf" for name in NORMALIZED)
    num_texts = num_wrong = 0
    for text, line in zip(texts.read_text().split(SEPARATOR), lines.read_text().split("\n"), strict=False):
        if is_normalized and not unicodedata.is_normalized("NFC", text):
            continue
        expected = [int(token) for token in line.split()]
        found = [library.encode(text, add_special_tokens=False).ids]
        if core is not None:
            found.append(core.encode(text, add_special_tokens=False))
        num_texts += 1
        num_wrong += any(ids != expected for ids in found)
    return f"{num_texts} texts, {num_wrong} differ{unsupported and f'; not in the core: {unsupported}'}", num_wrong


def main(folder: Path) -> int:
    """Print a line for each file."""
    paths = sorted(folder.glob("ggml-vocab-*.gguf"))
    if not paths:
        print(f"{folder}: expected files ggml-vocab-*.gguf, got none", file=sys.stderr)
        return 2
    total = 0
    for path in paths:
        line, num_wrong = compare(path)
        print(f"{path.name}: {line}", flush=True)
        total += num_wrong
    return 1 if total else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
