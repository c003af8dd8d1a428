"""A checkpoint: a folder as Hugging Face lays it out, checked in full and read without copies.

No PyTorch here: the same reader serves capture, packing, quantization and eager mode.  Nothing in the folder
is run: no pickles, no Python files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.checkpoint.side_files import SIDE_FILES, read_folder_files, read_small_file
from penstock.checkpoint.tensor_file import MAX_TENSORS, TensorFile, TensorInfo
from penstock.config import ConfigReader, show
from penstock.core.native import QuantizedRows
from penstock.errors import FileAccessError, InvalidArgumentError, InvalidFileError, UnsupportedError
from penstock.quant.folder import QUANTIZED_VERSION
from penstock.quant.scheme import GROUP_LEN, SCHEMES, default_scheme, find_scheme

__all__ = ["Checkpoint", "FileStamp", "TensorInfo"]

HEAD_NAME: Final = "lm_head.weight"
_SCALE: Final = "_scale"
_GROUPS: Final = "_groups"
_COMPARE_BYTES: Final = 1 << 22
_SINGLE: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"
_CONVERT = "use the safetensors version of the model, or convert it with transformers' save_pretrained"


@dataclass(frozen=True)
class FileStamp:
    """What a cache key knows of a file.

    ``ctime_ns`` and ``inode`` change when a file is replaced by one of equal size and modification time.
    """

    name: str
    num_bytes: int
    mtime_ns: int
    ctime_ns: int
    inode: int


def _refuse_other_formats(folder: Path) -> None:
    """Say what to use instead of the weights that are there."""
    names = sorted(entry.name for entry in folder.iterdir())
    for suffix, kind in ((".gguf", "GGUF"), (".bin", "pickled PyTorch"), (".pt", "pickled PyTorch"),
                         (".pth", "pickled PyTorch"), (".h5", "Keras"), (".msgpack", "Flax"),
                         (".onnx", "ONNX")):  # fmt: skip
        found = next((name for name in names if name.endswith(suffix)), None)
        if found is not None:
            raise UnsupportedError(f"{found}: {kind} weights are not supported; {_CONVERT}")
    raise InvalidFileError(f"{folder}: expected {_SINGLE} or {_INDEX}, found neither")


def _check_folder(path: Path) -> None:
    if path.suffix == ".gguf":
        raise UnsupportedError(f"{path.name}: GGUF files are not supported; use the model's safetensors folder")
    if path.is_file():
        raise InvalidArgumentError(f"{path}: expected a checkpoint folder, found a file")
    if not path.is_dir():
        raise FileAccessError(f"{path}: no such folder")


def _read_index(folder: Path) -> dict[str, str]:
    """Tensor name to shard name; shards are plain names of files in the folder."""
    reader = ConfigReader.parse(read_small_file(folder / _INDEX, 64 << 20), _INDEX)
    section = reader.object("weight_map")
    if section is None or not section.values:
        raise InvalidFileError(f"{_INDEX}: weight_map: expected tensor names and files, found none")
    if len(section.values) > MAX_TENSORS:
        raise InvalidFileError(
            f"{_INDEX}: weight_map: expected at most {MAX_TENSORS} tensors, found {len(section.values)}"
        )
    for name, shard in section.values.items():
        plain = isinstance(shard, str) and shard.endswith(".safetensors") and len(shard) <= 255
        if not plain or not shard.isprintable() or any(char in shard for char in "/\\:") or shard.startswith("."):
            raise InvalidFileError(
                f"{_INDEX}: weight_map: {show(name)}: expected the name of a .safetensors file in the folder, "
                f"found {show(shard)}"
            )
    return dict(section.values)


def _open_shards(folder: Path) -> list[TensorFile]:
    if (folder / _SINGLE).exists():
        return [TensorFile(folder / _SINGLE)]
    if not (folder / _INDEX).exists():
        _refuse_other_formats(folder)
    weight_map = _read_index(folder)
    shards: list[TensorFile] = []
    for shard in sorted(set(weight_map.values())):
        if not (folder / shard).exists():
            raise InvalidFileError(f"{_INDEX}: names {show(shard)}, which is not in the folder")
        file = TensorFile(folder / shard)
        for name in file.tensors:
            if weight_map.get(name) != shard:
                raise InvalidFileError(
                    f"{shard}: holds tensor {show(name)}, which {_INDEX} expects in {show(weight_map.get(name))}"
                )
        shards.append(file)
    present = {name for file in shards for name in file.tensors}
    for name, shard in weight_map.items():
        if name not in present:
            raise InvalidFileError(f"{_INDEX}: expects tensor {show(name)} in {shard}, which does not hold it")
    return shards


def _equal_bytes(first: NDArray[Any], second: NDArray[Any]) -> bool:
    """Whether two arrays of one type and shape hold the same bits, without a large temporary."""
    a, b = first.reshape(-1).view(np.uint8), second.reshape(-1).view(np.uint8)
    return all(
        np.array_equal(a[i : i + _COMPARE_BYTES], b[i : i + _COMPARE_BYTES]) for i in range(0, len(a), _COMPARE_BYTES)
    )


class Checkpoint:
    """An opened folder: ``config``, ``dtype`` ("f32", "f16", "bf16"), ``tensors`` by name, ``scheme``.

    ``scheme`` is None but for a folder that ``penstock quantize`` made: there a linear weight ``X.weight`` of int8
    values (int4: two to a byte) has its scales beside it in ``X.weight_scale`` and, of int4, the steps and offsets of
    its groups in ``X.weight_groups``; ``tensors`` lists them all.
    Files are mapped: a file that shrinks while it is open ends the process, as with every mapped file.
    """

    def __init__(self, folder: Path, config: ConfigReader, shards: list[TensorFile]) -> None:
        self.folder = folder
        self.config = config
        self._home = {name: file for file in shards for name in file.tensors}
        self.tensors = {name: file.tensors[name] for name, file in self._home.items()}
        self.scheme: str | None = None
        self.dtype = self._stored_dtype()
        section = config.quantization()
        if section is not None:
            self._check_version(section.int("version", min=1))
            quantized = [scheme.name for scheme in SCHEMES.values() if scheme.quantized]
            self.scheme = section.one_of("scheme", quantized)
            self.dtype = section.one_of("dtype", ("f32", "f16", "bf16"))
            self._check_quantized()

    @classmethod
    def open(cls, folder: Path | str) -> Checkpoint:
        """Open and check a folder.

        Raises InvalidFileError (damaged), UnsupportedError (a format or type that Penstock does not read, with what
        to use instead) or FileAccessError.
        """
        path = Path(folder)
        try:
            _check_folder(path)
            if not (path / "config.json").exists():
                if any(entry.name.endswith(".gguf") for entry in path.iterdir()):
                    _refuse_other_formats(path)
                raise InvalidFileError(f"{path}: expected config.json, found no such file")
            config = ConfigReader.parse(read_small_file(path / "config.json"), "config.json")
            config.quantization()  # the refusal that says most comes first
            return cls(path, config, _open_shards(path))
        except PermissionError as error:
            raise FileAccessError(f"{path}: {error.strerror}") from None

    def _stored_dtype(self) -> str:
        """The float type that most bytes have; config.json decides when there are no floats."""
        totals = {"f32": 0, "f16": 0, "bf16": 0}
        for info in self.tensors.values():
            if info.dtype in totals:
                totals[info.dtype] += info.num_bytes
        best = max(totals, key=lambda name: totals[name])
        return best if totals[best] else (self.config.dtype() or "f32")

    def _check_version(self, version: int) -> None:
        if version != QUANTIZED_VERSION:
            raise UnsupportedError(
                f"{self.folder}: quantization_config.version: expected {QUANTIZED_VERSION}, found {version}: quantize "
                "the original checkpoint again"
            )

    def _check_quantized(self) -> None:
        for name, info in self.tensors.items():
            if info.dtype not in ("i8", "u8") or name.endswith(_GROUPS):
                continue
            if len(info.shape) != 2:
                raise InvalidFileError(f"{info.file}: tensor {show(name)}: expected a matrix, found {list(info.shape)}")
            wanted: list[tuple[str, str, Sequence[tuple[int, ...]]]] = [
                (f"{name}{_SCALE}", "f32", ((info.shape[0],), (info.shape[0], 1)))
            ]
            if info.dtype == "u8":
                num_groups = (info.shape[1] * 2 + GROUP_LEN - 1) // GROUP_LEN
                wanted.append((f"{name}{_GROUPS}", "i8", ((info.shape[0], num_groups, 2),)))
            for beside, dtype, shapes in wanted:
                self._check_beside(name, beside, dtype, shapes)

    def _check_beside(self, name: str, beside: str, dtype: str, shapes: Sequence[tuple[int, ...]]) -> None:
        found = self.tensors.get(beside)
        if found is None:
            file = self.tensors[name].file
            raise InvalidFileError(f"{file}: tensor {show(name)}: expected {show(beside)} beside it, found none")
        if found.dtype != dtype or found.shape not in shapes:
            raise InvalidFileError(
                f"{found.file}: tensor {show(beside)}: expected {dtype.upper()} of shape {list(shapes[0])}, found "
                f"{found.dtype.upper()} of {list(found.shape)}"
            )

    def companions(self, name: str) -> set[str]:
        """The tensors that belong to a quantized one: its scales and, of 4 bit, its groups."""
        if not self.is_quantized(name):
            return set()
        return {f"{name}{end}" for end in (_SCALE, _GROUPS) if f"{name}{end}" in self.tensors}

    def read(self, name: str) -> NDArray[Any]:
        """The stored tensor, zero-copy: float32, uint16 (the bits of f16 and bf16), int8 or uint8."""
        file = self._home.get(name)
        if file is None:
            raise InvalidFileError(f"{self.folder}: expected a tensor named {show(name)}, found none")
        return file.read(name)

    def is_quantized(self, name: str) -> bool:
        """Whether the tensor is stored as integers with scales."""
        is_integer = name in self.tensors and self.tensors[name].dtype in ("i8", "u8")
        return self.scheme is not None and is_integer and not name.endswith(_GROUPS)

    def read_quantized(self, name: str, cols: int) -> QuantizedRows:
        """A quantized weight of ``cols`` columns.  Four-bit values lie two to a byte, the even column in the low half.

        Whether groups keep their values within int8 is for the packer to see, which refuses a row that does not.
        """
        stored, scales = self.read(name), self._finite(name, self.read(f"{name}{_SCALE}").reshape(-1))
        if self.tensors[name].dtype == "i8":
            if stored.shape[1] != cols:
                raise self._wrong_cols(name, cols, stored.shape[1])
            if not (stored > -128).all():
                raise InvalidFileError(f"{name}: expected values from -127 to 127, found -128")
            return QuantizedRows(stored, scales)
        if stored.shape[1] != (cols + 1) // 2:
            raise self._wrong_cols(name, cols, 2 * stored.shape[1])
        values = np.empty((stored.shape[0], 2 * stored.shape[1]), np.int8)
        values[:, 0::2] = (stored & 15).view(np.int8)
        values[:, 1::2] = (stored >> 4).view(np.int8)
        return QuantizedRows(np.ascontiguousarray(values[:, :cols]), scales, self.read(f"{name}{_GROUPS}"))

    def _wrong_cols(self, name: str, cols: int, found: int) -> InvalidFileError:
        return InvalidFileError(
            f"{self.tensors[name].file}: tensor {show(name)}: expected {cols} columns, found {found}"
        )

    def _finite(self, name: str, scales: NDArray[np.float32]) -> NDArray[np.float32]:
        if not np.isfinite(scales).all():
            raise InvalidFileError(f"{name}{_SCALE}: expected finite scales")
        return scales

    def choose_scheme(self, scheme: str | None) -> str:
        """The scheme asked for, else the folder's own type; a quantized folder has one scheme alone.

        Raises InvalidArgumentError for an unknown scheme, UnsupportedError for another than a quantized folder's.
        """
        if scheme is None:
            return self.scheme or default_scheme(self.dtype)
        find_scheme(scheme)
        if self.scheme is not None and scheme != self.scheme:
            raise UnsupportedError(
                f"{self.folder}: holds weights quantized as {self.scheme}; expected scheme {self.scheme}, found "
                f"{scheme}: use the original checkpoint instead"
            )
        return scheme

    def redundant_names(self) -> set[str]:
        """Tensors that a network need not read: rotary frequencies, and an output head equal to the embedding it is
        tied to.  A tied head that differs stays, and is refused as left over.
        """
        names = {name for name in self.tensors if name.endswith(".rotary_emb.inv_freq")}
        embedding = next((name for name in self.tensors if name.endswith("embed_tokens.weight")), None)
        if embedding and HEAD_NAME in self.tensors and self.config.bool("tie_word_embeddings", False):
            first, second = self.tensors[embedding], self.tensors[HEAD_NAME]
            same_kind = (first.dtype, first.shape) == (second.dtype, second.shape)
            if same_kind and _equal_bytes(self.read(embedding), self.read(HEAD_NAME)):
                names.add(HEAD_NAME)
            self.release(embedding)
            self.release(HEAD_NAME)
        return names

    def logical_shape(self, name: str) -> tuple[int, ...]:
        """The shape as the network sees it.  Four-bit weights are stored with half the columns, rounded up."""
        info = self.tensors[name]
        if self.is_quantized(name) and info.dtype == "u8":
            return (info.shape[0], 2 * info.shape[1])
        return info.shape

    def release(self, name: str, begin: int = 0, end: int | None = None) -> None:
        """Let go of the memory behind a tensor that was read, or behind a range of its bytes; views stay sound."""
        self._home[name].release(name, begin, end)

    @property
    def files(self) -> list[FileStamp]:
        """Every file that decides what a bundle of this folder holds: for the cache's key."""
        names = {file.path.name for file in self._home.values()} | {_INDEX, "tokenizer.model", *SIDE_FILES}
        stamps = []
        for name in sorted(names):
            path = self.folder / name
            if path.exists():
                status = path.stat()
                stamps.append(FileStamp(name, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino))
        return stamps

    def side_files(self) -> dict[str, bytes]:
        """The files beside the weights that exist, by name: config, generation config, tokenizer, chat template.

        A folder with ``tokenizer.model`` alone gets its ``tokenizer.json`` converted (the extra
        penstock[sentencepiece]); without the extra it is refused.
        """
        return read_folder_files(self.folder)
