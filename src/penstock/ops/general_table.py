"""The op table of general networks: what a captured module or an ONNX file becomes.

These rows follow those of ``penstock.ops.table`` in the native core.  They differ from them: tensors are dense, of rank
0 to 6 and of any type; ``int[]`` attributes are lists of sizes, which a file writes as expressions over named sizes
("B,12*S,(H+1)//2"); and shape rules see only constants, because a program is planned for each set of sizes.  Images are
NHWC: passes change the layout of other networks.  A fused activation (``act``) is a kind of ``unary``, or "none".

Eager mode has no need of them: it runs the module itself.
"""

from __future__ import annotations

from typing import Final

__all__ = ["GENERAL_SCHEMAS"]

GENERAL_SCHEMAS: Final[dict[str, str]] = {
    # x [N, H, W, C]; act(conv + bias + residual).  kernel (h, w), pads (top, left, bottom, right).  The weight has the
    # columns (kernel row, kernel column, channel of the group): one group: t16_f32 [out_channels, kh * kw * C]; as many
    # groups as channels and outputs: rows_f32 [kh * kw, C]; else t16_f32, each group's rows padded to 16.
    "conv": (
        "(Tensor x, Weight weight, Weight? bias, Tensor? residual, *, int out_channels, int[] kernel, int[] "
        "strides, int[] pads, int[] dilations, int groups, str act, float alpha, float beta) -> Tensor"
    ),
    # x [N, H, W, C], as torch's ConvTranspose2d; the weight is laid out as that of conv
    "conv_transpose": (
        "(Tensor x, Weight weight, Weight? bias, *, int out_channels, int[] kernel, int[] strides, int[] pads, "
        "int[] dilations, int[] output_pads, int groups, str act, float alpha, float beta) -> Tensor"
    ),
    "max_pool": "(Tensor x, *, int[] kernel, int[] strides, int[] pads, int[] dilations, bool ceil) -> Tensor",
    "avg_pool": (
        "(Tensor x, *, int[] kernel, int[] strides, int[] pads, int[] dilations, bool ceil, bool count_pads) -> Tensor"
    ),
    # x [N, H, W, C] to sizes (h, w).  ONNX's Resize: mode nearest, linear or cubic; scales 0: from the sizes
    "resize": (
        "(Tensor x, *, int[] sizes, float scale_h, float scale_w, str mode, str coordinates, str rounding, float "
        "cubic_a, bool exclude_outside) -> Tensor"
    ),
    # numpy's matmul with scale; batch axes broadcast; a and b have rank 2 or more
    "matmul": "(Tensor a, Tensor b, *, bool transpose_a, bool transpose_b, float scale) -> Tensor",
    # q [B, heads, S, D], k and v [B, KV heads, L, D]; mask: f32 that is added, or bool, broadcast to [B, heads, S, L].
    # causal: query i sees the keys up to i.  A query that sees no key gives zeros.
    "sdpa": "(Tensor q, Tensor k, Tensor v, Tensor? mask, *, float scale, bool causal, float softcap) -> Tensor",
    # x [S, B, I], y [S, directions, B, hidden], h and c [directions, B, hidden]: ONNX's LSTM, gates i, o, f, c.  The
    # rows of w and r are (direction, gate, unit), each gate padded to tiles of 16; bias has a row for each of the two
    "lstm": (
        "(Tensor x, Weight w, Weight r, Weight? bias, Tensor? h0, Tensor? c0, Tensor? lengths, *, int hidden, str "
        "direction) -> (Tensor, Tensor, Tensor)"
    ),
    # ONNX's GRU, gates z, r, h
    "gru": (
        "(Tensor x, Weight w, Weight r, Weight? bias, Tensor? h0, Tensor? lengths, *, int hidden, str direction, "
        "bool linear_before_reset) -> (Tensor, Tensor)"
    ),
    # x [N, H, W, C] or [N, L, C]; instance norm: as many groups as channels
    "group_norm": "(Tensor x, Weight weight, Weight bias, *, int groups, float eps) -> Tensor",
    # kind of ONNX's elementwise ops in lower case; alpha and beta are the kind's parameters
    "unary": "(Tensor x, *, str kind, float alpha, float beta) -> Tensor",
    # numpy's broadcasting
    "binary": "(Tensor a, Tensor b, *, str kind) -> Tensor",
    "where": "(Tensor condition, Tensor a, Tensor b) -> Tensor",
    "cast": "(Tensor x, *, str dtype) -> Tensor",
    # up to 8 elementwise steps over x in one pass; operands broadcast to x
    "chain": "(Tensor x, Tensor? a, Tensor? b, Tensor? c, Tensor? d, Tensor? e, *, str steps) -> Tensor",
    "softmax": "(Tensor x, *, int axis, bool log) -> Tensor",
    "reduce": "(Tensor x, *, str kind, int[] axes, bool keep) -> Tensor",
    "arg_reduce": "(Tensor x, *, str kind, int axis, bool keep, bool last) -> Tensor",
    # k is a list of one size
    "top_k": "(Tensor x, *, int[] k, int axis, bool largest, bool sorted) -> (Tensor, Tensor)",
    "cumsum": "(Tensor x, *, int axis, bool exclusive, bool reverse) -> Tensor",
    "reshape": "(Tensor x, *, int[] sizes) -> Tensor",
    "permute": "(Tensor x, *, int[] order) -> Tensor",
    # one begin, end and step for each axis; ends are exclusive, and of negative steps -1 is before the first
    "slice": "(Tensor x, *, int[] begins, int[] ends, int[] steps) -> Tensor",
    "expand": "(Tensor x, *, int[] sizes) -> Tensor",
    "concat": (
        "(Tensor a, Tensor? b, Tensor? c, Tensor? d, Tensor? e, Tensor? f, Tensor? g, Tensor? h, *, int axis) -> Tensor"
    ),
    # pads: all begins, then all ends
    "pad": "(Tensor x, *, int[] pads, str mode, float value) -> Tensor",
    "trilu": "(Tensor x, *, int[] diagonal, bool upper) -> Tensor",
    # ONNX's; indices i32 or i64, negative ones count from the end; those out of range fail the run
    "gather": "(Tensor x, Tensor indices, *, int axis) -> Tensor",
    "gather_elements": "(Tensor x, Tensor indices, *, int axis) -> Tensor",
    "gather_nd": "(Tensor x, Tensor indices, *, int batch_dims) -> Tensor",
    "scatter_elements": "(Tensor x, Tensor indices, Tensor updates, *, int axis, str reduction) -> Tensor",
    "scatter_nd": "(Tensor x, Tensor indices, Tensor updates, *, str reduction) -> Tensor",
    "fill": "(*, int[] sizes, str dtype, float value) -> Tensor",
    # start, step and number: i64
    "iota": "(*, int[] range) -> Tensor",
    # i64 [n] of size expressions
    "sizes": "(*, int[] values) -> Tensor",
    # conv of int8: x is i8, -127 to 127, or u8, 0 to 127, times x_scale.  With one group or several: weight t16_i8, a
    # multiple of 4 channels in a group; depthwise: rows_f32.  A residual is f32 or int8 times residual_scale.  dtype is
    # f32, or i8 or u8: values are divided by y_scale and rounded half to even
    "conv_int8": (
        "(Tensor x, Weight weight, Weight? bias, Tensor? residual, *, int out_channels, int[] kernel, int[] "
        "strides, int[] pads, int[] dilations, int groups, str act, float alpha, float beta, float x_scale, "
        "float residual_scale, float y_scale, str dtype) -> Tensor"
    ),
    # f32 to int8, int8 to f32, and int8 to int8 of another scale; types and scales as in conv_int8
    "requantize": "(Tensor x, *, float x_scale, float y_scale, str dtype) -> Tensor",
    # ONNX's NonMaxSuppression: boxes [N, count, 4], scores [N, classes, count] to rows (image, class, box) of i64,
    # [N * classes * limit, 3], and their number [1]; rows behind those are 0.  limit is a list of one size: boxes of a
    # class of an image.  filtered: only scores above `score` take part.  format: corners in any order, centers with
    # sizes, or ordered: torchvision's corners, of which a box whose corners are exchanged is empty
    "nms": (
        "(Tensor boxes, Tensor scores, *, int[] limit, float iou, bool filtered, float score, str format) -> (Tensor, "
        "Tensor)"
    ),
    # conv of kernel (3, 3) and stride 1 with one group, by Winograd's F(2x2, 3x3).  The weight is t16_f32
    # [out_channels, 16 * C], each kernel g as G g G^T: columns (row of 4, column of 4, channel)
    "conv_winograd": (
        "(Tensor x, Weight weight, Weight? bias, Tensor? residual, *, int out_channels, int[] pads, str act, "
        "float alpha, float beta) -> Tensor"
    ),
}
