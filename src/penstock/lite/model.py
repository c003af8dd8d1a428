"""A bundle in plain Python: MindSpore Lite's Model over the native core."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol, Self

from penstock.core import native as core
from penstock.core.forked import check_process, is_forked
from penstock.core.predict import GENERAL_NETWORK
from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.lite.device import Context
from penstock.lite.inputs import check_inputs, check_outputs, checked_dims, input_tensors
from penstock.lite.network import BoundNetwork
from penstock.lite.open_model import ModelType, OpenModel
from penstock.lite.sequences import Sequences
from penstock.lite.settings import ModelConfig
from penstock.lite.tensor import Tensor, array_of
from penstock.lite.update import pack_updates, write_updates
from penstock.validation import nearest, refusal

__all__ = ["Model", "WeightGroup"]


class WeightGroup(Protocol):
    """Models that hold equal weights once (``group.ModelGroup``), as a model sees them."""

    def share_weights(self, model: Model, opened: OpenModel) -> AbstractContextManager[None]:
        """Share the weights of a bundle that ``model`` is about to take; no other model joins during the block."""


class Model:
    """A bundle that continues sequences of tokens and keeps their keys and values.

    The inputs are int32.  ``token_ids`` [B, T]: the next tokens of B sequences.  ``num_tokens`` [B]: the number of
    tokens in each row, 0 for none; the rest of the row is padding.  ``reset`` [B]: 1 starts a new sequence with these
    tokens, 0 appends them to those of earlier calls.

    The output is ``logits`` float32 [B, vocab] of the last token of each row, zeros for a row without tokens; with the
    config ``logits`` "all" it is [B, T, vocab].  A bundle that ends in token ids has the output ``token_ids`` int32
    [B, k] instead, and for topk also their ``logits`` [B, k].  The rows equal those of the engine bit for bit, however
    a sequence is split into calls.  A network whose attention is not causal takes each sequence whole, in one call with
    ``reset`` 1, and cannot continue one.

    A general network (an image classifier, a detector ...) has the inputs and outputs of its file instead, with their
    names and types.  A size that the file leaves open is -1 in ``shape``: ``resize`` sets it, or the data of a tensor.
    ``predict`` takes any sizes that the network allows.

    Calls from several threads run one at a time; use a ModelParallelRunner to run them in parallel.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._opened: OpenModel | None = None
        self._sequences: Sequences | BoundNetwork | None = None
        self._dims = (1, 1)
        self._pid = 0
        self.group: WeightGroup | None = None
        """The ModelGroup that the model is in; ``ModelGroup.add_model`` sets it."""
        self._closed = False

    def build_from_file(
        self,
        model_path: str | os.PathLike[str],
        model_type: ModelType,
        context: Context | None = None,
        config: str | os.PathLike[str] | Mapping[str, Any] | ModelConfig | None = None,
    ) -> None:
        """Open a bundle, plan its memory and start its threads; with the bundle of a rank, wait for the other ranks.

        ``config``: the fields of ``settings.ModelConfig`` in a dictionary or a file.  Raises InvalidArgumentError,
        InvalidFileError, UnsupportedError, OutOfMemoryError or FileAccessError, which name the field or the file; the
        model is then unchanged.
        """
        if isinstance(context, Context) and context.parallel.workers_num > 1:
            raise InvalidArgumentError(
                f"parallel.workers_num: expected 0 or 1 for a Model, got {context.parallel.workers_num}; use a "
                "ModelParallelRunner for more",
                param="parallel.workers_num",
            )
        opened = OpenModel(model_path, model_type, context, config)
        with ExitStack() as joining:
            try:
                settings = opened.config
                sequences = _program_of(opened)
                if self.group is not None:
                    joining.enter_context(self.group.share_weights(self, opened))
                opened.agree()
            except BaseException as error:
                opened.abort(str(error))
                opened.close()
                raise
            if is_forked(self._pid):  # a thread of the parent may have held the lock
                self._lock = threading.Lock()
            with self._lock:
                self._drop()
                self._opened, self._sequences = opened, sequences
                self._dims, self._pid, self._closed = (settings.batch_size, settings.seq_len), os.getpid(), False

    def get_inputs(self) -> list[Tensor]:
        """Return new tensors for ``predict``: ``token_ids`` 0, ``num_tokens`` T, ``reset`` 1."""
        with self.in_use() as (_, sequences):
            return sequences.inputs() if isinstance(sequences, BoundNetwork) else input_tensors(*self._dims)

    def get_outputs(self) -> list[Tensor]:
        """Return new tensors with the names, types and shapes of the outputs."""
        with self.in_use() as (_, sequences):
            if isinstance(sequences, BoundNetwork):
                return sequences.outputs()
            return [
                Tensor(name=spec.name, dtype=spec.dtype, shape=sequences.shape_of(spec, *self._dims))
                for spec in sequences.specs
            ]

    def resize(self, inputs: Sequence[Tensor], dims: Sequence[Sequence[int]]) -> None:
        """Change the shapes of the inputs to ``dims``, [[B, T], [B], [B]] in the order of ``inputs``.

        A new T has no other effect.  A new B creates a new program, in which all sequences are empty.
        """
        with self.in_use() as (opened, sequences):
            if isinstance(sequences, BoundNetwork):
                sequences.resize(inputs, dims)
                return
            batch_size, seq_len = checked_dims(inputs, dims)
            _check_seq_len(seq_len, sequences)
            if opened.rank.world > 1 and batch_size > opened.config.batch_size:
                raise UnsupportedError(
                    f"dims: expected at most {opened.config.batch_size} sequences (the config's batch_size), because "
                    f"the ranks have shared memory for so many, got {batch_size}",
                    param="dims",
                )
            if batch_size != sequences.batch_size:
                self._sequences = Sequences(opened.native, opened.bind(), opened.config, batch_size)
                sequences.close()
            self._dims = (batch_size, seq_len)

    def predict(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Compute the outputs; return new tensors, or ``outputs`` filled with the result.

        ``inputs`` are matched by name when they have the names of ``get_inputs``, else by order.  Raises
        InvalidArgumentError for a wrong shape or type, a token id beyond the vocabulary, a sequence beyond the context,
        and a model that is closed or was built before a fork.
        """
        with self.in_use() as (opened, sequences):
            if isinstance(sequences, BoundNetwork):
                return sequences.predict(inputs, outputs)
            arrays = check_inputs(inputs, opened.info.vocab_size, self._dims)
            targets = None
            if outputs is not None:
                shapes = [sequences.shape_of(spec, *self._dims) for spec in sequences.specs]
                targets = check_outputs(outputs, sequences.specs, shapes)
            rows = sequences.forward(*arrays)
            if targets is None:
                return [Tensor(row, name=spec.name) for row, spec in zip(rows, sequences.specs, strict=True)]
            for tensor, row in zip(targets, rows, strict=True):
                array_of(tensor)[...] = row
            return list(targets)

    def update_weights(self, weights: Sequence[Tensor] | Sequence[Sequence[Tensor]]) -> None:
        """Replace weights, named as in the checkpoint, by float32 or float16 tensors of the same shapes.

        They are packed as in an export, so that the model computes what a bundle of the new checkpoint would.  The
        first call copies the weights into private memory; the file is never written.  An error leaves every weight
        unchanged.  All sequences are empty afterwards.  Raises InvalidArgumentError, which names the tensor, and
        InvalidFileError when the file was replaced or changed.
        """
        with self.in_use() as (opened, sequences):
            if isinstance(sequences, BoundNetwork):
                raise UnsupportedError(
                    "update_weights: expected a language model, got a general network; export it again",
                    param="update_weights",
                )
            if opened.rank.world > 1:
                raise UnsupportedError(
                    "update_weights: expected a whole bundle, got that of a rank; export it again",
                    param="update_weights",
                )
            opened.check_unchanged()
            updates = pack_updates(opened, weights)
            native = opened.native if opened.is_private else core.Model.open(opened.path, mmap=False)
            try:
                opened.check_unchanged()  # confirms that the reads by name above were from the open file
                fresh = Sequences(native, opened.bind(), opened.config, sequences.batch_size)
            except BaseException:
                if native is not opened.native:
                    native.close()
                raise
            write_updates(native, updates)
            sequences.close()
            opened.replace(native)
            self._sequences = fresh

    def get_model_info(self, key: str | None = None) -> Any:
        """Return the description of the model as a dictionary, or one entry of it.

        Raises InvalidArgumentError for an unknown key.
        """
        with self.in_use() as (opened, sequences):
            info = opened.describe()
            if isinstance(sequences, BoundNetwork):
                info |= sequences.describe()
                return info if key is None else _entry(info, key)
            plan = core.plan(opened.native, opened.bind().native, sequences.options)
            info |= {"context_len": sequences.context_len, "planned_bytes": plan.total_bytes - plan.weight_bytes}
        return info if key is None else _entry(info, key)

    def get_file(self, name: str) -> bytes | None:
        """Return a file that the bundle contains ("tokenizer.json", "config.json" ...); None if there is none."""
        if not isinstance(name, str) or not name.isprintable():
            raise refusal("name", "the name of a file", name)
        with self.in_use() as (opened, _):
            segment = opened.native.segment(name)
            return None if segment is None else bytes(segment)

    @property
    def native(self) -> core.Model:
        """The model of the native core."""
        with self.in_use() as (opened, _):
            return opened.native

    def close(self) -> None:
        """Wait for a running call and free the memory.  A second call does nothing."""
        if is_forked(self._pid):
            return  # the threads and the memory belong to the parent
        with self._lock:
            self._drop()
            self._closed = True

    def _drop(self) -> None:
        if self._sequences is not None:
            self._sequences.close()
        if self._opened is not None:
            self._opened.close()
        self._opened = self._sequences = None

    @property
    def opened(self) -> OpenModel | None:
        """The open bundle; None before ``build_from_file`` and after ``close``."""
        return self._opened

    @contextmanager
    def in_use(self) -> Iterator[tuple[OpenModel, Sequences | BoundNetwork]]:
        """Hold the model's lock and yield its bundle and its sequences.

        Raises InvalidArgumentError for a model that is not built, is closed, or was built before a fork.
        """
        check_process(self._pid, "model", "built", "build")
        with self._lock:
            if self._opened is None or self._sequences is None:
                state = "closed" if self._closed else "not built; call build_from_file first"
                raise InvalidArgumentError(f"model: expected a built model, got one that is {state}", param="model")
            yield self._opened, self._sequences

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _program_of(opened: OpenModel) -> Sequences | BoundNetwork:
    if opened.info.kind == GENERAL_NETWORK:
        return BoundNetwork(opened.native, opened.bind())
    sequences = Sequences(opened.native, opened.bind(), opened.config, opened.config.batch_size)
    _check_seq_len(opened.config.seq_len, sequences)
    return sequences


def _check_seq_len(seq_len: int, sequences: Sequences) -> None:
    if seq_len > sequences.context_len:
        raise InvalidArgumentError(
            f"seq_len: expected at most the context's {sequences.context_len}, got {seq_len}", param="seq_len"
        )


def _entry(info: dict[str, Any], key: str) -> Any:
    if key not in info:
        near = nearest(str(key), info)
        hint = f"did you mean {near}?" if near else f"the entries are {', '.join(info)}"
        raise InvalidArgumentError(f"key: expected an entry of the model info, got {key!r:.60}; {hint}", param="key")
    return info[key]
