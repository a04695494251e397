// Included once per instruction set by ops.cpp, inside a namespace that defines F (a vector of W floats) and
// its operations. No include guard on purpose.

// ---------------------------------------------------------------- register tile

// c[R, NV*W] (+)= a[R, k] * b[k, NV*W], one chain per output in the order of k; `each(i)` is called beside.
template <int R, int NV, class Each>
static void tile(long k, const float* a, long a_stride, const float* b, long b_stride, float* c, long c_stride,
                 bool adds, Each&& each) {
  F acc[R][NV];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < NV; v++) acc[r][v] = adds ? load(c + r * c_stride + v * W) : all(0.0f);
  for (long i = 0; i < k; i++) {
    each(i);
    F row[NV];
    for (int v = 0; v < NV; v++) row[v] = load(b + i * b_stride + v * W);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      F value = all(a[r * a_stride + i]);
#pragma GCC unroll 4
      for (int v = 0; v < NV; v++) acc[r][v] = fma(value, row[v], acc[r][v]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < NV; v++) store(c + r * c_stride + v * W, acc[r][v]);
}

template <int R, int NV>
static void tile(long k, const float* a, long a_stride, const float* b, long b_stride, float* c, long c_stride,
                 bool adds) {
  tile<R, NV>(k, a, a_stride, b, b_stride, c, c_stride, adds, [](long) {});
}

template <int NV>
static void tile_rows(long rows, long k, const float* a, long a_stride, const float* b, long b_stride, float* c,
                      long c_stride, bool adds) {
#define TILE(R) \
  case R: tile<R, NV>(k, a, a_stride, b, b_stride, c, c_stride, adds); break;
  switch (rows) {
    TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6)
#define WIDE(R) \
  case R: if constexpr (R <= MAX_ROWS) tile<R, NV>(k, a, a_stride, b, b_stride, c, c_stride, adds); break;
    WIDE(7) WIDE(8) WIDE(9) WIDE(10) WIDE(11) WIDE(12)
  }
#undef TILE
#undef WIDE
}

template <int NV, class Each>
static void tile_few(long rows, long k, const float* a, long a_stride, const float* b, long b_stride, float* c,
                     long c_stride, bool adds, Each&& each) {
  if (rows == 1) tile<1, NV>(k, a, a_stride, b, b_stride, c, c_stride, adds, each);
  if (rows == 2) tile<2, NV>(k, a, a_stride, b, b_stride, c, c_stride, adds, each);
  if (rows == 3) tile<3, NV>(k, a, a_stride, b, b_stride, c, c_stride, adds, each);
}

constexpr long FEW = 3;

// c[rows, columns] (+)= a[rows, k] * b[k, columns]; columns is a multiple of W. With up to FEW rows, which wait
// for memory rather than for arithmetic, `each(i)` is called for each i of k, once for every 4 W columns.
template <class Each>
static void product(long rows, long columns, long k, const float* a, long a_stride, const float* b, long b_stride,
                    float* c, long c_stride, bool adds, Each&& each) {
  const long step = ceil_div(rows, ceil_div(rows, MAX_ROWS));
  for (long r = 0; r < rows; r += step) {
    const long count = least(step, rows - r);
    const float* from = a + r * a_stride;
    float* to = c + r * c_stride;
    long j = 0;
    if (count <= FEW)  // too few chains for the latency of an addition, unless more columns go together
      for (; j + 4 * W <= columns; j += 4 * W)
        tile_few<4>(count, k, from, a_stride, b + j, b_stride, to + j, c_stride, adds, each);
    for (; j + 2 * W <= columns; j += 2 * W)
      tile_rows<2>(count, k, from, a_stride, b + j, b_stride, to + j, c_stride, adds);
    if (j < columns) tile_rows<1>(count, k, from, a_stride, b + j, b_stride, to + j, c_stride, adds);
  }
}

#include "linear.h"

// ---------------------------------------------------------------- elementwise

// exp to 2 ulp: 2^n times a polynomial on [-ln2/2, ln2/2]; below -87 it is 0, a NaN stays one.
static inline F exponential(F x) {
  F bounded = larger(all(-87.3f), smaller(all(88.3f), x));
  F n = nearest(mul(bounded, all(1.44269504f)));
  F r = fma(n, all(-0.693359375f), bounded);
  r = fma(n, all(2.12194440e-4f), r);
  F p = all(1.9875691500e-4f);
  p = fma(p, r, all(1.3981999507e-3f));
  p = fma(p, r, all(8.3334519073e-3f));
  p = fma(p, r, all(4.1665795894e-2f));
  p = fma(p, r, all(1.6666665459e-1f));
  p = fma(p, r, all(5.0000001201e-1f));
  p = fma(p, mul(r, r), add(r, all(1.0f)));
  return zero_below(all(-87.3f), x, mul(p, power_of_two(n)));
}

