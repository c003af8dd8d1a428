// The gated delta rule over recurrent states (Yang et al., arXiv 2412.06464), behind a short convolution and SiLU.
#ifndef PENSTOCK_KERNELS_ATTENTION_GATED_DELTA_H
#define PENSTOCK_KERNELS_ATTENTION_GATED_DELTA_H

namespace ps {
namespace {

// log(1 + y) for y in [0, 1], relative error below 1e-7: 2 artanh(y / (2 + y)).
PS_LONG F16 f_log1p(F16 y) {
  static constexpr float series[] = {1.f / 17, 1.f / 15, 1.f / 13, 1.f / 11, 1.f / 9, 1.f / 7, 1.f / 5, 1.f / 3, 1.f};
  const F16 s = y / (f_set(2.f) + y);
  return (s + s) * f_polynomial(s * s, series, 9);
}

PS_INLINE float first_lane(F16 x) {
  float lanes[16];
  f_store(lanes, x);
  return lanes[0];
}

// Scalar and not inlined, which keeps the code of a level small.
__attribute__((noinline)) float exp_of(float x) { return first_lane(f_exp(f_set(x))); }
// log(1 + exp(z)) = max(z, 0) + log(1 + exp(-|z|)).
__attribute__((noinline)) float softplus_of(float x) {
  const F16 z = f_set(x), zero = f_set(0.f);
  return first_lane(f_max(z, zero) + f_log1p(f_exp(zero - f_abs(z))));
}

struct DeltaGates { float beta, decay; };
// beta = sigmoid(b), decay = exp(-exp(a_log) softplus(a + dt_bias)).
inline DeltaGates delta_gates(const GatedDeltaArgs& a, int64_t t, int64_t head) {
  const float softplus = softplus_of(a.a[t * a.a_stride + head] + a.dt_bias[head]);
  return {1.f / (1.f + exp_of(-a.b[t * a.b_stride + head])), exp_of(-exp_of(a.a_log[head]) * softplus)};
}

// x / sqrt(sum of squares + 1e-6) * factor, in place.
inline void normalise(float* x, int64_t dim, float factor) {
  F16 sum = f_set(0.f);
  for (int64_t i = 0; i < dim; i += 16) {
    const int n = tail(dim, i);
    const F16 v = f_load_n(x + i, n);
    sum = f_select(m_range(0, n), f_fma(v, v, sum), sum);
  }
  const F16 inverse = f_set(1.f / __builtin_sqrtf(f_sum(sum) + 1e-6f)), scale = f_set(factor);
  for (int64_t i = 0; i < dim; i += 16) {
    const int n = tail(dim, i);
    f_store_n(x + i, (f_load_n(x + i, n) * inverse) * scale, n);
  }
}

// y = SiLU of the convolution of `dim` channels.  past: the window - 1 inputs before x, `stride` apart; x becomes the
// last of them.  bias: the start of each sum, or null.
__attribute__((noinline)) void convolve_channels(const float* x, float* past, int64_t stride, const float* weight,
                                                 const float* bias, int64_t window, int64_t dim, float* y) {
  for (int64_t d = 0; d < dim; ++d) y[d] = bias ? bias[d] : 0.f;
  for (int64_t tap = 0; tap < window; ++tap)
    add_tap(tap + 1 < window ? past + tap * stride : x, weight + tap, window, dim, y);
  for (int64_t d = 0; d < dim; d += 16) {
    const int n = tail(dim, d);
    const F16 v = f_load_n(y + d, n);
    f_store_n(y + d, v / f_one_plus_exp(f_set(0.f) - v), n);
    for (int64_t tap = 0; tap + 1 < window; ++tap) {
      const float* next = tap + 2 < window ? past + (tap + 1) * stride : x;
      f_store_n(past + tap * stride + d, f_load_n(next + d, n), n);
    }
  }
}

// Updates the state for 16 * N values of a head from v, the last 16 of which are n; then out = state^T q.
template <int N>
PS_INLINE void delta_columns(const GatedDeltaArgs& a, float* state, const float* q, const float* k, const float* v,
                             DeltaGates g, float* out, int n) {
  const int64_t dim = a.value_dim;
  F16 seen[N], delta[N], sum[N];
  const F16 decay = f_set(g.decay), beta = f_set(g.beta);
  for (int c = 0; c < N; ++c) seen[c] = sum[c] = f_set(0.f);
  for (int64_t i = 0; i < a.head_dim; ++i) {
    const F16 key = f_set(k[i]);
    for (int c = 0; c < N; ++c) seen[c] = f_fma(f_load_n(state + i * dim + 16 * c, n), key, seen[c]);
  }
  for (int c = 0; c < N; ++c) delta[c] = (f_load_n(v + 16 * c, n) - seen[c] * decay) * beta;
  for (int64_t i = 0; i < a.head_dim; ++i) {
    const F16 key = f_set(k[i]), query = f_set(q[i]);
    for (int c = 0; c < N; ++c) {
      float* at = state + i * dim + 16 * c;
      const F16 s = f_fma(delta[c], key, f_load_n(at, n) * decay);
      f_store_n(at, s, n);
      sum[c] = f_fma(s, query, sum[c]);
    }
  }
  for (int c = 0; c < N; ++c) f_store_n(out + 16 * c, sum[c], n);
}

// Computes one token of one key head with its value heads.  `state` goes from the previous token's to this token's.
inline void delta_token(const GatedDeltaArgs& a, int64_t t, int64_t key_head, float* state) {
  const int64_t dim = a.head_dim, values = int64_t{a.heads_per_key} * a.value_dim, keys = int64_t{a.key_heads} * dim;
  const int64_t channels = 2 * dim + values;
  const int64_t starts[3] = {key_head * dim, keys + key_head * dim, 2 * keys + key_head * values};
  const int64_t counts[3] = {dim, dim, values}, places[3] = {0, dim, 2 * dim};
  float mixed[2 * kMaxDeltaDim + kMaxDeltaValues];
  for (int i = 0; i < 3; ++i) {
    convolve_channels(a.x + t * a.x_stride + starts[i], state + dim * values + places[i], channels,
                      a.conv + starts[i] * a.window, nullptr, a.window, counts[i], mixed + places[i]);
  }
  normalise(mixed, dim, 1.f / __builtin_sqrtf(float(dim)));
  normalise(mixed + dim, dim, 1.f);
  const int64_t first = key_head * a.heads_per_key;
  for (int64_t j = 0; j < a.heads_per_key; ++j) {
    const DeltaGates gates = delta_gates(a, t, first + j);
    float* matrix = state + j * dim * a.value_dim;
    const float* v = mixed + 2 * dim + j * a.value_dim;
    float* out = a.out + t * a.out_stride + (key_head * a.key_step + j * a.value_step) * a.value_dim;
    int64_t c = 0;
    for (; c + 64 <= a.value_dim; c += 64)
      delta_columns<4>(a, matrix + c, mixed, mixed + dim, v + c, gates, out + c, 16);
    for (; c < a.value_dim; c += 16)
      delta_columns<1>(a, matrix + c, mixed, mixed + dim, v + c, gates, out + c, tail(a.value_dim, c));
  }
}

// Returns the state of a head for the token at `position`.  It lies in the token's page.  At the first position of a
// page it is a copy of the previous page's state, so a full page keeps the state after its last token.
__attribute__((noinline)) float* state_at(uint8_t* states, int64_t page_bytes, const int32_t* table, int32_t position,
                                          int64_t head, int64_t elements) {
  const int32_t page = position / kPageTokens;
  float* state = (float*)(states + table[page] * page_bytes) + head * elements;
  if (position == 0) {
    for (int64_t i = 0; i < elements; ++i) state[i] = 0.f;
  } else if (position % kPageTokens == 0) {
    const float* before = (const float*)(states + table[page - 1] * page_bytes) + head * elements;
    for (int64_t i = 0; i < elements; i += 16) f_store(state + i, f_load(before + i));
  }
  return state;
}

// Computes the tokens of a request one after another.
void gated_delta(const GatedDeltaArgs& a, int64_t begin, int64_t end) {
  const int64_t values = int64_t{a.heads_per_key} * a.value_dim;
  const int64_t elements = state_elements(a.head_dim, values, a.window);
  for (int64_t item = begin; item < end; ++item) {
    const int64_t request = item / a.key_heads, head = item % a.key_heads;
    const int32_t* table = a.batch.page_table + request * a.batch.page_table_width;
    for (int32_t t = a.batch.request_starts[request]; t < a.batch.request_starts[request + 1]; ++t) {
      const int32_t position = a.batch.positions[t];
      float* state = state_at(a.state, a.page_bytes, table, position, head, elements);
      delta_token(a, t, head, state);
      state[elements - 1] = float(position + 1);
    }
  }
}

}  // namespace
}  // namespace ps

#endif
