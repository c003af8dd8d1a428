"""Folders with small tokenizers in the shapes that people have: one vocabulary file, and the files beside it."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from penstock.checkpoint.gguf.split_patterns import find_pre_tokenizer
from tests.support.charsmap import charsmap
from tests.support.tokenizer_kinds import LLAMA3, QWEN2, SAMPLES, corpus

__all__ = ["SHAPES", "TEXTS", "byte_ranks", "piece_model", "tekken_file", "tiktoken_file"]

TEXTS = (
    *SAMPLES[:4],
    "a <new> b<tool>c",
    " <x>  <y> leading <img> and <pad> trailing ",
    "<s>hi</s> <bos>hi<eos> [CLS] a [SEP] [MASK] <mask> <extra_id_0> <unk>",
    "<|endoftext|>def f(x):<|im_start|>user\n<|im_end|>",
    "",
)
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
Folder = Callable[[Path], None]


def _json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False))


def token(text: str, **flags: bool) -> dict[str, Any]:
    return {"content": text, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False} | flags


@cache
def _byte_level() -> dict[str, Any]:
    """A byte pair encoding of bytes whose last tokens are special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, show_progress=False, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(corpus(), trainer)
    values: dict[str, Any] = json.loads(tokenizer.to_str())
    return values


def _vocab(*specials: str) -> dict[str, int]:
    vocab = _byte_level()["model"]["vocab"]
    return vocab | {text: len(vocab) + i for i, text in enumerate(specials)}


def _bytes_json(
    specials: tuple[str, ...], pattern: str | None = None, bos: str | None = None, **changes: object
) -> dict[str, Any]:
    """A tokenizer.json of bytes; the special tokens are added ones behind the vocabulary."""
    values: dict[str, Any] = json.loads(json.dumps(_byte_level()))
    vocab = values["model"]["vocab"]
    tokenizer = Tokenizer.from_str(json.dumps(values | changes))
    if pattern is not None:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")  # type: ignore[arg-type]
        last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, last])  # type: ignore[assignment]
    tokenizer.add_special_tokens(list(specials))
    if bos is not None:
        around = [(bos, len(vocab) + specials.index(bos))]
        tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B:1", special_tokens=around
        )
    return dict(json.loads(tokenizer.to_str()))


LLAMA3_SPECIALS = ("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>")


def _llama3(files: Mapping[str, object] | None = None, **config: object) -> Folder:
    """Llama 3: tokenizer.json, and tokenizer_config.json with ``config``; ``files`` are further ones."""

    def write(folder: Path) -> None:
        _json(folder / "config.json", {"model_type": "llama"})
        _json(folder / "tokenizer.json", _bytes_json(LLAMA3_SPECIALS, LLAMA3, "<|begin_of_text|>"))
        if config:
            _json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **config})
        for name, value in (files or {}).items():
            _json(folder / name, value)

    return write


def _decoder(begin: int, *tokens: dict[str, Any]) -> dict[str, Any]:
    return {str(begin + i): value for i, value in enumerate(tokens)}


def _base() -> int:
    return len(_byte_level()["model"]["vocab"])


def _merges(
    model_type: str, specials: tuple[str, ...], files: Mapping[str, object] | None = None, **config: object
) -> Folder:
    """vocab.json and merges.txt; the vocabulary ends in the special tokens."""

    def write(folder: Path) -> None:
        _json(folder / "config.json", {"model_type": model_type})
        _json(folder / "vocab.json", _vocab(*specials))
        lines = [" ".join(pair) for pair in _byte_level()["model"]["merges"]]
        (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *lines]) + "\n")
        if config:
            _json(folder / "tokenizer_config.json", config)
        for name, value in (files or {}).items():
            _json(folder / name, value)

    return write


def _byte_json(
    model_type: str, specials: tuple[str, ...], changes: Mapping[str, object] | None = None, **config: object
) -> Folder:
    """A tokenizer.json of bytes with a class that has rules of its own."""

    def write(folder: Path) -> None:
        _json(folder / "config.json", {"model_type": model_type})
        pattern = QWEN2 if model_type == "qwen2" else None
        _json(folder / "tokenizer.json", _bytes_json(specials, pattern, **(changes or {})))
        _json(folder / "tokenizer_config.json", config)

    return write


