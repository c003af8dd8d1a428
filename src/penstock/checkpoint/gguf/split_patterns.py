"""The pre-tokenizers that ``tokenizer.ggml.pre`` names: the file has only the name, not the pattern.

The patterns are those of the published ``tokenizer.json`` of the models after which the pre-tokenizers are named.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from penstock.config import show
from penstock.errors import UnsupportedError

__all__ = ["PreTokenizer", "find_pre_tokenizer", "pre_tokenizer_name"]

_CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL: Final = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS: Final = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _TAIL
_MARKED_WORDS: Final = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _TAIL
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_WORDS: Final = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s|"
    rf"\p{{N}}%s| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"
)
_DEEPSEEK_3: Final = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"""
    r" ?[\p{P}\p{S}]+[\r\n]*|" + _TAIL,
)
_DEEPSEEK_LETTERS: Final = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫ"
    "ᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-"
    "ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-"
    "𞥃"
)
_GPT_2_WORDS: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_HAN_AND_HANGUL: Final = "[一-龥ࠀ-一가-퟿]+"


@dataclass(frozen=True)
class PreTokenizer:
    """``patterns`` split a text one after another; with ``has_gpt2_split``, GPT-2's pattern is the last.

    ``is_nfc``: texts are normalized first.  ``ignores_merges``: a word that is a token is not split.  ``adds_bos``: the
    default of ``tokenizer.ggml.add_bos_token``.
    """

    patterns: tuple[str, ...] = ()
    has_gpt2_split: bool = False
    is_nfc: bool = False
    ignores_merges: bool = False
    adds_bos: bool = False

    def components(self) -> dict[str, Any]:
        """Return the ``pre_tokenizer`` of a tokenizer.json."""
        steps: list[dict[str, Any]] = [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
            for pattern in self.patterns
        ]
        last = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": self.has_gpt2_split}
        return last if not steps else {"type": "Sequence", "pretokenizers": [*steps, last]}


_GPT_2: Final = PreTokenizer(has_gpt2_split=True)
_SINGLE_DIGITS: Final = PreTokenizer((r"\p{N}",), has_gpt2_split=True)
_LLAMA_3: Final = PreTokenizer((_WORDS % "{1,3}",), ignores_merges=True, adds_bos=True)
_GLM_4: Final = PreTokenizer(_LLAMA_3.patterns, ignores_merges=True)
_QWEN_2: Final = PreTokenizer((_WORDS % "",), is_nfc=True)
_GPT_4O: Final = PreTokenizer((_CASED_WORDS % (_CONTRACTIONS + "?", _CONTRACTIONS + "?", "{1,3}"),))

_FALCON: Final = PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT_2_WORDS, "[0-9][0-9][0-9]"))
_BLOOM: Final = PreTokenizer((r" ?[^(\s|.,!?…。，、।۔،)]+",))
_SEED: Final = PreTokenizer((
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|" + _TAIL,
))  # fmt: skip
_DEEPSEEK_LLM: Final = PreTokenizer((
    r"[\r\n]", rf"\s?[{_DEEPSEEK_LETTERS}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", _HAN_AND_HANGUL,
    r"\p{N}+",
))  # fmt: skip
_DEEPSEEK_CODER: Final = PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_AND_HANGUL, r"\p{N}"))

_KIMI_UPPER, _KIMI_LOWER = (rf"[{letters[1:-1]}&&[^\p{{Han}}]]" for letters in (_UPPER, _LOWER))
_KIMI_K2: Final = PreTokenizer((
    rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?{_KIMI_UPPER}*{_KIMI_LOWER}+{_CONTRACTIONS}?|"
    rf"[^\r\n\p{{L}}\p{{N}}]?{_KIMI_UPPER}+{_KIMI_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|"
    + _TAIL,
))  # fmt: skip
_TINY_AYA: Final = PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", *_GPT_4O.patterns))
_YOUTU: Final = PreTokenizer(
    (
        "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+",
        _CASED_WORDS % (_CONTRACTIONS + "?", _CONTRACTIONS + "?", ""),
    ),
    ignores_merges=True,
)
_BAILING: Final = PreTokenizer((
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
))  # fmt: skip

