// Operators of the CPU runtime behind a plain C interface.
//
// The arithmetic is in kernels.h, which is compiled twice, for AVX2 and for AVX-512; the caller says which of
// the two to run. Weights are read in panels of 32 outputs (see packing.py) and widened to fp32 in registers.
// Every output is one chain of fused multiply-adds in the order of its inputs, so a row's result depends
// neither on the other rows nor on the number of threads nor on the instruction set.
//
// Each calling thread has a team of helpers of its own (team.h), which sleep between steps.

#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>

#include <atomic>

#include "team.h"

namespace {

// Weights as packing.py lays them out: bytes of one panel for 32 inputs.
enum Kind { FP32 = 0, FP16 = 1, BF16 = 2, Q4_1 = 3, Q8_0 = 4 };
constexpr long PANEL = 32;
constexpr long BLOCK = 32;

struct LinearArgs {
  const float* x;
  const uint8_t* weight;
  const float* bias;  // or null
  float* out;
  long num_rows, num_out, num_in, x_stride;
  int kind;
  int adds;  // out += instead of out =
  int threads;
};

struct AttentionArgs {
  const float* q;        // [num_tokens, num_heads, head_dim], token stride q_stride
  float* out;            // [num_tokens, num_heads, head_dim], contiguous
  const float* keys;     // [num_blocks, num_kv_heads, block_size, head_dim]
  const float* values;   // the same
  const int64_t* tables; // [num_sequences, max_blocks]
  const int64_t* items;  // [num_items, 6]: sequence, first flat token, tokens, position of the first, split or -1, group
  const int64_t* groups; // [num_groups, 2]: first item, items; one group per row tile whose splits run apart
  long num_items, num_groups, max_blocks, q_stride;
  long num_heads, num_kv_heads, head_dim, block_size;
  int threads;
};

struct RotateArgs {
  float* heads;            // [num_tokens, num_heads + 2 * num_kv_heads, head_dim]: q and k are rotated in place
  const float* cos;        // [num_tokens, head_dim / 2]
  const float* sin;
  float* keys;             // one layer's pool, as above
  float* values;
  const int64_t* blocks;   // [num_tokens]
  const int64_t* offsets;  // [num_tokens]
  long num_tokens, num_heads, num_kv_heads, head_dim, block_size;
  int threads;
};

struct Matrix {
  const uint8_t* data;
  const float* bias;  // or null
  int64_t kind, num_out, num_in;
};

struct Layer {
  const float *input_norm, *q_norm, *k_norm, *post_norm;  // q_norm and k_norm may be null
  Matrix qkv, output, gate_up, down;
};

// One pass of a step's tokens through all layers; operators.py holds the same fields in the same order.
struct Pass {
  const Layer* layers;
  float* hidden;  // [num_tokens, hidden_size], changed in place
  const float *cos, *sin;
  float* pool;  // [num_layers, 2, num_blocks, num_kv_heads, block_size, head_dim]
  const int64_t *tables, *items, *groups, *blocks, *offsets;
  float *normed, *heads, *mixed, *gate_up, *gated;  // one step's memory
  int64_t num_layers, num_tokens, hidden_size, num_heads, num_kv_heads, head_dim;
  int64_t num_blocks, block_size, max_blocks, num_items, num_groups, threads;
  double eps;
};

// Memory of one thread, kept between calls and grown to the largest size that was asked for.
struct Scratch {
  void* memory = nullptr;
  size_t size = 0;
  ~Scratch() { free(memory); }
  float* floats(size_t count) {
    size_t bytes = (count * sizeof(float) + 63) / 64 * 64;
    if (bytes > size) {
      free(memory);
      memory = aligned_alloc(64, bytes);
      if (!memory) abort();
      size = bytes;
    }
    return static_cast<float*>(memory);
  }
};

thread_local Scratch thread_scratch;
thread_local Scratch call_scratch;  // shared by the threads of one call, owned by its caller

inline long least(long a, long b) { return a < b ? a : b; }
inline long ceil_div(long a, long b) { return (a + b - 1) / b; }

// body(r) for each row of `size` numbers, several rows at a time where they are short.
template <class Body>
inline void each_row(long threads, long num_rows, long size, Body&& body) {
  const long rows = size >= 8192 ? 1 : 8192 / size;
  team().each(threads, ceil_div(num_rows, rows), [&](long part) {
    for (long r = part * rows; r < least(num_rows, (part + 1) * rows); r++) body(r);
  });
}

inline long block_bytes(int kind) {
  switch (kind) {
    case FP32: return BLOCK * PANEL * 4;
    case Q4_1: return 2 * PANEL * 2 + BLOCK * PANEL / 2;
    case Q8_0: return PANEL * 2 + BLOCK * PANEL;
    default: return BLOCK * PANEL * 2;
  }
}

inline long panel_bytes(int kind, long num_in) {
  if (kind == Q4_1 || kind == Q8_0) return num_in / BLOCK * block_bytes(kind);
  return num_in * PANEL * (kind == FP32 ? 4 : 2);
}

}  // namespace

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
namespace {
namespace avx2 {
using F = __m256;
constexpr long W = 8;
constexpr int MAX_ROWS = 6;     // of a register tile
constexpr int DIRECT_ROWS = 4;     // of one whose weights of 4 or 8 bits are widened in registers
constexpr long DIRECT_LIMIT = 16;  // rows up to which they are
static inline F load(const float* p) { return _mm256_loadu_ps(p); }
static inline void store(float* p, F a) { _mm256_storeu_ps(p, a); }
static inline F all(float a) { return _mm256_set1_ps(a); }
static inline F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
static inline F add(F a, F b) { return _mm256_add_ps(a, b); }
static inline F sub(F a, F b) { return _mm256_sub_ps(a, b); }
static inline F mul(F a, F b) { return _mm256_mul_ps(a, b); }
static inline F div(F a, F b) { return _mm256_div_ps(a, b); }
// a NaN in b is kept
static inline F larger(F a, F b) { return _mm256_max_ps(a, b); }
static inline F smaller(F a, F b) { return _mm256_min_ps(a, b); }
static inline F zero_below(F limit, F x, F value) { return _mm256_andnot_ps(_mm256_cmp_ps(x, limit, _CMP_LT_OQ), value); }
static inline F nearest(F a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
static inline F power_of_two(F a) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(a), _mm256_set1_epi32(127)), 23));
}
static inline float max_of(F a) {
  __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_max_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_max_ss(b, _mm_movehdup_ps(b)));
}
static inline float sum_of(F a) {
  __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}
