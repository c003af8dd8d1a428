// The table of the kernels of windows.h and conv_int8.h.
#ifndef PENSTOCK_KERNELS_GENERAL_WINDOW_TABLE_H
#define PENSTOCK_KERNELS_GENERAL_WINDOW_TABLE_H

namespace ps {
namespace {

constexpr bool kConv = builds_op("conv") || builds_op("conv_transpose") || builds_op("conv_winograd");
constexpr WindowKernels kWindows = {
    .conv_rows = kFloatM,
    .conv_tiles = kFloatN,
    .depthwise_rows = kDepthwiseRows,
    .conv = kConv ? conv : nullptr,
    .depthwise = builds_op("conv") ? depthwise : nullptr,
    .winograd_input = builds_op("conv_winograd") ? winograd_input : nullptr,
    .winograd_output = builds_op("conv_winograd") ? winograd_output : nullptr,
    .conv_int8 = builds_op("conv_int8") ? conv_int8 : nullptr,
    .depthwise_int8 = builds_op("conv_int8") ? depthwise_int8 : nullptr,
    .widen_pixels = builds_op("conv_int8") ? widen_pixels : nullptr,
    .to_int8 = builds_op("requantize") ? values_to_int8 : nullptr,
    .from_int8 = builds_op("requantize") ? int8_to_values : nullptr,
    .pool_max = builds_op("max_pool") ? pool_max : nullptr,
    .weighted_sum = builds_op("avg_pool") || builds_op("resize") || builds_op("matmul") ? weighted_sum : nullptr,
    .column_sums = builds_op("group_norm") ? column_sums : nullptr,
    .normalize_columns = builds_op("group_norm") ? normalize_columns : nullptr,
    .lstm_cell = builds_op("lstm") ? lstm_cell : nullptr,
    .gru_gates = builds_op("gru") ? gru_gates : nullptr,
    .gru_cell = builds_op("gru") ? gru_cell : nullptr,
};

}  // namespace
}  // namespace ps

#endif
