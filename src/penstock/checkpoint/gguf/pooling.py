"""The pooling head of a GGUF file of an embedding model or of a reranker, in the forms of llama.cpp's converter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from penstock.checkpoint.gguf.metadata import Metadata
from penstock.checkpoint.gguf.weights import GgufFile, GgufSource, GgufWeights
from penstock.checkpoint.pooling.head import HeadLayer, PoolingHead
from penstock.checkpoint.pooling.stored import read_linear
from penstock.checkpoint.pooling.yes_no import LOGIT_LABEL, YES_NO_INSTRUCTION, YES_NO_PROMPT
from penstock.config import show
from penstock.errors import InvalidFileError, UnsupportedError

__all__ = ["POOLING_KEYS", "RERANK_KEYS", "RERANK_TEMPLATE", "pooling_head", "pooling_values"]

POOLING_KEYS: Final = ("pooling_type",)
RERANK_KEYS: Final = (*POOLING_KEYS, "classifier.output_labels")
RERANK_TEMPLATE: Final = "tokenizer.chat_template.rerank"
_POOLINGS: Final = {1: "mean", 2: "cls", 3: "last"}
_RANK: Final = 4
_RANKERS: Final = ("qwen3", "bert")


def pooling_values(metadata: Metadata, name: str) -> dict[str, Any]:
    """Return what config.json says of the head; UnsupportedError for a kind of pooling that is not read, by key."""
    key = f"{name}.pooling_type"
    kind = metadata.integer(key, 0)
    if kind == _RANK and name in _RANKERS:
        return {"architectures": ["Qwen3ForSequenceClassification"]} if name == "qwen3" else {}
    if kind and kind not in _POOLINGS:
        raise UnsupportedError(
            f"{metadata.file}: {key}: expected 0 (none), 1 (mean), 2 (cls) or 3 (last)"
            f"{', or 4 (rank)' if name in _RANKERS else ''}, got {kind}",
            param=key,
        )
    return {}


def pooling_head(
    metadata: Metadata, name: str, files: Sequence[GgufFile], parts: Sequence[str] = ()
) -> PoolingHead | None:
    """Return the pooling head; None for a file without pooling.

    Vectors of embedding models have length 1, as llama.cpp returns them; the linears ``parts`` that the file has come
    before that.  A reranker of ``qwen3`` has two rows, of the
    answers "yes" and "no"; the score is the sigmoid of the difference of their logits, which is the share of "yes" in
    the softmax of both.  A classifier of ``bert`` is that of RoBERTa: two linears, the first with tanh, over the first
    row; without its first linear, as in files of BERT, its scores cannot be computed.  Raises InvalidFileError and
    UnsupportedError, which name the key or the tensor.
    """
    kind = metadata.integer(f"{name}.pooling_type", 0)
    stored = {tensor for file in files for tensor in file.header.tensors}
    linears = [part for part in parts if f"{part}.weight" in stored]
    if kind != _RANK:
        if linears and not kind:
            raise metadata.error(f"{name}.pooling_type", f"1 (mean), 2 (cls) or 3 (last) beside {linears[0]}.weight")
        layers = tuple(_linear(metadata, files, part, "identity") for part in linears)
        for part, layer in zip(linears, layers, strict=True):
            for end, size in zip(("in", "out"), reversed(layer.weight.shape), strict=True):
                if metadata.integer(key := f"{name}.{part}_feat_{end}", size) != size:
                    raise metadata.error(key, f"{size}, as {part}.weight has")
        return PoolingHead(_POOLINGS[kind], layers, normalize=True) if kind else None
    return _classifier(metadata, name, files) if name == "bert" else _yes_no_head(metadata, name, files)


def _classifier(metadata: Metadata, name: str, files: Sequence[GgufFile]) -> PoolingHead:
    layers = (_linear(metadata, files, "cls", "tanh"), _linear(metadata, files, "cls.output", "identity"))
    num_labels, key = len(layers[1].weight), f"{name}.classifier.output_labels"
    labels = metadata.texts(key) if key in metadata.values else [f"LABEL_{index}" for index in range(num_labels)]
    if len(labels) != num_labels:
        raise metadata.error(key, f"{num_labels} names, one for each row of cls.output.weight")
    function = "sigmoid" if num_labels == 1 else "softmax"
    return PoolingHead("cls", layers, labels=tuple(labels), score_function=function)


def _yes_no_head(metadata: Metadata, name: str, files: Sequence[GgufFile]) -> PoolingHead:
    labels_key = f"{name}.classifier.output_labels"
    labels = metadata.texts(labels_key)
    if labels != ["yes", "no"]:
        raise UnsupportedError(
            f"{metadata.file}: {labels_key}: expected yes, no; got {show(', '.join(labels[:4]))}", param=labels_key
        )
    prompt = YES_NO_PROMPT.replace("{instruction}", YES_NO_INSTRUCTION)
    if metadata.values.get(RERANK_TEMPLATE) != prompt:
        raise UnsupportedError(
            f"{metadata.file}: {RERANK_TEMPLATE}: expected the prompt of Qwen3-Reranker, got "
            f"{'none' if RERANK_TEMPLATE not in metadata.values else 'another'}",
            param=RERANK_TEMPLATE,
        )
    rows = _linear(metadata, files, "cls.output", "identity").weight
    if len(rows) != 2:
        raise InvalidFileError(
            f"{metadata.file}: tensor cls.output.weight: expected 2 rows, got {len(rows)}", param="cls.output.weight"
        )
    layer = HeadLayer(rows[:1] - rows[1:])
    return PoolingHead("last", (layer,), labels=(LOGIT_LABEL,), score_function="sigmoid", pair_format="qwen3")


def _linear(metadata: Metadata, files: Sequence[GgufFile], name: str, activation: str) -> HeadLayer:
    """Return a linear of the head; InvalidFileError if its weight is missing."""
    for file in files:
        if f"{name}.weight" in file.header.tensors:
            parts = [part for part in (f"{name}.weight", f"{name}.bias") if part in file.header.tensors]
            return read_linear(GgufWeights(file, {part: GgufSource(part) for part in parts}), name, activation)
    raise InvalidFileError(f"{metadata.file}: expected a matrix {name}.weight, got none", param=f"{name}.weight")