static void rms_norm(const float* x, const float* weight, float eps, float* out, long num_rows, long size,
                     int threads) {
  each_row(threads, num_rows, size, [&](long r) {
    const float* from = x + r * size;
    float* to = out + r * size;
    F a = all(0.0f), b = all(0.0f);
    long i = 0;
    for (; i + 2 * W <= size; i += 2 * W) {
      F u = load(from + i), v = load(from + i + W);
      a = fma(u, u, a);
      b = fma(v, v, b);
    }
    float sum = sum_of(add(a, b));
    for (; i < size; i++) sum += from[i] * from[i];
    const float scale = 1.0f / __builtin_sqrtf(sum / (float)size + eps);
    for (long j = 0; j < size; j++) to[j] = from[j] * scale * weight[j];
  });
}

static inline F swiglu_of(F gate, F up) {
  return mul(div(gate, add(all(1.0f), exponential(sub(all(0.0f), gate)))), up);
}

static void swiglu(const float* gate_up, float* out, long num_rows, long size, int threads) {
  each_row(threads, num_rows, 2 * size, [&](long r) {
    const float* gate = gate_up + r * 2 * size;
    const float* up = gate + size;
    float* to = out + r * size;
    long i = 0;
    for (; i + W <= size; i += W) store(to + i, swiglu_of(load(gate + i), load(up + i)));
    if (i < size) {
      alignas(64) float g[W] = {}, u[W] = {};
      for (long j = i; j < size; j++) g[j - i] = gate[j], u[j - i] = up[j];
      store(g, swiglu_of(load(g), load(u)));
      for (long j = i; j < size; j++) to[j] = g[j - i];
    }
  });
}

static inline void rotate(float* __restrict head, const float* __restrict cos, const float* __restrict sin,
                          long half) {
  for (long i = 0; i < half; i++) {
    const float a = head[i], b = head[i + half];
    head[i] = a * cos[i] - b * sin[i];
    head[i + half] = b * cos[i] + a * sin[i];
  }
}

static void rotate_store(const RotateArgs& a) {
  const long row = (a.num_heads + 2 * a.num_kv_heads) * a.head_dim, half = a.head_dim / 2;
  each_row(a.threads, a.num_tokens, row, [&](long t) {
    float* heads = a.heads + t * row;
    for (long h = 0; h < a.num_heads + a.num_kv_heads; h++)
      rotate(heads + h * a.head_dim, a.cos + t * half, a.sin + t * half, half);
    const float* k = heads + a.num_heads * a.head_dim;
    const float* v = k + a.num_kv_heads * a.head_dim;
    for (long h = 0; h < a.num_kv_heads; h++) {
      const long slot = ((a.blocks[t] * a.num_kv_heads + h) * a.block_size + a.offsets[t]) * a.head_dim;
      for (long i = 0; i < a.head_dim; i++) a.keys[slot + i] = k[h * a.head_dim + i];
      for (long i = 0; i < a.head_dim; i++) a.values[slot + i] = v[h * a.head_dim + i];
    }
  });
}

#include "attention.h"

// ---------------------------------------------------------------- all layers

static void multiply(const Pass& p, const Matrix& m, const float* x, float* out, int adds) {
  linear({x, m.data, m.bias, out, p.num_tokens, m.num_out, m.num_in, m.num_in, (int)m.kind, adds, (int)p.threads});
}

// Norms of the heads of q and k, for models that have them.
static void norm_heads(const Pass& p, const Layer& layer) {
  const long row = (p.num_heads + 2 * p.num_kv_heads) * p.head_dim;
  each_row(p.threads, p.num_tokens, row, [&](long t) {
    float* q = p.heads + t * row;
    float* k = q + p.num_heads * p.head_dim;
    rms_norm(q, layer.q_norm, p.eps, q, p.num_heads, p.head_dim, 1);
    rms_norm(k, layer.k_norm, p.eps, k, p.num_kv_heads, p.head_dim, 1);
  });
}

static void layers(const Pass& p) {
  const int threads = (int)p.threads;
  const long plane = p.num_blocks * p.num_kv_heads * p.block_size * p.head_dim;
  const long q_stride = (p.num_heads + 2 * p.num_kv_heads) * p.head_dim;
  for (long l = 0; l < p.num_layers; l++) {
    const Layer& layer = p.layers[l];
    float* keys = p.pool + 2 * l * plane;
    float* values = keys + plane;
    rms_norm(p.hidden, layer.input_norm, p.eps, p.normed, p.num_tokens, p.hidden_size, threads);
    multiply(p, layer.qkv, p.normed, p.heads, 0);
    if (layer.q_norm) norm_heads(p, layer);
    rotate_store({p.heads, p.cos, p.sin, keys, values, p.blocks, p.offsets, p.num_tokens, p.num_heads,
                  p.num_kv_heads, p.head_dim, p.block_size, threads});
    attention({p.heads, p.mixed, keys, values, p.tables, p.items, p.groups, p.num_items, p.num_groups, p.max_blocks,
               q_stride, p.num_heads, p.num_kv_heads, p.head_dim, p.block_size, threads});
    multiply(p, layer.output, p.mixed, p.hidden, 1);
    rms_norm(p.hidden, layer.post_norm, p.eps, p.normed, p.num_tokens, p.hidden_size, threads);
    multiply(p, layer.gate_up, p.normed, p.gate_up, 0);
    swiglu(p.gate_up, p.gated, p.num_tokens, layer.down.num_in, threads);
    multiply(p, layer.down, p.gated, p.hidden, 1);
  }
}