static inline F load_fp16(const uint8_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
static inline F load_bf16(const uint8_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
static inline F load_int8(const uint8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
// 16 bytes hold outputs 0..15 in their low and 16..31 in their high four bits; half 0 is 0..15
static inline void load_nibbles(const uint8_t* p, int half, F& a, F& b) {
  const __m256i mask = _mm256_set1_epi32(15);
  __m256i low = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
  __m256i high = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8)));
  if (half) {
    low = _mm256_srli_epi32(low, 4);
    high = _mm256_srli_epi32(high, 4);
  } else {
    low = _mm256_and_si256(low, mask);
    high = _mm256_and_si256(high, mask);
  }
  a = _mm256_cvtepi32_ps(low);
  b = _mm256_cvtepi32_ps(high);
}
// W rows of W floats to columns: out[c * out_stride + row] = r[row][c]
static inline void transpose(F (&r)[W], float* out, long out_stride) {
  F s[8];
  for (int i = 0; i < 8; i += 2) {
    s[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    s[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    r[i] = _mm256_shuffle_ps(s[i], s[i + 2], 0x44);
    r[i + 1] = _mm256_shuffle_ps(s[i], s[i + 2], 0xee);
    r[i + 2] = _mm256_shuffle_ps(s[i + 1], s[i + 3], 0x44);
    r[i + 3] = _mm256_shuffle_ps(s[i + 1], s[i + 3], 0xee);
  }
  for (int i = 0; i < 4; i++) {
    store(out + i * out_stride, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
    store(out + (i + 4) * out_stride, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
  }
}
#include "kernels.h"
}  // namespace avx2
}  // namespace
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
namespace {
namespace avx512 {
using F = __m512;
constexpr long W = 16;
constexpr int MAX_ROWS = 12;
constexpr int DIRECT_ROWS = 12;
constexpr long DIRECT_LIMIT = 32;
static inline F load(const float* p) { return _mm512_loadu_ps(p); }
static inline void store(float* p, F a) { _mm512_storeu_ps(p, a); }
static inline F all(float a) { return _mm512_set1_ps(a); }
static inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
static inline F add(F a, F b) { return _mm512_add_ps(a, b); }
static inline F sub(F a, F b) { return _mm512_sub_ps(a, b); }
static inline F mul(F a, F b) { return _mm512_mul_ps(a, b); }
static inline F div(F a, F b) { return _mm512_div_ps(a, b); }
static inline F larger(F a, F b) { return _mm512_max_ps(a, b); }
static inline F smaller(F a, F b) { return _mm512_min_ps(a, b); }
static inline F zero_below(F limit, F x, F value) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, limit, _CMP_NLT_UQ), value);
}
static inline F nearest(F a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
static inline F power_of_two(F a) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(a), _mm512_set1_epi32(127)), 23));
}
static inline float max_of(F a) { return _mm512_reduce_max_ps(a); }
static inline float sum_of(F a) { return _mm512_reduce_add_ps(a); }
static inline F load_fp16(const uint8_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
static inline F load_bf16(const uint8_t* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
static inline F load_int8(const uint8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
static inline void load_nibbles(const uint8_t* p, int, F& a, F& b) {
  __m512i both = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
  a = _mm512_cvtepi32_ps(_mm512_and_si512(both, _mm512_set1_epi32(15)));
  b = _mm512_cvtepi32_ps(_mm512_srli_epi32(both, 4));
}
static inline void transpose(F (&r)[W], float* out, long out_stride) {
  F s[16];
  for (int i = 0; i < 16; i += 2) {
    s[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
    s[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_shuffle_ps(s[i], s[i + 2], 0x44);
    r[i + 1] = _mm512_shuffle_ps(s[i], s[i + 2], 0xee);
    r[i + 2] = _mm512_shuffle_ps(s[i + 1], s[i + 3], 0x44);
    r[i + 3] = _mm512_shuffle_ps(s[i + 1], s[i + 3], 0xee);
  }
  for (int i = 0; i < 4; i++) {
    F low = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88), odd = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xdd);
    F low2 = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88), odd2 = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xdd);
    store(out + i * out_stride, _mm512_shuffle_f32x4(low, low2, 0x88));
    store(out + (i + 4) * out_stride, _mm512_shuffle_f32x4(odd, odd2, 0x88));
    store(out + (i + 8) * out_stride, _mm512_shuffle_f32x4(low, low2, 0xdd));
    store(out + (i + 12) * out_stride, _mm512_shuffle_f32x4(odd, odd2, 0xdd));
  }
}
#include "kernels.h"
}  // namespace avx512
}  // namespace
#pragma GCC pop_options

