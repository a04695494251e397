// ---------------------------------------------------------------- attention

constexpr long KEYS = 64;    // of a tile, always counted from position 0
constexpr long SPLIT = 256;  // keys whose softmax is accumulated together before it is merged, likewise
constexpr long SHARES = 8;   // of the pieces, for each thread
constexpr long AHEAD_BYTES = 16 << 10;  // a third of the first-level cache
// Lines of memory to ask for beside each part of a tile's work, about as many as there are to be asked for: per
// transposition, per input of a product for the scores, and per input of one for the values.
constexpr long TURN_LINES = W == 16 ? 10 : 3, SCORE_LINES = W == 16 ? 2 : 1, VALUE_LINES = W == 16 ? 3 : 2;
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

struct Item {
  long sequence, token, num_tokens, position, split, group;
};
static inline Item item_at(const AttentionArgs& a, long index) {
  const int64_t* p = a.items + index * 6;
  return {p[0], p[1], p[2], p[3], p[4], p[5]};
}

static inline void range_of(const Item& item, long& begin, long& end) {
  const long num_keys = item.position + item.num_tokens;
  begin = item.split < 0 ? 0 : item.split * SPLIT;
  end = item.split < 0 ? num_keys : least(num_keys, begin + SPLIT);
}

// Runs ahead of the reader of some pieces, in its order: of each tile the keys, then the values. Memory answers
// late, and the processor's own prefetching learns each block anew, so it is asked this much in advance.
struct Ahead {
  const AttentionArgs& a;
  long piece, last;  // of pieces (item, KV head)
  const int64_t* table;
  long kv_head, begin, key, stop, end;  // of the tile: first slot, next, last; and of the piece
  bool is_values;
  const float *at = nullptr, *run_end = nullptr;  // what of a block is asked for next
  long owed = 0;                                  // lines of memory

  Ahead(const AttentionArgs& args, long first, long last_) : a(args), piece(first), last(last_) {
    enter();
    owe(AHEAD_BYTES / (a.head_dim * 4));
    pay_all();
  }

  // As many slots as the reader will read; memory is asked for them by `pay`, since many questions at once
  // would only wait for each other.
  void owe(long count) { owed += count * a.head_dim / LINE; }

  inline void pay(long num_lines) {
    num_lines = least(num_lines, owed);
    owed -= num_lines;
    for (; num_lines > 0; num_lines--, at += LINE) {
      if (at == run_end && !next_run()) return;
      _mm_prefetch((const char*)at, _MM_HINT_T0);
    }
  }

  void pay_all() { pay(owed); }

 private:
  static constexpr long LINE = 16;  // floats

  bool next_run() {
    if (piece == last) return false;
    const long place = key / a.block_size, offset = key - place * a.block_size;
    const long run = least(stop - key, a.block_size - offset);
    const float* pool = is_values ? a.values : a.keys;
    at = pool + ((table[place] * a.num_kv_heads + kv_head) * a.block_size + offset) * a.head_dim;
    run_end = at + run * a.head_dim;
    key += run;
    if (key == stop) turn();
    return true;
  }

  void enter() {
    if (piece == last) return;
    const Item item = item_at(a, piece / a.num_kv_heads);
    kv_head = piece % a.num_kv_heads;
    table = a.tables + item.sequence * a.max_blocks;
    range_of(item, begin, end);
    is_values = false;
    key = begin;
    stop = least(begin + KEYS, end);
  }

