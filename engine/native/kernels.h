// Included once per instruction set by ops.cpp, inside a namespace that defines F (a vector of W floats) and
// its operations. No include guard on purpose.

// ---------------------------------------------------------------- register tile

// c[R, NV*W] (+)= a[R, k] * b[k, NV*W], one chain per output in the order of k.
template <int R, int NV>
static void tile(long k, const float* a, long a_stride, const float* b, long b_stride, float* c, long c_stride,
                 bool adds) {
  F acc[R][NV];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < NV; v++) acc[r][v] = adds ? load(c + r * c_stride + v * W) : all(0.0f);
  for (long i = 0; i < k; i++) {
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

template <int NV>
static void tile_few(long rows, long k, const float* a, long a_stride, const float* b, long b_stride, float* c,
                     long c_stride, bool adds) {
  if (rows == 1) tile<1, NV>(k, a, a_stride, b, b_stride, c, c_stride, adds);
  if (rows == 2) tile<2, NV>(k, a, a_stride, b, b_stride, c, c_stride, adds);
  if (rows == 3) tile<3, NV>(k, a, a_stride, b, b_stride, c, c_stride, adds);
}

// c[rows, columns] (+)= a[rows, k] * b[k, columns]; columns is a multiple of W.
static void product(long rows, long columns, long k, const float* a, long a_stride, const float* b, long b_stride,
                    float* c, long c_stride, bool adds) {
  const long step = ceil_div(rows, ceil_div(rows, MAX_ROWS));
  for (long r = 0; r < rows; r += step) {
    const long count = least(step, rows - r);
    const float* from = a + r * a_stride;
    float* to = c + r * c_stride;
    long j = 0;
    if (count <= 3)  // too few chains for the latency of an addition, unless more columns go together
      for (; j + 4 * W <= columns; j += 4 * W)
        tile_few<4>(count, k, from, a_stride, b + j, b_stride, to + j, c_stride, adds);
    for (; j + 2 * W <= columns; j += 2 * W)
      tile_rows<2>(count, k, from, a_stride, b + j, b_stride, to + j, c_stride, adds);
    if (j < columns) tile_rows<1>(count, k, from, a_stride, b + j, b_stride, to + j, c_stride, adds);
  }
}

// ---------------------------------------------------------------- weights, widened to fp32

// Each reader gives, for input i of a block, the 2*W weights of one half of the panel (AVX-512: all of it).
struct ReadFp32 {
  static constexpr int kind = FP32;
  const uint8_t* at;
  ReadFp32(const uint8_t* block, int half) : at(block + half * 2 * W * 4) {}
  inline void get(long i, F& a, F& b) const {
    const float* row = reinterpret_cast<const float*>(at) + i * PANEL;
    a = load(row);
    b = load(row + W);
  }
};
struct ReadFp16 {
  static constexpr int kind = FP16;
  const uint8_t* at;
  ReadFp16(const uint8_t* block, int half) : at(block + half * 2 * W * 2) {}
  inline void get(long i, F& a, F& b) const {
    a = load_fp16(at + i * PANEL * 2);
    b = load_fp16(at + i * PANEL * 2 + W * 2);
  }
};
struct ReadBf16 {
  static constexpr int kind = BF16;
  const uint8_t* at;
  ReadBf16(const uint8_t* block, int half) : at(block + half * 2 * W * 2) {}
  inline void get(long i, F& a, F& b) const {
    a = load_bf16(at + i * PANEL * 2);
    b = load_bf16(at + i * PANEL * 2 + W * 2);
  }
};
// q * scale is exact in fp32 (4 or 8 bits times 11), so the fused sum rounds once, like the dequantized weight.
struct ReadQ4 {
  static constexpr int kind = Q4_1;
  const uint8_t* at;
  int half;
  F scale0, scale1, min0, min1;
  ReadQ4(const uint8_t* block, int half_) : at(block + 4 * PANEL), half(half_) {
    const uint8_t* p = block + half * 2 * W * 2;
    scale0 = load_fp16(p);
    scale1 = load_fp16(p + W * 2);
    min0 = load_fp16(p + 2 * PANEL);
    min1 = load_fp16(p + 2 * PANEL + W * 2);
  }
  inline void get(long i, F& a, F& b) const {
    load_nibbles(at + i * (PANEL / 2), half, a, b);
    a = fma(a, scale0, min0);
    b = fma(b, scale1, min1);
  }
};
struct ReadQ8 {
  static constexpr int kind = Q8_0;
  const uint8_t* at;
  F scale0, scale1;
  ReadQ8(const uint8_t* block, int half) : at(block + 2 * PANEL + half * 2 * W) {
    scale0 = load_fp16(block + half * 2 * W * 2);
    scale1 = load_fp16(block + half * 2 * W * 2 + W * 2);
  }
  inline void get(long i, F& a, F& b) const {
    a = mul(load_int8(at + i * PANEL), scale0);
    b = mul(load_int8(at + i * PANEL + W), scale1);
  }
};

// Asks for memory some blocks ahead: the processor's own prefetching stops at each page.
static inline void ahead(const uint8_t* block, long bytes) {
  for (long p = 0; p < bytes; p += 64) _mm_prefetch((const char*)block + 4096 + p, _MM_HINT_T0);
}

// out[R, PANEL] = x[R, num_in] * panel: the weights never leave the registers.
template <class Reader, int R>
static void direct(const uint8_t* panel, const float* x, long x_stride, long num_in, float* out) {
  const long bytes = block_bytes(Reader::kind);
  for (int half = 0; half < PANEL / (2 * W); half++) {
    F acc[R][2];
    for (int r = 0; r < R; r++) acc[r][0] = acc[r][1] = all(0.0f);
    const uint8_t* block = panel;
    for (long begin = 0; begin < num_in; begin += BLOCK, block += bytes) {
      const long count = least(BLOCK, num_in - begin);
      const Reader reader(block, half);
      if (half == 0) ahead(block, bytes);
#pragma GCC unroll 2
      for (long i = 0; i < count; i++) {
        F w0, w1;
        reader.get(i, w0, w1);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
          F value = all(x[r * x_stride + begin + i]);
          acc[r][0] = fma(value, w0, acc[r][0]);
          acc[r][1] = fma(value, w1, acc[r][1]);
        }
      }
    }
    for (int r = 0; r < R; r++) {
      store(out + r * PANEL + half * 2 * W, acc[r][0]);
      store(out + r * PANEL + half * 2 * W + W, acc[r][1]);
    }
  }
}

