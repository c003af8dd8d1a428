"""A checkpoint folder in Hugging Face's format, or a GGUF file, checked completely and read without copies.

This reader does not import PyTorch; capture, packing, quantization and eager mode share it.  It runs no code from the
folder: neither pickles nor Python files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.checkpoint.generation import clean_generation_config
from penstock.checkpoint.gguf.weights import GgufWeights
from penstock.checkpoint.pooling.files import POOLING_INPUTS, classifier_tensors, make_pooling_head
from penstock.checkpoint.pooling.head import POOLING_FILE
from penstock.checkpoint.quantized.section import QUANTIZATION_FILES, find_section, with_section
from penstock.checkpoint.quantized.weights import QuantizedWeights, open_quantized, rounding_note
from penstock.checkpoint.side_files import SIDE_FILES, model_folder, read_folder_files, read_small_file, template_files
from penstock.checkpoint.stored.shards import INDEX, open_shards, refuse_other_formats
from penstock.checkpoint.stored.tied_head import find_tied, may_untie, with_stored_head
from penstock.checkpoint.stored.unused import unused_tensors, zero_biases
from penstock.checkpoint.tensor_file import TensorFile, TensorInfo
from penstock.checkpoint.tokenizer_files.names import TOKENIZER_INPUTS
from penstock.config import ConfigReader, show
from penstock.core.layouts import BLOCKS, KV_LAYOUTS
from penstock.core.native import QuantizedRows
from penstock.errors import FileAccessError, InvalidArgumentError, InvalidFileError, UnsupportedError
from penstock.file_kinds import is_bundle, is_gguf, refuse_mindspore
from penstock.ops.table import BLOCK_SCHEMES
from penstock.quant.folder import QUANTIZED_VERSION
from penstock.quant.mixed_schemes import MIXED_VERSION, block_tensors, mixed_schemes, named_scheme
from penstock.quant.scheme import GROUP_LEN, SCHEMES, default_scheme, find_scheme

__all__ = ["Checkpoint", "FileStamp", "TensorInfo", "WeightFile", "stored_dtype"]

_SCALE: Final = "_scale"
_GROUPS: Final = "_groups"
_COMPARE_BYTES: Final = 1 << 22


@dataclass(frozen=True)
class FileStamp:
    """The identity of a file for a cache key.

    ``ctime_ns`` and ``inode`` change when another file of equal size and modification time takes its name.
    """

    name: str
    num_bytes: int
    mtime_ns: int
    ctime_ns: int
    inode: int


class WeightFile(Protocol):
    """A file of weights: ``path``, its ``tensors`` by name, and how they are read."""

    path: Path

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """The tensors by name."""

    def read(self, name: str) -> NDArray[Any]:
        """Return a tensor in its shape."""

    def release(self, name: str, begin: int = 0, end: int | None = None) -> None:
        """Release the memory pages of bytes ``begin`` to ``end`` of a tensor."""


def _refuse_without_config(folder: Path) -> NoReturn:
    """Raise an error that names the model file in a folder that is no checkpoint."""
    names = sorted(entry.name for entry in folder.iterdir())
    if any(name.lower().endswith(".gguf") for name in names):
        refuse_other_formats(folder)
    bundle = next((name for name in names if name.lower().endswith(".psm")), None)
    hint = "" if bundle is None else f"; to run a bundle, pass {folder / bundle}"
    if not hint and any(name.endswith(".safetensors") for name in names):
        hint = "; of weights alone `penstock export --config FOLDER` makes a bundle, with the config.json of FOLDER"
    raise InvalidFileError(
        f"{folder}: expected a checkpoint folder with config.json, got no file{hint}", param="folder"
    )


def _check_is_whole(folder: Path) -> None:
    """Raise UnsupportedError, with what opens it, for a folder that is cut for ranks."""
    if (folder / "rank_0").is_dir():
        actual = "one that is cut for several ranks; `penstock shard FOLDER OUT --merge` makes a whole one"
    elif (folder / "rank_0.psm").exists():
        actual = "the bundles of several ranks; penstock inspect takes each of them"
    else:
        return
    raise UnsupportedError(
        f"{folder}: expected a checkpoint folder, got {actual}, and run, chat and serve open all with the folder's "
        "--tp, --pp and --cp",
        param="folder",
    )


def _check_folder(path: Path) -> None:
    if path.is_file():
        refuse_mindspore(path)
        actual = "a bundle" if is_bundle(path) else "another file"
        raise InvalidArgumentError(f"{path}: expected a checkpoint folder or a GGUF file, got {actual}", param="folder")
    if not path.is_dir():
        raise FileAccessError(f"{path}: no such folder", param="folder")


def _equal_bytes(first: NDArray[Any], second: NDArray[Any]) -> bool:
    """Return True if two arrays of equal type and shape have the same bits; makes no large temporary array."""
    a, b = first.reshape(-1).view(np.uint8), second.reshape(-1).view(np.uint8)
    return all(
        np.array_equal(a[i : i + _COMPARE_BYTES], b[i : i + _COMPARE_BYTES]) for i in range(0, len(a), _COMPARE_BYTES)
    )


def stored_dtype(config: ConfigReader, tensors: Mapping[str, TensorInfo]) -> str:
    """Return the float type of most bytes; config.json decides when no tensor is a float."""
    totals = {"f32": 0, "f16": 0, "bf16": 0}
    for info in tensors.values():
        if info.dtype in totals:
            totals[info.dtype] += info.num_bytes
    best = max(totals, key=lambda name: totals[name])
    return best if totals[best] else (config.dtype() or "f32")


def _without_group(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a tensor as networks have it.

    A convolution of each channel for itself (PyTorch's Conv1d with as many groups as channels) is stored as
    [channels, 1, length], and is a matrix [channels, length] here.
    """
    is_conv = name.endswith((".conv.weight", ".conv1d.weight")) and len(shape) == 3 and shape[1] == 1
    return (shape[0], shape[2]) if is_conv else shape


