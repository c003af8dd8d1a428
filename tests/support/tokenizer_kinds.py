"""Tiny tokenizers of every kind that the core runs, made with the library, and texts to try them on."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from penstock.graph.tokenizer.compiler import compile_tokenizer
from tests.support.charsmap import REPLACEMENTS, charsmap

ROOT = Path(__file__).parents[2]
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SAMPLES = (
    "The quick brown fox doesn't jump; it'll've gone, they're 3 of 1234567.",
    "def add(a, b):\n    return a + b\n\n\nclass A:\n\tpass\r\n",
    "Größe naïve façade Ångström ﬁne",
    "Привет, мир! Это тест.",
    "日本語のテキスト、漢字かな混じり。中文文本。",
    "नमस्ते दुनिया العربية עברית ไทย한국어 텍스트",
    "🙂👩‍👩‍👧 🇩🇪 emoji ✨",
    "'S 'Ll I'M WE'RE don'T 'ſ ٣٤٥ ½ Ⅷ ²",
)
MORE = (
    "é", "e\u0301", "\u1100\u1161\u11a8", "\u0344", "q\u0323\u0307", "\u212b", "\uf900", "\x00", "\x7f", "\u200d",
    "\ufeff",
)  # fmt: skip
SPACES = (
    " ", "  ", "   ", "\n", "\r\n", "\t", "\u00a0", "\u3000", "\u2028", " \n \n", "\u0085", "\u2581", "\u180e",
    "\u001c",
)  # fmt: skip


def corpus() -> list[str]:
    return [*SAMPLES, *(" ".join(reversed(sample.split())) for sample in SAMPLES)] * 4


def _trained(tokenizer: Tokenizer, vocab_size: int = 700, **options: object) -> Tokenizer:
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, show_progress=False, **options)  # type: ignore[arg-type]
    tokenizer.train_from_iterator(corpus(), trainer)
    return tokenizer


def _byte_level(pre_tokenizer: pre_tokenizers.PreTokenizer, specials: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    return _trained(tokenizer, special_tokens=specials, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())


def _split(pattern: str, behavior: str = "isolated", invert: bool = False) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior, invert=invert),  # type: ignore[arg-type]
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _gpt2() -> Tokenizer:
    tokenizer = _byte_level(pre_tokenizers.ByteLevel(add_prefix_space=True), ["<|endoftext|>"])
    tokenizer.post_processor = processors.RobertaProcessing(("a", 65), ("b", 66))  # type: ignore[assignment]
    tokenizer.add_tokens(
        [
            AddedToken("word", single_word=True),
            AddedToken("<left>", lstrip=True),
            AddedToken("<right>", rstrip=True, normalized=False),
            AddedToken("<right>more", lstrip=True, rstrip=True),
            AddedToken("\n\n", rstrip=True),
            "日本",
            "é",
        ]
    )
    return tokenizer


def _gpt2_sparse() -> Tokenizer:
    """Bytes without a token, which are unknown."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))  # noqa: S106
    tokenizer.pre_tokenizer = _split(GPT2)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    return _trained(tokenizer, 200, special_tokens=["<unk>"], limit_alphabet=60)


def _llama3() -> Tokenizer:
    specials = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|eot_id|><|eot_id|>"]
    tokenizer = _byte_level(_split(LLAMA3, "removed", invert=True), specials)
    tokenizer.model.ignore_merges = True  # type: ignore[attr-defined]
    vocab = tokenizer.get_vocab_size()
    tokenizer.add_tokens(["tool"])
    tokenizer.post_processor = processors.Sequence(  # type: ignore[assignment]
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single="<|begin_of_text|> $A tool", special_tokens=[("<|begin_of_text|>", 0), ("tool", vocab)]
            ),
        ]
    )
    return tokenizer


def _qwen2() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()  # type: ignore[assignment]
    tokenizer.pre_tokenizer = _split(QWEN2)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    _trained(tokenizer, special_tokens=["<|endoftext|>", "<|im_start|>"], initial_alphabet=alphabet)
    tokenizer.add_tokens([AddedToken("e\u0301te", normalized=True), AddedToken("<tool_call>", normalized=False)])
    return tokenizer


