"""Quantize a network step by step, under the names of MindSpore Golden Stick: apply, convert, save.

    network = penstock.load_network("model")
    ptq = PTQ(PTQConfig(weight_dtype="int4", act_dtype="int8", precision_recovery="gptq"))
    ptq.apply(network, datasets="texts.jsonl")
    ptq.convert(network)
    ptq.save("model-w4a8")

The folder opens by itself.  To fill a network of PyTorch with it, without repeating the configuration:

    ptq = PTQ(PTQConfig(mode=PTQMode.DEPLOY))
    ptq.load_checkpoint("model-w4a8", network)
"""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.calibration.arguments import MethodArguments
from penstock.calibration.quantize import DataOptions, check_data, quantize_with_data
from penstock.calibration.rotate import rotate_checkpoint
from penstock.calibration.texts import DEFAULT_TOKENS
from penstock.checkpoint.folder import Checkpoint
from penstock.checkpoint.quantize import plan_weights, quantize_checkpoint
from penstock.config import is_integer
from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.extras import without_torch
from penstock.models.mapped import open_mapped
from penstock.quant.ptq_config import PTQConfig, PTQMode
from penstock.quant.scheme import quantizing_scheme
from penstock.validation import refusal, wrong_type

if TYPE_CHECKING:
    from penstock.nn.base import nn
    from penstock.quant.round_to_nearest import RoundToNearest

__all__ = ["PTQ"]


class PTQ:
    """Quantizes the linear layers of a network by the methods of a PTQConfig."""

    def __init__(self, config: PTQConfig) -> None:
        if not isinstance(config, PTQConfig):
            raise wrong_type("config", "a PTQConfig", config)
        try:
            from penstock.quant.round_to_nearest import RoundToNearest
        except ModuleNotFoundError as error:
            raise without_torch("penstock.PTQ", error) from None
        self.config = config
        self._algorithm: RoundToNearest = RoundToNearest(config)

    def apply(self, network: nn.Module, network_helper: object = None, datasets: Any = None) -> nn.Module:
        """Set every linear weight to values on the grid of the scheme, in place; the network computes in floats.

        ``datasets``: the texts to calibrate with: a file as of ``penstock quantize --calibration``, or strings, lists
        of token ids, messages, or objects with ``input_ids``, ``text`` or ``messages``.  None: texts that the network
        samples.  Smoothing also changes norms, so that the network computes the same.  ``network_helper`` is not used:
        the layers of a network describe themselves.

        In the mode DEPLOY nothing changes; ``load_checkpoint`` sets the weights.  Raises InvalidArgumentError for a
        network that ``load_network`` did not read, if a method needs data.
        """
        if network_helper is not None:
            warnings.warn("network_helper is not used: the layers of a network describe themselves", stacklevel=2)
        needs_data = self.config.steps != ("rtn",) and self.config.mode is PTQMode.QUANTIZE
        if datasets is not None and not needs_data:
            raise InvalidArgumentError(
                f"datasets: expected none for {self.config.method} in the mode {self.config.mode.value}, which use no "
                "data",
                param="datasets",
            )
        if self.config.mode is PTQMode.DEPLOY:
            return network
        rotation = self.config.algo_args.get("rotate")
        if needs_data or any(name in self.config.algo_args for name in ("head", "exportable")):
            return self._apply_in_folder(network, datasets, rotation)
        if rotation is not None:
            _rotate(network, rotation)
        return self._algorithm.round(network)

    def _apply_in_folder(self, network: nn.Module, datasets: Any, rotation: str | None) -> nn.Module:
        """Quantize as the command does; the network itself changes only when nothing can fail any more."""
        from penstock.models.loader import read_quantized, save_network

        scheme, head = self.config.scheme, self.config.algo_args.get("head")
        row = quantizing_scheme(scheme, self.config.algo_args.get("exportable", False))
        with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
            source, out = Path(folder) / "source", Path(folder) / "out"
            save_network(network, source)
            options = None if self.config.steps == ("rtn",) else self._data_options(_file_of(datasets, Path(folder)))
            blacklist = tuple(self.config.opname_blacklist)
            if options is None:
                plan_weights(open_mapped(source), row, blacklist, head)
            else:
                check_data(open_mapped(source), out, scheme, options)
            if rotation is not None:
                source = _rotated_folder(source, rotation)
            if options is None:
                rows = open_mapped(source)
                quantize_checkpoint(rows, out, row, blacklist=blacklist, head=head)
                self._algorithm.recipe = {"exportable": True} if row.exportable else None
            else:
                self._algorithm.recipe = quantize_with_data(source, out, scheme, options).recipe
            quantized = Checkpoint.open(out)
            return self._algorithm.take(network, read_quantized(quantized, network), quantized.mixed_schemes)

    def _data_options(self, texts: Path | None) -> DataOptions:
        arguments = dict(self.config.algo_args)
        return DataOptions(
            self.config.method,
            texts,
            arguments.get("calibration_tokens", DEFAULT_TOKENS),
            arguments.get("threads", 0),
            arguments=MethodArguments.of(arguments),
            blacklist=tuple(self.config.opname_blacklist),
            smooth_keys=arguments.get("smooth_keys", False),
            head=arguments.get("head"),
            exportable=arguments.get("exportable", False),
        )

    def convert(self, network: nn.Module) -> nn.Module:
        """Replace the weights by packed integers, in place.  ``network`` is the one that ``apply`` was called with."""
        if self.config.mode is PTQMode.DEPLOY:
            return network
        return self._algorithm.convert(network)

    def save(self, path: Path | str, side_files: Mapping[str, bytes] | None = None) -> None:
        """Write a folder that opens wherever a checkpoint does; it has the scheme and the type of keys and values.

        The arguments are those of ``RoundToNearest.save``.
        """
        self._algorithm.save(path, side_files)

    def load_checkpoint(self, path: Path | str, network: nn.Module) -> nn.Module:
        """Set the weights of a network with floats to the integers of a quantized folder, in place.

        The folder says how it is quantized; of this configuration only the mode is read, which is DEPLOY.  Raises
        InvalidArgumentError for a folder that is not quantized, and InvalidFileError for one of another network.
        """
        from penstock.models.loader import read_quantized
        from penstock.quant.round_to_nearest import RoundToNearest, RoundToNearestConfig

        if self.config.mode is not PTQMode.DEPLOY:
            raise refusal("mode", "PTQMode.DEPLOY, to load a quantized folder", self.config.mode)
        checkpoint = Checkpoint.open(path)
        if checkpoint.scheme is None:
            raise InvalidArgumentError(
                f"path: expected a folder that Penstock quantized, got {path} with float weights", param="path"
            )
        algorithm = RoundToNearest(RoundToNearestConfig(checkpoint.scheme))
        algorithm.take(network, read_quantized(checkpoint, network), checkpoint.mixed_schemes)
        return algorithm.convert(network)


