// The ops as functions of memory: what handlers.cc binds to XLA, and what runs without jax too.
// pallas_kernels/OP/api.py has each op's meaning, pallas_kernels/OP/cpu.cc what it does. Operands are
// dense in C order.
//
// An op throws Refused where a table's entry is wrong; then nothing was read or written by it.
#pragma once
#include <stdexcept>
#include <string>
#include <vector>

#include "pallas_kernels/cpu/arrivals.h"
#include "pallas_kernels/cpu/kernels.h"
#include "pallas_kernels/cpu/pool.h"
#include "pallas_kernels/cpu/supply.h"

namespace moejax {

struct Refused : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// ---- linear, and head_linear one head after the other

// y[t] = x[t] · wᵀ + bias for t < tokens: x [tokens, inputs], w [outputs, inputs], both of `type`;
// rows of x and y lie x_stride and y_stride elements apart; bias: null or [outputs] of `type`.
struct Product {
  Type type, out_type;
  int64_t tokens, inputs, outputs, x_stride, y_stride;
  const void *x, *w, *bias;
  void* y;
};

// Rows of w in codes, as if they were `up` of an expert.
struct CodedRows {
  Format format;  // width: how many rows
  const uint16_t* record;
};
// The product with w's rows in these parts, one after the other, instead of `w`; of BF16 and F32.
void multiply_codes(Pool& pool, const Kernels& kernels, const Product& product,
                    const std::vector<CodedRows>& w);

// Products of the same shape.
void multiply(Pool& pool, const Kernels& kernels, const std::vector<Product>& products);
// The same with w [inputs, outputs], without bias: a sum over rows, which no lane of w crosses. Rows
// are added up in ascending order, whatever the number of tokens.
void multiply_transposed(Pool& pool, const Kernels& kernels, const std::vector<Product>& products);

// ---- records: expert_ffn, fill

// Whether experts have a gate that is not up.
static inline bool has_gate(const Format& f) {
  return f.matrix[GATE].codes != f.matrix[UP].codes;
}

// The records of one version: how they lie in cells, and in their store.
struct StoredVersion {
  Format cell, held;       // held: in the store
  const uint16_t* store;   // [layers, experts, held.rows, hidden]; null: records are in files
  int64_t layers, experts;
  std::vector<int64_t> places;  // layer of the tables → layer of the store, −1: none; empty: equal
};

// An arena with the versions whose records its cells hold.
struct Records {
  uint16_t* arena;  // [arena_rows, hidden]
  int64_t arena_rows, hidden;
  std::vector<StoredVersion> versions;
  Supply* supply;   // null: nothing brings records beside the ops