def _llama2(metaspace: str = "", **metaspace_options: bool) -> Tokenizer:
    """Characters with bytes as the fallback: by the normalizer, or by the pre-tokenizer."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))  # noqa: S106
    if metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=metaspace, **metaspace_options)  # type: ignore[assignment]
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")  # type: ignore[assignment]
    _trained(
        tokenizer,
        900,
        special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))],
        limit_alphabet=150,
    )
    if not metaspace:
        steps = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        tokenizer.normalizer = normalizers.Sequence(steps)  # type: ignore[assignment]
        tokenizer.pre_tokenizer = None  # type: ignore[assignment]
    tokenizer.decoder = decoders.Sequence(  # type: ignore[assignment]
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    tokenizer.add_tokens([AddedToken("<tag>", normalized=True), AddedToken("word", single_word=True, normalized=False)])
    return tokenizer


def _without_bytes() -> Tokenizer:
    """Characters that are unknown when they have neither a token nor all of their bytes."""
    model = models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=False)  # noqa: S106
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")  # type: ignore[assignment]
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])  # type: ignore[assignment]
    return _trained(tokenizer, 400, special_tokens=["<unk>", "<0xC3>", "<0xA9>", "<0x20>", "<0x00>"], limit_alphabet=60)


def bytes_only(normalizer: normalizers.Normalizer) -> Tokenizer:
    """A tokenizer whose tokens are bytes, behind a normalizer."""
    tokenizer = Tokenizer(models.BPE({f"<0x{byte:02X}>": byte for byte in range(256)}, [], byte_fallback=True))
    tokenizer.normalizer = normalizer  # type: ignore[assignment]
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])  # type: ignore[assignment]
    return tokenizer


def _bert(cleanup: bool = True, **options: bool) -> Tokenizer:
    """WordPiece with BERT's normalizer."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]", max_input_chars_per_word=40))  # noqa: S106
    tokenizer.normalizer = normalizers.BertNormalizer(**options)  # type: ignore[assignment]
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()  # type: ignore[assignment]
    tokenizer.decoder = decoders.WordPiece(cleanup=cleanup)  # type: ignore[assignment]
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(
        vocab_size=600, show_progress=False, special_tokens=specials, continuing_subword_prefix="##"
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    if not cleanup:
        tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))  # type: ignore[assignment]
    tokenizer.add_tokens(
        [AddedToken("Größe naïve"), AddedToken(" .", normalized=False), AddedToken("n't", lstrip=True)]
    )
    return tokenizer


def _whole_words() -> Tokenizer:
    """WordPiece whose vocabulary has no token that goes on in a word."""
    words = sorted({word for text in SAMPLES for word in text.split()})[:40]
    vocab = {token: i for i, token in enumerate(dict.fromkeys(["[UNK]", *"abcde", *words]))}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    return tokenizer


def _bare_word_piece() -> Tokenizer:
    """WordPiece of words between spaces, without a decoder; its prefix is a letter."""
    tokenizer = _bert()
    values = json.loads(tokenizer.to_str())
    vocab = values["model"]["vocab"]
    values["model"] |= {"continuing_subword_prefix": "é", "vocab": {k.replace("##", "é"): i for k, i in vocab.items()}}
    steps = [
        {"type": "StripAccents"},
        {"type": "Lowercase"},
        {"type": "Strip", "strip_left": True, "strip_right": True},
    ]
    values |= {
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFD"}, *steps]},
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "decoder": None,
    }
    return Tokenizer.from_str(json.dumps(values))


def _scored_pieces() -> list[tuple[str, float]]:
    """Parts of the samples' words, most letters among them, with scores of which many are equal."""
    r = random.Random("pieces")
    words = ["\u2581" + word for sample in SAMPLES for word in sample.split()]
    parts = {word[i:j] for word in words for i in range(len(word)) for j in range(i + 1, min(i + 7, len(word) + 1))}
    kept = [part for part in sorted(parts) if r.random() < (0.8 if len(part) == 1 else 0.4)]
    specials = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    return specials + [(part, round(r.uniform(-9, -7) + 0.5 * len(part), 1)) for part in kept]


def _unigram(words: bool = False, **options: bool) -> Tokenizer:
    """Unigram with a character map; the words are cut as XLM-RoBERTa does, or as T5 does."""
    tokenizer = Tokenizer(models.Unigram(_scored_pieces(), unk_id=3, byte_fallback=False))
    steps = [normalizers.Precompiled(charsmap(REPLACEMENTS)), normalizers.Replace(Regex(" {2,}"), " ")]
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Strip(left=False)])  # type: ignore[assignment]
    metaspace = pre_tokenizers.Metaspace(prepend_scheme="always", **options)
    tokenizer.pre_tokenizer = (  # type: ignore[assignment]
        pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), metaspace]) if words else metaspace
    )
    tokenizer.decoder = decoders.Metaspace()  # type: ignore[assignment]
    tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    tokenizer.add_tokens([AddedToken("<mask>", lstrip=True, special=True), AddedToken("word", single_word=True)])
    return tokenizer