  void turn() {
    is_values = !is_values;
    if (!is_values) {
      begin = stop;
      if (begin == end) {
        piece++;
        enter();
        return;
      }
      stop = least(begin + KEYS, end);
    }
    key = begin;
  }
};

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

  // Keys `first : first + count`.
  void add(Rows& s, long first, long count, Ahead& ahead) const {
    const long padded = ceil_div(count, W) * W;
    ahead.owe(2 * count);
    for (long j = 0; j < padded; j += W) turn(first + j, least(W, count - j), columns + j, ahead);
    product(rows, padded, a.head_dim, q, a.head_dim, columns, KEYS, scores, KEYS, false,
            [&](long) { ahead.pay(SCORE_LINES); });
    for (long r = 0; r < rows; r++) soften(s, r, least(count, position + r / group + 1 - first));
    for (long j = 0, run; j < count; j += run) {
      const float* values = slots(a.values, first + j, run);
      run = least(run, count - j);
      if (rows > FEW) ahead.pay(run * a.head_dim / 16);
      product(rows, a.head_dim, run, scores + j, KEYS, values, a.head_dim, s.mixed, a.head_dim, true,
              [&](long) { ahead.pay(VALUE_LINES); });
    }
    ahead.pay_all();
  }

  // Keys `first : first + count` to columns; the columns after them, up to W, repeat one of them.
  void turn(long first, long count, float* to, Ahead& ahead) const {
    F r[W];
    long run;
    const float* from = slots(a.keys, first, run);
    if (count == W && run >= W) {
      for (long d = 0; d < a.head_dim; d += W) {
        ahead.pay(TURN_LINES);
        for (long i = 0; i < W; i++) r[i] = load(from + i * a.head_dim + d);
        transpose(r, to + d * KEYS, KEYS);
      }
      return;
    }
    const float* keys[W];
    for (long i = 0; i < W; i++) keys[i] = i < count ? slots(a.keys, first + i, run) : from;
    for (long d = 0; d < a.head_dim; d += W) {
      ahead.pay(TURN_LINES);
      for (long i = 0; i < W; i++) r[i] = load(keys[i] + d);
      transpose(r, to + d * KEYS, KEYS);
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

// All splits in turn, or the one that the item names; the result is in `s`.
static void attend(const AttentionArgs& a, const Item& item, long kv_head, Rows s, float* memory, Ahead& ahead) {
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
  long begin, end;
  range_of(item, begin, end);
  for (long first = begin; first < end; first += SPLIT) {
    Rows& target = first == begin ? s : part;
    clear(target, rows, a.head_dim);
    const long stop = least(end, first + SPLIT);
    for (long key = first; key < stop; key += KEYS) tile_.add(target, key, least(KEYS, stop - key), ahead);
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
  const long num_pieces = a.num_items * a.num_kv_heads;
  const auto attend_piece = [&](long index, Ahead& ahead) {
    const Item item = item_at(a, index / a.num_kv_heads);
    const long kv_head = index % a.num_kv_heads, num_rows = item.num_tokens * group;
    float* memory = thread_scratch.floats(2 * size + rows * (a.head_dim + KEYS) + a.head_dim * KEYS);
    float* own = memory + size + rows * (a.head_dim + KEYS) + a.head_dim * KEYS;
    if (item.split < 0) {
      Rows s = rows_at(own, num_rows, a.head_dim);
      attend(a, item, kv_head, s, memory, ahead);
      emit(a, s, kv_head, item.token, num_rows);
      return;
    }
    attend(a, item, kv_head, rows_at(parts + index * part_size, num_rows, a.head_dim), memory, ahead);
    const int64_t first = a.groups[item.group * 2], count = a.groups[item.group * 2 + 1];
    if (counters[item.group * a.num_kv_heads + kv_head].fetch_add(1, std::memory_order_acq_rel) + 1 < count) return;
    // the last to finish merges, always from the first split to the last
    Rows s = rows_at(parts + (first * a.num_kv_heads + kv_head) * part_size, num_rows, a.head_dim);
    for (long i = first + 1; i < first + count; i++)
      merge(s, rows_at(parts + (i * a.num_kv_heads + kv_head) * part_size, num_rows, a.head_dim), num_rows, a.head_dim);
    emit(a, s, kv_head, item.token, num_rows);
  };
  // a few shares for each thread, so that one that has lost its core leaves the rest to the others
  const long share = ceil_div(num_pieces, SHARES * a.threads);
  team().each(a.threads, ceil_div(num_pieces, share), [&](long s) {
    const long last = least(num_pieces, (s + 1) * share);
    Ahead ahead(a, s * share, last);
    for (long index = s * share; index < last; index++) attend_piece(index, ahead);
  });
}