// out[count, PANEL] = inputs `begin : begin + count` of the panel in fp32; begin is a multiple of BLOCK.
template <class Reader>
static void widen(const uint8_t* panel, long begin, long count, float* out) {
  const long bytes = block_bytes(Reader::kind);
  for (long b = 0; b < count; b += BLOCK) {
    const uint8_t* block = panel + (begin + b) / BLOCK * bytes;
    ahead(block, bytes);
    for (int half = 0; half < PANEL / (2 * W); half++) {
      const Reader reader(block, half);
      const long n = least(BLOCK, count - b);
      for (long i = 0; i < n; i++) {
        F w0, w1;
        reader.get(i, w0, w1);
        store(out + (b + i) * PANEL + half * 2 * W, w0);
        store(out + (b + i) * PANEL + half * 2 * W + W, w1);
      }
    }
  }
}

// ---------------------------------------------------------------- linear

// Bias, residual and the ragged last panel, on the way from a tile [rows, PANEL] to the output.
static void finish(const LinearArgs& a, long row, long rows, long column, const float* tile_, long tile_stride) {
  const long count = least(PANEL, a.num_out - column);
  for (long r = 0; r < rows; r++) {
    const float* from = tile_ + r * tile_stride;
    float* to = a.out + (row + r) * a.num_out + column;
    if (a.bias && a.adds) {
      for (long j = 0; j < count; j++) to[j] += from[j] + a.bias[column + j];
    } else if (a.bias) {
      for (long j = 0; j < count; j++) to[j] = from[j] + a.bias[column + j];
    } else if (a.adds) {
      for (long j = 0; j < count; j++) to[j] += from[j];
    } else {
      for (long j = 0; j < count; j++) to[j] = from[j];
    }
  }
}

template <class Reader>
static void direct_panel(const LinearArgs& a, long panel) {
  alignas(64) float out[DIRECT_ROWS * PANEL];
  const uint8_t* weight = a.weight + panel * panel_bytes(a.kind, a.num_in);
  const long step = ceil_div(a.num_rows, ceil_div(a.num_rows, DIRECT_ROWS));
  for (long row = 0; row < a.num_rows; row += step) {
    const long rows = least(step, a.num_rows - row);
    const float* x = a.x + row * a.x_stride;
#define DIRECT(R) \
  case R: if constexpr (R <= DIRECT_ROWS) direct<Reader, R>(weight, x, a.x_stride, a.num_in, out); break;
    switch (rows) {
      DIRECT(1) DIRECT(2) DIRECT(3) DIRECT(4) DIRECT(5) DIRECT(6) DIRECT(7) DIRECT(8)
    }
#undef DIRECT
    finish(a, row, rows, panel * PANEL, out, PANEL);
  }
}

