"""The blocks of GGUF in tiles (docs/explanation/bundle-format.md has the bytes): their values in plain PyTorch."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from penstock.core import layouts

__all__ = ["unpack_blocks"]

_LINE: Final = 64
_FLOAT4: Final = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the values of MXFP4 (OCP Microscaling Formats, version 1.0), by nibble."""
_IQ4: Final = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The values of IQ4_NL and IQ4_XS, by nibble (kvalues_iq4nl of ggml-common.h)."""
_ZEROS: Final = {layouts.T16_Q4_0: 8, layouts.T16_Q5_0: 16, layouts.T16_Q6_K: 32, layouts.T16_Q3_K: 4}
"""The values that are subtracted from the integers."""
_PAIRS: Final = (
    layouts.T16_Q8_0,
    layouts.T16_Q4_0,
    layouts.T16_Q4_1,
    layouts.T16_Q5_0,
    layouts.T16_Q5_1,
    layouts.T16_IQ4_NL,
)
"""Layouts of pairs of groups with f16 scales."""
_LOW_BITS: Final = (layouts.T16_TQ2_0, layouts.T16_TQ1_0, layouts.T16_Q2_0, layouts.T16_Q1_0)
"""Layouts of values of one or two bits, or of five a byte."""
_WITH_MINIMUMS: Final = (layouts.T16_Q4_1, layouts.T16_Q5_1)
"""The types with a second line, of f16 minimums."""


def unpack_blocks(weight: Tensor, layout: int) -> Tensor:
    """Return the values of packed blocks [tiles, blocks, lines, 64] with padding, float64 [rows, cols].

    Scales are multiplied exactly, and a minimum is subtracted in float32, as the format's reference does.
    """
    lines = weight.reshape(weight.shape[0], weight.shape[1], -1)  # [tiles, blocks, bytes]
    if layout in _PAIRS:
        scale = _split(_halves(lines[..., :_LINE]), (1, 2, 16))  # [tiles, blocks, pair, group, row]
        if layout not in _WITH_MINIMUMS:
            return _rows(_integers(lines[:, :, None, _LINE:], layout) * scale.unsqueeze(-1))
        minimum = _split(_halves(lines[..., _LINE : 2 * _LINE]), (1, 2, 16))
        values = _integers(lines[:, :, None, 2 * _LINE :], layout) * scale.unsqueeze(-1)
        return _rows((values.float() + minimum.float().unsqueeze(-1)).double())
    if layout == layouts.T16_MXFP4:
        exponents = _split(lines[..., :_LINE], (1, 16, 4)).transpose(-2, -1)  # [tiles, blocks, 1, group, row]
        nibbles = _nibbles(lines[:, :, None, _LINE:], 4).long()
        return _rows(torch.tensor(_FLOAT4).double()[nibbles] * torch.exp2(exponents.double() - 128).unsqueeze(-1))
    if layout == layouts.T16_UINT4:
        scale = _split(_halves(lines[..., : 2 * _LINE]), (1, 4, 16))  # [tiles, blocks, 1, group, row]
        zeros = _split(lines[..., 2 * _LINE : 3 * _LINE], (1, 16, 4)).transpose(-2, -1).double()
        integers = _nibbles(lines[:, :, None, 3 * _LINE :], 4).double() - zeros.unsqueeze(-1)
        return _rows(integers * scale.unsqueeze(-1))
    if layout == layouts.T16_NVFP4:
        return _unpack_nvfp4(lines)
    if layout in _LOW_BITS:
        return _unpack_low_bits(lines, layout)
    if layout in (layouts.T16_IQ4_XS, layouts.T16_Q2_K, layouts.T16_Q3_K):
        return _unpack_byte_scales(lines, layout)
    pairs = _split(lines[..., _LINE:], (4, -1))  # [tiles, blocks, pair, bytes]
    halves = _split(_halves(lines[..., :_LINE]), (2, 1, 1, 16))
    d, minimum = halves[..., 0, :, :, :], halves[..., 1, :, :, :]  # [tiles, blocks, 1, 1, row]
    own = _split(pairs[..., :_LINE], (16, 2, 2)).transpose(-3, -2)  # [tiles, blocks, pair, group, row, 2]
    integers = _integers(pairs[..., _LINE:], layout)
    if layout == layouts.T16_Q6_K:
        scale = own.contiguous().view(torch.int8).double().repeat_interleave(16, dim=-1)
        return _rows(integers * (d.unsqueeze(-1) * scale))
    values = integers * (d * own[..., 0].double()).unsqueeze(-1)
    return _rows(values.float() - (minimum * own[..., 1].double()).float().unsqueeze(-1)).double()


def _unpack_byte_scales(lines: Tensor, layout: int) -> Tensor:
    """Return the values of blocks [tiles, blocks, bytes] whose scales are a byte for each 32 or 16 columns."""
    halves = _split(_halves(lines[..., :_LINE]), (2, 1, 1, 16))
    d, minimum = halves[..., 0, :, :, :].unsqueeze(-1), halves[..., 1, :, :, :].unsqueeze(-1)  # [.., 1, 1, row, 1]
    num_lines = 2 if layout == layouts.T16_IQ4_XS else 4
    head = (1 + num_lines) * _LINE
    scale = _split(lines[..., _LINE:head], (num_lines, 16, 4)).transpose(-2, -1)  # [.., line, byte, row]
    scale = _split(scale.flatten(-3), (1, 8, num_lines // 2, 16)).transpose(-2, -1)  # [.., 1, group, row, scale]
    columns = 32 // scale.shape[-1]
    if layout == layouts.T16_IQ4_XS:
        values = torch.tensor(_IQ4).double()[_nibbles(lines[:, :, None, head:], 8).long()]
    else:
        values = _bits(lines[:, :, None, head:], layout).double() - _ZEROS.get(layout, 0)
    if layout != layouts.T16_Q2_K:
        own = scale.contiguous().view(torch.int8).double().repeat_interleave(columns, dim=-1)
        return _rows(values * (d * own))
    own = scale.repeat_interleave(columns, dim=-1)
    products = values * (d * (own & 15).double())
    return _rows((products.float() - (minimum * (own >> 4).double()).float()).double())


def _unpack_nvfp4(lines: Tensor) -> Tensor:
    """Return the values of blocks [tiles, blocks, bytes] with a scale of 8 bits for each 16 columns."""
    d = _split(lines[..., :_LINE].contiguous().view(torch.float32), (1, 1, 16, 1))  # [.., 1, 1, row, 1]
    codes = _split(lines[..., _LINE : 5 * _LINE], (4, 16, 4)).transpose(-2, -1)  # [.., line, byte, row]
    scale = _split(codes.contiguous().view(torch.float8_e4m3fn).float().flatten(-3), (1, 8, 2, 16)).transpose(-2, -1)
    values = torch.tensor(_FLOAT4).double()[_nibbles(lines[:, :, None, 5 * _LINE :], 8).long()]
    return _rows(values * (0.5 * scale * d).double().repeat_interleave(16, dim=-1))


def _unpack_low_bits(lines: Tensor, layout: int) -> Tensor:
    """Return the values of blocks [tiles, blocks, bytes] of ``_LOW_BITS``: -1, 0, 1 or 2 times the scale of a row."""
    head, rest = lines[..., :_LINE].contiguous(), lines[:, :, None, _LINE:]
    groups = 4 if layout == layouts.T16_Q2_0 else 8
    if layout in (layouts.T16_TQ2_0, layouts.T16_TQ1_0):
        scale = _split(head.view(torch.float32).double(), (1, 1, 16, 1))
    else:
        scale = _split(_halves(head), (1, 2, 16, 1)).repeat_interleave(groups // 2, dim=-3)
    if layout == layouts.T16_TQ1_0:
        integers = _trits(rest)
    elif layout == layouts.T16_Q1_0:
        integers = 2 * _single_bits(_split(rest, (groups, _LINE)))
    else:
        integers = _bits(rest, layout, groups)
    return _rows((integers.double() - 1) * scale)


def _trits(raw: Tensor) -> Tensor:
    """Return the integers 0 to 2 of four pairs of groups [..., bytes] as uint8 [..., group, row, 32]."""
    last = _split(raw[..., :_LINE], (16, 4)).transpose(-2, -1)  # [..., pair, row]
    last = (last.unsqueeze(-1) >> torch.arange(0, 8, 2, dtype=torch.uint8)) & 3  # [..., pair, row, i]
    digits, numbers = [], (_split(raw[..., _LINE:], (4, 3, 16, 4)).int() + 128) % 256
    for _ in range(5):
        digits.append(3 * numbers // 256)
        numbers = 3 * numbers % 256
    five = torch.stack(digits, dim=-2).to(torch.uint8)  # [..., pair, line, row, digit, i]
    first, middle, second = five.unbind(-4)
    even = torch.cat((first, middle[..., :3, :]), dim=-2).flatten(-2)
    odd = torch.cat((second, middle[..., 3:, :], last.unsqueeze(-2)), dim=-2).flatten(-2)
    return torch.stack((even, odd), dim=-3).flatten(-4, -3)


def _bits(raw: Tensor, layout: int, num_groups: int = 8) -> Tensor:
    """Return the integers of two or three bits of groups [..., bytes] as uint8 [..., group, row, 32]."""
    groups = _split(raw, (num_groups, -1))
    pairs = _split(groups[..., : 2 * _LINE], (2, 16, 1, 4)).transpose(-4, -3)  # [..., group, row, half, 1, i]
    integers = ((pairs >> torch.arange(0, 8, 2, dtype=torch.uint8).view(4, 1)) & 3).flatten(-3)
    if layout == layouts.T16_Q3_K:
        integers = integers | _single_bits(groups[..., 2 * _LINE :]) << 2
    return integers


def _single_bits(lines: Tensor) -> Tensor:
    """Return one bit of each value of groups [..., group, 64], uint8 [..., group, row, 32]."""
    bits = _split(lines, (16, 1, 4))  # bit j, or 4 + j in the last 16 columns
    return ((bits >> torch.arange(8, dtype=torch.uint8).view(8, 1)) & 1).flatten(-2)


def _split(values: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Return ``values`` with the last dimension replaced by several."""
    return values.reshape(*values.shape[:-1], *sizes)


