"""PTQConfig: the names of the documents, what they mean here, and values that are refused by name."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import pytest

from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.quant.ptq_config import BackendTarget, PTQConfig, PTQMode
from tests.support.errors import raises

AWQ: dict[str, Any] = {"outliers_suppression": "awq"}
GPTQ: dict[str, Any] = {"precision_recovery": "gptq"}


class Suppression(Enum):
    SMOOTH = 1


@dataclass
class GptqArguments:
    damp_percent: float = 0.1
    desc_act: bool = False
    static_groups: bool = False
    block_size: int = 64


class MindSporeType:
    def __str__(self) -> str:
        return "Int8"


@pytest.mark.parametrize(
    ("values", "scheme", "method"),
    [
        ({}, "w8a16", "rtn"),
        ({"mode": "deploy", "backend": "NONE"}, "w8a16", "rtn"),
        ({"weight_quant_dtype": MindSporeType()}, "w8a16", "rtn"),
        ({"weight_dtype": np.int8, "act_dtype": np.dtype("int8")}, "w8a8", "rtn"),
        ({"weight_dtype": "qint4x2", "weight_quant_granularity": "PER_GROUP", "group_size": 32}, "w4a16", "rtn"),
        ({"weight_dtype": "int4", "act_quant_dtype": "int8", "act_quant_granularity": "per_token"}, "w4a8", "rtn"),
        ({"weight_dtype": "int4", "weight_quant_dtype": "qint4x2", "kvcache_dtype": "int8"}, "w4a16", "rtn"),
        (
            {"weight_dtype": "int8", "kvcache_quant_dtype": "int4", "kvcache_quant_granularity": "per_token"},
            "w8a16",
            "rtn",
        ),
        ({"outliers_suppression": Suppression.SMOOTH, "algo_args": {"alpha": 0.8}}, "w8a16", "smooth"),
        ({"outliers_suppression": "AWQ", "algo_args": {"smooth_alpha": [0, 1]}}, "w8a16", "awq"),
        ({"precision_recovery": "gptq", "algo_args": GptqArguments()}, "w8a16", "gptq"),
        ({"outliers_suppression": "awq", "precision_recovery": "imatrix"}, "w8a16", "awq+imatrix"),
        ({"act_quant_granularity": "per_tensor", "kvcache_quant_granularity": "per_channel"}, "w8a16", "rtn"),
    ],
)
def test_configurations_name_a_scheme_and_a_method(values: dict[str, Any], scheme: str, method: str) -> None:
    config = PTQConfig(**values)
    assert (config.scheme, config.method) == (scheme, method)
    assert config.weight_quant_dtype == config.weight_dtype


@pytest.mark.parametrize(
    ("values", "error", "param"),
    [
        ({"mode": "train"}, InvalidArgumentError, "mode"),
        ({"backend": "ascend"}, UnsupportedError, "backend"),
        ({"backend": BackendTarget.ASCEND}, UnsupportedError, "backend"),
        ({"backend": 3}, InvalidArgumentError, "backend"),
        ({"weight_dtype": None}, UnsupportedError, "weight_dtype"),
        ({"weight_dtype": None, "kvcache_dtype": "int8"}, UnsupportedError, "weight_dtype"),
        ({"weight_dtype": "float16"}, UnsupportedError, "weight_dtype"),
        ({"weight_dtype": "int4", "weight_quant_dtype": "int8"}, InvalidArgumentError, "weight_quant_dtype"),
        ({"act_dtype": "int4"}, UnsupportedError, "act_dtype"),
        ({"kvcache_dtype": "fp8"}, UnsupportedError, "kvcache_dtype"),
        ({"outliers_suppression": "outlier_suppression_plus"}, UnsupportedError, "outliers_suppression"),
        ({"precision_recovery": "omniquant"}, UnsupportedError, "precision_recovery"),
        ({"weight_quant_granularity": "per_group"}, UnsupportedError, "weight_quant_granularity"),
        ({"act_dtype": "int8", "act_quant_granularity": "per_tensor"}, UnsupportedError, "act_quant_granularity"),
        (
            {"kvcache_dtype": "int8", "kvcache_quant_granularity": "per_channel"},
            UnsupportedError,
            "kvcache_quant_granularity",
        ),
        ({"weight_dtype": "int4", "group_size": 128}, UnsupportedError, "group_size"),
        ({"group_size": 64}, UnsupportedError, "group_size"),
        ({"opname_blacklist": [3]}, InvalidArgumentError, "opname_blacklist"),
        ({"algo_args": {"alpha": 0.5}}, InvalidArgumentError, "algo_args.alpha"),
        ({"algo_args": {"alfa": 0.5}}, InvalidArgumentError, "algo_args.alfa"),
        ({"algo_args": 3}, InvalidArgumentError, "algo_args"),
        ({"algo_args": {"rotate": "r3"}}, InvalidArgumentError, "algo_args.rotate"),
        ({"algo_args": {"rotation": "r1"}}, InvalidArgumentError, "algo_args.rotation"),
        ({"algo_args": {"exportable": 1}}, InvalidArgumentError, "algo_args.exportable"),
        ({"algo_args": {"smooth_keys": True}}, InvalidArgumentError, "algo_args.smooth_keys"),
        (GPTQ | {"algo_args": {"smooth_keys": 1}}, InvalidArgumentError, "algo_args.smooth_keys"),
        ({"outliers_suppression": "smooth", "algo_args": {"alpha": 2}}, InvalidArgumentError, "algo_args.alpha"),
        (AWQ | {"algo_args": {"smooth_alpha": 3}}, InvalidArgumentError, "algo_args.smooth_alpha"),
        (GPTQ | {"algo_args": {"desc_act": True}}, UnsupportedError, "algo_args.desc_act"),
        (GPTQ | {"algo_args": {"damp_percent": 0}}, InvalidArgumentError, "algo_args.damp_percent"),
    ],
)  # fmt: skip
def test_other_values_are_refused_by_name(values: dict[str, Any], error: type[Exception], param: str) -> None:
    with raises(error, param=param):
        PTQConfig(**values)


def test_modes_and_backends_are_those_of_the_documents() -> None:
    assert PTQConfig(mode=PTQMode.DEPLOY).mode is PTQMode.DEPLOY
    assert PTQConfig(backend=BackendTarget.CPU).backend is BackendTarget.CPU