constexpr long DIRECT_LIMIT = 16;   // rows up to which a panel is widened anew for each register tile
constexpr long SHALLOW_LIMIT = 96;  // rows up to which widened weights should stay in the first-level cache
constexpr long SHALLOW = 192;       // inputs widened at a time for these
constexpr long DEPTH = 768;         // and for more rows: a few panels of them stay in the second-level cache
constexpr long ROWS = 240;          // rows of a piece of work

// Rows `row : row + rows` of panels `first : last`; `buffer` holds the widened weights and the partial sums.
template <class Reader>
static void blocked(const LinearArgs& a, long row, long rows, long first, long last) {
  const long width = (last - first) * PANEL;
  const long num_parts = ceil_div(a.num_in, a.num_rows > SHALLOW_LIMIT ? DEPTH : SHALLOW);
  const long depth = ceil_div(ceil_div(a.num_in, num_parts), BLOCK) * BLOCK;
  float* widened = thread_scratch.floats(depth * width + rows * width);
  float* sums = widened + depth * width;
  const long step = ceil_div(rows, ceil_div(rows, MAX_ROWS));
  for (long begin = 0; begin < a.num_in; begin += depth) {
    const long count = least(depth, a.num_in - begin);
    for (long p = first; p < last; p++)
      widen<Reader>(a.weight + p * panel_bytes(a.kind, a.num_in), begin, count, widened + (p - first) * depth * PANEL);
    for (long r = 0; r < rows; r += step) {
      const long n = least(step, rows - r);
      const float* x = a.x + (row + r) * a.x_stride + begin;
      for (long p = 0; p < last - first; p++) {
        const float* w = widened + p * depth * PANEL;
        float* sum = sums + r * width + p * PANEL;
        for (long j = 0; j < PANEL; j += 2 * W)
          tile_rows<2>(n, count, x, a.x_stride, w + j, PANEL, sum + j, width, begin > 0);
        if (begin + count == a.num_in) finish(a, row + r, n, (first + p) * PANEL, sum, width);
      }
    }
  }
}

template <class Reader>
static void linear_of(const LinearArgs& a) {
  const long num_panels = ceil_div(a.num_out, PANEL);
  if (a.num_rows <= DIRECT_LIMIT) {
    const long share = ceil_div(num_panels, 4 * a.threads);
    const long num_shares = ceil_div(num_panels, share);
    team().each(a.threads, num_shares, [&](long s) {
      for (long p = s * share; p < least(num_panels, (s + 1) * share); p++) direct_panel<Reader>(a, p);
    });
    return;
  }
  const long num_pieces = ceil_div(a.num_rows, ROWS);
  const long rows = ceil_div(ceil_div(a.num_rows, num_pieces), MAX_ROWS) * MAX_ROWS;
  long share = a.num_rows > SHALLOW_LIMIT ? 3 : 1;
  while (share > 1 && num_pieces * ceil_div(num_panels, share) < 4 * a.threads) share--;
  const long num_shares = ceil_div(num_panels, share);
  team().each(a.threads, num_pieces * num_shares, [&](long item) {
    const long row = item / num_shares * rows, first = item % num_shares * share;
    if (row < a.num_rows)
      blocked<Reader>(a, row, least(rows, a.num_rows - row), first, least(num_panels, first + share));
  });
}

static void linear(const LinearArgs& a) {
  switch (a.kind) {
    case FP32: linear_of<ReadFp32>(a); break;
    case FP16: linear_of<ReadFp16>(a); break;
    case BF16: linear_of<ReadBf16>(a); break;
    case Q4_1: linear_of<ReadQ4>(a); break;
    case Q8_0: linear_of<ReadQ8>(a); break;
  }
}

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

// ---------------------------------------------------------------- attention

constexpr long KEYS = 64;    // of a tile, always counted from position 0
constexpr long SPLIT = 256;  // keys whose softmax is accumulated together before it is merged, likewise
constexpr float LOWEST = -1e30f;

// Softmax so far of some rows: weighted values [rows, head_dim], largest score, sum of weights.
struct Rows {
  float *mixed, *top, *sum;
};

static inline Rows rows_at(float* memory, long rows, long head_dim) {
  return {memory, memory + rows * head_dim, memory + rows * head_dim + rows};
}
static inline long rows_size(long rows, long head_dim) { return ceil_div(rows * (head_dim + 2), 16) * 16; }

static inline void clear(Rows& s, long rows, long head_dim) {
  for (long i = 0; i < rows * head_dim; i++) s.mixed[i] = 0.0f;
  for (long r = 0; r < rows; r++) s.top[r] = LOWEST, s.sum[r] = 0.0f;
}