_PRE_TOKENIZERS: Final = {
    "gpt-2": _GPT_2,
    "jina-es": _GPT_2,
    "jina-de": _GPT_2,
    "jina-v2-es": _GPT_2,
    "jina-v2-de": _GPT_2,
    "jais": _GPT_2,
    "phi-2": _GPT_2,
    "olmo": _GPT_2,
    "exaone4": _GPT_2,
    "mpt": _GPT_2,
    "gigachat": _GPT_2,
    "a.x-4.0": _GPT_2,
    "mellum": _GPT_2,
    "trillion": _GPT_2,
    "granite-docling": _GPT_2,
    "modern-bert": _GPT_2,
    "roberta-bpe": _GPT_2,
    "starcoder": _SINGLE_DIGITS,
    "refact": _SINGLE_DIGITS,
    "command-r": _SINGLE_DIGITS,
    "smollm": _SINGLE_DIGITS,
    "exaone": _SINGLE_DIGITS,
    "codeshell": _SINGLE_DIGITS,
    "minerva-7b": _SINGLE_DIGITS,
    "mellum2": _SINGLE_DIGITS,
    "llama3": _LLAMA_3,
    "llama-v3": _LLAMA_3,
    "llama-bpe": _LLAMA_3,
    "falcon3": _LLAMA_3,
    "falcon-h1": _LLAMA_3,
    "lfm2": _LLAMA_3,
    "pixtral": _LLAMA_3,
    "midm-2.0": _LLAMA_3,
    "jina-v5-nano": _LLAMA_3,
    "dbrx": PreTokenizer(_LLAMA_3.patterns),
    "smaug-bpe": PreTokenizer(_LLAMA_3.patterns),
    "chatglm-bpe": PreTokenizer(_LLAMA_3.patterns),
    "glm4": _GLM_4,
    "glm5": _GLM_4,
    "qwen2": _QWEN_2,
    "deepseek-r1-qwen": _QWEN_2,
    "megrez": _QWEN_2,
    "kormo": _QWEN_2,
    "f2llmv2": _QWEN_2,
    "hunyuan": PreTokenizer(_QWEN_2.patterns),
    "stablelm2": PreTokenizer(_QWEN_2.patterns),
    "solar-open": PreTokenizer(_QWEN_2.patterns),
    "grok-2": PreTokenizer(_QWEN_2.patterns),
    "qwen35": PreTokenizer((_MARKED_WORDS,), is_nfc=True),
    "tekken": PreTokenizer((_CASED_WORDS % ("", "", ""),), ignores_merges=True, adds_bos=True),
    "gpt-4o": _GPT_4O,
    "llama4": _GPT_4O,
    "kanana2": _GPT_4O,
    "talkie": _GPT_4O,
    "minimax-m2": _GPT_4O,
    "deepseek-v3": PreTokenizer(_DEEPSEEK_3),
    "hunyuan-dense": PreTokenizer(_DEEPSEEK_3),
    "joyai-llm": PreTokenizer(_DEEPSEEK_3),
    "deepseek-llm": _DEEPSEEK_LLM,
    "deepseek-coder": _DEEPSEEK_CODER,
    "falcon": _FALCON,
    "bloom": _BLOOM,
    "poro-chat": _BLOOM,
    "gpt3-finnish": _BLOOM,
    "seed-coder": _SEED,
    "kimi-k2": _KIMI_K2,
    "tiny_aya": _TINY_AYA,
    "cohere2moe": _TINY_AYA,
    "superbpe": PreTokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    "youtu": _YOUTU,
    "bailingmoe": _BAILING,
    "bailingmoe2": _BAILING,
    "llada-moe": _BAILING,
    "viking": PreTokenizer((*_BLOOM.patterns, r"\p{N}")),
    "granite-embed-multi-97m": PreTokenizer(_GPT_4O.patterns, ignores_merges=True),
}


def find_pre_tokenizer(name: str, file: str) -> PreTokenizer:
    """Return the pre-tokenizer with this name; UnsupportedError lists the names that Penstock knows."""
    if name not in _PRE_TOKENIZERS:
        raise UnsupportedError(
            f"{file}: tokenizer.ggml.pre: expected one of {', '.join(_PRE_TOKENIZERS)}, got {show(name)}",
            param="tokenizer.ggml.pre",
        )
    return _PRE_TOKENIZERS[name]


def pre_tokenizer_name(tokenizer: Mapping[str, Any], file: str) -> str:
    """Return the name of the pre-tokenizer that a tokenizer.json has; UnsupportedError for one without a name."""
    own = _patterns(tokenizer.get("pre_tokenizer"))
    is_nfc = (tokenizer.get("normalizer") or {}).get("type") == "NFC"
    ignores_merges = bool((tokenizer.get("model") or {}).get("ignore_merges", False))
    for name, pre in _PRE_TOKENIZERS.items():
        same_rules = (pre.is_nfc, pre.ignores_merges) == (is_nfc, ignores_merges)
        if same_rules and own == _patterns(pre.components()):
            return name
    raise UnsupportedError(
        f"{file}: pre_tokenizer: expected that of one of {', '.join(_PRE_TOKENIZERS)}, got another",
        param="pre_tokenizer",
    )


def _patterns(pre_tokenizer: Any) -> tuple[list[str], bool] | None:
    """Return the patterns that split a text, and whether GPT-2's is the last; None for another pre-tokenizer."""
    if not isinstance(pre_tokenizer, Mapping):
        return None
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    last = steps[-1] if steps else {}
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space", True):
        return None
    patterns = []
    for step in steps[:-1]:
        pattern = step.get("pattern") or {}
        is_digits = step.get("type") == "Digits" and step.get("individual_digits")
        if not is_digits and (step.get("type") != "Split" or step.get("behavior") != "Isolated" or step.get("invert")):
            return None
        patterns.append(r"\p{N}" if is_digits else str(pattern.get("Regex")))
    return patterns, bool(last.get("use_regex", True))
