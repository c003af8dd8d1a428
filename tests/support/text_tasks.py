"""Tiny encoders with heads and a tokenizer, and the comparison of results with those of transformers' pipelines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tests.support.encoders import build

__all__ = ["assert_close", "write_folder", "write_t5", "write_words"]

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


def write_t5(folder: Path) -> tuple[Any, Any]:
    """Write a T5 with a task for translations and its tokenizer; return both as transformers has them."""
    torch.manual_seed(0)
    sizes = {"d_model": 80, "d_kv": 24, "d_ff": 100, "num_layers": 2, "num_heads": 3, "vocab_size": 40}
    of_task = {"translation_en_to_de": {"prefix": "to german : ", "num_beams": 3, "max_length": 9}}
    config = transformers.T5Config(**sizes, decoder_start_token_id=0, task_specific_params=of_task)
    model = transformers.T5ForConditionalGeneration(config).float().eval()
    with torch.no_grad():
        model.shared.weight.copy_(3 * torch.randn_like(model.shared.weight))
    model.save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"task_specific_params": of_task}))
    words = ["<pad>", "</s>", "<unk>", *(f"w{i}" for i in range(32)), "to", "german", ":", "the", "cat"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    roles = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **roles)
    wrapped.save_pretrained(folder)
    return model, wrapped


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
