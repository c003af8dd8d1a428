"""The pooling head: which hidden rows of a text are taken, and what is done with them.

A bundle stores it as the file ``pooling.bin``: a magic number, the length of a JSON text, that text, and the float32
arrays of its layers in their order (weight [rows, columns], bias, and weight and bias of the norm, if it has them).
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.config import ConfigReader, show
from penstock.errors import InvalidArgumentError, InvalidFileError

__all__ = [
    "ACTIVATIONS", "ALL_ROWS", "ANSWER_TASK", "PAIR_FORMATS", "POOLINGS", "POOLING_FILE", "SCORE_FUNCTIONS",
    "TOKEN_TASK", "HeadLayer", "PoolingHead", "read_pooling_head", "read_prompts",
]  # fmt: skip

POOLING_FILE: Final = "pooling.bin"
POOLINGS: Final = ("mean", "last", "cls", "max")
ALL_ROWS: Final = "all"
"""The pooling that keeps the row of each token."""
TOKEN_TASK, ANSWER_TASK = "token_classification", "question_answering"
_TASKS: Final = ("", TOKEN_TASK, ANSWER_TASK)
PAIR_FORMATS: Final = ("", "qwen3", "flat_messages", "structured_messages")
"""The ways to make one text of a query and a document: "" is the post-processor of tokenizer.json, "qwen3" the format
of Qwen3-Reranker, and the others are the model's chat template over messages of the roles query and document."""
MAX_LAYERS: Final = 8
MAX_WIDTH: Final = 1 << 16
MAX_HEADER_BYTES: Final = 1 << 20

_PREFIX: Final = struct.Struct("<8sI")
_MAGIC: Final = b"PSPOOL1\n"

_Floats = NDArray[np.float64]


def _gelu(x: _Floats) -> _Floats:
    y: _Floats = np.array([0.5 * value * (1 + math.erf(value / math.sqrt(2))) for value in x.tolist()])
    return y


def _sigmoid(x: _Floats) -> _Floats:
    positive = np.exp(-np.abs(x))  # never overflows
    y: _Floats = np.where(x >= 0, 1 / (1 + positive), positive / (1 + positive))
    return y


def _softmax(x: _Floats) -> _Floats:
    powers: _Floats = np.exp(x - x.max())
    y: _Floats = powers / powers.sum()
    return y


def _identity(x: _Floats) -> _Floats:
    return x


def _tanh(x: _Floats) -> _Floats:
    y: _Floats = np.tanh(x)
    return y


def _relu(x: _Floats) -> _Floats:
    y: _Floats = np.maximum(x, 0.0)
    return y


def _silu(x: _Floats) -> _Floats:
    return x * _sigmoid(x)


_Function = Callable[[_Floats], _Floats]
ACTIVATIONS: Final[dict[str, _Function]] = {
    "identity": _identity,
    "tanh": _tanh,
    "gelu": _gelu,
    "relu": _relu,
    "sigmoid": _sigmoid,
    "silu": _silu,
}
"""The functions behind a layer of a pooling head, by name."""

SCORE_FUNCTIONS: Final[dict[str, _Function]] = {"identity": _identity, "sigmoid": _sigmoid, "softmax": _softmax}
"""The functions from the logits of classes to scores, by name."""


@dataclass(frozen=True)
class HeadLayer:
    """A linear with ``weight`` [rows, columns] and an optional ``bias`` [rows], its activation, and a layer norm.

    ``norm`` [rows] is the weight of the norm, or None without one.
    """

    weight: _Floats
    bias: _Floats | None = None
    activation: str = "identity"
    norm: _Floats | None = None
    norm_bias: _Floats | None = None
    norm_eps: float = 1e-5

    def apply(self, x: _Floats) -> _Floats:
        """Return the layer's output [rows] of x [columns]."""
        y: _Floats = self.weight @ x
        if self.bias is not None:
            y = y + self.bias
        y = ACTIVATIONS[self.activation](y)
        if self.norm is not None:
            y = y - y.mean()
            y = y / np.sqrt((y * y).mean() + self.norm_eps) * self.norm
            y = y if self.norm_bias is None else y + self.norm_bias
        return y

    def arrays(self) -> list[_Floats]:
        """Return the arrays that it has, in the order of the file."""
        return [array for array in (self.weight, self.bias, self.norm, self.norm_bias) if array is not None]