// `wide` chooses AVX-512. Sizes and pointers are the caller's responsibility (operators.py checks them).
extern "C" {

int baton_best_isa() {
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("f16c")) return 0;
  bool has_wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  return has_wide ? 512 : 256;
}

void baton_linear(int wide, int threads, int kind, const float* x, long x_stride, const uint8_t* weight,
                  const float* bias, float* out, int adds, long num_rows, long num_out, long num_in) {
  LinearArgs a{x, weight, bias, out, num_rows, num_out, num_in, x_stride, kind, adds, threads};
  wide ? avx512::linear(a) : avx2::linear(a);
}

void baton_attention(int wide, int threads, const float* q, long q_stride, float* out, const float* keys,
                     const float* values, const int64_t* tables, long max_blocks, const int64_t* items,
                     long num_items, const int64_t* groups, long num_groups, long num_heads, long num_kv_heads,
                     long head_dim, long block_size) {
  AttentionArgs a{q,         out,        keys,       values,   tables,    items,        groups,   num_items,
                  num_groups, max_blocks, q_stride, num_heads, num_kv_heads, head_dim, block_size, threads};
  wide ? avx512::attention(a) : avx2::attention(a);
}

void baton_rotate_store(int wide, int threads, float* heads, const float* cos, const float* sin, float* keys,
                        float* values, const int64_t* blocks, const int64_t* offsets, long num_tokens,
                        long num_heads, long num_kv_heads, long head_dim, long block_size) {
  RotateArgs a{heads,      cos,       sin,          keys,     values,     blocks, offsets,
               num_tokens, num_heads, num_kv_heads, head_dim, block_size, threads};
  wide ? avx512::rotate_store(a) : avx2::rotate_store(a);
}

void baton_layers(int wide, const Pass* pass) { wide ? avx512::layers(*pass) : avx2::layers(*pass); }

void baton_rms_norm(int wide, int threads, const float* x, const float* weight, float eps, float* out,
                    long num_rows, long size) {
  wide ? avx512::rms_norm(x, weight, eps, out, num_rows, size, threads)
       : avx2::rms_norm(x, weight, eps, out, num_rows, size, threads);
}

void baton_swiglu(int wide, int threads, const float* gate_up, float* out, long num_rows, long size) {
  wide ? avx512::swiglu(gate_up, out, num_rows, size, threads) : avx2::swiglu(gate_up, out, num_rows, size, threads);
}
}
