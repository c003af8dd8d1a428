"""Converts between the forms of a model: folders, pickled weights, sharded folders, bundles (``penstock convert``)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from penstock.checkpoint.convert import Conversion, ConvertReport, convert_checkpoint
from penstock.checkpoint.folder import Checkpoint
from penstock.checkpoint.fused_layout import FUSED_TYPE
from penstock.checkpoint.own_layout import Arrangement, join_rows_of_tensors, split_into_parameters
from penstock.checkpoint.pickled import is_pickled, open_pickled
from penstock.checkpoint.sources import has_own_names
from penstock.config import OWN_NAMES, ConfigReader
from penstock.errors import FileAccessError, InvalidArgumentError, UnsupportedError
from penstock.file_kinds import is_bundle, is_gguf
from penstock.graph.unpack_bundle import unpack_bundle
from penstock.quant.folder import check_folder_name, private_folder
from penstock.runtime.build import build_in_child
from penstock.sharding.folder import is_sharded, kept_files
from penstock.sharding.write import merge_folder

__all__ = ["convert"]

_OF_PENSTOCK: Final = (OWN_NAMES, "quantization_config")
"""Entries of config.json that say that a folder has the parameters of a network."""


def convert(
    source: Path, out: Path, conversion: Conversion, progress: Callable[[int, int], None] | None = None
) -> ConvertReport:
    """Write ``out`` from ``source``.

    ``source``: a checkpoint folder with safetensors or pickled weights, a sharded folder, or a whole bundle.  ``out``:
    a new folder, a bundle if its name ends in ".psm", or a GGUF file if it ends in ".gguf".  Raises what the steps
    raise; errors name the field, the tensor or the file.
    """
    if not source.exists():
        raise FileAccessError(f"{source}: no such file or folder", param="source")
    if is_gguf(source):
        raise UnsupportedError(
            f"source: expected a checkpoint folder or a bundle, got a GGUF file. `penstock export {source} OUT.psm` "
            "makes a bundle of it; run, chat and serve take the file itself.",
            param="source",
        )
    suffix = out.suffix.lower()
    if suffix not in (".psm", ".gguf"):
        check_folder_name(out)
    home = out.parent
    if not home.is_dir():
        raise FileAccessError(f"{home}: no such folder", param="out")
    with private_folder(out) as temporary:
        with _opened(source, temporary) as checkpoint:
            if checkpoint.config.bool("linear_value_heads_tiled", False) and (
                suffix == ".gguf" or conversion.lora is not None or conversion.layout is not None
            ):
                raise UnsupportedError(
                    "source: expected value heads in the published order for a LoRA adapter, a layout or a GGUF file, "
                    "got a bundle of a GGUF file, which has another order. Use the published folder.",
                    param="source",
                )
            sides = kept_files(checkpoint.folder)
            if conversion.format is not None:
                return _write_compressed(checkpoint, out, conversion, sides, progress)
            if suffix == ".gguf":
                return _write_gguf(checkpoint, out, conversion, temporary, progress)
            target = temporary / "folder" if suffix == ".psm" else out
            arrangement = None if conversion.layout is None else _arrangement(conversion.layout, checkpoint)
            report = convert_checkpoint(checkpoint, target, conversion, sides, progress, arrangement)
        if target != out:
            build_in_child(target, out)
        return report


def _write_compressed(
    checkpoint: Checkpoint,
    out: Path,
    conversion: Conversion,
    side_files: Mapping[str, bytes],
    progress: Callable[[int, int], None] | None,
) -> ConvertReport:
    """Write a compressed-tensors folder."""
    for name in ("dtype", "layout", "lora", "max_file_mb"):
        if value := getattr(conversion, name):
            raise InvalidArgumentError(f"{name}: expected none for compressed-tensors, got {value}", param=name)
    if out.suffix.lower() in (".psm", ".gguf"):
        raise InvalidArgumentError(f"out: expected a folder for compressed-tensors, got {out}", param="out")
    if checkpoint.scheme is not None and _has_other_names(checkpoint):
        model_type = checkpoint.config.str("model_type")
        raise UnsupportedError(
            f"source: expected a model whose published tensors are its parameters for compressed-tensors, got one of "
            f"{model_type}, whose linears are fused, split or transposed here",
            param="source",
        )
    from penstock.checkpoint.quantized.compressed_out import write_compressed

    num_tensors = write_compressed(checkpoint, out, side_files, progress)
    return ConvertReport(num_tensors, (out / "model.safetensors").stat().st_size, 1, 0)


def _has_other_names(checkpoint: Checkpoint) -> bool:
    """Return True for a folder of parameters that differ from the published tensors."""
    from penstock.models.meta import construct_on_meta
    from penstock.models.sources import differs

    kept = {key: value for key, value in checkpoint.config.values.items() if key not in _OF_PENSTOCK}
    published = ConfigReader(kept, checkpoint.config.file)
    return differs(published, checkpoint.tensors, construct_on_meta(checkpoint.config).network)


def _write_gguf(
    checkpoint: Checkpoint,
    out: Path,
    conversion: Conversion,
    temporary: Path,
    progress: Callable[[int, int], None] | None,
) -> ConvertReport:
    """Write a GGUF file, which appears complete or not at all."""
    for name, value in (("layout", conversion.layout), ("max_file_mb", conversion.max_file_mb)):
        if value:
            raise InvalidArgumentError(f"{name}: expected none for a GGUF file, got {value}", param=name)
    if checkpoint.scheme is not None and conversion.dtype is not None:
        raise InvalidArgumentError(
            f"dtype: expected none for a folder quantized as {checkpoint.scheme}, whose integers stay, got "
            f"{conversion.dtype}",
            param="dtype",
        )
    from penstock.models.gguf_out import write_gguf

    folder, num_changed = checkpoint.folder, 0
    if conversion.lora is not None or is_pickled(folder):  # a GGUF file is written from the folder of a network
        folder = temporary / "folder"
        sides = kept_files(checkpoint.folder)
        num_changed = convert_checkpoint(
            checkpoint, folder, replace(conversion, dtype=None, imatrix=None), sides
        ).num_changed
    written = temporary / "model.gguf"
    kind = conversion.dtype or checkpoint.dtype
    num_tensors, note = write_gguf(folder, written, kind, progress or (lambda *_: None), conversion.imatrix)
    num_bytes = written.stat().st_size
    os.replace(written, out)
    return ConvertReport(num_tensors, num_bytes, 1, num_changed, note)


def _arrangement(layout: str, checkpoint: Checkpoint) -> Arrangement | None:
    """Return a layout of a network that declares where its parameters come from; None if ``fused_layout`` has it."""
    config, is_own = checkpoint.config, has_own_names(checkpoint.config)
    if checkpoint.scheme is not None or is_own != (layout == "fused") or config.values.get("model_type") == FUSED_TYPE:
        return None
    from penstock.models.meta import construct_on_meta
    from penstock.models.sources import differs, parameter_names, sources_of

    network = construct_on_meta(config).network
    names = parameter_names(network)
    if is_own:
        published = ConfigReader({k: v for k, v in config.values.items() if k != OWN_NAMES}, config.file)
        begins = [getattr(network, "tensor_prefix", ""), *(own for own, _ in getattr(network, "other_prefixes", ()))]
        return join_rows_of_tensors(config, checkpoint.tensors, names, sources_of(published, begins, network))
    if not differs(config, checkpoint.tensors, network):
        return None
    sources = sources_of(config, checkpoint.tensors, network)
    return split_into_parameters(config, checkpoint.tensors, names, sources)


@contextlib.contextmanager
def _opened(source: Path, temporary: Path) -> Iterator[Checkpoint]:
    whole = temporary / "source"
    if source.is_file() and is_bundle(source):
        unpack_bundle(source, whole)
        yield Checkpoint.open(whole)
    elif source.is_dir() and is_sharded(source):
        merge_folder(source, whole)
        yield Checkpoint.open(whole)
    elif is_pickled(source):
        whole.mkdir()
        yield open_pickled(source, whole)
    else:
        yield Checkpoint.open(source)
