"""Tiny encoders with heads and a tokenizer, and the comparison of results with those of transformers' pipelines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tests.support.encoders import build

__all__ = ["assert_close", "write_folder", "write_words"]

_WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] the cat sat on mat ##s ##t micro ##soft in new york . is this example positive"
WORDS = [*_WORDS.split(), "negative", "who", "?", "a", "b", "c", "##c"]


def write_words(folder: Path, max_len: int = 24) -> Any:
    """Write a tokenizer of WORDS, and return it as transformers has it."""
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))  # noqa: S106
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    roles = {f"{role}_token": f"[{role.upper()}]" for role in ("unk", "pad", "cls", "sep", "mask")}
    names = ["input_ids", "token_type_ids", "attention_mask"]
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=max_len, model_input_names=names, **roles
    )
    wrapped.save_pretrained(folder)
    return wrapped


def write_folder(folder: Path, kind: str, max_len: int = 24, **changes: Any) -> tuple[Any, Any]:
    """Write a BERT of the class ``AutoModel`` + ``kind``; return it with its tokenizer."""
    model = build(getattr(transformers, f"AutoModel{kind}"), "bert", **({"vocab_size": len(WORDS)} | changes))
    model.save_pretrained(folder)
    return model, write_words(folder, max_len)


def assert_close(found: Any, expected: Any) -> None:
    """Check that results are equal, and numbers within 1e-5."""
    if isinstance(expected, dict):
        assert set(found) == set(expected)
        for name, value in expected.items():
            assert_close(found[name], value)
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other)
    elif isinstance(expected, (float, np.floating)):
        assert abs(found - expected) < 1e-5
    else:
        assert found == expected