  // The version of that number. name: of the expert, for errors.
  const StoredVersion& version(int64_t number, const std::string& name) const;
  // The cell from a row on, where a version's record has room.
  uint16_t* cell(const StoredVersion& version, int64_t row, const std::string& name) const;
  // Where a record lies in its version's store; null: in a file, from which the supply brings it, but
  // not where it is to be read here.
  const uint16_t* stored(int64_t number, int64_t layer, int64_t expert, bool read_here,
                         const std::string& name) const;
};

// The experts of a layer, read where their records lie.
struct Experts {
  Type type;
  int64_t tokens, top_k, width, layers, experts;
  Activation activation;
  const void* x;
  const int32_t* ids;
  Records records;
  int64_t layer;
  const int32_t *address, *version;  // [layers, experts]
  const int32_t* active;
  int64_t active_count;
  float* y;  // [tokens · top_k, hidden]; rows of experts that are not active are left alone
  uint32_t writes;  // of the arena, so far
  float limit = 0, alpha = 0;  // of CLAMPED_SWIGLU
};

// With a supply, experts are computed as their records come. One whose record does not is zeros, and
// said to the supply.
void run_experts(Pool& pool, const Kernels& kernels, const Experts& call);

// Records of one layer, from their stores into cells, which do not overlap.
struct Fills {
  Records records;
  int64_t layer;
  const int32_t *expert, *row, *version;  // [count]
  int64_t count;
  bool ahead;  // of need: nothing waits for them yet
};

// With a supply records are queued, and come beside what follows; those that are decoded on the way
// are written here also then.
void fill(Pool& pool, const Kernels& kernels, const Fills& call);

// Rows of the arena copied within it, out of it and into it: cells, and pages of KV. Targets overlap
// neither each other nor a source.
struct Copy {
  const uint16_t* from;
  uint16_t* to;
  int64_t elements;
};
void copy_all(Pool& pool, const std::vector<Copy>& copies);

// ---- paged_attention, of single queries (decode) and of chunks of them (prefill)

// Spans of decode's splits: threads share a long sequence by them, and each reads the heads of a token
// together.
constexpr int64_t kDecodeSplit = 16;

// What both have in common.
struct Attention {
  Type type;
  int64_t heads, kv_heads, head_dim, block_size;
  int64_t latent;       // 0: keys and values are rows of their own
  int64_t window;       // 0: none
  const float* sinks;   // [heads], or null
  float scale;
  const void* q;        // [rows, heads, head_dim]
  const uint16_t* arena;
  int64_t kv_rows;      // rows of head_dim in the arena
  const int32_t* block_table;
  int64_t sequences, blocks;
  int64_t layer;
  void* out;            // [rows, heads · value_dim]
  int64_t split;        // spans, counted from position 0, whose sums are folded into those before; 0: none
};

// Rows [first, first + count) of q are one sequence's queries at positions `position` and on.
struct Queries {
  int64_t first, count, sequence, position;
};

// Writes the results of these queries, nothing else.
void attend(Pool& pool, const Kernels& kernels, const Attention& call,
            const std::vector<Queries>& queries);

// ---- kv_write, latent_write: rotated queries, and KV in its pages

// Where tokens' KV rows lie.
struct Pages {
  Type type;
  int64_t tokens;
  int64_t head_dim, block_size, rows_per_token;
  uint16_t* arena;
  int64_t kv_rows;             // rows of head_dim in the arena
  const int32_t *positions, *pages;
  int64_t layer;               // of a page
  const float* frequencies;    // of half the values that turn
  int64_t half;
  float factor, eps;           // of cosine and sine; of the norms

  // Token t's first row in the arena; −1: it has none. The others are block_size rows apart.
  int64_t row(int64_t t) const {
    if (pages[t] < 0) return -1;
    return pages[t] + layer * rows_per_token * block_size + positions[t] % block_size;
  }
};

struct Heads {
  int64_t heads, kv_heads;
  const void* qkv;                  // [tokens, heads + 2 · kv_heads, head_dim]
  const void *q_norm, *k_norm;      // [head_dim], or null
  void* q;                          // [tokens, heads, head_dim]
};
void kv_write(Pool& pool, const Kernels& kernels, const Pages& pages, const Heads& heads);

// ---- gated_delta, short_conv, selective_scan: states advanced in their pages

// The tokens of a step by sequence: pallas_kernels/state_pages.py.
struct StateRuns {
  int64_t runs, run_tokens;                // runs in use, and rows of each
  uint16_t* arena;
  int64_t kv_rows;                         // rows of row_elements in the arena
  int64_t page_rows, row_elements, layer_rows, first_row, state_pages;
  const int32_t *pages, *read, *copy;      // [runs, state_pages]; copy[n][0] < 0: none
  const int32_t *start, *skip, *length;    // [runs]
  int64_t layer;

  bool is_new(int64_t n) const { return start[n] + skip[n] == 0; }
  int64_t tokens() const {
    int64_t sum = 0;
    for (int64_t n = 0; n < runs; n++) sum += length[n] > skip[n] ? length[n] - skip[n] : 0;
    return sum;
  }
};

struct Delta {
  StateRuns states;
  Type type;                               // of qkv, beta, decay and out
  int64_t key_heads, value_heads, key_dim, value_dim, taps;
  bool each;                               // each value of a key has its own decay
  const void *qkv, *beta, *decay;
  const float *conv, *a_log, *dt_bias;     // [columns, taps], [value_heads], [decays]
  void* out;                               // [runs · run_tokens, value_heads · value_dim]
};
void gated_delta(Pool& pool, const Kernels& kernels, const Delta& delta);

struct ShortConv {
  StateRuns states;
  Type type;
  int64_t width, taps;
  const void* x;                           // [runs · run_tokens, width]
  const float *weights, *bias;             // [width, taps], [width]
  bool silu;
  void* out;                               // as x
};
void short_conv(Pool& pool, const Kernels& kernels, const ShortConv& conv);

struct Scan {
  StateRuns states;
  Type type;                               // of xbc, dt and out
  int64_t heads, values, groups, keys;
  bool each;                               // each value of a head has its own dt and rates
  float least, most;                       // of dt
  const void *xbc, *dt;                    // [tokens, heads · values + 2 · groups · keys]
  const float *a_log, *dt_bias, *skip;     // [rates] or [rates, keys], [rates], [rates]
  void* out;                               // [runs · run_tokens, heads · values]