def _halves(raw: Tensor) -> Tensor:
    return raw.contiguous().view(torch.float16).double()


def _rows(values: Tensor) -> Tensor:
    """Return [tiles, blocks, pair, group, row, 32] as [rows, cols]."""
    return values.permute(0, 4, 1, 2, 3, 5).flatten(2).flatten(0, 1)


def _nibbles(raw: Tensor, groups: int) -> Tensor:
    """Return the nibbles of ``groups`` groups [..., bytes] as uint8 [..., group, row, 32]."""
    nibbles = _split(raw, (groups, 4, 16, 4)).transpose(-3, -2)  # [..., group, row, j, i]
    return torch.cat(((nibbles & 15).flatten(-2), (nibbles >> 4).flatten(-2)), dim=-1)


def _integers(raw: Tensor, layout: int) -> Tensor:
    """Return the integers of pairs of groups [..., bytes] as float64 [..., group, row, 32]."""
    if layout == layouts.T16_Q8_0:
        return _split(raw.contiguous().view(torch.int8), (2, 8, 16, 4)).transpose(-3, -2).flatten(-2).double()
    integers = _nibbles(raw[..., :512], 2)
    if layout == layouts.T16_IQ4_NL:
        return torch.tensor(_IQ4).double()[integers.long()]
    if layout in (layouts.T16_Q5_K, layouts.T16_Q5_0, layouts.T16_Q5_1):
        integers = integers | _single_bits(_split(raw[..., 512:], (2, _LINE))) << 4
    if layout == layouts.T16_Q6_K:
        pairs = _split(raw[..., 512:], (2, 2, 16, 1, 4)).transpose(-4, -3)  # [..., group, row, half, 1, i]
        integers = integers | ((pairs >> torch.arange(0, 8, 2, dtype=torch.uint8).view(4, 1)) & 3).flatten(-3) << 4
    return integers.double() - _ZEROS.get(layout, 0)
