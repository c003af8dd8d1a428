// Checks of kv_append, attention (latent attention too), the short convolution and the recurrent states: pages in
// random order, unwritten slots full of NaN, no pages before a window.
#ifndef PENSTOCK_KERNEL_CHECK_ATTENTION_H
#define PENSTOCK_KERNEL_CHECK_ATTENTION_H

#include "kernel_check.h"

namespace check {

struct AttentionCase {
  int num_heads, num_kv_heads, head_dim, kv_layout, causal, window;
  float softcap;
  bool alibi;
  std::vector<int> lens;  // number of tokens of each request
  int queries;            // how many of the last tokens of each request are queries
  bool sinks = false;
  int latent_dim = 0;  // for latent attention
  int reach = 0;       // for biases by distance; 0: none
};

struct Ragged {
  std::vector<int32_t> positions, starts, request, table;
  int width;
  ps::RaggedView view() const {
    return {positions.data(),           starts.data(), request.data(), table.data(), int32_t(positions.size()),
            int32_t(starts.size()) - 1, width};
  }
};

// The last `count` tokens of each request, or all if it has fewer.
inline Ragged ragged(const std::vector<int>& lens, int count, int width, const std::vector<int32_t>& table) {
  Ragged r = {{}, {0}, {}, table, width};
  for (size_t i = 0; i < lens.size(); ++i) {
    for (int p = lens[i] > count ? lens[i] - count : 0; p < lens[i]; ++p) {
      r.positions.push_back(p);
      r.request.push_back(int32_t(i));
    }
    r.starts.push_back(int32_t(r.positions.size()));
  }
  return r;
}

struct Prepared {
  AttentionCase c;
  Ragged all, asking;
  Floats k, v, q, slopes, sinks, biases;  // k, v of all tokens; q of the queries
  int64_t page_bytes, num_pages;
};

inline Prepared prepare(const AttentionCase& c, Random& random) {
  Prepared p;
  p.c = c;
  int longest = 0;
  for (int len : c.lens) longest = len > longest ? len : longest;
  const int width = (longest + 31) / 32;
  std::vector<int32_t> table(c.lens.size() * size_t(width), -1);
  int32_t next = 0;
  for (int page = 0; page < width; ++page)  // interleaved, so that no request's pages are adjacent
    for (size_t i = 0; i < c.lens.size(); ++i)
      if (page * 32 < c.lens[i]) table[i * size_t(width) + size_t(page)] = next++;
  p.num_pages = next;
  p.all = ragged(c.lens, 1 << 20, width, table);
  p.asking = ragged(c.lens, c.queries, width, table);
  const int64_t kv = c.num_kv_heads * c.head_dim;
  p.k = random.normals(int64_t(p.all.positions.size()) * kv);
  p.v = random.normals(int64_t(p.all.positions.size()) * kv);
  p.q = random.normals(int64_t(p.asking.positions.size()) * c.num_heads * c.head_dim, 0.7f);
  p.slopes = random.normals(c.num_heads, 0.05f);
  if (c.sinks) p.sinks = random.normals(c.num_heads, 3.f);
  if (c.reach) p.biases = random.normals(c.num_heads * (2 * c.reach + 1), 3.f);
  const int64_t element = c.kv_layout == PS_KV_F32 ? 4 : c.kv_layout == PS_KV_BF16 ? 2 : 1;
  const int64_t pad = c.kv_layout == PS_KV_BF16 ? c.head_dim % 2 : 0;
  const int64_t rows = c.latent_dim ? 1 : 2;
  p.page_bytes =
      c.num_kv_heads * (32 * (rows * c.head_dim + pad) * element + (c.kv_layout == PS_KV_INT8 ? 128 * rows : 0));
  if (c.kv_layout == PS_KV_INT4)
    p.page_bytes = c.num_kv_heads * (32 * ((c.head_dim + 1) / 2 + (c.head_dim + 31) / 32 * 16) + 256);
  return p;
}

inline ps::KvView kv_view(const Prepared& p, Bytes& pages) {
  return {pages.data(), p.c.kv_layout, p.c.num_kv_heads, p.c.head_dim, p.page_bytes, p.c.latent_dim};
}

inline Bytes append(const ps::Kernels* k, const Prepared& p) {
  Bytes pages(size_t(p.page_bytes * p.num_pages), 0xff);
  const int64_t stride = p.c.num_kv_heads * p.c.head_dim;
  ps::KvAppendArgs a = {p.k.data(), p.v.data(), stride, stride, kv_view(p, pages), p.all.view()};
  const int64_t n = int64_t(p.all.positions.size());
  if (p.c.latent_dim) {
    ps::LatentAppendArgs latents = {p.k.data(), p.k.data() + p.c.latent_dim, stride,
                                    stride,     kv_view(p, pages),           p.all.view()};
    k->latent_append(latents, 0, n / 2);
    k->latent_append(latents, n / 2, n);
    return pages;
  }
  k->kv_append(a, 0, n / 2);
  k->kv_append(a, n / 2, n);
  return pages;
}

// `split`: items per call; 0: the partitions one by one in descending order, then their merge.
inline Floats attend(const ps::Kernels* k, const Prepared& p, const Ragged& batch, const Floats& q, Bytes& pages,
                     int64_t split) {
  const AttentionCase& c = p.c;
  const int64_t stride = c.num_heads * c.head_dim;
  Floats out(q.size(), 777.f);
  std::vector<char> scratch(size_t(k->attention_scratch_bytes(c.num_heads, kv_view(p, pages))));
  ps::AttentionArgs a = {q.data(),          stride,
                         out.data(),        stride,
                         kv_view(p, pages), batch.view(),
                         c.num_heads,       1.f / std::sqrt(float(c.head_dim)),
                         c.softcap,         c.alibi ? p.slopes.data() : nullptr,
                         c.causal,          c.window,
                         nullptr,           0};
  if (c.sinks) a.sinks = p.sinks.data();
  if (c.reach) a.bias = p.biases.data(), a.bias_reach = c.reach;
  const int64_t width = c.latent_dim ? c.latent_dim : c.head_dim;
  Floats first, rest;  // latent attention: the two parts of each query
  if (c.latent_dim) {
    for (size_t at = 0; at < q.size(); at += size_t(c.head_dim)) {
      first.insert(first.end(), q.begin() + long(at), q.begin() + long(at) + c.latent_dim);
      rest.insert(rest.end(), q.begin() + long(at) + c.latent_dim, q.begin() + long(at) + c.head_dim);
    }
    out.resize(first.size());
    a.q = first.data();
    a.q_stride = a.out_stride = c.num_heads * width;
    a.out = out.data();
    a.q_rope = rest.data();
    a.q_rope_stride = c.num_heads * (c.head_dim - width);
  }
  const int64_t tokens = int64_t(batch.positions.size()), items = tokens * c.num_kv_heads;
  if (split == 0) {
    a.num_parts = (batch.width + ps::kPartitionPages - 1) / ps::kPartitionPages;
    Floats partials(size_t(tokens * c.num_heads * a.num_parts * (16 + (width + 15) / 16 * 16)), NAN);
    a.partials = partials.data();
    for (int64_t i = items * a.num_parts; i-- > 0;) k->attention_part(a, i, i + 1, scratch.data());
    k->attention_merge(a, 0, tokens / 2);
    k->attention_merge(a, tokens / 2, tokens);
    return out;
  }
  for (int64_t i = 0; i < items; i += split) k->attention(a, i, i + split < items ? i + split : items, scratch.data());
  return out;
}

inline float half_value(float x) { return std::fabs(x) < 0x1p-50f ? 0.f : round_bf16(x); }

// The rotation of a head of int4 pages or, with `back`, its inverse, one number at a time and in their order of sums.
template <class T>
void rotate(T* x, int dim, bool back) {
  const std::string signs = "+++-+++-+++----+";  // a bent sequence
  for (int at = 0, n; dim - at >= 16; at += n) {
    for (n = 16; 2 * n <= dim - at;) n *= 2;
    auto sign = [&](int i) { return T(signs[size_t(i % 16)] == '+' ? 1 : -1); };
    auto add = [&](int apart) {
      for (int i = at; i < at + n; ++i)
        if (!((i - at) & apart)) {
          const T a = x[i], b = x[i + apart];
          x[i] = a + b, x[i + apart] = a - b;
        }
    };
    auto lanes = [&] { add(8), add(4), add(2), add(1); };
    auto far = [&] {
      for (int apart = 16; apart < n; apart *= 2) add(apart);
    };
    const T norm = T(float(4 / std::sqrt(double(n))));
    if (back) far(), lanes();
    for (int i = 0; i < n && !back; ++i) x[at + i] *= sign(i) / 4;
    if (!back) lanes();
    for (int i = 0; i < n; ++i) x[at + i] *= (back ? sign(i) / 4 : T(1)) * sign(i / 16) * norm;
    if (!back) far();
  }
}

inline void round_to_nibbles(float* x, int dim) {
  rotate(x, dim, false);
  float most = 0;
  for (int i = 0; i < dim; ++i) most = std::fmax(most, std::fabs(x[i]));
  const float scale = most / 15 < 1e-37f ? 0.f : most / 15, inverse = scale == 0.f ? 0.f : 1 / scale;
  std::vector<double> y;
  for (int i = 0; i < dim; ++i) {
    const float v = std::fmax(std::fmin(x[i] * (0.5f * inverse) - 0.5f, 7.f), -8.f);
    y.push_back(double(2 * std::nearbyint(v) + 1) * double(scale));
  }
  rotate(y.data(), dim, true);
  for (int i = 0; i < dim; ++i) x[i] = float(y[size_t(i)]);
}

inline Floats rounded_queries(const Prepared& p) {
  Floats q = p.q;
  const int dim = p.c.head_dim;
  for (size_t at = 0; p.c.kv_layout == PS_KV_INT4 && at < q.size(); at += size_t(dim)) rotate(&q[at], dim, false);
  if (p.c.kv_layout != PS_KV_F32)
    for (float& x : q) x = half_value(x);
  for (size_t at = 0; p.c.kv_layout == PS_KV_INT4 && at < q.size(); at += size_t(dim)) {
    std::vector<double> row(q.begin() + long(at), q.begin() + long(at) + dim);
    rotate(row.data(), dim, true);
    for (int i = 0; i < dim; ++i) q[at + size_t(i)] = float(row[size_t(i)]);
  }
  return q;
}

inline Floats stored(const Prepared& p, const Floats& x) {
  Floats y = x;
  for (size_t at = 0; at < y.size(); at += size_t(p.c.head_dim)) {
    if (p.c.kv_layout == PS_KV_INT4) {
      round_to_nibbles(&y[at], p.c.head_dim);
      continue;
    }
    float scale = int8_scale(&x[at], p.c.head_dim);
    for (size_t i = at; i < at + size_t(p.c.head_dim); ++i) {
      if (p.c.kv_layout == PS_KV_BF16) y[i] = half_value(x[i]);
      if (p.c.kv_layout == PS_KV_INT8) y[i] = int8_value(x[i], scale) * scale;
    }
  }
  return y;
}

inline void compare_attention(const Prepared& p, const Floats& out, const std::string& what, const char* level) {
  const AttentionCase& c = p.c;
  Floats ks = stored(p, p.k), vs = stored(p, p.v), qs = rounded_queries(p);
  // Probabilities are rounded to bf16 too, each by at most 2^-8 of itself.
  const double tolerance = c.kv_layout == PS_KV_F32 ? 2e-5 : 1. / 256;
  const int64_t dim = c.head_dim, width = c.latent_dim ? c.latent_dim : dim, group = c.num_heads / c.num_kv_heads;
  if (c.latent_dim) vs = ks;
  for (size_t t = 0; t < p.asking.positions.size(); t += 7)
    for (int64_t h = 0; h < c.num_heads; ++h) {
      const int32_t request = p.asking.request[t], position = p.asking.positions[t];
      int32_t first = c.window && position >= c.window ? position - c.window + 1 : 0;
      int32_t last = c.causal ? position : c.lens[size_t(request)] - 1;
      if (c.window && last - position >= c.window) last = position + c.window - 1;
      const float* q = &qs[(t * size_t(c.num_heads) + size_t(h)) * size_t(dim)];
      std::vector<double> o(size_t(width), 0.), w;
      double sum = 0, highest = -1e300, largest = 0;
      auto row = [&](const Floats& x, int32_t j) {
        return &x[size_t(((p.all.starts[size_t(request)] + j) * c.num_kv_heads + h / group) * dim)];
      };
      for (int32_t j = first; j <= last; ++j) {
        double s = 0;
        for (int64_t d = 0; d < dim; ++d) s += double(q[d]) * row(ks, j)[d];
        s /= std::sqrt(double(dim));
        if (c.softcap != 0.f) s = c.softcap * std::tanh(s / c.softcap);
        if (c.alibi) s += p.slopes[size_t(h)] * double(j - position);
        const int32_t distance = j - position < -c.reach ? -c.reach : j - position > c.reach ? c.reach : j - position;
        if (c.reach) s += p.biases[size_t(h * (2 * c.reach + 1) + c.reach + distance)];
        w.push_back(s);
        highest = std::fmax(highest, s);
      }
      if (c.sinks)
        highest = std::fmax(highest, double(p.sinks[size_t(h)])), sum = std::exp(p.sinks[size_t(h)] - highest);
      for (double& s : w) sum += (s = std::exp(s - highest));
      for (int32_t j = first; j <= last; ++j)
        for (int64_t d = 0; d < width; ++d) {
          o[size_t(d)] += w[size_t(j - first)] / sum * row(vs, j)[d];
          largest = std::fmax(largest, std::fabs(double(row(vs, j)[d])));
        }
      for (int64_t d = 0; d < width; ++d)
        expect_near(out[(t * size_t(c.num_heads) + size_t(h)) * size_t(width) + size_t(d)], o[size_t(d)],
                    tolerance * std::fmax(1., largest), what, level);
    }
}

// Each token computed separately must give the same as in the batch.
inline void compare_alone(const ps::Kernels* k, const Prepared& p, const Ragged& batch, Bytes& pages, const Floats& out,
                          const std::string& what) {
  const size_t row = size_t(p.c.num_heads * p.c.head_dim), n = batch.positions.size(), width = out.size() / n;
  if (!p.c.causal) return;
  for (size_t t = 0; t < n; t += n / 9 + 1) {
    Ragged one = {{batch.positions[t]}, {0, 1}, {0}, {}, batch.width};
    auto begin = batch.table.begin() + long(batch.request[t]) * batch.width;
    one.table.assign(begin, begin + batch.width);
    Floats q(p.q.begin() + long(t * row), p.q.begin() + long((t + 1) * row));
    expect_same(attend(k, p, one, q, pages, 1),
                Floats(out.begin() + long(t * width), out.begin() + long((t + 1) * width)), what + " alone", k->level);
  }
}

// `magnitude`: of queries, keys and values.  Below 2^-50 they are zero in bf16 pages, so that the order and the
// subnormal numbers of a bf16 dot product have no effect.
inline void check_attention_case(const AttentionCase& c, Random& random, float magnitude = 1.f) {
  Prepared p = prepare(c, random);
  for (Floats* x : {&p.q, &p.k, &p.v})
    for (float& value : *x) value = random.uniform() < 0.5f ? value * magnitude : value;
  std::string what = "attention latent " + std::to_string(c.latent_dim) + " heads " + std::to_string(c.num_heads) +
                     "/" + std::to_string(c.num_kv_heads) + " dim " + std::to_string(c.head_dim) + " kv " +
                     std::to_string(c.kv_layout) + " window " + std::to_string(c.window) + " causal " +
                     std::to_string(c.causal) + " len " + std::to_string(c.lens[0]) + (c.sinks ? " sinks" : "") +
                     (c.reach ? " biases" : "");
  Bytes pages = append(ps::kernels_generic, p);
  Ragged batch = p.asking;
  for (size_t i = 0; i < c.lens.size() && c.window; ++i) {  // pages that no query needs any more are freed
    int32_t first = c.lens[i] - c.queries - c.window + 1;
    for (int page = 0; (page + 1) * 32 <= first; ++page) batch.table[i * size_t(batch.width) + size_t(page)] = -1;
  }
  Floats expected = attend(ps::kernels_generic, p, batch, p.q, pages, 1 << 20);
  for (const ps::Kernels* k : levels()) {
    Bytes own = append(k, p);
    expect_same(own, pages, "kv_append " + what, k->level);
    Floats out = k == ps::kernels_generic ? expected : attend(k, p, batch, p.q, own, 1 << 20);
    expect_same(out, expected, what, k->level);
    expect_same(attend(k, p, batch, p.q, own, 7), out, what + " split", k->level);
    expect_same(attend(k, p, batch, p.q, own, 0), out, what + " by partitions", k->level);
    if (k == ps::kernels_generic) compare_attention(p, out, what, k->level);  // the others have the same bits
    compare_alone(k, p, batch, own, out, what);
  }
}

// Tokens [begin, end) of the queries.
inline void convolve(const ps::Kernels* k, const Prepared& p, const Ragged& batch, const Floats& weight, Bytes& pages,
                     int64_t begin, int64_t end, Floats& out) {
  const int64_t stride = p.c.num_heads * p.c.head_dim;
  ps::ShortConvArgs a = {p.q.data(),   stride,        out.data(),      stride,    kv_view(p, pages),
                         batch.view(), weight.data(), p.slopes.data(), p.c.window};
  k->short_conv(a, begin, end);
}

// Every level and every split of the tokens gives the same as a slow sum over the stored inputs.
inline void check_short_conv_case(int heads, int dim, int layout, int window, Random& random) {
  Prepared p = prepare({2 * heads, heads, dim, layout, 1, window, 0.f, false, {70, 1, 33}, 34}, random);
  const int64_t channels = 2 * heads * dim, n = int64_t(p.asking.positions.size());
  const Floats weight = random.normals(channels * window), ks = stored(p, p.k), vs = stored(p, p.v);
  p.slopes = random.normals(channels);
  const std::string what = "short_conv " + std::to_string(heads) + " dim " + std::to_string(dim) + " kv " +
                           std::to_string(layout) + " window " + std::to_string(window);
  Bytes pages = append(ps::kernels_generic, p);
  Floats expected(p.q.size(), 777.f);
  convolve(ps::kernels_generic, p, p.asking, weight, pages, 0, n, expected);
  for (int64_t at = 0; at < n * channels; ++at) {
    const int64_t t = at / channels, c = at % channels;
    const int32_t position = p.asking.positions[size_t(t)], start = p.all.starts[size_t(p.asking.request[size_t(t)])];
    double sum = p.slopes[size_t(c)];
    for (int tap = 0; tap < window; ++tap) {
      const int64_t row = position - (window - 1) + tap, half = channels / 2;
      if (row < 0) continue;
      sum += double(weight[size_t(c * window + tap)]) * (c < half ? ks : vs)[size_t((start + row) * half + c % half)];
    }
    expect_near(expected[size_t(at)], sum * p.q[size_t(at)], 1e-4, what, "generic");
  }
  for (const ps::Kernels* k : levels()) {
    Floats out(p.q.size(), 777.f);
    for (int64_t t = n; t-- > 0;) convolve(k, p, p.asking, weight, pages, t, t + 1, out);
    expect_same(out, expected, what, k->level);
  }
}

struct DeltaCase {
  int key_heads, shared, dim, value_dim, window;
  bool tiled;
};

// Calls run(batch, token) for the tokens of each request in steps of `step`; `token` is the first of the batch.
template <class Run>
void in_steps(const Ragged& all, int step, const Run& run) {
  for (size_t r = 0; r + 1 < all.starts.size(); ++r) {
    for (int32_t t = all.starts[r]; t < all.starts[r + 1]; t += step) {
      const int32_t count = t + step < all.starts[r + 1] ? step : all.starts[r + 1] - t;
      const Ragged batch = {{all.positions.begin() + t, all.positions.begin() + t + count},
                            {0, count},
                            std::vector<int32_t>(size_t(count), 0),
                            {all.table.begin() + long(r) * all.width, all.table.begin() + long(r + 1) * all.width},
                            all.width};
      run(batch, int64_t{t});
    }
  }
}

// From empty pages on: compares the outputs, and the pages afterwards.
inline Floats delta_rule(const ps::Kernels* k, const DeltaCase& c, const Ragged& all, const std::vector<Floats>& inputs,
                         int step, Floats& pages) {
  const int64_t heads = c.key_heads * c.shared, channels = 2 * c.key_heads * c.dim + heads * c.value_dim;
  const int64_t elements = ps::state_elements(c.dim, c.shared * c.value_dim, c.window);
  Floats out(all.positions.size() * size_t(heads * c.value_dim), 777.f);
  in_steps(all, step, [&](const Ragged& batch, int64_t t) {
    ps::GatedDeltaArgs a = {inputs[0].data() + t * channels,
                            inputs[1].data() + t * heads,
                            inputs[2].data() + t * heads,
                            channels,
                            heads,
                            heads,
                            out.data() + t * heads * c.value_dim,
                            heads * c.value_dim,
                            reinterpret_cast<uint8_t*>(pages.data()),
                            4 * c.key_heads * elements,
                            batch.view(),
                            inputs[3].data(),
                            inputs[4].data(),
                            inputs[5].data(),
                            c.key_heads,
                            c.shared,
                            c.dim,
                            c.value_dim,
                            c.window,
                            c.tiled ? 1 : c.shared,
                            c.tiled ? c.key_heads : 1};
    for (int64_t head = c.key_heads; head-- > 0;) k->gated_delta(a, head, head + 1);
  });
  return out;
}

// Every level and every step size: the same outputs and states. tests/ops compares the numbers with the reference.
inline void check_gated_delta_case(const DeltaCase& c, Random& random) {
  const std::vector<int> lens = {70, 1, 33};
  const Ragged all = ragged(lens, 1 << 20, 3, {5, 0, 3, 1, -1, -1, 4, 2, -1});
  const int64_t heads = c.key_heads * c.shared, channels = 2 * c.key_heads * c.dim + heads * c.value_dim;
  const int64_t n = int64_t(all.positions.size());
  const std::vector<Floats> inputs = {random.normals(n * channels),   random.normals(n * heads, 3.f),
                                      random.normals(n * heads, 3.f), random.normals(channels * c.window),
                                      random.normals(heads),          random.normals(heads)};
  const size_t size = size_t(6 * c.key_heads * ps::state_elements(c.dim, c.shared * c.value_dim, c.window));
  const std::string what = "gated_delta " + std::to_string(c.key_heads) + "x" + std::to_string(c.shared) + " dim " +
                           std::to_string(c.dim) + " to " + std::to_string(c.value_dim) + " window " +
                           std::to_string(c.window);
  Floats expected_pages(size, NAN);
  const Floats expected = delta_rule(ps::kernels_generic, c, all, inputs, 1 << 20, expected_pages);
  for (const ps::Kernels* k : levels()) {
    for (int step : {1 << 20, 1, 7, 32}) {
      Floats pages(size, NAN);
      expect_same(delta_rule(k, c, all, inputs, step, pages), expected, what + " step " + std::to_string(step),
                  k->level);
      expect_same(pages, expected_pages, what + " states", k->level);
    }
  }
}

struct ScanCase {
  int groups, blocks, shared, state_dim, head_dim, window;
  bool bias;
};

// The same for selective state spaces.
inline Floats scan(const ps::Kernels* k, const ScanCase& c, const Ragged& all, const std::vector<Floats>& inputs,
                   int step, Floats& pages) {
  const int64_t heads = c.blocks * c.shared, channels = heads * c.head_dim + 2 * c.groups * c.state_dim;
  const int64_t elements = ps::state_elements(c.state_dim, c.shared * c.head_dim, c.window);
  Floats out(all.positions.size() * size_t(heads * c.head_dim), 777.f);
  in_steps(all, step, [&](const Ragged& batch, int64_t t) {
    ps::SsmScanArgs a = {inputs[0].data() + t * channels,
                         inputs[1].data() + t * heads,
                         channels,
                         heads,
                         out.data() + t * heads * c.head_dim,
                         heads * c.head_dim,
                         reinterpret_cast<uint8_t*>(pages.data()),
                         4 * c.blocks * elements,
                         batch.view(),
                         inputs[2].data(),
                         c.bias ? inputs[3].data() : nullptr,
                         inputs[4].data(),
                         inputs[5].data(),
                         inputs[6].data(),
                         int32_t(heads),
                         c.blocks,
                         c.groups,
                         c.state_dim,
                         c.head_dim,
                         c.window,
                         0.01f,
                         2.f};
    for (int64_t block = c.blocks; block-- > 0;) k->ssm_scan(a, block, block + 1);
  });
  return out;
}

inline void check_ssm_scan_case(const ScanCase& c, Random& random) {
  const Ragged all = ragged({70, 1, 33}, 1 << 20, 3, {5, 0, 3, 1, -1, -1, 4, 2, -1});
  const int64_t heads = c.blocks * c.shared, channels = heads * c.head_dim + 2 * c.groups * c.state_dim;
  const int64_t n = int64_t(all.positions.size());
  const std::vector<Floats> inputs = {
      random.normals(n * channels), random.normals(n * heads, 3.f), random.normals(channels * c.window),
      random.normals(channels),     random.normals(heads),          random.normals(heads),
      random.normals(heads)};
  const size_t size = size_t(6 * c.blocks * ps::state_elements(c.state_dim, c.shared * c.head_dim, c.window));
  const std::string what = "ssm_scan " + std::to_string(c.groups) + " of " + std::to_string(c.blocks) + "x" +
                           std::to_string(c.shared) + " state " + std::to_string(c.state_dim) + " dim " +
                           std::to_string(c.head_dim);
  Floats expected_pages(size, NAN);
  const Floats expected = scan(ps::kernels_generic, c, all, inputs, 1 << 20, expected_pages);
  for (const ps::Kernels* k : levels()) {
    for (int step : {1 << 20, 1, 7, 32}) {
      Floats pages(size, NAN);
      expect_same(scan(k, c, all, inputs, step, pages), expected, what + " step " + std::to_string(step), k->level);
      expect_same(pages, expected_pages, what + " states", k->level);
    }
  }
}

inline void check_attention() {
  Random random = {4};
  for (int layout : {PS_KV_F32, PS_KV_BF16, PS_KV_INT8, PS_KV_INT4})
    for (int window : {1, 3, 5})
      for (int dim : {17, 40, 64}) check_short_conv_case(3, dim, layout, window, random);
  for (const DeltaCase& c :
       {DeltaCase{1, 1, 16, 64, 4, false}, DeltaCase{2, 3, 17, 20, 3, true}, DeltaCase{3, 2, 24, 80, 1, false}})
    check_gated_delta_case(c, random);
  for (const ScanCase& c :
       {ScanCase{1, 1, 1, 16, 64, 4, true}, ScanCase{2, 4, 3, 17, 20, 3, false}, ScanCase{1, 3, 2, 24, 80, 1, true}})
    check_ssm_scan_case(c, random);
  const int heads[][3] = {{4, 4, 32},  {6, 2, 40}, {5, 1, 64},  {16, 2, 80},
                          {2, 1, 128}, {3, 3, 17}, {1, 1, 512}, {40, 1, 16}};
  for (int layout : {PS_KV_F32, PS_KV_BF16, PS_KV_INT8, PS_KV_INT4})
    for (auto [h, g, d] : heads) {
      // In a part, only the smallest heads ask for every token: most of the time is in the generic level's attention.
      const int many = whole || d == 17 ? 300 : h == 6 ? 70 : 20;
      const bool is_whole = whole || h * d <= 320;
      const int longest = is_whole ? 300 : 130;
      check_attention_case({h, g, d, layout, 1, 0, 0.f, false, {31, 1, 33}, 40}, random);
      check_attention_case({h, g, d, layout, 1, 20, 0.f, false, {255, 32}, 9}, random);
      check_attention_case({h, g, d, layout, 1, 40, 5.f, true, {257}, 33}, random);
      check_attention_case({h, g, d, layout, 0, 0, 0.f, true, {70, 5}, is_whole ? 100 : 20}, random);
      check_attention_case({h, g, d, layout, 0, 9, 0.f, false, {290, 5}, many}, random);
      check_attention_case({h, g, d, layout, 1, h % 2 ? 0 : 20, 0.f, h > 4, {longest, 1}, many < 40 ? many : 40, true},
                           random);
      check_attention_case({h, g, d, layout, h % 2, 0, 0.f, false, {longest, 1, 33}, many, false, 0, h > 4 ? 5 : 40},
                           random);
    }
  const int latents[][3] = {{5, 32, 16}, {3, 17, 6}, {36, 40, 11}, {1, 128, 64}};
  for (int layout : {PS_KV_F32, PS_KV_BF16, PS_KV_INT8})
    for (auto [h, first, rest] : latents) {
      check_attention_case({h, 1, first + rest, layout, 1, 0, 0.f, false, {31, 1, 33}, 40, false, first}, random);
      check_attention_case({h, 1, first + rest, layout, 1, 40, 5.f, false, {300, 257}, 9, false, first}, random);
    }
  for (int layout : {PS_KV_F32, PS_KV_BF16, PS_KV_INT8, PS_KV_INT4})
    for (float magnitude : {1e-39f, 0x1p-63f, 0x1p-50f, 0x1p-30f})
      check_attention_case({4, 2, 32, layout, 1, 0, 0.f, false, {70, 33}, 9}, random, magnitude);
  check_attention_case({whole ? 4 : 2, whole ? 2 : 1, 32, PS_KV_F32, 1, 0, 0.f, false, {600}, 600}, random);
  check_attention_case({4, 2, 32, PS_KV_BF16, 1, 300, 0.f, false, {600, 2}, 64}, random);
  check_attention_case({4, 2, 32, PS_KV_INT8, 1, 0, 2.f, false, {600, 256}, 3}, random);
}

}  // namespace check

#endif
