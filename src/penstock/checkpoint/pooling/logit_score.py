"""Rerankers that are causal models: the score of a document comes from the logits of one or two tokens.

The module ``LogitScore`` of sentence-transformers 6 names them by id.  Original folders of Qwen3-Reranker say nothing;
there the keys ``is_original_qwen3_reranker`` and ``classifier_from_token`` of config.json declare them, which have the
names and the meaning of vLLM's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from penstock.checkpoint.pooling.head import HeadLayer
from penstock.checkpoint.pooling.stored import Tensors, read_rows
from penstock.checkpoint.side_files import read_small_file
from penstock.config import ConfigReader, parse_object, show
from penstock.errors import InvalidFileError, UnsupportedError

__all__ = ["DECLARED", "check_architecture", "declared_tokens", "message_format", "token_layer"]

DECLARED: Final = "is_original_qwen3_reranker"
"""The key of config.json that is true in an original folder of Qwen3-Reranker, by its user's declaration."""

_TOKENS: Final = "classifier_from_token"
_ARCHITECTURES: Final = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Networks whose logits are the product of the head's weight and the hidden rows, and nothing else."""

_MAX_TOKENIZER_BYTES: Final = 256 << 20
_MAX_TOKENIZER_VALUES: Final = 1 << 23


def check_architecture(config: ConfigReader) -> None:
    """Raise an error unless the network is a causal model whose logits have no scale, cap or bias."""
    names = config.text_list("architectures") or []
    if len(names) != 1 or names[0] not in _ARCHITECTURES:
        expected = f"one of {', '.join(_ARCHITECTURES)} for a reranker by logits"
        raise UnsupportedError(
            f"{config.file}: architectures: expected {expected}, got {show(', '.join(names))}", param="architectures"
        )


def declared_tokens(folder: Path, config: ConfigReader) -> tuple[int, int]:
    """Return the ids of the tokens "yes" and "no", or of those that ``classifier_from_token`` names as [no, yes].

    The vocabulary of tokenizer.json has them.  Raises InvalidFileError for a token that it lacks.
    """
    names = config.text_list(_TOKENS) or ["no", "yes"]
    if len(names) != 2:
        raise config.error(_TOKENS, "two tokens, that of an irrelevant document and that of a relevant one", names)
    data = read_small_file(folder / "tokenizer.json", _MAX_TOKENIZER_BYTES)
    tokenizer = parse_object(
        data, "tokenizer.json", max_bytes=_MAX_TOKENIZER_BYTES, max_values=_MAX_TOKENIZER_VALUES, lenient=True
    )
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None

    def token_of(name: str) -> int:
        token = vocabulary.get(name) if isinstance(vocabulary, dict) else None
        if type(token) is int and token >= 0:
            return token
        raise InvalidFileError(
            f"{_TOKENS}: expected tokens of the vocabulary of tokenizer.json, got {show(name)}", param=_TOKENS
        )

    return token_of(names[1]), token_of(names[0])


def token_layer(config: ConfigReader, stored: Tensors, true_token: int, false_token: int | None) -> HeadLayer:
    """Return the layer that makes the logit of ``true_token``, less that of ``false_token``, of the last hidden row.

    Its weight [1, hidden_size] comes from the output head, or from the embedding that it is tied to, if it is stored.
    """
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    tied = config.bool("tie_word_embeddings", head not in stored.tensors)
    name = embedding if tied and embedding in stored.tensors else head
    tokens = {"true_token_id": true_token} | ({} if false_token is None else {"false_token_id": false_token})
    rows = read_rows(stored, name, tokens)
    return HeadLayer(rows[0] if len(rows) == 1 else rows[0] - rows[1])


def message_format(transformer: ConfigReader) -> tuple[str, bool]:
    """Return the pair format that sentence_bert_config.json names, and its ``add_generation_prompt``.

    Values that change the prompt otherwise are refused by name.
    """
    processing = transformer.object("processing_kwargs") or ConfigReader({}, transformer.file)
    for name, value in processing.values.items():
        if name != "chat_template" and value:
            raise processing.error(name, "nothing but chat_template in processing_kwargs", value)
    template = processing.object("chat_template") or ConfigReader({}, transformer.file)
    for name, value in template.values.items():
        if name not in ("add_generation_prompt", "restore_suffix"):
            raise template.error(name, "add_generation_prompt or restore_suffix in chat_template", value)
    if not template.bool("restore_suffix", True):
        raise template.error("restore_suffix", "true", False)
    generates = template.bool("add_generation_prompt", False)
    modalities = transformer.object("modality_config")
    if modalities is None:
        return "flat_messages", generates
    message = modalities.object("message")
    if message is None:
        return "", False
    return message.one_of("format", ("flat", "structured"), "flat") + "_messages", generates
