// The micro-kernels: everything that multiplies, decodes or rounds. One table of them for each
// instruction set (kernels.cc is compiled once for each), chosen at run time (select.cc).
//
// Contract 1 lives here: the order of the sum of a result depends on the length of the sum, the
// kind of the weights and the instruction set, never on how many rows or tokens a call has.
#pragma once
#include <cstdint>

namespace moejax {

enum class Type : int32_t { BF16, F16, F32 };  // a run's dtype
static inline int64_t size_of(Type type) { return type == Type::F32 ? 4 : 2; }
static inline const char* at(const void* p, int64_t elements, Type type) {
  return (const char*)p + elements * size_of(type);
}
static inline char* at(void* p, int64_t elements, Type type) {
  return (char*)p + elements * size_of(type);
}

// What the codes of a record are, as `native` of pallas_kernels/records/encoding.py counts them.
// Of Zero8 and Zero4 each group says which code means 0; Min4 and Min5 have a minimum that is added
// to code times scale; Int5, Int6 and Min5 have 1 or 2 bits of a code above the lowest four apart.
enum class Codes : int32_t {
  Dense, Int8, Int4, Int2, Lossless12, E4M3, E2M1, IQ4, Zero8, Zero4, Min4, Min5, Int5, Int6
};
enum class ScaleType : int32_t { F16, BF16, F32, E8M0, E4M3, U8, I8 };
enum class Rounding : int32_t { Whole, BF16, F16 };  // what code times scale is rounded to at first
enum class Whole : int32_t { None, Times, Over };    // what a float32 of the matrix does to scales
enum Matrix { GATE, UP, DOWN };

// How a record has one matrix.
struct Coding {
  Codes kind;
  ScaleType scale;
  Rounding product;
  int64_t group, across;  // weights that share a scale, along the summed axis and the other one
  int64_t codes, extra;   // first rows of its codes (dense: weights; lossless12: bytes), and of its
                          // scales (lossless12: its 4-bit codes)
  int64_t highs, shifts;  // of the upper bits of codes; of zeros, or of minimums
  int64_t super, supers, min_supers;  // groups that share a float16 (0: none), first rows of these
  Whole whole;
  int64_t global;         // row of the matrix's float32
  int64_t unit;           // weights of a sum of integers (integers.h), 16 or 32; 0: floats are multiplied
};

// One record format of pallas_kernels/records/format.py, as numbers.
struct Format {
  Coding matrix[3];
  int64_t rows;                       // arena rows of a record
  int64_t hidden, width;              // D and I
  Type type;                          // of the decoded weights
  int64_t bias[3];                    // first rows of the matrices' biases; 0: there are none
  int64_t blocks, escapes, tables;    // lossless12: row blocks of a matrix, entries of a table, and
                                      // the first row of the tables
};

// What a product reads: bfloat16 weights as they are, anything else widened to float32.
static inline Type kind_of(Type type) { return type == Type::BF16 ? Type::BF16 : Type::F32; }

constexpr int64_t kTokens = 4;   // tokens of one call of `dots` and `add`, at most
constexpr int64_t kAhead = 4;    // rows behind those of a call that are fetched, as `next` of dots
constexpr int64_t kRows = 8;     // rows of one call of `add`, at most
constexpr int64_t kManyAdded = 64;  // rows of one call of `add_of_many`, at most
constexpr int64_t kAddedTokens = 128;  // tokens of one call of `add_of_many`, at most
constexpr int64_t kTokenGroup = 16;  // to a multiple of which there is room for its totals
constexpr int64_t kMostRows = 128;  // what `rows_of_task` says, and of one call of `dots_of_many`, at most
constexpr int64_t kPad = 64;     // sums and operands lie in buffers padded to so many floats

static inline int64_t padded(int64_t n) { return (n + kPad - 1) / kPad * kPad; }

// The distance of operands of n numbers, as many as `padded` says or more: rows that lie whole pages
// apart would share a few sets of the first cache.
static inline int64_t apart(int64_t n) { return padded(n) + (padded(n) % 1024 ? 0 : 512); }

constexpr int64_t kIntegerTokens = 64;  // of one call of `integer_columns`, at most

// Floats of n quantized numbers, and of scratch memory of products with them: for rows of D, and for n
// columns of a matrix of I rows.
static inline int64_t quantized_size(int64_t n) {
  return 3 * n / 4 + 2 * ((n / 32 + 7) / 8 * 8 + (n / 16 + 7) / 8 * 8);
}
constexpr int64_t kFew = kTokens - 1;   // tokens whose sums are open while codes pass
constexpr int64_t kSideBySide = 8;      // for which 16 rows of gate or up are multiplied side by side, at most
constexpr int64_t kAtOnce = 4;          // of them, whose sums are open
constexpr int64_t kRowsAtOnce = 8;      // of gate and up, whose sums are open then
constexpr int64_t kUnitLanes = 8;  // sums over units, which are added pairwise at the end
// Products of many tokens: outputs of a block, blocks made at once, and tokens whose sums are open.
constexpr int64_t kOutputs = 16, kBlocks = 4, kBlockTokens = 16;
// Floats of a token's n numbers, scales and sums of units of 16, for tiles.
static inline int64_t room_of_tiles(int64_t n) { return n / 4 + n / 8; }
static inline int64_t integer_scratch(int64_t hidden, int64_t tokens) {
  const int64_t units = hidden / 16 + 16, open = kBlockTokens * kOutputs * kUnitLanes;
  const int64_t block = kOutputs * (hidden / 2 + 2 * units);
  const int64_t tiles = (tokens + kBlockTokens - 1) / kBlockTokens * kBlockTokens * room_of_tiles(hidden) + 32;
  const int64_t sums = kOutputs * kAtOnce > tokens ? kOutputs * kAtOnce : tokens;
  return (66 + sums) * units + hidden + 64 + (tokens > kFew ? block + open + tiles : 0);
}
// The distance of rows of n sums: more than their size, since rows that lie whole pages apart share a
// few sets of the first cache.
static inline int64_t sums_apart(int64_t n) { return (n + 7) / 8 * 8 + 16; }
static inline int64_t integer_columns_scratch(int64_t width, int64_t n, int64_t tokens) {
  const int64_t few = tokens > kFew ? kFew : tokens, open = kBlockTokens * kOutputs * kUnitLanes;
  const int64_t blocks = kBlocks * (kOutputs * width / 2 + 48);
  const int64_t tiles = (tokens + kBlockTokens - 1) / kBlockTokens * kBlockTokens * room_of_tiles(width) + 32;
  return sums_apart(n) * (few * (width / 16 + kUnitLanes / 2) + width / 64 + 2) + (tokens > kFew ? blocks + open + tiles : 0);
}

// Columns of one call of `integer_columns`, as ops make it: few tokens read long streams, and the sums of
// many stay in the second cache.
constexpr int64_t kIntegerColumns = 2048;  // at most
static inline int64_t integer_columns_of(int64_t tokens) { return tokens > kFew ? 256 : kIntegerColumns; }

constexpr int64_t kSpan = 64;  // tokens that attention reduces at once, ascending (contract 1b)

// Sums of rows over spans: totals, largest scores and masses of weights.
struct AttendedSums {
  float *total, *top, *mass;
};

// A span of keys and values of one KV head, for rows of queries that look at it. Each row's result so
// far is taken on by the span.
struct AttendedSpan {
  Type type;                       // of queries; keys and values are of its kind_of
  int64_t head_dim, value_dim;
  const char* const* tokens;       // [kSpan], those in [from, to) are set
  int64_t key, value;              // bytes from a token to its key and its value
  int64_t from, to;
  const void* const* next;         // next_count pieces of memory to fetch meanwhile
  int64_t next_count, next_bytes;
  float scale;
  int64_t rows;
  const int32_t *first, *end;      // [rows]: the keys that a row sees; none: the row is left alone
  const float* q;                  // as pack_queries gave them, q_width apart
  float* total;                    // in the order that `attended` undoes, width apart
  int64_t q_width, width;
  float *top, *mass;               // [rows]
  uint32_t* scratch;               // kSpan · (padded(head_dim) + padded(value_dim))
};

constexpr int64_t kCandidates = 16;  // tokens that a drawn row leaves to XLA's logarithm, at most

// A row of sampling: see pallas_kernels/sample/api.py, and its cpu.py for what is left to do.
struct DrawnRow {
  const float* logits;         // [n]
  int64_t n;
  float temperature, top_p;    // temperature 0: the likeliest
  int64_t top_k;
  uint32_t far;                // bits of the largest distance that min_p keeps
  const uint32_t* key;         // [2]
  uint32_t *distance, *list;   // scratch: [n + kPad], used where a row truncates
  void* buckets;               // scratch: kBucketBytes
  int32_t* id;                 // [kCandidates], ascending
  float* scaled;               // −∞ where there is none
  uint32_t* bits;
};
constexpr int64_t kBucketBytes = 2 * 8 << 11;

// A row's log-probabilities: of `token`, of which `rank` are counted from 1, and of the `most`
// likeliest.
struct RankedRow {
  const float* logits;  // [n]
  int64_t n, most;
  int32_t token;
  float* chosen;
  int32_t *rank, *top_ids;
  float* top;
};

constexpr int64_t kDeltaScratch = 32;

// Operands of tokens whose numbers lie `apart` floats from each other's.
struct DeltaTokens {
  int64_t tokens, apart, keys;
  int64_t decays;             // 1: `kept` has a number for each key; 0: one for all
  const float *kept, *rate, *q, *key;
};
struct ScanTokens {
  int64_t tokens, apart, keys;
  const float *kept, *key, *read;  // kept: one number
};

struct Kernels {
  const char* name;
  // Tokens for which `dots_of_many` and `add_of_many` do as `dots` and `add` do, which is faster, at
  // most. The two ways have the same bits, but where this is 0.
  int64_t (*few)(Type kind);
  // Rows of weights of a task, whose tokens' operands are put in order once.
  int64_t (*rows_of_task)(Type kind);
  // x[n] of a dtype, in the order in which `dots` with weights of kind_of(type) wants it; out has
  // padded(n) floats, all written.
  void (*pack)(Type type, const void* x, int64_t n, float* out);
  // y[t · stride + r] = Σ_k x[t][k] · w[r][k] for tokens ≤ kTokens, any rows; x as packed.
  // next: the kAhead rows behind them, to fetch towards the cache meanwhile, or null. A matrix that
  // ends has its last row there instead.
  void (*dots)(Type kind, const void* const* w, int64_t rows, const float* const* x, int64_t tokens,
               int64_t n, float* y, int64_t stride, const void* const* next);
  // The same for any number of tokens: weights are put in order once for many of them. Only kernels
  // that know more than one way fetch `next`.
  void (*dots_of_many)(Type kind, const void* const* w, int64_t rows, const float* const* x,
                       int64_t tokens, int64_t n, float* y, int64_t stride,
                       const void* const* next);
  // total[t][c] += Σ_i h[t][i] · w[i][c], i ascending, for tokens ≤ kTokens, rows ≤ kRows; totals
  // are padded(n) floats in an order of their own, which `unpack` undoes.
  void (*add)(Type kind, const void* const* w, int64_t rows, const float* const* h, int64_t tokens,
              int64_t n, float* const* total);
  // The same for tokens ≤ kAddedTokens and rows ≤ kManyAdded, in an op's calls but the last one
  // kManyAdded of them; of few tokens rows ≤ kRows. Totals lie evenly apart, with room for a multiple
  // of kTokenGroup of them. coarse: true at first, when totals are 0, and kept by the calls.
  void (*add_of_many)(Type kind, const void* const* w, int64_t rows, const float* const* h,
                      int64_t tokens, int64_t n, float* const* total, bool* coarse);
  void (*unpack)(Type kind, const float* total, int64_t n, float* out);
  // Weights [first, first + count) of a row of a matrix, as kind_of(format.type): gate and up rows
  // are [D], rows of down^T too. A dense row of that kind is read where it lies: see row_of.
  // scales: what down_scales gave for the same columns; only rows of down^T need them.
  void (*decode)(const Format& format, const uint16_t* record, int matrix, int64_t row,
                 int64_t first, int64_t count, const float* scales, void* out);
  // The scales of down^T for some columns, in the order that decode wants:
  // 2 · padded(count) floats for each group of rows.
  void (*down_scales)(const Format& format, const uint16_t* record, int64_t first, int64_t count,
                      float* out);
  // Tokens of an expert for which these two take records of a format, at most; 0: none. They have the
  // bits of `decode` with `dots` and `add`, or with those of many.
  int64_t (*takes)(const Format& format);
  // `dots` with rows [first, first + rows) of gate or up.
  void (*encoded_dots)(const Format& format, const uint16_t* record, int matrix, int64_t first,
                       int64_t rows, const float* const* x, int64_t tokens, float* y,
                       int64_t stride);
  // `add` of columns [column, column + n), n a multiple of kPad, of down^T's rows r, r + I/4, r + I/2,
  // r + 3·I/4, for r in [first, first + rows), rows ≤ elements, which divides I/4 or these are the
  // last; h in that order.
  void (*encoded_add)(const Format& format, const uint16_t* record, int64_t first, int64_t rows,
                      int64_t column, int64_t n, const float* scales, const float* const* h,
                      int64_t tokens, float* const* total);
  int64_t elements;
  bool scales_ahead;  // whether encoded_add reads `scales`
  // ---- matrices with a unit: products of their codes with numbers of 8 bits (integers.h)
  // n numbers, a multiple of 32, into quantized_size(n) floats.
  void (*quantize)(const float* x, int64_t n, float* out);
  // `dots` with rows of gate or up, for any number of tokens. x: quantized. scratch:
  // integer_scratch.
  void (*integer_dots)(const Format& format, const uint16_t* record, int matrix, int64_t first, int64_t rows,
                       const float* const* x, int64_t tokens, float* y, int64_t stride, float* scratch);
  // y[t] = h[t] · down^T, n columns from `column` on, for tokens ≤ kIntegerTokens. h: quantized. scratch:
  // integer_columns_scratch. next: where the record is whose columns are multiplied then, and the first of them, to
  // fetch towards the cache meanwhile, or null.
  void (*integer_columns)(const Format& format, const uint16_t* record, int64_t column, int64_t n,
                          const float* const* h, int64_t tokens, float* const* y, float* scratch, const uint16_t* next);
  void (*widen)(Type type, const void* in, int64_t n, float* out);
  void (*narrow)(Type type, const float* in, int64_t n, void* out);  // round to nearest even
  // x[0 … n) = weight · round(x / rms(x)), rounded to `type` both times as transformers does; weight:
  // n floats. scratch: n values of `type`.
  void (*norm)(Type type, const float* weight, int64_t n, float eps, float* x, void* scratch);
  // gate[i] = act(gate[i]) · up[i]; of CLAMPED_SWIGLU, with its limit and alpha,
  // (up + 1) · gate · sigmoid(alpha · gate), gate at most limit and up within ± limit.
  void (*activate)(int activation, float limit, float alpha, float* gate, const float* up, int64_t n);
  // The gated delta rule of a head's s [keys, values], for some tokens, in order: s *= kept of each
  // key; s += key ⊗ (rate · (v − keyᵀ s)); v = qᵀ s. scratch: kDeltaScratch floats a key.
  void (*delta)(float* s, int64_t values, const DeltaTokens& tokens, float* v, float* scratch);
  // Mamba-2's recurrence of a head's s [keys, values], for some tokens, in order: s = kept · s +
  // key ⊗ x, x = readᵀ s.
  void (*scan)(float* s, int64_t values, ScanTokens tokens, float* x);
  // Mamba's, for one token: kept is [keys, values].
  void (*scan_each)(float* s, int64_t keys, int64_t values, const float* kept, const float* key,
                    const float* x, const float* read, float* out);
  // x[i] = exp(x[i] − top), 0 where x[i] is −inf; returns nothing, sums are the caller's.
  void (*exponentials)(float* x, float top, int64_t n);
  int64_t (*attended_rows)(Type type);  // (query, head) rows of one call of `attend`, at most
  // Rows x[n] of queries in the order in which `attend` wants them: padded(n) floats each, with room
  // for a multiple of kTokenGroup of them.
  void (*pack_queries)(Type type, const void* const* rows, int64_t count, int64_t n, float* out);
  void (*attend)(const AttendedSpan& span);
  // The sums of rows, whose totals lie width apart, with those over later spans.
  void (*fold)(int64_t rows, int64_t width, const AttendedSums& onto, const AttendedSums& more);
  void (*attended)(Type kind, const float* total, int64_t n, float* out);  // n columns of a row's total
  void (*draw)(const DrawnRow& row);
  void (*rank)(const RankedRow& row);
};

#ifdef MOEJAX_X86
extern const Kernels kernels_avx2, kernels_avx512, kernels_avx512bf16;
const Kernels& kernels_amx();  // avx512bf16's with products by tiles
#endif

enum Activation { SILU, GELU, GELU_TANH, RELU, CLAMPED_SWIGLU };

// Where a dense record of kind_of's type has a row; null: it must be decoded.
static inline const void* row_of(const Format& f, const uint16_t* record, int matrix, int64_t row) {
  const Coding& c = f.matrix[matrix];
  if (c.kind != Codes::Dense || f.type == Type::F16) return nullptr;
  return record + (c.codes + row * (size_of(f.type) / 2)) * f.hidden;
}

// The kernels that MOEJAX_CPU_ISA names, or the best that this machine has and that were tested;
// null: there are none of that name here, and `select_error` says so.
const Kernels* select_kernels();
const char* select_error();
// A table by its name; null where it was not compiled or the CPU lacks it.
const Kernels* kernels_named(const char* name);

}  // namespace moejax