@cache
def byte_ranks() -> dict[bytes, int]:
    """The tokens of a byte pair encoding of bytes, by rank."""
    letters = {char: byte for byte, char in bytes_to_unicode().items()}
    vocab = _byte_level()["model"]["vocab"]
    return {
        bytes(map(letters.__getitem__, text)): rank for text, rank in sorted(vocab.items(), key=lambda pair: pair[1])
    }


def tiktoken_file() -> bytes:
    return b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for token, rank in byte_ranks().items())


def _tiktoken(file: str, missing: tuple[bytes, ...] = (), **config: object) -> Folder:
    """A vocabulary file of tiktoken, without the ranks ``missing``."""

    def write(folder: Path) -> None:
        _json(folder / "config.json", {"model_type": "llama"})
        lines = tiktoken_file().splitlines(keepends=True)
        (folder / file).write_bytes(b"".join(line for line in lines if line.split()[1] not in missing))
        _json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **config})

    return write


def tekken_file(**changes: object) -> dict[str, Any]:
    """Mistral's tekken.json; ``changes``: of its config."""
    specials = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "<pad>")
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for token, rank in byte_ranks().items()
    ]
    padding = {"rank": len(vocab), "token_bytes": base64.b64encode(b"never read").decode(), "token_str": None}
    sizes = {"default_vocab_size": len(vocab) + 9, "default_num_special_tokens": 9, "num_vocab_tokens": len(vocab) + 1}
    tokens = [{"rank": i, "token_str": text, "is_control": True} for i, text in enumerate(specials)]
    config = {"pattern": find_pre_tokenizer("tekken", "").patterns[0], "version": "v7"} | sizes | changes
    return {"config": config, "vocab": [*vocab, padding], "special_tokens": tokens[::-1]}


ROBERTA = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
BERT = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


@cache
def _words() -> tuple[str, ...]:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))  # noqa: S106
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)  # type: ignore[assignment]
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()  # type: ignore[assignment]
    trainer = trainers.WordPieceTrainer(
        vocab_size=400, show_progress=False, special_tokens=list(BERT), continuing_subword_prefix="##"
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    vocab = tokenizer.get_vocab()
    return tuple(sorted(vocab, key=vocab.__getitem__))


def _bert(files: Mapping[str, object] | None = None, **config: object) -> Folder:
    def write(folder: Path) -> None:
        _json(folder / "config.json", {"model_type": "bert"})
        (folder / "vocab.txt").write_text("\n".join(_words()) + "\n")
        if config:
            _json(folder / "tokenizer_config.json", config)
        for name, value in (files or {}).items():
            _json(folder / name, value)

    return write


def _bert_json(**config: object) -> Folder:
    def write(folder: Path) -> None:
        _bert(**config)(folder)
        (folder / "vocab.txt").unlink()
        vocab = {text: i for i, text in enumerate(_words())}
        tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))  # noqa: S106
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)  # type: ignore[assignment]
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()  # type: ignore[assignment]
        tokenizer.decoder = decoders.WordPiece()  # type: ignore[assignment]
        tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
        tokenizer.add_special_tokens(list(BERT))
        tokenizer.save(str(folder / "tokenizer.json"))

    return write


def _field(number: int, value: bytes | int | float) -> bytes:
    """A field of a protobuf message."""
    if isinstance(value, float):
        return bytes([number << 3 | 5]) + struct.pack("<f", value)
    rest = value if isinstance(value, int) else len(value)
    key, out = number << 3 | (0 if isinstance(value, int) else 2), bytearray()
    for part in (key, rest):
        while part >= 0x80:
            out.append(part & 0x7F | 0x80)
            part >>= 7
        out.append(part)
    return bytes(out) + (value if isinstance(value, bytes) else b"")