@dataclass(frozen=True)
class PoolingHead:
    """The way from hidden rows to a vector, as a model's files say.

    ``pooling``: "mean", "last", "cls" (the first row), "max", or "all", whose result is a matrix with a row for each
    token.  ``layers`` follow it in float64; with ``pools_layers`` they are applied to every row, and the pooling
    follows them.  ``task``: what a head of "all" rows is for, "token_classification" or "question_answering".
     ``normalize``: the vector is scaled to length 1.
    ``labels`` are the names of the classes whose logits the vector has; without them it is an embedding.
    ``score_function`` turns logits into scores.  ``prompts``: texts that are put before others, by name;
    ``default_prompt`` is the name of the one that is put there unless another is chosen, or "".  ``segment_offset`` is
    added to the token ids of the second text of a pair.  ``pair_format`` is one of ``PAIR_FORMATS``;
    ``add_generation_prompt`` goes to the chat template of a format that has one.  A text that becomes a vector is
    lowercased with ``lowercase``, and cut to ``max_text_len`` tokens unless that is 0.
    """

    pooling: str = "mean"
    layers: tuple[HeadLayer, ...] = ()
    normalize: bool = False
    labels: tuple[str, ...] = ()
    score_function: str = "identity"
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str = ""
    segment_offset: int = 0
    pair_format: str = ""
    add_generation_prompt: bool = False
    pools_layers: bool = False
    max_text_len: int = 0
    lowercase: bool = False
    task: str = ""

    def apply(self, pooled: _Floats) -> _Floats:
        """Return the vector, or the logits of the classes, of the pooled row [hidden_size]; not normalised."""
        for layer in self.layers:
            if layer.weight.shape[1] != len(pooled):
                raise InvalidFileError(
                    f"{POOLING_FILE}: expected a layer of {len(pooled)} columns, got {layer.weight.shape[1]}"
                )
            pooled = layer.apply(pooled)
        return pooled

    def scores(self, logits: NDArray[Any]) -> _Floats:
        """Return the scores of classes from their logits [num_labels]."""
        return SCORE_FUNCTIONS[self.score_function](np.asarray(logits, np.float64))

    def prompt(self, name: str | None) -> str:
        """Return the text of a prompt, "" without one; None is the default prompt.

        InvalidArgumentError lists the prompts for an unknown name.
        """
        if name is None:
            return self.prompts[self.default_prompt] if self.default_prompt else ""
        if name not in self.prompts:
            choices = ", ".join(sorted(self.prompts))
            expected = f"expected one of {choices}" if choices else "the model's files have no prompts; expected none"
            raise InvalidArgumentError(f"prompt_name: {expected}, got {name!r:.60}", param="prompt_name")
        return self.prompts[name]

    def to_bytes(self) -> bytes:
        """Return the content of the file ``pooling.bin``."""
        layers = [
            {
                "rows": layer.weight.shape[0],
                "columns": layer.weight.shape[1],
                "activation": layer.activation,
                "has_bias": layer.bias is not None,
                "has_norm": layer.norm is not None,
                "has_norm_bias": layer.norm_bias is not None,
                "norm_eps": layer.norm_eps,
            }
            for layer in self.layers
        ]
        header = {
            "pooling": self.pooling,
            "normalize": self.normalize,
            "labels": list(self.labels),
            "score_function": self.score_function,
            "prompts": dict(self.prompts),
            "default_prompt": self.default_prompt,
            "segment_offset": self.segment_offset,
            "pair_format": self.pair_format,
            "add_generation_prompt": self.add_generation_prompt,
            "pools_layers": self.pools_layers,
            "max_text_len": self.max_text_len,
            "lowercase": self.lowercase,
            **({"task": self.task} if self.task else {}),
            "layers": layers,
        }
        text = json.dumps(header).encode()
        arrays = [array.astype("<f4").tobytes() for layer in self.layers for array in layer.arrays()]
        return b"".join([_PREFIX.pack(_MAGIC, len(text)), text, *arrays])


