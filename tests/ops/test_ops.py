"""Every op of the table: its kernel against its reference, its registration, and its refusals."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.core import layouts
from penstock.errors import InvalidArgumentError
from penstock.nn.packing import pack_matrix
from penstock.ops import reference
from penstock.ops.eager import ops
from penstock.ops.schema import parse_arguments
from penstock.ops.table import OPS, Op
from tests.ops.cases import CASES, Case, int32, randn
from tests.support.errors import raises
from tests.support.marks import mostly_long

BY_NAME = {op.name: op for op in OPS}


def outputs_of(result: Any) -> tuple[Tensor, ...]:
    return () if result is None else result if isinstance(result, tuple) else (result,)


def copies(case: Case) -> tuple[Tensor | None, ...]:
    """States are written in place: each run gets its own."""
    return tuple(t.clone() if t is not None and t.is_contiguous() else t for t in case.tensors)


def errors(found: Tensor, expected: Tensor) -> float:
    """Largest difference of a row over that row's largest expected value: the measure of the table's tolerance."""
    if not found.is_floating_point():
        return float((found != expected).sum())
    difference = (found.double() - expected.double()).abs().flatten(1)
    return float((difference.amax(1) / expected.double().abs().flatten(1).amax(1).clamp(min=1e-30)).max())


def test_every_op_has_reference_and_cases() -> None:
    assert set(CASES) == set(BY_NAME)
    for op in OPS:
        names = list(inspect.signature(getattr(reference, op.name)).parameters)
        wanted = [argument.name for argument in parse_arguments(op.schema)]
        assert names == wanted or names == [*[n for n in wanted if n in names], "attrs"], op.name


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_kernel_matches_reference(op: Op) -> None:
    for case in CASES[op.name]():
        native_tensors, reference_tensors = copies(case), copies(case)
        found = outputs_of(getattr(ops, op.name)(*native_tensors, **case.attrs))
        expected = outputs_of(getattr(reference, op.name)(*reference_tensors, **case.attrs))
        assert len(found) == len(expected)
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.shape == theirs.shape, case.name
            assert ours.dtype == theirs.dtype, case.name
            if ours.numel():
                assert errors(ours, theirs) <= (case.tolerance or op.tolerance), case.name
        for ours, theirs in zip(native_tensors, reference_tensors, strict=True):
            if ours is not None and "(a!)" in op.schema and op.tolerance:
                assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-6, equal_nan=True), case.name
            elif ours is not None and "(a!)" in op.schema:
                assert ours.reshape(-1).view(torch.uint8).equal(theirs.reshape(-1).view(torch.uint8)), case.name


@pytest.mark.parametrize("backend", mostly_long(["0", "1"], "0"), ids=["native", "reference"])
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_registration_passes_opcheck(op: Op, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Schema, fake outputs, strides and aliases: what capture relies on."""
    monkeypatch.setenv("PENSTOCK_REFERENCE", backend)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    for case in list(CASES[op.name]())[:12]:
        torch.library.opcheck(getattr(ops, op.name).default, copies(case), case.attrs, test_utils=tests)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_bad_shapes_are_refused_by_name(op: Op) -> None:
    """One dimension too many in the first argument, on real and on meta tensors."""
    case = next(CASES[op.name]())
    for device in ("cpu", "meta"):
        tensors = [None if t is None else t.to(device) for t in case.tensors]
        tensors[0] = tensors[0].expand(1, 1, 1, *tensors[0].shape)
        with pytest.raises(InvalidArgumentError, match=rf"\[{op.name}\] .*expected .*got"):
            getattr(ops, op.name)(*tensors, **case.attrs)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_bad_dtypes_are_refused_by_name(op: Op) -> None:
    case = next(CASES[op.name]())
    tensors = list(case.tensors)
    tensors[0] = tensors[0].double()
    with pytest.raises(InvalidArgumentError, match=rf"\[{op.name}\] .*expected .*float64"):
        getattr(ops, op.name)(*tensors, **case.attrs)


