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
// Always inline: GCC drops calls of a function that only prefetches, since they change nothing.
__attribute__((always_inline)) static inline void ahead(const uint8_t* block, long bytes) {
  for (long p = 0; p < bytes; p += 64) _mm_prefetch((const char*)block + 4096 + p, _MM_HINT_T0);
}

// What to ask of memory during one of several passes over a panel: in the first the panel itself, a little ahead;
// in the others, which find it in a cache, their parts of the panel after it, if there is one.
struct Turn {
  long index, count;
  const uint8_t* next;  // or null

  __attribute__((always_inline)) inline void ask(const uint8_t* block, long offset, long bytes) const {
    if (index == 0) return ahead(block, bytes);
    if (!next) return;
    const long part = ceil_div(bytes / 64, count - 1) * 64;
    const uint8_t* at = next + offset;
    for (long p = (index - 1) * part; p < least(bytes, index * part); p += 64)
      _mm_prefetch((const char*)at + p, _MM_HINT_T1);
  }
};

// out[R, PANEL] = x[R, num_in] * panel: the weights never leave the registers.
template <class Reader, int R>
static void direct(const uint8_t* panel, const float* x, long x_stride, long num_in, float* out, const Turn& pass) {
  const long bytes = block_bytes(Reader::kind);
  for (int half = 0; half < PANEL / (2 * W); half++) {
    F acc[R][2];
    for (int r = 0; r < R; r++) acc[r][0] = acc[r][1] = all(0.0f);
    const uint8_t* block = panel;
    const char* from = reinterpret_cast<const char*>(x);
    long stride = x_stride * 4, stride3 = 3 * stride;
    const long stride4 = 4 * stride;
    for (long begin = 0; begin < num_in; begin += BLOCK, block += bytes) {
      const long count = least(BLOCK, num_in - begin);
      const Reader reader(block, half);
      if (half == 0) pass.ask(block, block - panel, bytes);
#pragma GCC unroll 2
      for (long i = 0; i < count; i++) {
        F w0, w1;
        reader.get(i, w0, w1);
        // four rows from one pointer: a pointer for each would not fit the registers
        asm("" : "+r"(stride), "+r"(stride3));
        const char* four = from;
        from += 4;
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
          if (r > 0 && r % 4 == 0) four += stride4;
          const long offset = r % 4 == 3 ? stride3 : r % 4 * stride;
          F value = all(*reinterpret_cast<const float*>(four + offset));
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

// Weights of 16 or 32 bits are widened anew for each register tile: the conversion is cheap, and multiplying goes on
// while memory is read. 4 and 8 bits cost more, and for many rows are widened once, into a buffer.
template <class Reader>
constexpr bool is_plain = Reader::kind <= BF16;
template <class Reader>
constexpr int direct_rows = is_plain<Reader> ? MAX_ROWS : DIRECT_ROWS;
template <class Reader>
constexpr long direct_limit = is_plain<Reader> ? 256 : DIRECT_LIMIT;

template <class Reader>
static void direct_panel(const LinearArgs& a, long panel, bool has_next) {
  alignas(64) float out[direct_rows<Reader> * PANEL];
  const long bytes = panel_bytes(a.kind, a.num_in);
  const uint8_t* weight = a.weight + panel * bytes;
  const long num_passes = ceil_div(a.num_rows, direct_rows<Reader>), step = ceil_div(a.num_rows, num_passes);
  for (long row = 0; row < a.num_rows; row += step) {
    const long rows = least(step, a.num_rows - row);
    const float* x = a.x + row * a.x_stride;
    const Turn pass{row / step, num_passes, has_next ? weight + bytes : nullptr};
#define DIRECT(R) \
  case R: if constexpr (R <= direct_rows<Reader>) direct<Reader, R>(weight, x, a.x_stride, a.num_in, out, pass); break;
    switch (rows) {
      DIRECT(1) DIRECT(2) DIRECT(3) DIRECT(4) DIRECT(5) DIRECT(6)
      DIRECT(7) DIRECT(8) DIRECT(9) DIRECT(10) DIRECT(11) DIRECT(12)
    }
#undef DIRECT
    finish(a, row, rows, panel * PANEL, out, PANEL);
  }
}

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
  if (a.num_rows <= direct_limit<Reader>) {
    const long share = ceil_div(num_panels, 4 * a.threads);
    const long num_shares = ceil_div(num_panels, share);
    team().each(a.threads, num_shares, [&](long s) {
      const long last = least(num_panels, (s + 1) * share);
      for (long p = s * share; p < last; p++) direct_panel<Reader>(a, p, p + 1 < last);
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
