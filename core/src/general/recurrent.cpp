// Ops of general networks: lstm, gru.
// Hot: runs in every step.
#include <string.h>

#include <algorithm>

#include "base/memory.h"
#include "general/panel.h"

namespace ps {
namespace {

constexpr int32_t kW = argument_at(OP_LSTM, "Weight w"), kR = argument_at(OP_LSTM, "Weight r");
constexpr int32_t kBias = argument_at(OP_LSTM, "Weight? bias"), kH0 = argument_at(OP_LSTM, "Tensor? h0");
constexpr int32_t kC0 = argument_at(OP_LSTM, "Tensor? c0");
constexpr int32_t kLstmLengths = argument_at(OP_LSTM, "Tensor? lengths");
constexpr int32_t kGruLengths = argument_at(OP_GRU, "Tensor? lengths");
constexpr int32_t kHidden = attr_at(OP_LSTM, "int hidden"), kDirection = attr_at(OP_LSTM, "str direction");
constexpr int32_t kLinearBeforeReset = attr_at(OP_GRU, "bool linear_before_reset");
static_assert(kW == argument_at(OP_GRU, "Weight w") && kR == argument_at(OP_GRU, "Weight r") &&
                  kBias == argument_at(OP_GRU, "Weight? bias") && kH0 == argument_at(OP_GRU, "Tensor? h0") &&
                  kHidden == attr_at(OP_GRU, "int hidden") && kDirection == attr_at(OP_GRU, "str direction"),
              "");

enum Direction { FORWARD, REVERSE, BIDIRECTIONAL };
constexpr int64_t kMaxHidden = 1 << 20;

// Rows of each gate are padded to whole tiles: `padded` rows per gate, `rows` per direction.
struct Sizes {
  bool lstm;
  int64_t steps, batch, inputs, hidden, directions, gates, padded, rows;
};
Sizes sizes_of(const Call& c, bool lstm) {
  const Tensor& x = c.in[0];
  Sizes s{
      lstm,         x.dims[0], x.dims[1], x.dims[2], c.attrs[kHidden].i, c.attrs[kDirection].i == BIDIRECTIONAL ? 2 : 1,
      lstm ? 4 : 3, 0,         0};
  s.padded = round_up(s.hidden, 16);
  s.rows = s.gates * s.padded;
  return s;
}

int64_t row_block(const Call& c) { return c.kernels->windows.conv_rows; }

// A product with the rows of a weight from `first_row` on, a multiple of 16.
struct Product {
  const Tensor* weight;
  int64_t first_row, rows;
  const float *bias, *x;
  int64_t x_stride, count;
  float* y;
  int64_t y_stride;
};
LinearArgs linear_args(const Call& c, const Product& p) {
  LinearArgs args{};
  const int64_t cols = p.weight->dims[1];
  args.weight = WeightView{p.weight->data + p.first_row * cols * 4, PS_T16_F32, p.rows, cols};
  args.bias = p.bias ? p.bias + p.first_row : nullptr;
  args.x = p.x;
  args.x_stride = p.x_stride;
  args.y = p.y;
  args.y_stride = p.y_stride;
  args.m = static_cast<int32_t>(p.count);
  args.short_prefetch = c.kernels->short_prefetch;
  return args;
}

// Shared scratch: the gates of all inputs, [steps * batch][directions * rows].
float* input_gates(const Call& c) { return reinterpret_cast<float*>(c.scratch); }

int64_t project_items(const Call& c, bool lstm) {
  const Sizes s = sizes_of(c, lstm);
  return s.steps * s.batch > 0 ? s.directions * s.rows / 16 : 0;
}
int64_t lstm_project_items(const Call& c) { return project_items(c, true); }
int64_t gru_project_items(const Call& c) { return project_items(c, false); }

void project(const Call& c, bool lstm, int64_t begin, int64_t end) {
  const Sizes s = sizes_of(c, lstm);
  const int64_t width = s.directions * s.rows;
  const Product p{&c.in[kW],      0,    width, f32_data(c.in[kBias]), f32_data(c.in[0]), s.inputs, s.steps * s.batch,
                  input_gates(c), width};
  c.kernels->linear[LINEAR_F32](linear_args(c, p), begin, end);
}
void project_lstm(const Call& c, int64_t begin, int64_t end, int32_t) { project(c, true, begin, end); }
void project_gru(const Call& c, int64_t begin, int64_t end, int32_t) { project(c, false, begin, end); }

int64_t cell_items(const Call& c) {
  const Sizes s = sizes_of(c, true);
  return s.directions * ((s.batch + row_block(c) - 1) / row_block(c));
}

int64_t length_of(const Call& c, const Sizes& s, int64_t sequence) {
  const Tensor& lengths = c.in[s.lstm ? kLstmLengths : kGruLengths];
  if (!lengths.data) return s.steps;
  const int64_t n = lengths.dtype == PS_I64 ? reinterpret_cast<const int64_t*>(lengths.data)[sequence]
                                            : reinterpret_cast<const int32_t*>(lengths.data)[sequence];
  return std::max<int64_t>(0, std::min(n, s.steps));
}

// A block of sequences of one direction.  Their states are the outputs h and c.
struct Block {
  int64_t direction, first, count;
  bool reverse;
  float *h, *cells;
};

void start_states(const Call& c, const Sizes& s, const Block& b) {
  const int64_t at = (b.direction * s.batch + b.first) * s.hidden;
  const size_t bytes = static_cast<size_t>(b.count * s.hidden * 4);
  for (int32_t i = 0; i < (s.lstm ? 2 : 1); ++i) {
    const Tensor& start = c.in[i ? kC0 : kH0];
    float* const state = i ? b.cells : b.h;
    if (start.data) memcpy(state, f32_data(start) + at, bytes);
    else memset(state, 0, bytes);
  }
}

// The gates from the states of a block of sequences.
void multiply_states(const Call& c, const Sizes& s, const Block& b, int64_t first_gate, int64_t num_gates,
                     const float* x, float* gates) {
  const float* const bias = f32_data(c.in[kBias]);
  const Product p{&c.in[kR],
                  b.direction * s.rows + first_gate * s.padded,
                  num_gates * s.padded,
                  bias ? bias + s.directions * s.rows : nullptr,
                  x,
                  s.hidden,
                  b.count,
                  gates + first_gate * s.padded,
                  s.rows};
  c.kernels->linear[LINEAR_F32](linear_args(c, p), 0, p.rows / 16);
}

void run_steps(const Call& c, const Sizes& s, const Block& b, float* gates) {
  const bool early = s.lstm || c.attrs[kLinearBeforeReset].i;  // all gates use the unmodified state
  float* const reset = gates + b.count * s.rows;               // r * h for gru
  CellArgs args[16];
  for (int64_t step = 0; step < s.steps; ++step) {
    multiply_states(c, s, b, 0, early ? s.gates : 2, b.h, gates);
    int64_t at[16];
    for (int64_t i = 0; i < b.count; ++i) {
      const int64_t length = length_of(c, s, b.first + i);
      at[i] = step >= length ? -1 : b.reverse ? length - 1 - step : step;
      float* const x = input_gates(c) +
                       ((std::max<int64_t>(at[i], 0) * s.batch + b.first + i) * s.directions + b.direction) * s.rows;
      args[i] = CellArgs{x,        gates + i * s.rows, s.padded,
                         s.hidden, b.h + i * s.hidden, (s.lstm ? b.cells : reset) + i * s.hidden,
                         early};
      if (at[i] < 0) continue;
      if (s.lstm) c.kernels->windows.lstm_cell(args[i]);
      else c.kernels->windows.gru_gates(args[i]);
    }
    if (!early) multiply_states(c, s, b, 2, 1, reset, gates);
    for (int64_t i = 0; i < b.count; ++i) {
      if (!s.lstm && at[i] >= 0) c.kernels->windows.gru_cell(args[i]);
      const int64_t time = at[i] < 0 ? step : at[i];
      float* const y = f32_data(c.out[0]) + ((time * s.directions + b.direction) * s.batch + b.first + i) * s.hidden;
      if (at[i] < 0) memset(y, 0, static_cast<size_t>(s.hidden) * 4);
      else memcpy(y, b.h + i * s.hidden, static_cast<size_t>(s.hidden) * 4);
    }
  }
}

void run_cells(const Call& c, bool lstm, int64_t begin, int64_t end, int32_t thread) {
  const Sizes s = sizes_of(c, lstm);
  const int64_t blocks = (s.batch + row_block(c) - 1) / row_block(c);
  float* const gates = reinterpret_cast<float*>(c.thread_scratch + thread * c.thread_scratch_bytes);
  for (int64_t item = begin; item < end; ++item) {
    const int64_t direction = item / blocks, first = item % blocks * row_block(c);
    const int64_t at = (direction * s.batch + first) * s.hidden;
    const Block b{direction,
                  first,
                  std::min(row_block(c), s.batch - first),
                  direction == 1 || c.attrs[kDirection].i == REVERSE,
                  f32_data(c.out[1]) + at,
                  lstm ? f32_data(c.out[2]) + at : nullptr};
    start_states(c, s, b);
    run_steps(c, s, b, gates);
  }
}
void run_lstm(const Call& c, int64_t begin, int64_t end, int32_t thread) { run_cells(c, true, begin, end, thread); }
void run_gru(const Call& c, int64_t begin, int64_t end, int32_t thread) { run_cells(c, false, begin, end, thread); }

constexpr Phase kLstm[] = {
    {.split = SPLIT_SHARES,
     .items = lstm_project_items,
     .run = project_lstm,
     .reads_all = operands(0),
     .writes_scratch = true,
     .grain = 4},
    {.split = SPLIT_ITEMS,
     .items = cell_items,
     .run = run_lstm,
     .reads_all = operands(kH0, kC0, kLstmLengths),
     .writes_outputs = true,
     .reads_scratch = true},
};
constexpr Phase kGru[] = {
    {.split = SPLIT_SHARES,
     .items = gru_project_items,
     .run = project_gru,
     .reads_all = operands(0),
     .writes_scratch = true,
     .grain = 4},
    {.split = SPLIT_ITEMS,
     .items = cell_items,
     .run = run_gru,
     .reads_all = operands(kH0, kGruLengths),
     .writes_outputs = true,
     .reads_scratch = true,
     .writes_scratch = true},
};

ps_status expect_state(const Spec& s, const char* name, const int64_t* dims) {
  if (s.kind == OPERAND_NONE) return PS_OK;
  if (is_tensor(s, PS_F32, 3, 3) && dim(s, 0) == dims[0] && dim(s, 1) == dims[1] && dim(s, 2) == dims[2]) return PS_OK;
  return fail(PS_INVALID_ARGUMENT, "%s: expected f32 [%lld, %lld, %lld], got %s", name, static_cast<long long>(dims[0]),
              static_cast<long long>(dims[1]), static_cast<long long>(dims[2]), describe(s).text);
}

ps_status expect_weight(const Spec& w, const char* name, int32_t layout, int64_t rows, int64_t cols) {
  if (w.layout == layout && dim(w, 0) == rows && dim(w, 1) == cols) return PS_OK;
  return fail(PS_INVALID_ARGUMENT, "%s: expected a %s weight [%lld, %lld], got [%lld, %lld]", name, layout_name(layout),
              static_cast<long long>(rows), static_cast<long long>(cols), static_cast<long long>(dim(w, 0)),
              static_cast<long long>(dim(w, 1)));
}

ps_status infer_recurrent(const Spec* in, AttrValue* attrs, Spec* out, bool lstm) {
  PS_TRY(expect_f32(in[0], "x", 3, 3));
  AttrValue& direction = attrs[kDirection];
  direction.i = equal(direction.s, "forward")         ? FORWARD
                : equal(direction.s, "reverse")       ? REVERSE
                : equal(direction.s, "bidirectional") ? BIDIRECTIONAL
                                                      : -1;
  if (direction.i < 0) {
    return fail(PS_INVALID_ARGUMENT, "direction: expected forward, reverse or bidirectional, got \"%.*s\"",
                PS_STR(direction.s));
  }
  const int64_t hidden = attrs[kHidden].i, steps = dim(in[0], 0), batch = dim(in[0], 1);
  if (hidden < 1 || hidden > kMaxHidden) {
    return fail(PS_INVALID_ARGUMENT, "hidden: expected 1 to %lld, got %lld", static_cast<long long>(kMaxHidden),
                static_cast<long long>(hidden));
  }
  if (steps > INT32_MAX / std::max<int64_t>(batch, 1))
    return fail(PS_INVALID_ARGUMENT, "x: expected fewer than 2^31 steps of all sequences, got %s",
                describe(in[0]).text);
  const int64_t directions = direction.i == BIDIRECTIONAL ? 2 : 1;
  const int64_t rows = directions * (lstm ? 4 : 3) * round_up(hidden, 16);
  PS_TRY(expect_weight(in[kW], "w", PS_T16_F32, rows, dim(in[0], 2)));
  PS_TRY(expect_weight(in[kR], "r", PS_T16_F32, rows, hidden));
  if (in[kBias].kind != OPERAND_NONE) PS_TRY(expect_weight(in[kBias], "bias", PS_ROWS_F32, 2, rows));
  const int64_t state[3] = {directions, batch, hidden}, all[4] = {steps, directions, batch, hidden};
  PS_TRY(expect_state(in[kH0], "h0", state));
  if (lstm) PS_TRY(expect_state(in[kC0], "c0", state));
  const Spec& lengths = in[lstm ? kLstmLengths : kGruLengths];
  if (lengths.kind != OPERAND_NONE &&
      !((lengths.dtype == PS_I32 || lengths.dtype == PS_I64) && lengths.rank == 1 && dim(lengths, 0) == batch)) {
    return fail(PS_INVALID_ARGUMENT, "lengths: expected i32 or i64 [%lld], got %s", static_cast<long long>(batch),
                describe(lengths).text);
  }
  PS_TRY(set_output(&out[0], PS_F32, 4, all));
  PS_TRY(set_output(&out[1], PS_F32, 3, state));
  return lstm ? set_output(&out[2], PS_F32, 3, state) : PS_OK;
}

ps_status recurrent_scratch(const Call& c, bool lstm, Scratch* out) {
  const Sizes s = sizes_of(c, lstm);
  out->per_thread = row_block(c) * (s.rows + s.hidden) * 4 + 64;
  if (checked_mul(s.steps * s.batch, s.directions * s.rows, &out->shared) && checked_mul(out->shared, 4, &out->shared))
    return PS_OK;
  return fail(PS_INVALID_ARGUMENT, "x: its gates do not fit in memory");
}

}  // namespace

ps_status infer_lstm(const Spec* in, AttrValue* attrs, Spec* out) { return infer_recurrent(in, attrs, out, true); }
Phases lstm_phases(const Call&) { return Phases{kLstm, 2}; }
ps_status lstm_scratch(const Call& c, Scratch* out) { return recurrent_scratch(c, true, out); }

ps_status infer_gru(const Spec* in, AttrValue* attrs, Spec* out) { return infer_recurrent(in, attrs, out, false); }
Phases gru_phases(const Call&) { return Phases{kGru, 2}; }
ps_status gru_scratch(const Call& c, Scratch* out) { return recurrent_scratch(c, false, out); }

}  // namespace ps