  int64_t rates() const { return each ? heads * values : heads; }
};
void selective_scan(Pool& pool, const Kernels& kernels, const Scan& scan);

struct Latent {
  int64_t heads, latent;
  bool interleave;
  const void* kv;      // [tokens, head_dim]
  const void* norm;    // [latent]
  const void* q_rope;  // [tokens, heads, head_dim − latent]
  void* out;           // as q_rope
};
void latent_write(Pool& pool, const Kernels& kernels, const Pages& pages, const Latent& latent);

// ---- rms_norm, route, combine

// x and out are [rows, width], weight is [width], all of `type`.
void rms_norm(Pool& pool, const Kernels& kernels, Type type, const void* x, const void* weight,
              int64_t rows, int64_t width, float eps, void* out);

enum class Scoring : int32_t { Softmax, Sigmoid, Sparsemixer };

// A RouteRule of pallas_kernels/route/rule.py; a group's score is the sum of its `group_best` best.
struct Rule {
  Scoring scoring;
  int64_t top_k, groups, top_groups, group_best;
  bool normalize;
  float scale, jitter;
};

// logits float[tokens, experts] → ids and weights [tokens, top_k], ids ascending. correction:
// float[experts] or null. The rule must fit the number of experts.
void route(Pool& pool, const Rule& rule, const float* logits, const bool* valid,
           const float* correction, int64_t tokens, int64_t experts, int32_t* ids, float* weights);

// out[t] = residual[t] + Σ_k weights[t, k] · y[t, k], k ascending, rounded once. residual and out
// are [tokens, width] of `type`, y is float[tokens, top_k, width], weights float[tokens, top_k].
void combine(Pool& pool, const Kernels& kernels, Type type, const void* residual, const float* y,
             const float* weights, int64_t tokens, int64_t top_k, int64_t width, void* out);

// ---- sample

struct Draws {
  int64_t rows, vocabulary;
  const float* logits;                 // [rows, vocabulary]
  const bool* wanted;                  // [rows]; of others nothing is written
  const float *temperature, *top_p;    // [rows]
  const int32_t* top_k;
  const uint32_t *far, *keys;          // [rows], [rows, 2]; see DrawnRow
  int32_t* ids;                        // [rows, kCandidates]
  float* scaled;
  uint32_t* bits;
};
void draw(Pool& pool, const Kernels& kernels, const Draws& draws);

struct Ranks {
  int64_t rows, vocabulary, most;
  const float* logits;     // [rows, vocabulary]
  const int32_t* tokens;   // [rows]; a row of none is left alone
  float *chosen, *top;     // [rows], [rows, most]
  int32_t *rank, *top_ids;
};
void rank(Pool& pool, const Kernels& kernels, const Ranks& ranks);

struct Greedy {
  int64_t rows, vocabulary;
  const float* logits;  // [rows, vocabulary]
  const bool* update;   // [rows]; of others nothing is written
  int32_t* tokens;      // [rows]
};
void choose_likeliest(Pool& pool, const Greedy& greedy);

// ---- plan

// Tables and results. The layer's rows of those that change are changed in place.
struct Plan {
  int64_t layers, cells, experts, layer;
  const int32_t *cell_row, *cell_version;          // [layers, cells]
  int32_t *owner, *last_used;                      // [layers, cells]
  int32_t *address, *version, *frequency;          // [layers, experts]
  const int32_t *fill_version, *prior;             // [layers, experts]
  int32_t* clock;                                  // [layers]
  const int32_t* weights;                          // [3]
  const bool* due;                                 // [experts]: what is active
  int32_t *active, *fill_expert, *fill_row, *fill_list_version;  // [experts]
  int32_t *active_count, *fill_count, *hits, *read_through;
};
// One layer's references: hits, victims, fills, and the tables after them.
void plan(const Plan& call);

}  // namespace moejax