static inline void scale_row(float* row, long size, float factor) {
  if (factor == 1.0f) return;
  for (long i = 0; i < size; i++) row[i] *= factor;
}

static inline float exponential_of(float x) {
  alignas(64) float lane[W];
  store(lane, exponential(all(x)));
  return lane[0];
}

// The later split is added to the earlier ones. A row that saw no key of the later one is unchanged, bit by bit.
static void merge(Rows& into, const Rows& from, long rows, long head_dim) {
  for (long r = 0; r < rows; r++) {
    const float top = from.top[r] > into.top[r] ? from.top[r] : into.top[r];
    const float old = exponential_of(into.top[r] - top), part = exponential_of(from.top[r] - top);
    float* a = into.mixed + r * head_dim;
    const float* b = from.mixed + r * head_dim;
    for (long i = 0; i < head_dim; i++) a[i] = a[i] * old + b[i] * part;
    into.sum[r] = into.sum[r] * old + from.sum[r] * part;
    into.top[r] = top;
  }
}

// One tile of keys: scores, softmax, weighted values. Row r stands at `position + r / group`.
struct Tile {
  const AttentionArgs& a;
  const int64_t* table;
  long kv_head, rows, group, position;
  const float* q;  // [rows, head_dim], scaled
  float *scores, *columns;

  // The pool's keys or values of slot `key`, and how many slots follow it in its block, itself included.
  const float* slots(const float* pool, long key, long& run) const {
    const long place = key / a.block_size, offset = key - place * a.block_size;
    run = a.block_size - offset;
    return pool + ((table[place] * a.num_kv_heads + kv_head) * a.block_size + offset) * a.head_dim;
  }

  // Asks for the slots that the next tile will read in the place of `count` ones from `key`.
  void ahead(const float* pool, long key, long count) const {
    for (long run; count > 0; key += run, count -= run) {
      const float* from = slots(pool, key, run);
      run = least(run, count);
      for (long i = 0; i < run * a.head_dim; i += 16) _mm_prefetch((const char*)(from + i), _MM_HINT_T0);
    }
  }

  // Keys `first : first + count`; `following` slots after them are read next.
  void add(Rows& s, long first, long count, long following) const {
    const long padded = ceil_div(count, W) * W;
    const float* keys[KEYS];
    for (long j = 0, run; j < count; j += run) {
      const float* from = slots(a.keys, first + j, run);
      run = least(run, count - j);
      for (long i = 0; i < run; i++) keys[j + i] = from + i * a.head_dim;
    }
    for (long j = count; j < padded; j++) keys[j] = keys[0];
    for (long j = 0; j < padded; j += W) {
      ahead(a.keys, first + KEYS + j, least(W, following - j));
      for (long d = 0; d < a.head_dim; d += W) transpose(keys + j, d, columns + d * KEYS + j, KEYS);
    }
    product(rows, padded, a.head_dim, q, a.head_dim, columns, KEYS, scores, KEYS, false);
    for (long r = 0; r < rows; r++) soften(s, r, least(count, position + r / group + 1 - first));
    for (long j = 0, run; j < count; j += run) {
      const float* values = slots(a.values, first + j, run);
      run = least(run, count - j);
      ahead(a.values, first + KEYS + j, least(run, following - j));
      product(rows, a.head_dim, run, scores + j, KEYS, values, a.head_dim, s.mixed, a.head_dim, true);
    }
  }

  // Scores of one row to weights; those beyond `visible` become 0.
  void soften(Rows& s, long r, long visible) const {
    float* row = scores + r * KEYS;
    for (long j = visible < 0 ? 0 : visible; j < KEYS; j++) row[j] = -__builtin_inff();
    F top = all(s.top[r]);
    for (long j = 0; j < KEYS; j += W) top = larger(load(row + j), top);
    const float best = max_of(top);
    F total = all(0.0f);
    for (long j = 0; j < KEYS; j += W) {
      F weight = exponential(sub(load(row + j), all(best)));
      store(row + j, weight);
      total = total + weight;
    }
    const float factor = best == s.top[r] ? 1.0f : exponential_of(s.top[r] - best);
    scale_row(s.mixed + r * a.head_dim, a.head_dim, factor);
    s.sum[r] = s.sum[r] * factor + sum_of(total);
    s.top[r] = best;
  }

};