def _unigram_of_bytes() -> Tokenizer:
    """Unigram without a pre-tokenizer, with bytes as the fallback, two equal tokens, and letters without one."""
    values = json.loads(_unigram().to_str())
    vocab = [pair for pair in values["model"]["vocab"] if pair[0] not in ("e", "а", "ö")]
    vocab += [[f"<0x{byte:02X}>", -30.0 - byte] for byte in range(256)] + [["the", -1.5], ["the", -2.5]]
    values["model"] |= {"vocab": vocab, "byte_fallback": True}
    values["added_tokens"] = values["added_tokens"][:4]
    steps = [{"type": "Nmt"}, {"type": "Prepend", "prepend": "\u2581"}]
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    back = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
    values |= {
        "normalizer": {"type": "Sequence", "normalizers": [*steps, replace]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}]},
    }
    return Tokenizer.from_str(json.dumps(values))


def _gemma() -> Tokenizer:
    """Characters with bytes as the fallback, spaces marked by the normalizer, a split that finds none."""
    values = json.loads(_llama2().to_str())
    values |= {
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
        "pre_tokenizer": {
            "type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False
        },
    }  # fmt: skip
    values["decoder"]["decoders"].pop()
    return Tokenizer.from_str(json.dumps(values))


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "demo": lambda: Tokenizer.from_file(str(ROOT / "demo" / "model" / "tokenizer.json")),
    "gpt2": _gpt2,
    "gpt2 with unknown bytes": _gpt2_sparse,
    "llama3": _llama3,
    "qwen2": _qwen2,
    "llama2 by its normalizer": _llama2,
    "llama2 by Metaspace first": lambda: _llama2("first", split=False),
    "llama2 by Metaspace always": lambda: _llama2("always", split=True),
    "llama2 by Metaspace never": lambda: _llama2("never", split=False),
    "gemma": _gemma,
    "characters without bytes": _without_bytes,
    "WordPiece": _bert,
    "WordPiece with case": lambda: _bert(lowercase=False, cleanup=False),
    "WordPiece with accents": lambda: _bert(strip_accents=False, handle_chinese_chars=False, clean_text=False),
    "WordPiece without a decoder": _bare_word_piece,
    "WordPiece of whole words": _whole_words,
    "Unigram": _unigram,
    "Unigram of whole texts": lambda: _unigram(split=False),
    "Unigram of words": lambda: _unigram(True),
    "Unigram of bytes": _unigram_of_bytes,
}


def _character(r: random.Random) -> str:
    most = r.choice((0x80, 0x250, 0x3000, 0x10000, 0x30000, 0x110000))
    while True:
        c = r.randrange(most)
        if not 0xD800 <= c < 0xE000:
            return chr(c)


def text_of(r: random.Random, added: list[str]) -> str:
    """A random text: words of many scripts, marks, white space, numbers, contractions and added tokens."""
    words = [word for sample in SAMPLES for word in sample.split(" ")]
    parts = []
    for _ in range(r.choice((1, 2, 3, 5, 8, 20))):
        match r.randrange(12):
            case 0 | 1 | 2:
                parts.append(r.choice(("", " ")) + r.choice(words))
            case 3:
                parts.append(r.choice(SPACES) * r.choice((1, 1, 2, 7)))
            case 4:
                parts.append("".join(_character(r) for _ in range(r.randrange(1, 6))))
            case 5:
                parts.append("".join(chr(r.randrange(0x20, 0x7F)) for _ in range(r.randrange(1, 8))))
            case 6:
                parts.append(
                    r.choice(("'", " '", "\u2019")) + r.choice(("s", "S", "ll", "lL", "Re", "vE", "m", "D", "ſ", "x"))
                )
            case 7:
                parts.append(str(r.randrange(10 ** r.randrange(1, 12))))
            case 8:
                parts.append(r.choice(MORE) + chr(r.randrange(0x300, 0x370)) * r.randrange(3))
            case 9 if added:
                token = r.choice(added)
                parts.append(token if r.random() < 0.8 else token[: r.randrange(len(token) + 1)])
            case 10:
                word = r.choice(words)
                parts.append(word[r.randrange(len(word) + 1) :] * r.choice((1, 2, 30)))
            case _:
                parts.append(r.choice(SPACES) + r.choice(words).upper())
    return "".join(parts)


def segment_of(tokenizer: Tokenizer) -> bytes:
    segment, reason = compile_tokenizer({"tokenizer.json": tokenizer.to_str().encode()})
    assert reason == ""
    return segment


if __name__ == "__main__":  # the seeds of `make fuzz`
    for _i, (_kind, _make) in enumerate(KINDS.items()):
        if _kind != "demo":  # larger than the rest together
            (Path(sys.argv[1]) / f"{_i}.bin").write_bytes(segment_of(_make()))
