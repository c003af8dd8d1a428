"""The tokenizer classes of transformers 5: which one opens a folder, and the special tokens that it has by default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

__all__ = [
    "BEGINNING_CLASSES", "BERT_CLASSES", "SPACE_MARK_CLASSES", "TEKKEN_CLASS", "default_roles", "tokenizer_class",
]  # fmt: skip

_ROBERTA: Final = {
    "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "sep_token": "</s>", "pad_token": "<pad>",
    "cls_token": "<s>", "mask_token": "<mask>",
}  # fmt: skip
_LLAMA: Final = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
_BERT: Final = {
    "unk_token": "[UNK]", "sep_token": "[SEP]", "pad_token": "[PAD]", "cls_token": "[CLS]", "mask_token": "[MASK]"
}  # fmt: skip
_END_OF_TEXT: Final = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
BERT_CLASSES: Final = frozenset(("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer", "MobileBertTokenizer"))
TEKKEN_CLASS: Final = "MistralCommonBackend"
"""The class of a tekken.json, whatever the other files say."""
SPACE_MARK_CLASSES: Final = ("LlamaTokenizer", "CodeLlamaTokenizer")
BEGINNING_CLASSES: Final = (TEKKEN_CLASS, "CodeLlamaTokenizer")
"""The classes that put the begin token before a text unless add_bos_token is false."""
_DEFAULTS: Final[Mapping[str, Mapping[str, str]]] = {
    **dict.fromkeys(SPACE_MARK_CLASSES, _LLAMA),
    "GemmaTokenizer": {
        "unk_token": "<unk>", "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "mask_token": "<mask>"
    },
    TEKKEN_CLASS: _LLAMA | {"pad_token": "<pad>"},
    "GPT2Tokenizer": _END_OF_TEXT,
    "GPTNeoXTokenizer": _END_OF_TEXT | {"pad_token": "<|padding|>"},
    "Qwen2Tokenizer": dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>"),
    "Qwen3_5Tokenizer": dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>"),
    "RobertaTokenizer": _ROBERTA,
    "XLMRobertaTokenizer": _ROBERTA,
    "CamembertTokenizer": _ROBERTA,
    "T5Tokenizer": {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"},
    "DebertaV2Tokenizer": {"bos_token": "[CLS]", "eos_token": "[SEP]", **_BERT},
    **dict.fromkeys(BERT_CLASSES, _BERT),
}  # fmt: skip

_CLASS_MODELS: Final[Mapping[str, tuple[str, ...]]] = {
    "BertTokenizer": ("bert", "distilbert", "nomic_bert"),
    "CamembertTokenizer": ("camembert",),
    "CohereTokenizer": ("cohere", "cohere2"),
    "DebertaV2Tokenizer": ("deberta-v2",),
    "GPT2Tokenizer": ("gpt2", "phi", "starcoder2"),
    "GPTNeoXTokenizer": ("gpt_neox", "falcon_mamba", "mamba", "mamba2", "olmo", "olmoe"),
    "GemmaTokenizer": ("gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n", "gemma3n_text"),
    "Qwen2Tokenizer": ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next"),
    "Qwen3_5Tokenizer": ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
    "RobertaTokenizer": ("roberta",),
    "T5Tokenizer": ("t5", "mt5"),
    "XLMRobertaTokenizer": ("xlm-roberta",),
    "": (
        "ernie4_5", "ernie4_5_moe", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "granite", "granitemoe",
        "granitemoehybrid", "internlm2", "internlm3", "minicpm3", "minimax_m2", "mistral", "mixtral", "modernbert",
        "olmo2", "olmo3", "phi3", "umt5",
    ),
}  # fmt: skip
"""The class of each model_type; "" for those whose files transformers opens without a class."""
_MODEL_CLASSES: Final = {model: name for name, models in _CLASS_MODELS.items() for model in models}
_WRONG_IN_FILES: Final = ("qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text")
"""Values of model_type whose folders often name another class than the one that transformers opens them with."""
_ALIASES: Final = {
    "BartTokenizer": "RobertaTokenizer", "CodeGenTokenizer": "GPT2Tokenizer", "LongformerTokenizer": "RobertaTokenizer",
    "MT5Tokenizer": "T5Tokenizer",
}  # fmt: skip
_WITHOUT_RULES: Final = ("PreTrainedTokenizer", "TokenizersBackend", "PythonBackend", "BloomTokenizer")


def tokenizer_class(config: Mapping[str, Any], model: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Return the class that opens a folder with tokenizer.json, and the class that makes one where it is missing.

    ``config`` and ``model`` are tokenizer_config.json and config.json.  Names have no "Fast" at the end.  None for the
    class without rules of its own.
    """
    named = config.get("tokenizer_class") or model.get("tokenizer_class")
    declared = named.removesuffix("Fast") if isinstance(named, str) else None
    declared = _ALIASES.get(declared, declared) if declared else None
    if declared in _WITHOUT_RULES:
        return None, None
    model_type = model.get("model_type")
    registered = _MODEL_CLASSES.get(model_type) if isinstance(model_type, str) else None
    if declared is None or (registered and model_type in _WRONG_IN_FILES):
        return registered or None, registered or None
    return None if registered == "" else declared, declared


def default_roles(name: str | None) -> Mapping[str, str]:
    """Return the special tokens that a class has if no file names others, by role."""
    return _DEFAULTS.get(name or "", {})
