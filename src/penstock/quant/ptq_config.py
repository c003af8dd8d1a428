"""The configuration of quantization under the names of MindSpore Golden Stick, and what each value means here.

PTQConfig(weight_dtype="int4", act_dtype="int8", precision_recovery="gptq").scheme == "w4a8"
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

from penstock.config import is_number
from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.quant.hadamard import ROTATIONS
from penstock.quant.mixed_schemes import HEAD_BLOCKS
from penstock.quant.scheme import GROUP_LEN
from penstock.validation import nearest, refusal, strings

__all__ = ["BackendTarget", "PTQConfig", "PTQMode", "check_blacklist", "is_listed"]


class PTQMode(Enum):
    """The purpose of a configuration: to quantize a network, or to fill one with the weights of a quantized folder."""

    QUANTIZE = "quantize"
    DEPLOY = "deploy"


class BackendTarget(Enum):
    """The device that runs the result: a processor.  ``NONE`` is the same; PTQConfig refuses ``ASCEND``."""

    NONE = "none"
    CPU = "cpu"
    ASCEND = "ascend"


_EXPERT: Final = re.compile(r"\.experts\.\d+\.(?:(?:gate|up)_proj|w1|w3)?")
_UNSET: Final[Any] = object()
_SCHEMES: Final = {
    ("int8", None): "w8a16",
    ("int8", "int8"): "w8a8",
    ("int4", None): "w4a16",
    ("int4", "int8"): "w4a8",
}
_DTYPE_NAMES: Final = {"qint4x2": "int4", "none": None}
_SUPPRESSIONS: Final = {"none": "", "smooth": "smooth", "awq": "awq"}
_RECOVERIES: Final = {"none": "", "gptq": "gptq", "imatrix": "imatrix"}
_ARGUMENTS: Final = {
    "alpha": ("smooth",),
    "smooth_alpha": ("awq",),
    "damp_percent": ("gptq",),
    "desc_act": ("gptq",),
    "static_groups": ("gptq",),
    "block_size": ("gptq",),
    "calibration_tokens": ("smooth", "awq", "gptq", "imatrix"),
    "threads": ("smooth", "awq", "gptq", "imatrix"),
    "smooth_keys": ("smooth", "awq", "gptq", "imatrix"),
    "rotate": ("rtn", "smooth", "awq", "gptq", "imatrix"),
    "head": ("rtn", "smooth", "awq", "gptq", "imatrix"),
    "exportable": ("rtn", "smooth", "awq", "gptq", "imatrix"),
}
"""The arguments of algorithms, and the methods that read each."""
_FIXED: Final = {"desc_act": False, "static_groups": False}
"""Arguments with one value only: lines are fitted when their group is reached, in the order of the columns."""


@dataclass(frozen=True)
class PTQConfig:
    """The weights, activations and cache to quantize, and the method.

    ``mode``: PTQMode.QUANTIZE or DEPLOY.  ``backend``: BackendTarget.CPU.
    ``weight_dtype``: "int8" or "int4" ("qint4x2"); ``act_dtype``: "int8", or None for 16-bit integers;
    ``kvcache_dtype``: "int8", "int4", or None for the default of the scheme.  A type may be a string, or that of NumPy,
    PyTorch or MindSpore.  Golden Stick's ``weight_quant_dtype``, ``act_quant_dtype`` and ``kvcache_quant_dtype``
    are the same.
    ``opname_blacklist``: a layer whose path contains one of these strings keeps its floats.
    ``outliers_suppression``: "none", "smooth" or "awq".  ``precision_recovery``: "none", "gptq", or "imatrix" for
    rounding that weights the columns of a matrix by their inputs.
    ``algo_args``: an object or a mapping with ``alpha`` (smooth), ``smooth_alpha`` (awq: the grid), ``damp_percent``
    (gptq), ``calibration_tokens``, ``threads``, ``smooth_keys`` (a bool), ``rotate`` ("r1", "r2" or "r1r2"),
    ``head`` ("q6_k") and ``exportable`` (a bool), as the options of ``penstock quantize`` with these names.
    The granularities are None, or those of the scheme: weights per channel (int8) or per group of 32 (int4),
    activations per token, keys and values per token.

    Raises InvalidArgumentError or UnsupportedError, which names the field, for values that would compute something
    else.
    """

    mode: Any = PTQMode.QUANTIZE
    backend: Any = BackendTarget.CPU
    weight_dtype: Any = _UNSET
    act_dtype: Any = _UNSET
    kvcache_dtype: Any = _UNSET
    algo_args: Any = field(default_factory=dict)
    opname_blacklist: Sequence[str] = ()
    outliers_suppression: Any = None
    precision_recovery: Any = None
    weight_quant_granularity: Any = None
    act_quant_granularity: Any = None
    kvcache_quant_granularity: Any = None
    group_size: int = 0
    weight_quant_dtype: Any = _UNSET
    act_quant_dtype: Any = _UNSET
    kvcache_quant_dtype: Any = _UNSET

    def __post_init__(self) -> None:
        """Replace each value by its plain form, and refuse those that cannot be honoured."""
        self._set("mode", _member(PTQMode, "mode", self.mode))
        self._set("backend", _backend(self.backend))
        for name, default in (("weight", "int8"), ("act", None), ("kvcache", None)):
            dtype = self._dtype(f"{name}_dtype", f"{name}_quant_dtype", default)
            self._set(f"{name}_dtype", dtype)
            self._set(f"{name}_quant_dtype", dtype)
        self._set("opname_blacklist", strings("opname_blacklist", _listed(self.opname_blacklist), 1024))
        for name, known in (("outliers_suppression", _SUPPRESSIONS), ("precision_recovery", _RECOVERIES)):
            self._set(name, _choice(name, getattr(self, name), known))
        self._check_types()
        self._check_granularity()
        self._set("algo_args", self._arguments())

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _dtype(self, name: str, other: str, default: str | None) -> str | None:
        values = {key: getattr(self, key) for key in (name, other) if getattr(self, key) is not _UNSET}
        dtypes = {key: _dtype_name(key, value) for key, value in values.items()}
        if len(set(dtypes.values())) > 1:
            raise refusal(other, f"the value of {name}, {dtypes[name]}", dtypes[other])
        return next(iter(dtypes.values()), default)

    def _check_types(self) -> None:
        if self.weight_dtype is None:
            found = "None; pass kv_cache when you open the model" if self.kvcache_dtype else "None"
            raise UnsupportedError(f"weight_dtype: expected int8 or int4, got {found}", param="weight_dtype")
        both = ("int8", "int4")
        for name, known in (("weight_dtype", both), ("act_dtype", ("int8",)), ("kvcache_dtype", both)):
            value = getattr(self, name)
            if value is not None and value not in known:
                raise UnsupportedError(f"{name}: expected {' or '.join(known)}, got {value}", param=name)

    def _check_granularity(self) -> None:
        of_weights, length = ("per_channel", 0) if self.weight_dtype == "int8" else ("per_group", GROUP_LEN)
        for name, expected, is_used in (
            ("weight_quant_granularity", of_weights, True),
            ("act_quant_granularity", "per_token", self.act_dtype is not None),
            ("kvcache_quant_granularity", "per_token", self.kvcache_dtype is not None),
        ):
            value = _word(getattr(self, name))
            if is_used and value not in (None, expected):
                raise UnsupportedError(f"{name}: expected {expected}, got {value}", param=name)
            self._set(name, expected if is_used else None)
        if isinstance(self.group_size, bool) or self.group_size not in (0, length):
            raise UnsupportedError(
                f"group_size: expected {length} for {self.weight_dtype} weights, got {self.group_size!r:.40}",
                param="group_size",
            )
        self._set("group_size", length)

    def _arguments(self) -> dict[str, Any]:
        """Return the arguments that a method of this configuration reads."""
        given = {} if self.algo_args is None else self.algo_args
        fields = given if isinstance(given, Mapping) else getattr(given, "__dict__", None)
        if isinstance(given, type) or fields is None or not all(isinstance(name, str) for name in fields):
            raise refusal("algo_args", "an object or a mapping with names", given)
        values = dict(fields)
        for name, value in values.items():
            param = f"algo_args.{name}"
            if name not in _ARGUMENTS:
                hint = nearest(name, _ARGUMENTS)
                raise InvalidArgumentError(
                    f"{param}: expected one of {', '.join(_ARGUMENTS)}, got {name!r:.60}"
                    f"{f'; did you mean {hint}?' if hint else ''}",
                    param=param,
                )
            if not set(_ARGUMENTS[name]) & set(self.steps):
                raise InvalidArgumentError(
                    f"{param}: expected a configuration with {' or '.join(_ARGUMENTS[name])}, got {self.method}",
                    param=param,
                )
            _check_argument(param, name, value)
        if "smooth_alpha" in values:
            values["smooth_alpha"] = tuple(map(float, values["smooth_alpha"]))
        return values

    @property
    def scheme(self) -> str:
        """The scheme of the result: w8a16, w8a8, w4a16 or w4a8."""
        return _SCHEMES[self.weight_dtype, self.act_dtype]

    @property
    def steps(self) -> tuple[str, ...]:
        """The methods that are applied one after another; rtn by itself needs no data."""
        steps = filter(None, (_SUPPRESSIONS[self.outliers_suppression], _RECOVERIES[self.precision_recovery]))
        return tuple(steps) or ("rtn",)

    @property
    def method(self) -> str:
        """The value of ``penstock quantize --method`` with the same meaning."""
        return "+".join(self.steps)


def is_listed(name: str, blacklist: Iterable[str]) -> bool:
    """Return True if the path of a layer, or the name of its weight, contains a string of the list."""
    return any(part in name for part in blacklist)


def check_blacklist(names: Iterable[str], blacklist: Sequence[str]) -> None:
    """Refuse a list that has only some of the experts of a layer: their matrix has one scheme.  InvalidArgumentError.

    A string that is in none of the names is a warning.
    """
    names, kept = list(names), {name for name in names if is_listed(name, blacklist)}
    by_matrix: dict[str, list[str]] = {}
    for name in names:
        if _EXPERT.search(name):
            by_matrix.setdefault(_EXPERT.sub(".experts.*.", name), []).append(name)
    for members in by_matrix.values():
        if kept & set(members) and not kept >= set(members):
            other = next(name for name in members if name not in kept)
            raise InvalidArgumentError(
                f"opname_blacklist: expected all experts of a layer or none, got {(kept & set(members)).pop()} without "
                f"{other}",
                param="opname_blacklist",
            )
    for part in blacklist:
        if not any(part in name for name in names):
            warnings.warn(f"opname_blacklist: no linear layer has {part!r:.80} in its name", stacklevel=3)


def _word(value: object) -> str | None:
    """Return the plain name of a choice: a string, or a member of an enumeration."""
    if value is None:
        return None
    return (value.name if isinstance(value, Enum) else str(value)).lower()


def _member(kind: type[Enum], name: str, value: object) -> Enum:
    known = {member.name.lower(): member for member in kind if member is not BackendTarget.ASCEND}
    word = _word(value)
    if word not in known:
        raise refusal(name, " or ".join(known), value)
    return known[str(word)]


def _backend(value: object) -> Enum:
    if _word(value) == "ascend":
        raise UnsupportedError(
            "backend: expected cpu, got ascend. Penstock runs on processors; use BackendTarget.CPU.", param="backend"
        )
    return _member(BackendTarget, "backend", value)


def _listed(value: object) -> object:
    return list(value) if isinstance(value, (set, frozenset)) else value


def _dtype_name(name: str, value: object) -> str | None:
    """Return the name of a type: a string, None, or a type of NumPy, PyTorch or MindSpore."""
    if value is None:
        return None
    text = value if isinstance(value, str) else getattr(value, "__name__", None) or str(value)
    word = text.lower().rpartition(".")[2]
    if not word.isidentifier():
        raise refusal(name, "the name of a type such as int8", value)
    return _DTYPE_NAMES.get(word, word)


def _choice(name: str, value: object, known: Mapping[str, str]) -> str:
    word = _word(value) or "none"
    if word not in known:
        raise UnsupportedError(f"{name}: expected one of {', '.join(known)}, got {word:.60}", param=name)
    return word


def _check_argument(param: str, name: str, value: object) -> None:
    if name in _FIXED and value is not _FIXED[name]:
        raise UnsupportedError(f"{param}: expected {_FIXED[name]}, got {value!r:.40}", param=param)
    if name == "rotate" and value not in ROTATIONS:
        raise refusal(param, f"one of {', '.join(ROTATIONS)}", value)
    if name == "head" and value != HEAD_BLOCKS:
        raise refusal(param, HEAD_BLOCKS, value)
    if name in ("smooth_keys", "exportable") and not isinstance(value, bool):
        raise refusal(param, "a bool", value)
    if name == "alpha" and not is_number(value, 0, 1):
        raise refusal(param, "a number from 0 to 1", value)
    if name == "damp_percent" and not (is_number(value, 0, 1) and value):
        raise refusal(param, "a number above 0 and at most 1", value)
    if name == "block_size" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise refusal(param, "an integer of at least 1", value)
    if name == "smooth_alpha" and not (
        isinstance(value, (list, tuple)) and value and all(is_number(item, 0, 1) for item in value)
    ):
        raise refusal(param, "a list of numbers from 0 to 1", value)