static void emit(const AttentionArgs& a, const Rows& s, long kv_head, long token, long rows) {
  const long group = a.num_heads / a.num_kv_heads;
  for (long r = 0; r < rows; r++) {
    float* to = a.out + ((token + r / group) * a.num_heads + kv_head * group + r % group) * a.head_dim;
    const float scale = 1.0f / s.sum[r];
    for (long i = 0; i < a.head_dim; i++) to[i] = s.mixed[r * a.head_dim + i] * scale;
  }
}

struct Item {
  long sequence, token, num_tokens, position, split, group;
};
static inline Item item_at(const AttentionArgs& a, long index) {
  const int64_t* p = a.items + index * 6;
  return {p[0], p[1], p[2], p[3], p[4], p[5]};
}

// All splits in turn, or the one that the item names; the result is in `s`.
static void attend(const AttentionArgs& a, const Item& item, long kv_head, Rows s, float* memory) {
  const long group = a.num_heads / a.num_kv_heads, rows = item.num_tokens * group;
  float* q = memory;
  float* scores = q + rows * a.head_dim;
  float* columns = scores + rows * KEYS;
  Rows part = rows_at(columns + a.head_dim * KEYS, rows, a.head_dim);
  const float scale = 1.0f / __builtin_sqrtf((float)a.head_dim);
  for (long r = 0; r < rows; r++) {
    const float* from = a.q + (item.token + r / group) * a.q_stride + (kv_head * group + r % group) * a.head_dim;
    for (long i = 0; i < a.head_dim; i++) q[r * a.head_dim + i] = from[i] * scale;
  }
  const Tile tile_{a, a.tables + item.sequence * a.max_blocks, kv_head, rows, group, item.position, q, scores, columns};
  const long num_keys = item.position + item.num_tokens;
  const long begin = item.split < 0 ? 0 : item.split * SPLIT;
  const long end = item.split < 0 ? num_keys : least(num_keys, begin + SPLIT);
  for (long first = begin; first < end; first += SPLIT) {
    Rows& target = first == begin ? s : part;
    clear(target, rows, a.head_dim);
    const long stop = least(end, first + SPLIT);
    for (long key = first; key < stop; key += KEYS)
      tile_.add(target, key, least(KEYS, stop - key), least(KEYS, end - key - KEYS));
    if (first != begin) merge(s, part, rows, a.head_dim);
  }
}

static void attention(const AttentionArgs& a) {
  const long group = a.num_heads / a.num_kv_heads;
  long most = 0, most_split = 0;
  for (long i = 0; i < a.num_items; i++) {
    const Item item = item_at(a, i);
    if (item.num_tokens > most) most = item.num_tokens;
    if (item.split >= 0 && item.num_tokens > most_split) most_split = item.num_tokens;
  }
  const long rows = most * group, size = rows_size(rows, a.head_dim), part_size = rows_size(most_split * group, a.head_dim);
  const long num_counters = ceil_div(a.num_groups * a.num_kv_heads, 16) * 16;
  float* shared = call_scratch.floats(num_counters + (most_split ? a.num_items * a.num_kv_heads * part_size : 0));
  auto* counters = reinterpret_cast<std::atomic<int>*>(shared);
  for (long i = 0; i < num_counters; i++) counters[i].store(0, std::memory_order_relaxed);
  float* parts = shared + num_counters;
  team().each(a.threads, a.num_items * a.num_kv_heads, [&](long index) {
    const Item item = item_at(a, index / a.num_kv_heads);
    const long kv_head = index % a.num_kv_heads, num_rows = item.num_tokens * group;
    float* memory = thread_scratch.floats(2 * size + rows * (a.head_dim + KEYS) + a.head_dim * KEYS);
    float* own = memory + size + rows * (a.head_dim + KEYS) + a.head_dim * KEYS;
    if (item.split < 0) {
      Rows s = rows_at(own, num_rows, a.head_dim);
      attend(a, item, kv_head, s, memory);
      emit(a, s, kv_head, item.token, num_rows);
      return;
    }
    attend(a, item, kv_head, rows_at(parts + index * part_size, num_rows, a.head_dim), memory);
    const int64_t first = a.groups[item.group * 2], count = a.groups[item.group * 2 + 1];
    if (counters[item.group * a.num_kv_heads + kv_head].fetch_add(1, std::memory_order_acq_rel) + 1 < count) return;
    // the last to finish merges, always from the first split to the last
    Rows s = rows_at(parts + (first * a.num_kv_heads + kv_head) * part_size, num_rows, a.head_dim);
    for (long i = first + 1; i < first + count; i++)
      merge(s, rows_at(parts + (i * a.num_kv_heads + kv_head) * part_size, num_rows, a.head_dim), num_rows, a.head_dim);
    emit(a, s, kv_head, item.token, num_rows);
  });
}

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
