// Rotary position embedding: the table of cosines and sines, and the rotation.
#ifndef PENSTOCK_KERNELS_ROWS_ROPE_H
#define PENSTOCK_KERNELS_ROWS_ROPE_H

namespace ps {
namespace {

void rotary_embedding(const int32_t* positions, const float* inv_freq, int64_t half, float scaling, float* y,
                      int64_t y_stride, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    float* out = y + row * y_stride;
    for (int64_t i = 0; i < half; ++i) {
      float angle = float(positions[row]) * inv_freq[i];
      double sine, cosine;
      sin_cos(double(angle), &sine, &cosine);
      out[i] = float(cosine) * scaling;
      out[half + i] = float(sine) * scaling;
    }
  }
}

inline void rotate_halves(const float* x, const float* cosine, const float* sine, float* y, int64_t half) {
  for (int64_t i = 0; i < half; i += 16) {
    int n = tail(half, i);
    F16 a = f_load_n(x + i, n), b = f_load_n(x + half + i, n);
    F16 c = f_load_n(cosine + i, n), s = f_load_n(sine + i, n);
    f_store_n(y + i, (a * c) - (b * s), n);
    f_store_n(y + half + i, (b * c) + (a * s), n);
  }
}

void rope(const RopeArgs& args, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const float* cosine = args.cos_sin + row * args.cos_sin_stride;
    const float* sine = cosine + args.half;
    for (int64_t head = 0; head < args.num_heads; ++head) {
      const float* x = args.x + row * args.x_stride + head * args.head_dim;
      float* y = args.y + row * args.y_stride + head * args.head_dim;
      if (row + 1 < end) prefetch_row(x + args.x_stride, args.head_dim);
      if (args.interleaved) {
        for (int64_t i = 0; i < args.half; ++i) {
          float a = x[2 * i], b = x[2 * i + 1];
          y[2 * i] = a * cosine[i] - b * sine[i];
          y[2 * i + 1] = b * cosine[i] + a * sine[i];
        }
      } else {
        rotate_halves(x, cosine, sine, y, args.half);
      }
      for (int64_t i = 2 * args.half; i < args.head_dim; ++i) y[i] = x[i];
    }
  }
}

}  // namespace
}  // namespace ps

#endif
