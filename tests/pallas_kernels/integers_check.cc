// Products of integers over random formats and shapes, for sanitizers: every operand lies in an
// allocation of exactly its size. Arguments: a seed and a number of rounds. Prints a digest of all
// results, the same for every instruction set; anything else is a failure.
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "pallas_kernels/cpu/kernels.cc"
#ifdef MOEJAX_TILES
#include <sys/syscall.h>
#include <unistd.h>
#endif

using namespace moejax;

namespace {

#ifdef MOEJAX_TILES
constexpr bool kTiles = true;
#else
constexpr bool kTiles = false;
#endif

std::mt19937 rng;
uint64_t digest = 14695981039346656037u;

int64_t pick(int64_t low, int64_t high) { return low + (int64_t)(rng() % (uint64_t)(high - low + 1)); }

struct Kind {
  Codes codes;
  ScaleType scale;
  int64_t group, super;
};
const Kind kKinds[] = {
    {Codes::Int8, ScaleType::F16, 32, 0}, {Codes::Int4, ScaleType::F16, 32, 0},
    {Codes::Int2, ScaleType::F32, 64, 0}, {Codes::E2M1, ScaleType::E8M0, 32, 0},
    {Codes::E2M1, ScaleType::U8, 16, 0},  {Codes::IQ4, ScaleType::F16, 32, 0},
    {Codes::Zero8, ScaleType::F16, 32, 0}, {Codes::Zero4, ScaleType::BF16, 32, 0},
    {Codes::Min4, ScaleType::U8, 32, 8},  {Codes::Min5, ScaleType::U8, 32, 8},
    {Codes::Int5, ScaleType::F16, 32, 0}, {Codes::Int6, ScaleType::I8, 16, 16},
};

// A record's matrices one after the other, each with its parts in whole rows.
std::vector<uint16_t> record_of(const Kind& kind, Format& f) {
  int64_t rows = 0;
  std::vector<std::pair<int64_t, int64_t>> scales;  // first row, behind the last one
  const auto part = [&](int64_t bytes, bool scale) {
    const int64_t first = rows;
    rows += (bytes + 2 * f.hidden - 1) / (2 * f.hidden);
    if (scale) scales.push_back({first, rows});
    return first;
  };
  for (int matrix : {GATE, UP, DOWN}) {
    const int64_t weights = f.hidden * f.width, along = matrix == DOWN ? f.width : f.hidden;
    const int64_t lines = matrix == DOWN ? f.hidden : f.width, groups = (along + kind.group - 1) / kind.group * lines;
    const int64_t size = kind.scale == ScaleType::F32 ? 4 : kind.scale <= ScaleType::BF16 ? 2 : 1;
    const int64_t supers = kind.super ? ((along + kind.group - 1) / kind.group + kind.super - 1) / kind.super * lines : 0;
    Coding& c = f.matrix[matrix];
    c = {};
    c.kind = kind.codes, c.scale = kind.scale, c.group = kind.group, c.across = 1, c.super = kind.super;
    c.unit = kind.group == 16 ? 16 : 32;
    c.codes = part(weights * bits_of(kind.codes) / 8, false);
    c.highs = part(weights * highs_of(kind.codes) / 8, false);
    c.extra = part(groups * size, true);
    if (has_shifts(kind.codes)) c.shifts = part(groups * (shift_of(kind.codes) == Shift::Zero ? 1 : size), true);
    c.supers = part(2 * supers, true);
    c.min_supers = part(has_shifts(kind.codes) ? 2 * supers : 0, true);
  }
  f.rows = rows;
  std::vector<uint16_t> record(rows * f.hidden);
  for (uint16_t& element : record) element = (uint16_t)rng();
  for (const auto& [first, last] : scales) {  // finite in every type
    for (int64_t i = first * f.hidden; i < last * f.hidden; i++) record[i] = (uint16_t)(0x3434 + 0x101 * (rng() % 8));
  }
  return record;
}

// Quantized numbers of n normal ones for each token.
std::vector<std::vector<float>> draw(int64_t tokens, int64_t n) {
  std::vector<std::vector<float>> all(tokens);
  for (auto& mine : all) {
    std::vector<float> x(n);
    for (float& number : x) number = (float)(int32_t)rng() * 0x1p-28f;
    mine.resize(quantized_size(n));
    quantize(x.data(), n, mine.data());
  }
  return all;
}

// All tokens at once and in pieces have the same bits: y[t] of `size` numbers each.
template <class F>
void check(int64_t tokens, int64_t size, F product) {
  std::vector<float> all(tokens * size), some(tokens * size);
  product(0, tokens, all.data());
  for (int64_t t = 0, count; t < tokens; t += count) {
    count = least(pick(1, 5), tokens - t);
    product(t, count, &some[t * size]);
  }
  if (memcmp(all.data(), some.data(), all.size() * sizeof all[0])) std::printf("other bits in pieces\n"), std::exit(1);
  for (float number : all) digest = (digest ^ as_bits(number)) * 1099511628211u;
}

void check_all() {
  const Kind& kind = kKinds[pick(0, (int64_t)std::size(kKinds) - 1)];
  Format f = {};
  f.type = Type::BF16, f.hidden = pick(0, 3) ? 32 * pick(1, 24) : 2048, f.width = pick(0, 2) ? 32 * pick(1, 20) : pick(1, 40);
  const auto record = record_of(kind, f);
  const int64_t tokens = pick(1, 20);
  const auto x = draw(tokens, f.hidden);
  const int matrix = (int)pick(GATE, UP);
  const int64_t first = pick(0, f.width - 1), rows = pick(1, f.width - first);
  check(tokens, rows, [&](int64_t from, int64_t count, float* y) {
    std::vector<float> scratch(integer_scratch(f.hidden, count));
    const float* mine[32];
    for (int64_t t = 0; t < count; t++) mine[t] = x[from + t].data();
    integer_dots_of<kTiles>(f, record.data(), matrix, first, rows, mine, count, y, rows, scratch.data());
  });
  if (f.width % 32) return;  // down's groups are whole
  const auto h = draw(tokens, f.width);
  check(tokens, f.hidden, [&](int64_t from, int64_t count, float* y) {
    const int64_t most = integer_columns_of(count);
    std::vector<float> scratch(integer_columns_scratch(f.width, most, count));
    const float* mine[32];
    float* to[32];
    for (int64_t t = 0; t < count; t++) mine[t] = h[from + t].data();
    for (int64_t at = 0; at < f.hidden; at += most) {
      for (int64_t t = 0; t < count; t++) to[t] = y + t * f.hidden + at;
      integer_columns_of<kTiles>(f, record.data(), at, least(most, f.hidden - at), mine, count, to, scratch.data(),
                                   record.data());
    }
  });
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return std::printf("usage: integers_check SEED ROUNDS\n"), 1;
#ifdef MOEJAX_TILES
  syscall(SYS_arch_prctl, 0x1023, 18);  // asks for the tiles' state
#endif
  rng.seed((unsigned)std::atoi(argv[1]));
  for (int i = 0; i < std::atoi(argv[2]); i++) check_all();
  std::printf("ok %016" PRIx64 "\n", digest);
}