def _rotate(network: nn.Module, rotation: str) -> None:
    """Fold a rotation into the weights of a network, in place; errors of ``rotate_checkpoint``."""
    from penstock.models.loader import read_quantized, save_network

    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        source = Path(folder) / "source"
        save_network(network, source)
        read_quantized(Checkpoint.open(_rotated_folder(source, rotation)), network)


def _rotated_folder(source: Path, rotation: str) -> Path:
    """Write a folder of a network with a rotation in its weights; errors of ``rotate_checkpoint``."""
    out = source.with_name(f"{source.name}-rotated")
    rotate_checkpoint(source, out, rotation)
    if len(Checkpoint.open(out).tensors) > len(Checkpoint.open(source).tensors):
        raise UnsupportedError(
            f"algo_args.rotate: expected r2 for a network whose head has the weight of its embedding, got "
            f"{rotation}, which gives the head a weight of its own; use penstock quantize --rotate {rotation}",
            param="algo_args.rotate",
        )
    return out


def _file_of(datasets: Any, folder: Path) -> Path | None:
    """Return the file of calibration texts; items in memory are written to one."""
    if datasets is None or isinstance(datasets, (str, Path)):
        return None if datasets is None else Path(datasets)
    if isinstance(datasets, Mapping) or not isinstance(datasets, Iterable):
        raise refusal("datasets", "a file, or texts and lists of token ids", datasets)
    path = folder / "datasets.jsonl"
    lines: list[str] = []
    for number, item in enumerate(datasets):
        param = f"datasets[{number}]"
        try:
            lines += map(json.dumps, _lines(item, param))
        except TypeError:
            raise refusal(param, "a text, messages, or a list of token ids", item) from None
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def _lines(item: Any, param: str) -> list[Any]:
    """Return the values of an item as lines of a file; a batch of token ids has several."""
    item = _plain(item)
    if isinstance(item, Mapping):
        values = {str(key): _plain(value) for key, value in item.items()}
        if "input_ids" not in values:
            return [values]
        item = values["input_ids"]
    if isinstance(item, str):
        return [item]
    if not isinstance(item, (list, tuple)) or not item:
        raise refusal(param, "a text, messages, or a list of token ids", item)
    if all(isinstance(value, Mapping) for value in item):
        return [list(item)]
    rows = [_plain(value) for value in item]
    if all(is_integer(value, 0, 2**31 - 1) for value in rows):
        return [{"input_ids": list(map(int, rows))}]
    return [line for row in rows for line in _lines(row, param)]


def _plain(value: Any) -> Any:
    """Return an array of any library as lists."""
    convert = getattr(value, "tolist", None)
    return convert() if callable(convert) else value