BAD = {
    "linear-scheme": ("linear", {"scheme": "w3a8"}),
    "linear-out_features": ("linear", {"out_features": 0}),
    "rms_norm-eps": ("rms_norm", {"eps": -1.0}),
    "kv_append-group": ("kv_append", {"group": 2}),
    "attention-group": ("attention", {"group": -1}),
    "attention-window": ("attention", {"window": -1}),
    "attention-softcap": ("attention", {"softcap": -1.0}),
    "short_conv-group": ("short_conv", {"group": 2}),
    "short_conv-window": ("short_conv", {"window": 0}),
    "short_conv-weight": ("short_conv", {"window": 2}),
    "gated_delta-group": ("gated_delta", {"group": 2}),
    "gated_delta-key_heads": ("gated_delta", {"key_heads": 0}),
    "gated_delta-head_dim": ("gated_delta", {"head_dim": 0}),
    "gated_delta_tiled-group": ("gated_delta_tiled", {"group": 2}),
    "gated_delta_tiled-key_heads": ("gated_delta_tiled", {"key_heads": 0}),
    "gated_delta_tiled-head_dim": ("gated_delta_tiled", {"head_dim": 0}),
    "ssm_scan-group": ("ssm_scan", {"group": 2}),
    "ssm_scan-groups": ("ssm_scan", {"groups": 0}),
    "ssm_scan-blocks": ("ssm_scan", {"blocks": 0}),
    "ssm_scan-state_dim": ("ssm_scan", {"state_dim": 0}),
    "ssm_scan-dt_min": ("ssm_scan", {"dt_min": 4e38}),
    "ssm_scan-dt_max": ("ssm_scan", {"dt_max": -1.0}),
    "latent_append-group": ("latent_append", {"group": 2}),
    "latent_attention-window": ("latent_attention", {"window": -1}),
    "latent_attention-softcap": ("latent_attention", {"softcap": -1.0}),
    "head_linear-scheme": ("head_linear", {"scheme": "w3a8"}),
    "head_linear-num_heads": ("head_linear", {"num_heads": 3}),
    "all_gather_rounded-bits": ("all_gather_rounded", {"bits": 4}),
    "gelu-approximate": ("gelu", {"approximate": "sigmoid"}),
    "scale-factor": ("scale", {"factor": 1e300}),
    "softcap-cap": ("softcap", {"cap": 0.0}),
    "clamp-limit": ("clamp", {"limit": 0.0}),
    "topk-k": ("topk", {"k": 2000}),
    "route-k": ("route", {"k": 2}),
    "route-score": ("route", {"score": "relu"}),
    "route-groups": ("route", {"groups": 2}),
    "route-kept_groups": ("route", {"kept_groups": 2}),
    "route-group_rule": ("route", {"group_rule": "mean"}),
    "expert_linear-scheme": ("expert_linear", {"scheme": "w3a8"}),
    "expert_linear-num_experts": ("expert_linear", {"num_experts": 0}),
    "sink_attention-window": ("sink_attention", {"window": -1}),
    "relative_attention-keys": ("relative_attention", {"keys": "rest"}),
    "relative_attention-window": ("relative_attention", {"window": -1}),
    "disentangled_attention-causal": ("disentangled_attention", {"causal": True}),
    "disentangled_attention-softcap": ("disentangled_attention", {"softcap": 2.0}),
    "prefix_lengths-group": ("prefix_lengths", {"group": 2}),
    "prefix_lengths-token": ("prefix_lengths", {"token": -1}),
    "clamped_swiglu-limit": ("clamped_swiglu", {"limit": 0.0}),
    "clamped_swiglu-alpha": ("clamped_swiglu", {"alpha": 1e300}),
    "match_rms-floor": ("match_rms", {"floor": 0.0}),
    "gaussian_topk-deviations": ("gaussian_topk", {"deviations": 1e300}),
    "embedding-dim": ("embedding", {"dim": 0}),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_attributes_are_refused_by_name(name: str) -> None:
    op, changes = BAD[name]
    case = next(CASES[op]())
    with pytest.raises(
        Exception, match=rf"\[{op}\] {name.partition('-')[2]}: .*expected|\[{op}\] {name.partition('-')[2]}"
    ):
        getattr(ops, op)(*case.tensors, **(case.attrs | changes))


@pytest.mark.parametrize("backend", ["0", "1"], ids=["native", "reference"])
def test_indices_out_of_range_are_refused(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_REFERENCE", backend)
    for bad in (-1, 40):
        with raises(InvalidArgumentError, param="ids"):
            ops.embedding(int32(0, bad), randn(37, 8), dim=8)
        with raises(InvalidArgumentError, param="rows", match=r"\[gather_rows\] rows"):
            ops.gather_rows(randn(37, 8), int32(0, bad))
        with raises(InvalidArgumentError, param="rows", match=r"\[gather_rows\] rows"):
            ops.gather_rows(randn(0, 8), int32(bad))


def test_a_row_that_is_not_finite_spoils_no_other() -> None:
    case = next(case for case in CASES["linear"]() if case.name == "w8a8-5x200x96")
    x, weight, bias = case.tensors
    clean = ops.linear(x, weight, bias, **case.attrs)
    for bad in (torch.nan, torch.inf):
        spoiled = x.clone()
        spoiled[2, 3] = bad
        y = ops.linear(spoiled, weight, bias, **case.attrs)
        assert y[2].isnan().all()
        assert y[[0, 1, 3, 4]].equal(clean[[0, 1, 3, 4]])
        assert reference.linear(spoiled, weight, bias, **case.attrs)[2].isnan().all()


def test_integer_kernels_equal_their_reference_bit_for_bit() -> None:
    """Sums of integers are exact in any order, and so nothing is left to a tolerance."""
    schemes = ("w8a16", "w8a8", "w4a16", "w4a8", "w8a8_h32", "w4a8_h32")
    cases = [case for case in CASES["linear"]() if case.attrs["scheme"] in schemes]
    assert len(cases) >= 36
    for case in cases:
        found = ops.linear(*case.tensors, **case.attrs)
        assert found.equal(reference.linear(*case.tensors, **case.attrs)), case.name


def test_activations_of_16_bit_are_close_to_floats() -> None:
    x, weight = randn(3, 256), pack_matrix(randn(40, 256, seed=1), layouts.T16_I8)
    expected = x.double() @ reference.unpack_weight(weight, 40, 256).T
    for scheme, limit in (("w8a16", 3e-5), ("w8a8", 1e-2)):
        y = ops.linear(x, weight, None, out_features=40, scheme=scheme)
        error = float((y - expected).norm() / expected.norm())
        assert limit / 30 < error < limit, scheme


def test_unpacking_in_pytorch_equals_the_core() -> None:
    """The layouts have two readers; here they meet."""
    from penstock.core import native
    from penstock.ops.eager import core_context

    for case in CASES["embedding"]():
        weight = case.tensors[1]
        layout = reference.layout_of_tensor(weight)
        cols = case.attrs["dim"]
        theirs = native.unpack(core_context(), layout, 37, cols, 0, 37, weight.data_ptr())
        ours = reference.unpack_weight(weight, 37, cols).float().numpy()
        assert ours.tobytes() == theirs.tobytes(), case.name
