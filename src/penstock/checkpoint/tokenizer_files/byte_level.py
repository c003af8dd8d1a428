"""The ``tokenizer.json`` of ``vocab.json`` and ``merges.txt``: BPE over bytes, in the forms of transformers.

https://huggingface.co/docs/transformers/model_doc/gpt2, .../roberta, .../qwen2 and .../gpt_neox
"""

from __future__ import annotations

from typing import Any, Final

from penstock.checkpoint.gguf.split_patterns import find_pre_tokenizer
from penstock.checkpoint.tokenizer_files.post_processors import NO_POST_PROCESSOR
from penstock.checkpoint.tokenizer_limits import MAX_MERGES, MAX_TOKENIZER_BYTES, check_json_size
from penstock.config import ConfigReader, parse_object, show
from penstock.errors import InvalidFileError

__all__ = ["byte_level_tokenizer"]

_VOCAB, _MERGES = "vocab.json", "merges.txt"
_PATTERNS: Final = {
    "GPT2Tokenizer": "gpt-2",
    "GPTNeoXTokenizer": "gpt-2",
    "RobertaTokenizer": "gpt-2",
    "Qwen2Tokenizer": "qwen2",
    "Qwen3_5Tokenizer": "qwen35",
}
_NORMALIZED: Final = ("GPTNeoXTokenizer", "Qwen2Tokenizer", "Qwen3_5Tokenizer")


def byte_level_tokenizer(vocab: bytes, merges: bytes, name: str | None, config: ConfigReader) -> dict[str, Any] | None:
    """Return the tokenizer.json of the class ``name``, without added tokens; its post-processor is
    ``NO_POST_PROCESSOR``.

    None for a class of another kind.  Raises InvalidFileError for a damaged file.
    """
    if name not in _PATTERNS:
        return None
    data = check_json_size(vocab, _VOCAB, MAX_TOKENIZER_BYTES)
    ids = parse_object(data, _VOCAB, max_bytes=len(data), max_values=len(data), lenient=True)
    pre_tokenizer = find_pre_tokenizer(_PATTERNS[name], _VOCAB).components()
    last = pre_tokenizer.get("pretokenizers", [pre_tokenizer])[-1]
    last["add_prefix_space"] = config.bool("add_prefix_space", False)
    return {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": {"type": "NFC"} if name in _NORMALIZED else None,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": NO_POST_PROCESSOR,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "fuse_unk": False, "vocab": ids, "merges": _read_merges(merges)},
    }


def _read_merges(data: bytes) -> list[list[str]]:
    """Return the pairs, one a line; a line that begins with "#version" and an empty one are none."""
    if len(data) > MAX_TOKENIZER_BYTES or data.count(b"\n") > MAX_MERGES:
        raise InvalidFileError(
            f"{_MERGES}: expected at most {MAX_TOKENIZER_BYTES} bytes and {MAX_MERGES} lines, got more"
        )
    try:
        lines = data.decode().split("\n")
    except UnicodeDecodeError as error:
        raise InvalidFileError(f"{_MERGES}: expected UTF-8, got none at byte {error.start}") from None
    merges = []
    for number, line in enumerate(lines, 1):
        pair = line.removesuffix("\r").split(" ")
        if line.startswith("#version") or pair == [""]:
            continue
        if len(pair) != 2:
            raise InvalidFileError(f"{_MERGES}: line {number}: expected two tokens, got {show(line)}")
        merges.append(pair)
    return merges