def piece_model(pieces: list[tuple[str, float, int]], model_type: int, unknown: int, **options: bytes | int) -> bytes:
    """A SentencePiece model: texts, scores and kinds; ``options``: of its normalizer, ``charsmap`` and ``prefix``."""
    data = b"".join(
        _field(1, _field(1, text.encode()) + _field(2, score) + _field(3, kind)) for text, score, kind in pieces
    )
    trainer = _field(3, model_type) + _field(40, unknown) + _field(35, int(any(kind == BYTE for *_, kind in pieces)))
    map_bytes = options.get("charsmap", b"")
    normalizer = _field(2, map_bytes) if map_bytes else b""
    normalizer += _field(3, options.get("prefix", 1)) + _field(4, options.get("removes_spaces", 0)) + _field(5, 1)
    return data + _field(2, trainer) + _field(3, normalizer)


@cache
def _unigram_pieces() -> tuple[tuple[str, float, int], ...]:
    words = ["\u2581" + word for sample in SAMPLES for word in sample.split()]
    parts = {word[i:j] for word in words for i in range(len(word)) for j in range(i + 1, min(i + 5, len(word) + 1))}
    return tuple((part, -float(12 - 2 * len(part)) - i / 4096, NORMAL) for i, part in enumerate(sorted(parts)))


def _pieces(
    file: str,
    model_type: str,
    first: list[tuple[str, float, int]],
    files: Mapping[str, object] | None = None,
    **config: object,
) -> Folder:
    """A SentencePiece model of Unigram; ``first`` are its first pieces."""

    def write(folder: Path) -> None:
        _json(folder / "config.json", {"model_type": model_type})
        unknown = next(i for i, (_, _, kind) in enumerate(first) if kind == UNKNOWN)
        model = piece_model(
            [*first, *_unigram_pieces()], 1, unknown, charsmap=charsmap({"\ufb01": "fi", "\u00a0": " ", "\uff21": "A"})
        )
        (folder / file).write_bytes(model)
        if config:
            _json(folder / "tokenizer_config.json", config)
        for name, value in (files or {}).items():
            _json(folder / name, value)

    return write


T5 = [("<pad>", 0.0, CONTROL), ("</s>", 0.0, CONTROL), ("<unk>", 0.0, UNKNOWN)]
XLM = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]

DEBERTA = [(text, 0.0, CONTROL) for text in ("[PAD]", "[CLS]", "[SEP]")] + [("[UNK]", 0.0, UNKNOWN)]


