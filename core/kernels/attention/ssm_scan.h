// Selective state spaces over recurrent states (Mamba-2: Dao and Gu, arXiv 2405.21060), behind a short convolution and
// SiLU.
#ifndef PENSTOCK_KERNELS_ATTENTION_SSM_SCAN_H
#define PENSTOCK_KERNELS_ATTENTION_SSM_SCAN_H

namespace ps {
namespace {

struct SsmGates { float step, decay; };
// step = softplus(dt + dt_bias) within the limits, decay = exp(-exp(a_log) step).
inline SsmGates ssm_gates(const SsmScanArgs& a, int64_t t, int64_t head) {
  const F16 softplus = f_set(softplus_of(a.dt[t * a.dt_stride + head] + a.dt_bias[head]));
  const float step = first_lane(f_min(f_set(a.dt_max), f_max(f_set(a.dt_min), softplus)));
  return {step, exp_of(-exp_of(a.a_log[head]) * step)};
}

// Updates the state for 16 * N values of a head from x, the last 16 of which are n; then out = state^T c + skip x.
template <int N>
PS_INLINE void ssm_columns(const SsmScanArgs& a, float* state, const float* x, const float* b, const float* c,
                           SsmGates g, float skip, float* out, int n) {
  const int64_t dim = a.head_dim;
  F16 value[N], sum[N];
  const F16 decay = f_set(g.decay);
  for (int j = 0; j < N; ++j) {
    value[j] = f_load_n(x + 16 * j, n) * f_set(g.step);
    sum[j] = f_set(0.f);
  }
  for (int64_t i = 0; i < a.state_dim; ++i) {
    const F16 key = f_set(b[i]), query = f_set(c[i]);
    for (int j = 0; j < N; ++j) {
      float* at = state + i * dim + 16 * j;
      const F16 s = f_fma(value[j], key, f_load_n(at, n) * decay);
      f_store_n(at, s, n);
      sum[j] = f_fma(s, query, sum[j]);
    }
  }
  for (int j = 0; j < N; ++j) f_store_n(out + 16 * j, f_fma(f_load_n(x + 16 * j, n), f_set(skip), sum[j]), n);
}

// Computes one token of the heads of one block.  `state` goes from the previous token's to this token's.
inline void ssm_token(const SsmScanArgs& a, int64_t t, int64_t block, float* state) {
  const int64_t dim = a.state_dim, shared = a.heads / a.blocks, values = shared * a.head_dim;
  const int64_t all = int64_t{a.heads} * a.head_dim, group = block / (a.blocks / a.groups);
  const int64_t starts[3] = {block * values, all + group * dim, all + (a.groups + group) * dim};
  const int64_t counts[3] = {values, dim, dim}, places[3] = {2 * dim, 0, dim};
  float mixed[2 * kMaxDeltaDim + kMaxDeltaValues];
  for (int i = 0; i < 3; ++i) {
    convolve_channels(a.x + t * a.x_stride + starts[i], state + dim * values + places[i], 2 * dim + values,
                      a.conv + starts[i] * a.window, a.conv_bias ? a.conv_bias + starts[i] : nullptr, a.window,
                      counts[i], mixed + places[i]);
  }
  for (int64_t j = 0; j < shared; ++j) {
    const int64_t head = block * shared + j;
    const SsmGates gates = ssm_gates(a, t, head);
    float* matrix = state + j * dim * a.head_dim;
    const float* x = mixed + 2 * dim + j * a.head_dim;
    float* out = a.out + t * a.out_stride + head * a.head_dim;
    int64_t at = 0;
    for (; at + 64 <= a.head_dim; at += 64)
      ssm_columns<4>(a, matrix + at, x + at, mixed, mixed + dim, gates, a.d[head], out + at, 16);
    for (; at < a.head_dim; at += 16)
      ssm_columns<1>(a, matrix + at, x + at, mixed, mixed + dim, gates, a.d[head], out + at, tail(a.head_dim, at));
  }
}

// Computes the tokens of a request one after another.
void ssm_scan(const SsmScanArgs& a, int64_t begin, int64_t end) {
  const int64_t elements = state_elements(a.state_dim, int64_t{a.heads} / a.blocks * a.head_dim, a.window);
  for (int64_t item = begin; item < end; ++item) {
    const int64_t request = item / a.blocks, block = item % a.blocks;
    const int32_t* table = a.batch.page_table + request * a.batch.page_table_width;
    for (int32_t t = a.batch.request_starts[request]; t < a.batch.request_starts[request + 1]; ++t) {
      const int32_t position = a.batch.positions[t];
      float* state = state_at(a.state, a.page_bytes, table, position, block, elements);
      ssm_token(a, t, block, state);
      state[elements - 1] = float(position + 1);
    }
  }
}

}  // namespace
}  // namespace ps

#endif
