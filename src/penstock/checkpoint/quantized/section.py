"""Find the settings of a folder that another tool quantized, in each place where tools write them.

config.json has them as ``quantization_config``, in ``text_config`` too, or as ``compression_config``.  AutoGPTQ writes
quantize_config.json, AutoAWQ quant_config.json, ModelOpt hf_quant_config.json.  vLLM reads all of these.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from penstock.checkpoint.side_files import read_small_file
from penstock.checkpoint.tensor_file import TensorInfo
from penstock.config import ConfigReader, show
from penstock.errors import InvalidFileError

__all__ = ["QUANTIZATION_FILES", "find_section", "packed_tensor", "stored_methods", "with_section"]

QUANTIZATION_FILES: Final = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
_KEY: Final = "quantization_config"
_METHODS: Final = {
    "gptq_marlin": "gptq", "awq_marlin": "awq", "compressed_tensors": "compressed-tensors", "modelopt_fp4": "modelopt",
}  # fmt: skip
"""Other names of the formats."""


def with_section(config: ConfigReader) -> ConfigReader:
    """Return the configuration with the section ``quantization_config``, wherever config.json has it."""
    values = dict(config.values)
    text = values.get("text_config")
    section, method = _written_section(values)
    if not section:  # an empty section says nothing
        values.pop(_KEY, None)
        return config if _KEY not in config.values else ConfigReader(values, config.file)
    if method:
        values.pop("compression_config")
    if isinstance(text, dict) and _KEY in text:
        values["text_config"] = {key: value for key, value in text.items() if key != _KEY}
    values[_KEY] = _with_method(section, method) if isinstance(section, dict) else section
    return ConfigReader(values, config.file)


def _written_section(values: Mapping[str, Any]) -> tuple[Any, str]:
    """Return the section of config.json, as it is written, and the format of sections with that key; or None and ""."""
    text = values.get("text_config")
    section = values.get(_KEY) or (text.get(_KEY) if isinstance(text, dict) else None)
    if not section and values.get("compression_config"):
        return values["compression_config"], "compressed-tensors"
    return section or None, ""


def find_section(folder: Path, config: ConfigReader, tensors: Mapping[str, TensorInfo]) -> ConfigReader:
    """Return the configuration with the section that a file of the folder has, if the weights are quantized.

    Raises InvalidFileError, which says where the section is expected, for quantized weights without one.
    """
    if config.has(_KEY):
        return config
    packed = packed_tensor(tensors)
    if packed is None:
        return config
    for name in QUANTIZATION_FILES:
        if (folder / name).exists():
            section = _with_method(*_read_section(name, read_small_file(folder / name)))
            return ConfigReader({**config.values, _KEY: section}, config.file)
    raise InvalidFileError(
        f"{folder}: tensor {show(packed)} is quantized, but the folder has no quantization settings: expected "
        f"{_KEY} in config.json, or one "
        f"of the files {', '.join(QUANTIZATION_FILES)}",
        param=_KEY,
    )


def packed_tensor(tensors: Mapping[str, TensorInfo]) -> str | None:
    """Return the name of a tensor that another tool quantized; None if there is none."""
    ends = (".qweight", ".weight_packed", ".weight_scale_2")
    packed = next((name for name in tensors if name.endswith(ends)), None)
    return packed or next((name for name, info in tensors.items() if info.dtype == "f8_e4m3"), None)


def stored_methods(files: Mapping[str, bytes]) -> list[str]:
    """Return the name of the format of quantized weights, and the one of the tool that wrote them if it differs.

    ``files``: config.json and, if the weights are quantized, those of ``QUANTIZATION_FILES`` that exist.  The list is
    empty if none has settings.
    """
    config = ConfigReader.parse(files["config.json"]).values if "config.json" in files else {}
    section, default = _written_section(config)
    for name in QUANTIZATION_FILES if section is None else ():
        if name in files and not section:
            section, default = _read_section(name, files[name])
    if not isinstance(section, dict):
        return []
    names = [_with_method(section, default).get("quant_method"), _named_method(section, default)]
    return list(dict.fromkeys(name for name in names if isinstance(name, str) and name))


def _read_section(name: str, data: bytes) -> tuple[dict[str, Any], str]:
    """Return the settings in a file of ``QUANTIZATION_FILES``, and the format of the tool that writes such files."""
    section = ConfigReader.parse(data, name).values
    section = section["quantization"] if isinstance(section.get("quantization"), dict) else section
    return section, {QUANTIZATION_FILES[1]: "awq", QUANTIZATION_FILES[2]: "modelopt"}.get(name, "gptq")


def _with_method(section: dict[str, Any], default: str) -> dict[str, Any]:
    """Return a section with the name of its format in the key ``quant_method``."""
    written = section.get("quant_method")
    method = _named_method(section, default)
    method = _METHODS.get(method, method)
    if method == "auto-round":
        packing = str(section.get("packing_format", "auto_round:auto_gptq"))
        method = next((known for known in ("gptq", "awq") if known in packing), method)
    if method == "modelopt" and str(section.get("quant_algo")).upper() == "FP8":
        method = "fp8"
    return section if method == written or not method else {**section, "quant_method": method}


def _named_method(section: Mapping[str, Any], default: str) -> str:
    written = section.get("quant_method")
    return written.lower() if isinstance(written, str) and written else _guess(section) or default


def _guess(section: Mapping[str, Any]) -> str:
    """Return the format of a section that does not name it, as its keys tell; "" if they do not."""
    if "w_bit" in section or "zero_point" in section:
        return "awq"
    if "config_groups" in section:
        return "compressed-tensors"
    if "quant_algo" in section:
        return "modelopt"
    return "gptq" if "bits" in section and "group_size" in section else ""