@cache
def _bpe_pieces() -> tuple[list[str], list[tuple[str, str]]]:
    """The pieces of a byte pair encoding of characters, in the order of their merges, and the merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(vocab_size=400, show_progress=False, limit_alphabet=100)
    tokenizer.train_from_iterator(corpus(), trainer)
    values = json.loads(tokenizer.to_str())["model"]
    merged = ["".join(pair) for pair in values["merges"]]
    letters = [text for text in values["vocab"] if len(text) == 1]
    return [*merged, *letters], values["merges"]


def _bpe_model(first: list[tuple[str, float, int]], prefix: int) -> bytes:
    pieces = [*first, *((f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256))]
    pieces += [(text, -float(i), NORMAL) for i, text in enumerate(dict.fromkeys(_bpe_pieces()[0]))]
    unknown = next(i for i, (_, _, kind) in enumerate(first) if kind == UNKNOWN)
    return piece_model(pieces, 2, unknown, prefix=prefix)


LLAMA = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]
GEMMA = [
    ("<pad>", 0.0, CONTROL), ("<eos>", 0.0, CONTROL), ("<bos>", 0.0, CONTROL), ("<unk>", 0.0, UNKNOWN),
    ("<mask>", 0.0, USER_DEFINED), ("<start_of_turn>", 0.0, CONTROL),
]  # fmt: skip


def _spm(
    model_type: str,
    first: list[tuple[str, float, int]],
    prefix: int,
    files: Mapping[str, object] | None = None,
    **config: object,
) -> Folder:
    """tokenizer.model: byte pair encoding of characters."""

    def write(folder: Path) -> None:
        _json(folder / "config.json", {"model_type": model_type})
        (folder / "tokenizer.model").write_bytes(_bpe_model(first, prefix))
        _json(folder / "tokenizer_config.json", config)
        for name, value in (files or {}).items():
            _json(folder / name, value)

    return write


def _llama_json(model_type: str, prefix: str, **config: object) -> Folder:
    """A tokenizer.json of SentencePiece's form; ``prefix``: the rule of Metaspace, "prepend", or "" for Gemma's."""

    def write(folder: Path) -> None:
        _json(folder / "config.json", {"model_type": model_type})
        first = LLAMA if prefix else GEMMA
        texts = [text for text, *_ in first] + [f"<0x{byte:02X}>" for byte in range(256)]
        vocab = {text: i for i, text in enumerate(dict.fromkeys([*texts, *_bpe_pieces()[0]]))}
        merges = [(left, right) for left, right in _bpe_pieces()[1]]
        model = models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)  # noqa: S106
        tokenizer = Tokenizer(model)
        steps: list[Any] = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
        bos = "<s>" if prefix else "<bos>"
        if prefix == "prepend":
            steps += [decoders.Strip(" ", 1, 0)]
            older = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
            tokenizer.normalizer = normalizers.Sequence(older)  # type: ignore[assignment]
        elif prefix:
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prefix, split=False)  # type: ignore[assignment]
            steps += [decoders.Strip(" ", 1, 0)]
        else:
            tokenizer.normalizer = normalizers.Replace(" ", "\u2581")  # type: ignore[assignment]
            tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")  # type: ignore[assignment]
        tokenizer.decoder = decoders.Sequence(steps)  # type: ignore[assignment]
        tokenizer.add_special_tokens([text for text, *_ in first])
        tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B:1", special_tokens=[(bos, vocab[bos])]
        )
        tokenizer.save(str(folder / "tokenizer.json"))
        _json(folder / "tokenizer_config.json", config)

    return write


_END = "<|endoftext|>"
_NEW = {"<new>": 403, "<tool>": 404}
_CHATML = (token(_END, special=True), token("<|im_start|>", special=True), token("<|im_end|>", special=True))

SHAPES: dict[str, Folder] = {
    "Llama 3": _llama3(bos_token="<|begin_of_text|>", eos_token="<|eot_id|>"),  # noqa: S106
    "Llama 3 without tokenizer_config.json": _llama3(),
    "Llama 3, added_tokens.json": _llama3({"added_tokens.json": _NEW}, eos_token="<|eot_id|>"),  # noqa: S106
    "Llama 3, added_tokens.json with a gap": _llama3({"added_tokens.json": {"<new>": 500, "<tool>": 450}}),
    "Llama 3, added_tokens_decoder": _llama3(
        added_tokens_decoder=_decoder(_base(), *(token(text, special=True) for text in LLAMA3_SPECIALS))
        | _decoder(_base() + 3, token("<new>", lstrip=True, rstrip=True), token("<tool>", normalized=True)),
    ),
    "Llama 3, added_tokens_decoder with other flags": _llama3(
        added_tokens_decoder=_decoder(_base(), token("<|begin_of_text|>", rstrip=True, special=True)),
    ),
    "Llama 3, special_tokens_map.json": _llama3(
        {"special_tokens_map.json": {"bos_token": "<|begin_of_text|>", "eos_token": token("<|eot_id|>")}},
        model_max_length=-1,
    ),
    "Llama 3, special_tokens_map.json with lists": _llama3(
        {"special_tokens_map.json": {"additional_special_tokens": ["<x>", "<y>"], "pad_token": "<pad>"}}
    ),
    "Llama 3, special_tokens_map.json beside added_tokens_decoder": _llama3(
        {"special_tokens_map.json": {"bos_token": "<x>"}, "added_tokens.json": {"<y>": 403}},
        added_tokens_decoder=_decoder(_base(), token("<|begin_of_text|>", special=True)),
        eos_token="<|eot_id|>",  # noqa: S106
    ),
    "Llama 3, both older files": _llama3(
        {
            "special_tokens_map.json": {
                "bos_token": "<|begin_of_text|>", "extra_special_tokens": [token("<tool>", lstrip=True)]
            },
            "added_tokens.json": _NEW,
        }
    ),
    "Llama 3, named tokens": _llama3(
        image_token="<img>",  # noqa: S106
        pad_token="<pad>",  # noqa: S106
        extra_special_tokens={"audio_token": "<x>", "boi": "<y>"},
    ),
    "Llama 3, additional_special_tokens": _llama3(additional_special_tokens=["<x>", "<tool>"], unk_token=None),
    "Llama 3, class of Llama": _llama3(tokenizer_class="LlamaTokenizerFast", add_bos_token=False, bos_token="<s>"),  # noqa: S106
    "tiktoken": _tiktoken("tiktoken.model"),
    "tiktoken with special tokens": _tiktoken(
        "tiktoken.model", bos_token="<|im_start|>", eos_token="<|im_end|>", add_bos_token=True,  # noqa: S106
        added_tokens_decoder=_decoder(_base(), token(_END, special=True))
        | _decoder(_base() + 3, token("<new>", special=True), token("<tool>", special=True, rstrip=True)),
    ),
    "tiktoken with further tokens": _tiktoken("tiktoken.model", extra_special_tokens=["<x>", _END], pad_token="<p>"),  # noqa: S106
    "tiktoken with a gap": _tiktoken("tiktoken.model", (b"300", b"301"), eos_token="</s>"),  # noqa: S106
    "tiktoken with a token in a gap": _tiktoken(
        "tiktoken.model", (b"300", b"301"), eos_token="<new>",  # noqa: S106
        added_tokens_decoder=_decoder(300, token("<new>", special=True)),
    ),
    "Qwen2": _byte_json(
        "qwen2", (_END, "<|im_start|>", "<|im_end|>"), {"normalizer": {"type": "NFC"}},
        tokenizer_class="Qwen2Tokenizer", eos_token="<|im_end|>", pad_token=_END,  # noqa: S106
        added_tokens_decoder=_decoder(_base(), *_CHATML), bos_token=None,
    ),
    "Qwen2, vocab.json": _merges(
        "qwen2", (), tokenizer_class="Qwen2Tokenizer", eos_token="<|im_end|>", pad_token=_END,  # noqa: S106
        added_tokens_decoder=_decoder(_base(), *_CHATML), additional_special_tokens=["<|im_start|>", "<|im_end|>"],
    ),
    "Qwen3, vocab.json without a class": _merges("qwen3", (_END,), eos_token=_END),
    "GPT-2, vocab.json": _merges("gpt2", (_END,), tokenizer_class="GPT2Tokenizer"),
    "CodeGen, vocab.json": _merges("phi", (_END,), tokenizer_class="CodeGenTokenizer"),
    "GPT-2, vocab.json only": _merges("gpt2", (_END,)),
    "GPT-2, vocab.json, add_prefix_space": _merges("gpt2", (_END,), add_prefix_space=True, add_bos_token=True),
    "GPT-2, tokenizer.json, add_prefix_space": _byte_json(
        "gpt2", (_END,), tokenizer_class="GPT2TokenizerFast", add_prefix_space=True
    ),
    "Phi-2": _merges(
        "phi", (_END,),
        {"added_tokens.json": {"\t\t": 401, "<new>": 402}, "special_tokens_map.json": {"bos_token": _END}},
        tokenizer_class="GPT2Tokenizer",
    ),
    "GPT-NeoX": _byte_json("gpt_neox", (_END, "<|padding|>"), {"normalizer": {"type": "NFC"}}, eos_token=_END),
    "GPT-NeoX, vocab.json": _merges("gpt_neox", (_END,), {"added_tokens.json": {"<new>": 401}}),
    "RoBERTa, vocab.json": _merges("roberta", ROBERTA, tokenizer_class="RobertaTokenizer"),
    "RoBERTa, tokenizer.json, add_prefix_space": _byte_json(
        "roberta", ROBERTA, {"post_processor": {
            "type": "RobertaProcessing", "sep": ["</s>", 402], "cls": ["<s>", 400], "trim_offsets": True,
            "add_prefix_space": True,
        }}, add_prefix_space=True, mask_token={"__type": "AddedToken"} | token("<mask>", lstrip=True),
    ),
    "BERT, vocab.txt": _bert(do_lower_case=False),
    "BERT, vocab.txt only": _bert(),
    "BERT, vocab.txt, older files": _bert(
        {"special_tokens_map.json": dict(zip(("cls_token", "sep_token"), BERT[2:4], strict=True)),
         "added_tokens.json": {"<new>": len(_words())}}, tokenizer_class="BertTokenizer", strip_accents=False,
    ),
    "BERT, tokenizer.json": _bert_json(do_lower_case=False, tokenizer_class="BertTokenizer"),
    "T5": _pieces("spiece.model", "t5", T5),
    "T5 with its older files": _pieces(
        "spiece.model", "t5", T5, {"special_tokens_map.json": {"eos_token": "</s>", "pad_token": "<pad>"}},
        additional_special_tokens=[f"<extra_id_{i}>" for i in range(100)], extra_ids=100, tokenizer_class="T5Tokenizer",
    ),
    "XLM-RoBERTa": _pieces("sentencepiece.bpe.model", "xlm-roberta", XLM, tokenizer_class="XLMRobertaTokenizer"),
    "XLM-RoBERTa without a class": _pieces("sentencepiece.bpe.model", "xlm-roberta", XLM),
    "CamemBERT": _pieces("sentencepiece.bpe.model", "camembert", XLM, tokenizer_class="CamembertTokenizer"),
    "DeBERTa": _pieces("spm.model", "deberta-v2", DEBERTA, do_lower_case=False, vocab_type="spm"),
    "DeBERTa, lower case": _pieces(
        "spm.model", "deberta-v2", DEBERTA, do_lower_case=True, split_by_punct=True,
        tokenizer_class="DebertaV2Tokenizer",
    ),
    "Llama 2": _spm("llama", LLAMA, 1, tokenizer_class="LlamaTokenizer", legacy=False, add_bos_token=True),
    "Llama 2 with added tokens": _spm(
        "llama", LLAMA, 1, {"added_tokens.json": {"<new>": 10_000}, "special_tokens_map.json": {"pad_token": "<pad>"}},
        tokenizer_class="LlamaTokenizer", legacy=False, add_bos_token=True, add_eos_token=True,
    ),
    "Llama 2, tokenizer.json": _llama_json("llama", "first", tokenizer_class="LlamaTokenizer", legacy=False),
    "Llama 2, tokenizer.json, add_prefix_space": _llama_json(
        "llama", "first", tokenizer_class="LlamaTokenizer", legacy=False, add_prefix_space=False
    ),
    "Llama 2, tokenizer.json of the older form": _llama_json("llama", "prepend", tokenizer_class="LlamaTokenizerFast"),
    "Llama 2, tokenizer.json of the older form, legacy": _llama_json(
        "llama", "prepend", tokenizer_class="LlamaTokenizer", legacy=True
    ),
    "Llama 2 without options": _spm("llama", LLAMA, 1, tokenizer_class="LlamaTokenizer"),
    "Code Llama": _spm("llama", LLAMA, 1, tokenizer_class="CodeLlamaTokenizer"),
    "Llama 2, legacy": _spm("llama", LLAMA, 1, tokenizer_class="LlamaTokenizer", legacy=True, add_bos_token=True),
    "Mistral, tokenizer.json of the older form": _llama_json("mistral", "prepend", tokenizer_class="LlamaTokenizer"),
    "Mistral with added tokens, legacy": _spm(
        "mistral", LLAMA, 1, {"added_tokens.json": {"<|im_start|>": 10_000, "<|im_end|>": 10_001}},
        tokenizer_class="LlamaTokenizer", legacy=True, eos_token="<|im_end|>",  # noqa: S106
    ),
    "Mistral": _spm("mistral", LLAMA, 1, tokenizer_class="LlamaTokenizer", add_bos_token=True),
    "Mistral, tokenizer.json": _llama_json("mistral", "always", tokenizer_class="LlamaTokenizer", bos_token="<s>"),  # noqa: S106
    "Gemma": _spm("gemma", GEMMA, 0, tokenizer_class="GemmaTokenizer", add_bos_token=True),
    "Gemma, tokenizer.json": _llama_json("gemma2", "", tokenizer_class="GemmaTokenizerFast"),
}  # fmt: skip