def read_pooling_head(files: Mapping[str, bytes | memoryview]) -> PoolingHead | None:
    """Return the pooling head among the files beside the weights; None if they have none.

    Raises InvalidFileError for a damaged file, and UnsupportedError for a value that is not known.
    """
    data = files.get(POOLING_FILE)
    if data is None:
        return None
    data = bytes(data)
    if len(data) < _PREFIX.size or data[:8] != _MAGIC:
        raise InvalidFileError(f"{POOLING_FILE}: expected a file that begins with {_MAGIC!r}")
    length = _PREFIX.unpack_from(data)[1]
    end = _PREFIX.size + length
    if length > MAX_HEADER_BYTES or end > len(data):
        raise InvalidFileError(f"{POOLING_FILE}: expected a header of at most {MAX_HEADER_BYTES} bytes, got {length}")
    reader = ConfigReader.parse(data[_PREFIX.size : end], POOLING_FILE)
    layers = reader.values.get("layers", [])
    if not isinstance(layers, list) or len(layers) > MAX_LAYERS:
        raise reader.error("layers", f"a list of at most {MAX_LAYERS} layers", layers)
    arrays = _Arrays(data[end:])
    result = PoolingHead(
        pooling=reader.one_of("pooling", (*POOLINGS, ALL_ROWS)),
        layers=tuple(_read_layer(reader, layer, arrays) for layer in layers),
        normalize=reader.bool("normalize"),
        labels=tuple(reader.text_list("labels") or ()),
        score_function=reader.one_of("score_function", SCORE_FUNCTIONS, "identity"),
        prompts=read_prompts(reader),
        default_prompt=reader.str("default_prompt", ""),
        segment_offset=reader.int("segment_offset", 0, min=0),
        pair_format=reader.one_of("pair_format", PAIR_FORMATS, ""),
        add_generation_prompt=reader.bool("add_generation_prompt", False),
        pools_layers=reader.bool("pools_layers", False),
        max_text_len=reader.int("max_text_len", 0, min=0),
        lowercase=reader.bool("lowercase", False),
        task=reader.one_of("task", _TASKS, ""),
    )
    arrays.check_end()
    if result.default_prompt and result.default_prompt not in result.prompts:
        raise reader.error("default_prompt", "the name of a prompt", result.default_prompt)
    return result


def read_prompts(reader: ConfigReader) -> dict[str, str]:
    """Return the object ``prompts`` of a config, texts by name; errors name the key."""
    section = reader.object("prompts")
    if section is None:
        return {}
    return {name: section.str(name, max_len=1 << 16) for name in section.values}


class _Arrays:
    """The float32 arrays behind the header, one after another."""

    def __init__(self, data: bytes) -> None:
        self._data, self._offset = data, 0

    def take(self, *shape: int) -> _Floats:
        num_bytes = 4 * math.prod(shape)
        if self._offset + num_bytes > len(self._data):
            raise InvalidFileError(f"{POOLING_FILE}: expected {list(shape)} float32 numbers, got the end of the file")
        values = np.frombuffer(self._data, "<f4", math.prod(shape), self._offset).reshape(shape)
        self._offset += num_bytes
        return values.astype(np.float64)

    def check_end(self) -> None:
        if self._offset != len(self._data):
            raise InvalidFileError(
                f"{POOLING_FILE}: expected nothing behind the layers, got {len(self._data) - self._offset} bytes",
                param="layers",
            )


def _read_layer(reader: ConfigReader, values: object, arrays: _Arrays) -> HeadLayer:
    if not isinstance(values, dict):
        raise reader.error("layers", "a list of objects", show(values))
    own = ConfigReader(values, f"{POOLING_FILE}: layers")
    rows, columns = own.int("rows", max=MAX_WIDTH), own.int("columns", max=MAX_WIDTH)
    has_norm = own.bool("has_norm", False)
    return HeadLayer(
        weight=arrays.take(rows, columns),
        bias=arrays.take(rows) if own.bool("has_bias", False) else None,
        activation=own.one_of("activation", ACTIVATIONS, "identity"),
        norm=arrays.take(rows) if has_norm else None,
        norm_bias=arrays.take(rows) if has_norm and own.bool("has_norm_bias", False) else None,
        norm_eps=own.float("norm_eps", 1e-5),
    )