class MadeFiles(Protocol):
    """The files beside the weights of a GGUF file: their names, and the files, which take longer."""

    def names(self) -> list[str]:
        """Return the names, in the order of ``make``."""

    def make(self) -> dict[str, bytes]:
        """Return the files by name."""


class Checkpoint:
    """An open folder or GGUF file: ``config``, ``dtype`` ("f32", "f16", "bf16"), ``tensors`` by name, ``scheme``.

    ``scheme`` is None except for a folder that ``penstock quantize`` made.  In such a folder a linear weight
    ``X.weight`` has int8 values, or 4-bit values two per byte.  Its scales are in ``X.weight_scale``; for 4 bit, the
    steps and offsets of its groups are in ``X.weight_groups``.  An output head may have blocks of bytes instead.
    ``tensors`` lists all of these.  Files are mapped: a file that shrinks while it is open kills the process, as with
    any mapped file.
    """

    def __init__(
        self,
        folder: Path,
        config: ConfigReader,
        shards: Sequence[WeightFile],
        side_files: MadeFiles | None = None,
    ) -> None:
        self.folder = folder
        self.made_files = side_files
        """Returns the files beside the weights of a GGUF file; None for a folder, which has them."""
        self.stored_config = config
        self._files = tuple(shards)
        self._home = {name: file for file in shards for name in file.tensors}
        self.tensors = {
            name: replace(file.tensors[name], shape=_without_group(name, file.tensors[name].shape))
            for name, file in self._home.items()
        }
        self._blocks: Mapping[str, str] = {}
        self.keeps_mxfp4 = config.has_mxfp4() and any(name.endswith("_blocks") for name in self.tensors)
        self.scheme: str | None = None
        self.dtype = stored_dtype(config, {n: info for n, info in self.tensors.items() if not self._is_foreign(n)})
        section = config.quantization()
        if section is not None:
            self._check_version(section.int("version", min=1))
            self._blocks = block_tensors(section)
            quantized = [scheme.name for scheme in SCHEMES.values() if scheme.quantized]
            self.scheme = section.one_of("scheme", quantized)
            self.dtype = section.one_of("dtype", ("f32", "f16", "bf16"))
            if section.has("kv_cache"):
                section.one_of("kv_cache", KV_LAYOUTS)
            self._check_quantized()
        self.mixed_schemes = mixed_schemes(config, {name: info.dtype for name, info in self.tensors.items()})
        """The schemes of the tensors of a folder that has several; None for others."""

    @classmethod
    def open(cls, folder: Path | str) -> Checkpoint:
        """Open and check a folder or a GGUF file.

        Raises InvalidFileError (damaged), UnsupportedError (a format or type that Penstock does not read; the message
        names the alternative) or FileAccessError.
        """
        path = Path(folder)
        try:
            if is_gguf(path):
                from penstock.checkpoint.gguf.checkpoint import open_gguf  # all architectures: folders need none

                parts = open_gguf(path)
                return cls(path, parts.config, parts.weights, parts.side_files)
            _check_folder(path)
            _check_is_whole(path)
            home = model_folder(path)
            if not (home / "config.json").exists():
                _refuse_without_config(path)
            config = with_section(ConfigReader.parse(read_small_file(home / "config.json"), "config.json"))
            config.quantization()  # checked first, because its error is the most helpful one
            shards = open_shards(home)
            config = find_section(home, config, {name: info for file in shards for name, info in file.tensors.items()})
            section = config.foreign_quantization()
            return cls(path, config, shards if section is None else open_quantized(section, shards))
        except PermissionError as error:
            raise FileAccessError(f"{path}: {error.strerror}") from None

    @cached_property
    def config(self) -> ConfigReader:
        """The configuration, in which ``tie_word_embeddings`` is false if the folder has an output head of its own."""
        return with_stored_head(self.stored_config, lambda: may_untie(self.tensors) and bool(self.head_differs))

    @cached_property
    def head_differs(self) -> bool | None:
        """True if the output head has other values than the embedding; None unless both are stored."""
        names = find_tied(self.tensors)
        return None if names is None else not self.has_equal(*names)

    @cached_property
    def equal_head(self) -> str | None:
        """The name of a stored output head that has the values of the embedding."""
        names = find_tied(self.tensors)
        return names[1] if names is not None and self.head_differs is False else None

    def has_equal(self, first: str, second: str) -> bool:
        """Return True if two tensors have the same type, shape and bits."""
        infos = [(self.tensors[name].dtype, self.tensors[name].shape) for name in (first, second)]
        is_equal = infos[0] == infos[1] and _equal_bytes(self.read(first), self.read(second))
        for name in (first, second):
            self.release(name)
        return is_equal

    def _is_foreign(self, name: str) -> bool:
        """Return True for a matrix that another tool quantized in a folder; a GGUF file is not a folder."""
        file = self._home[name]
        return isinstance(file, QuantizedWeights) and file.is_quantized(name)

    def _check_version(self, version: int) -> None:
        if version not in (QUANTIZED_VERSION, MIXED_VERSION):
            raise UnsupportedError(
                f"{self.folder}: quantization_config.version: expected {QUANTIZED_VERSION} or {MIXED_VERSION}, got "
                f"{version}. Quantize the original checkpoint again.",
                param="quantization_config.version",
            )

    def _check_quantized(self) -> None:
        for name, info in self.tensors.items():
            if info.dtype not in ("i8", "u8") or name.endswith(_GROUPS):
                continue
            if len(info.shape) != 2:
                raise InvalidFileError(
                    f"{info.file}: tensor {show(name)}: expected a matrix, got {list(info.shape)}", param=name
                )
            if name in self._blocks:
                self._check_blocks(name, info)
                continue
            companions: list[tuple[str, str, Sequence[tuple[int, ...]]]] = [
                (f"{name}{_SCALE}", "f32", ((info.shape[0],), (info.shape[0], 1)))
            ]
            if info.dtype == "u8":
                num_groups = (info.shape[1] * 2 + GROUP_LEN - 1) // GROUP_LEN
                companions.append((f"{name}{_GROUPS}", "i8", ((info.shape[0], num_groups, 2),)))
            for companion, dtype, shapes in companions:
                self._check_companion(name, companion, dtype, shapes)

    def _check_blocks(self, name: str, info: TensorInfo) -> None:
        num_bytes = BLOCKS[find_scheme(self._blocks[name]).layout].block_bytes
        if info.dtype == "u8" and info.shape[1] % num_bytes:
            raise InvalidFileError(
                f"{info.file}: tensor {show(name)}: expected rows of blocks of {num_bytes} bytes, got {info.shape[1]}",
                param=name,
            )

    def _check_companion(self, name: str, companion: str, dtype: str, shapes: Sequence[tuple[int, ...]]) -> None:
        info = self.tensors.get(companion)
        if info is None:
            file = self.tensors[name].file
            raise InvalidFileError(
                f"{file}: tensor {show(name)}: expected {show(companion)} beside it, got none", param=name
            )
        if info.dtype != dtype or info.shape not in shapes:
            raise InvalidFileError(
                f"{info.file}: tensor {show(companion)}: expected {dtype.upper()} of shape {list(shapes[0])}, got "
                f"{info.dtype.upper()} of {list(info.shape)}",
                param=companion,
            )

    def companions(self, name: str) -> set[str]:
        """Return the names of the tensors that belong to a quantized one: its scales and, for 4 bit, its groups."""
        if not self.is_quantized(name):
            return set()
        return {f"{name}{end}" for end in (_SCALE, _GROUPS) if f"{name}{end}" in self.tensors}

    def read(self, name: str) -> NDArray[Any]:
        """Return the stored tensor without a copy: float32, uint16 (the bits of f16 and bf16), int8 or uint8."""
        file = self._home.get(name)
        if file is None:
            raise InvalidFileError(f"{self.folder}: expected a tensor named {show(name)}, got none", param=name)
        array = file.read(name)
        return array.reshape(_without_group(name, array.shape))

    def is_quantized(self, name: str) -> bool:
        """Return True if the tensor is stored as integers with scales."""
        is_integer = name in self.tensors and self.tensors[name].dtype in ("i8", "u8")
        return self.scheme is not None and is_integer and not name.endswith(_GROUPS)

    def read_quantized(self, name: str, cols: int) -> QuantizedRows:
        """Return a quantized weight of ``cols`` columns.

        4-bit values are stored two per byte, the even column in the low half.  The packer checks that the groups keep
        their values within int8, and refuses a row that does not.
        """
        stored, scales = self.read(name), self._finite(name, self.read(f"{name}{_SCALE}").reshape(-1))
        if self.tensors[name].dtype == "i8":
            if stored.shape[1] != cols:
                raise self._wrong_cols(name, cols, stored.shape[1])
            return QuantizedRows(stored, scales)
        if stored.shape[1] != (cols + 1) // 2:
            raise self._wrong_cols(name, cols, 2 * stored.shape[1])
        values = np.empty((stored.shape[0], 2 * stored.shape[1]), np.int8)
        values[:, 0::2] = (stored & 15).view(np.int8)
        values[:, 1::2] = (stored >> 4).view(np.int8)
        return QuantizedRows(np.ascontiguousarray(values[:, :cols]), scales, self.read(f"{name}{_GROUPS}"))

    def _wrong_cols(self, name: str, cols: int, actual: int) -> InvalidFileError:
        return InvalidFileError(
            f"{self.tensors[name].file}: tensor {show(name)}: expected {cols} columns, got {actual}", param=name
        )

    def _finite(self, name: str, scales: NDArray[np.float32]) -> NDArray[np.float32]:
        if not np.isfinite(scales).all():
            raise InvalidFileError(f"{name}{_SCALE}: expected finite scales")
        return scales

    def check_rotation(self, name: str, rotated: bool) -> None:
        """Refuse a quantized tensor whose columns are rotated where the network's linear does not rotate its inputs, or
        the other way round: that of a head under a name that ``plan_weights`` does not know.  UnsupportedError."""
        if self.scheme is None or self.mixed_schemes is not None or not self.is_quantized(name):
            return
        base = find_scheme(self.scheme)
        if find_scheme(named_scheme(base, name, self.tensors[name].dtype)).hadamard != rotated:
            raise UnsupportedError(
                f"{self.folder}: scheme: expected {base.plain}, because {show(name)} is the output "
                f"head of this network, got {self.scheme}",
                param="scheme",
            )

    def choose_scheme(self, scheme: str | None) -> str:
        """Return the requested scheme, or else the folder's own type; a quantized folder has only its own scheme.

        Raises InvalidArgumentError for an unknown scheme, UnsupportedError for one that a quantized folder lacks.
        """
        own = self.scheme or self.own_block_scheme()
        if scheme is None:
            return own or default_scheme(self.dtype)
        if find_scheme(scheme).in_blocks and scheme != own:
            plain = ", ".join(name for name, row in SCHEMES.items() if not row.in_blocks)
            expected = f"{own}, the type of most of its blocks" if own in BLOCK_SCHEMES else f"one of {plain}"
            raise UnsupportedError(
                f"{self.folder}: scheme: expected {expected}, got {scheme}, which keeps the blocks of a GGUF file "
                "or the groups of a quantized folder",
                param="scheme",
            )
        if self.scheme is not None and scheme != self.scheme:
            raise UnsupportedError(
                f"{self.folder}: expected scheme {self.scheme}, which its weights are quantized with, got {scheme}. "
                "Use the original checkpoint for another scheme.",
                param="scheme",
            )
        return scheme

    def block_scheme(self, name: str) -> str | None:
        """Return the scheme that computes with a tensor's blocks, of a GGUF file, of a folder that another tool
        quantized, or of an output head; None for any other tensor.

        A scheme without blocks is that of a matrix with rows for ``read_rows``.
        """
        if name in self._blocks:
            return self._blocks[name]
        file = self._home[name]
        return file.block_scheme(name) if isinstance(file, GgufWeights | QuantizedWeights) else None

    def has_rows(self, name: str) -> bool:
        """Return True for a matrix that another tool stored as 8-bit integers with one scale for each row."""
        scheme = self.block_scheme(name)
        return scheme is not None and not find_scheme(scheme).in_blocks

    def read_rows(self, name: str) -> QuantizedRows:
        """Return the integers and scales, as they are stored, of a matrix with ``has_rows``."""
        file = self._home[name]
        if not isinstance(file, QuantizedWeights):
            raise InvalidFileError(f"{self.folder}: expected integers in tensor {show(name)}, got none", param=name)
        rows = file.read_rows(name)
        return QuantizedRows(rows.q, self._finite(name, rows.scales))

    def read_blocks(self, name: str) -> NDArray[np.uint8]:
        """Return the blocks of a matrix that has a ``block_scheme``, uint8 [rows, bytes of a row]."""
        if name in self._blocks:
            return self.read(name)
        file = self._home[name]
        if not isinstance(file, GgufWeights | QuantizedWeights):
            raise InvalidFileError(f"{self.folder}: expected blocks in tensor {show(name)}, got none", param=name)
        return file.read_blocks(name)

    def stored_bytes(self, name: str) -> int:
        """Return the size of a tensor, in bytes: of its blocks if a scheme computes with them."""
        info, scheme = self.tensors[name], self.block_scheme(name)
        if scheme is None or name in self._blocks:
            return info.num_bytes
        if self.has_rows(name):
            return math.prod(info.shape) + 4 * info.shape[0]
        block = BLOCKS[find_scheme(scheme).layout]
        return math.prod(info.shape) // block.block_len * block.block_bytes

    def file_bytes(self, name: str) -> int:
        """Return the size of a tensor in its file, in bytes; of a GGUF file in the type that the file has."""
        file = self._home[name]
        return file.file_bytes(name) if isinstance(file, GgufWeights) else self.stored_bytes(name)

    def weight_schemes(self, scheme: str) -> dict[str, str] | None:
        """Return the scheme of a linear with each of the tensors, by name, if the tensors of the file have several.

        ``scheme`` is a choice of ``choose_scheme``.  None: all linears have it.  A tensor whose blocks no scheme takes
        has its exact values in float32.
        """
        is_own = find_scheme(scheme).in_blocks or scheme == self.own_block_scheme()
        if self.mixed_schemes is not None or not is_own:
            return self.mixed_schemes
        return {name: self.block_scheme(name) or default_scheme(info.dtype) for name, info in self.tensors.items()}

    def own_block_scheme(self) -> str | None:
        """Return the scheme of most values that lie in blocks; None if there are none."""
        if self.keeps_mxfp4:
            return "mxfp4"
        totals: dict[str, int] = {}
        for name, info in self.tensors.items():
            scheme = self.block_scheme(name)
            if scheme is not None:
                totals[scheme] = totals.get(scheme, 0) + info.num_bytes
        return max(totals, key=lambda name: totals[name]) if totals else None

    def redundant_names(self, unread: Collection[str] = ()) -> set[str]:
        """Return the names of tensors that a network need not read.

        These are tensors that change nothing, the head of a classifier, which ``side_files`` has, and an output head
        that equals the embedding it is tied to.  ``unread``: tensors that the network does not read; of these, a bias
        of zeros and any output head that equals the embedding are redundant, too.
        """
        names = unused_tensors(self.tensors) | zero_biases(self.tensors, unread, self.read)
        names |= classifier_tensors(self.config) & self.tensors.keys()
        head = self.equal_head
        if head in self.tensors and (head in unread or self.config.bool("tie_word_embeddings", False)):
            names.add(head)
        return names

    def logical_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape as the network sees it.  4-bit weights are stored with half the columns, rounded up."""
        info = self.tensors[name]
        if name in self._blocks:
            block = BLOCKS[find_scheme(self._blocks[name]).layout]
            return (info.shape[0], info.shape[1] // block.block_bytes * block.block_len)
        if self.is_quantized(name) and info.dtype == "u8":
            return (info.shape[0], 2 * info.shape[1])
        return info.shape

    def release(self, name: str, begin: int = 0, end: int | None = None) -> None:
        """Release the memory pages of a tensor, or of a range of its bytes.  Views stay valid."""
        self._home[name].release(name, begin, end)

    @property
    def weight_files(self) -> list[WeightFile]:
        """The files of the weights, by name."""
        return sorted(set(self._files), key=lambda file: file.path)

    @property
    def rounding_note(self) -> str:
        """The difference between the blocks that were read and the stored values; "" while they are exact."""
        return rounding_note(self._files)

    def widening_note(self, scheme: str) -> str:
        """The matrices of a GGUF file that become float32 under ``scheme``, and why; "" for none."""
        if not find_scheme(scheme).in_blocks:
            return ""
        files = [file for file in self.weight_files if isinstance(file, GgufWeights)]
        reasons = {name: reason for file in files for name in file.tensors if (reason := file.widening_reason(name))}
        if not reasons:
            return ""
        name = next(iter(reasons))
        others = f" and {len(reasons) - 1} more tensors become" if len(reasons) > 1 else " becomes"
        return f"{name}{others} float32 in memory, because {reasons[name]}"

    @property
    def tensor_files(self) -> list[TensorFile]:
        """The files of the weights, by name; UnsupportedError for GGUF and for a folder that another tool quantized."""
        files: list[TensorFile] = [file for file in set(self._files) if isinstance(file, TensorFile)]
        if self.made_files is not None:
            raise UnsupportedError(
                f"{self.folder}: expected a checkpoint folder with safetensors, got a GGUF file", param="folder"
            )
        if (section := self.config.foreign_quantization()) is not None:
            raise UnsupportedError(
                f"{self.folder}: expected float weights or weights quantized by Penstock, got quant_method "
                f"{show(section.str('quant_method'))}",
                param="quant_method",
            )
        return sorted(files, key=lambda file: file.path)

    @property
    def files(self) -> list[FileStamp]:
        """The identity of every file that determines the content of this folder's bundle, for the cache key."""
        home = self.folder if self.made_files is None else self.folder.parent
        names = {file.path.relative_to(home).as_posix() for file in self._files}
        if self.made_files is None:
            names |= {INDEX, *TOKENIZER_INPUTS, *SIDE_FILES, *POOLING_INPUTS, *QUANTIZATION_FILES}
            names.update(template_files(home))
            modules = home.glob("[0-9]*_*/*")
            names |= {path.relative_to(home).as_posix() for path in modules if (home / "modules.json").exists()}
        stamps = []
        for name in sorted(names):
            path = home / name
            if path.exists():
                status = path.stat()
                stamps.append(FileStamp(name, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino))
        return stamps

    def side_files(self) -> dict[str, bytes]:
        """Return the files beside the weights that exist, by name: config, generation config, tokenizer, chat template.

        Those of a GGUF file are made from its metadata.  Converts a ``tokenizer.model`` as ``read_folder_files`` does,
        and makes ``pooling.bin`` of the files of sentence-transformers and of the tensors of a classifier.
        """
        if self.made_files is not None:
            return self.made_files.make()
        files = read_folder_files(self.folder)
        if ConfigReader.parse(files["config.json"]).values != self.config.values:  # settings of other files, or untied
            files["config.json"] = (json.dumps(self.config.values, indent=2) + "\n").encode()
        if "generation_config.json" in files:
            clean = clean_generation_config(files["generation_config.json"])
            if clean is None:
                del files["generation_config.json"]
            else:
                files["generation_config.json"] = clean  # at its place: equal folders give equal bundles
        if POOLING_FILE not in files:
            head = make_pooling_head(self.folder, self.config, self)
            if head is not None:
                files[POOLING_FILE] = head.to_bytes()
        return files
