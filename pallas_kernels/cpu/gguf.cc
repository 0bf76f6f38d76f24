// The codes and scales of a matrix in a GGUF file, into the parts of a record: what
// host_offload.versions.quantized and moejax.checkpoints.gguf_tensors do with numpy.
#include "pallas_kernels/cpu/gguf.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "pallas_kernels/cpu/transpose.h"

#define MOEJAX_EXPORT extern "C" __attribute__((visibility("default")))

namespace moejax {
namespace {

enum Kind : int32_t { Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K, MXFP4, AS_BF16, AS_F32 };
enum Field { CODES, HIGHS, SCALES, SUPERS, MINS, MIN_SUPERS, FIELDS };

constexpr int64_t kTile = 32;  // rows at once: their codes stay in the cache

// Bytes [from, from + size) of a block are numbers of `item` bytes of a field. size 0: it has none.
struct Numbers {
  int from, size, item;
};

struct Layout {
  int weights, bytes, bits, high;
  bool packed;  // scales and minimums are 6 bits each, in 12 bytes from 4 on
  Numbers numbers[FIELDS];
};

constexpr Layout kLayouts[] = {
    {32, 34, 8, 0, false, {{}, {}, {0, 2, 2}, {}, {}, {}}},
    {32, 18, 4, 0, false, {{}, {}, {0, 2, 2}, {}, {}, {}}},
    {32, 20, 4, 0, false, {{}, {}, {0, 2, 2}, {}, {2, 2, 2}, {}}},
    {32, 22, 4, 1, false, {{}, {}, {0, 2, 2}, {}, {}, {}}},
    {32, 24, 4, 1, false, {{}, {}, {0, 2, 2}, {}, {2, 2, 2}, {}}},
    {256, 144, 4, 0, true, {{}, {}, {0, 8, 1}, {0, 2, 2}, {0, 8, 1}, {2, 2, 2}}},
    {256, 176, 4, 1, true, {{}, {}, {0, 8, 1}, {0, 2, 2}, {0, 8, 1}, {2, 2, 2}}},
    {256, 210, 4, 2, false, {{}, {}, {192, 16, 1}, {208, 2, 2}, {}, {}}},
    {32, 17, 4, 0, false, {{}, {}, {0, 1, 1}, {}, {}, {}}},
};

// Codes of 4 bits: the lower halves of n bytes, then the upper halves.
inline void halves(const uint8_t* from, int n, uint8_t* codes) {
  for (int i = 0; i < n; i++) codes[i] = from[i] & 15, codes[n + i] = from[i] >> 4;
}

// Eight bytes for a byte: 16 where bit i is set, else 0.
struct Spread {
  uint64_t of[256];
  constexpr Spread() : of() {
    for (int byte = 0; byte < 256; byte++) {
      for (int i = 0; i < 8; i++) of[byte] |= (uint64_t)(byte >> i & 1) << (8 * i + 4);
    }
  }
};
constexpr Spread kSpread;

// Bit i of four bytes is the fifth one of code i.
inline void fifth_bits(const uint8_t* from, uint8_t* codes) {
  for (int i = 0; i < 4; i++) {
    uint64_t eight;
    std::memcpy(&eight, codes + 8 * i, 8);
    eight |= kSpread.of[from[i]];
    std::memcpy(codes + 8 * i, &eight, 8);
  }
}

// Adds `bits` bits above the fourth one to 32 codes for each shift of 32 bytes.
template <int bits>
inline void upper_bits(const uint8_t* from, uint8_t* codes) {
  for (int part = 0; part < 8 / bits; part++) {
    for (int i = 0; i < 32; i++) {
      codes[32 * part + i] |= (from[i] >> (bits * part) & ((1 << bits) - 1)) << 4;
    }
  }
}

// All bits of a block's codes.
template <int kind>
inline void unpack(const uint8_t* b, uint8_t* codes) {
  if constexpr (kind == Q8_0) {
    for (int i = 0; i < 32; i++) codes[i] = b[2 + i] ^ 0x80;
  } else if constexpr (kind == Q4_0) {
    halves(b + 2, 16, codes);
  } else if constexpr (kind == Q4_1) {
    halves(b + 4, 16, codes);
  } else if constexpr (kind == Q5_0) {
    halves(b + 6, 16, codes), fifth_bits(b + 2, codes);
  } else if constexpr (kind == Q5_1) {
    halves(b + 8, 16, codes), fifth_bits(b + 4, codes);
  } else if constexpr (kind == MXFP4) {
    halves(b + 1, 16, codes);
  } else if constexpr (kind == Q6_K) {
    for (int half = 0; half < 2; half++) {
      halves(b + 64 * half, 64, codes + 128 * half);
      upper_bits<2>(b + 128 + 32 * half, codes + 128 * half);
    }
  } else {
    constexpr int begin = kind == Q4_K ? 16 : 48;
    for (int part = 0; part < 4; part++) halves(b + begin + 32 * part, 32, codes + 64 * part);
    if constexpr (kind == Q5_K) upper_bits<1>(b + 16, codes);
  }
}

// Eight scales, then eight minimums.
inline void six_bits(const uint8_t* from, uint8_t* to) {
  for (int i = 0; i < 4; i++) {
    const uint8_t scale = from[i], low = from[4 + i], both = from[8 + i];
    to[i] = scale & 63, to[4 + i] = (both & 15) | (scale >> 2 & 48);
    to[8 + i] = low & 63, to[12 + i] = both >> 4 | (low >> 2 & 48);
  }
}

struct Matrix {
  const uint8_t* raw;
  int64_t rows, width;
  bool down;
  uint8_t* parts[FIELDS];
};

// Bits of a row's codes from `shift` on: planes are equal parts of the row.
template <int bits>
inline void put_row(const uint8_t* codes, int64_t n, int shift, uint16_t* to) {
  constexpr uint8_t mask = (uint8_t)((1 << bits) - 1);
  for (int64_t e = 0; e < n; e++) to[e] = codes[e] >> shift & mask;
  for (int j = 1; j < 16 / bits; j++) {
    const uint8_t* const from = codes + j * n;
    for (int64_t e = 0; e < n; e++) {
      to[e] = (uint16_t)(to[e] | (from[e] >> shift & mask) << (bits * j));
    }
  }
}

// The same of rows [first, first + count) whose codes are there, transposed if the record has them
// so.
template <int bits>
void put_rows(const uint8_t* codes, const Matrix& m, int64_t first, int64_t count, int shift,
              uint16_t* row, uint16_t* to) {
  const int64_t n = m.width * bits / 16;
  for (int64_t r = 0; r < count; r++) {
    put_row<bits>(codes + r * m.width, n, shift, m.down ? row + r * n : to + (first + r) * n);
  }
  if (m.down) transpose((const uint8_t*)row, count, 2 * n, n, 2, (uint8_t*)to, first, m.rows);
}

// A block's numbers of a field, from number i of row r on; there are `count` in a row.
template <int item, int each>
inline void put_numbers(const Matrix& m, uint8_t* to, int64_t r, int64_t i, int64_t count,
                        const uint8_t* from) {
  if (!m.down) {
    std::memcpy(to + (r * count + i) * item, from, item * each);
    return;
  }
  for (int n = 0; n < each; n++) {
    std::memcpy(to + ((i + n) * m.rows + r) * item, from + n * item, item);
  }
}

template <int kind, int field>
inline void put_field(const Matrix& m, int64_t r, int64_t b, const uint8_t* block,
                      const uint8_t* six) {
  constexpr Layout layout = kLayouts[kind];
  constexpr Numbers have = layout.numbers[field];
  if constexpr (have.size > 0) {
    constexpr int each = have.size / have.item;
    constexpr bool packed = layout.packed && (field == SCALES || field == MINS);
    const uint8_t* const from = packed ? six + (field == MINS ? 8 : 0) : block + have.from;
    put_numbers<have.item, each>(m, m.parts[field], r, b * each, m.width / layout.weights * each,
                                 from);
  }
}

template <int kind>
void put(const Matrix& m) {
  constexpr Layout layout = kLayouts[kind];
  const int64_t blocks = m.width / layout.weights;
  std::vector<uint8_t> codes((size_t)(m.width * kTile));
  std::vector<uint16_t> row((size_t)(m.down ? m.width * kTile : 0));
  for (int64_t first = 0; first < m.rows; first += kTile) {
    const int64_t count = std::min(kTile, m.rows - first);
    for (int64_t r = 0; r < count; r++) {
      for (int64_t b = 0; b < blocks; b++) {
        const uint8_t* const block = m.raw + ((first + r) * blocks + b) * layout.bytes;
        unpack<kind>(block, &codes[(size_t)(r * m.width + b * layout.weights)]);
        uint8_t six[16];
        if constexpr (layout.packed) six_bits(block + 4, six);
        put_field<kind, SCALES>(m, first + r, b, block, six);
        put_field<kind, SUPERS>(m, first + r, b, block, six);
        put_field<kind, MINS>(m, first + r, b, block, six);
        put_field<kind, MIN_SUPERS>(m, first + r, b, block, six);
      }
    }
    put_rows<layout.bits>(codes.data(), m, first, count, 0, row.data(), (uint16_t*)m.parts[CODES]);
    if constexpr (layout.high > 0) {
      put_rows<layout.high>(codes.data(), m, first, count, layout.bits, row.data(),
                            (uint16_t*)m.parts[HIGHS]);
    }
  }
}

// Bytes of a field of the matrix.
int64_t size_of(const Layout& layout, const BlockMatrix& m, int field) {
  if (field == CODES || field == HIGHS) {
    const int bits = field == CODES ? layout.bits : layout.high;
    if (!bits) return 0;
    return m.rows * m.width * bits / 8;  // a width of whole blocks has whole planes
  }
  return m.rows * (m.width / layout.weights) * layout.numbers[field].size;
}

inline bool is_bias(const BlockMatrix& m) { return m.kind == AS_BF16 || m.kind == AS_F32; }

// Float32 values, into the place of the codes, as bfloat16 to nearest even or as they are.
int put_values(const BlockMatrix& m, const uint8_t* raw, uint8_t* record) {
  const int64_t count = m.rows * m.width, size = count * (m.kind == AS_BF16 ? 2 : 4);
  if (size > m.sizes[CODES]) return 1 + CODES;
  uint8_t* const to = record + m.places[CODES];
  if (m.kind == AS_F32) std::memcpy(to, raw, (size_t)size);
  for (int64_t i = 0; m.kind == AS_BF16 && i < count; i++) {
    uint32_t bits;
    std::memcpy(&bits, raw + 4 * i, 4);
    const bool finite = (bits & 0x7F800000u) != 0x7F800000u;  // adding would make zeros of some NaN
    const auto upper = (uint16_t)((finite ? bits + 0x7FFFu + (bits >> 16 & 1) : 0x7F800000u) >> 16);
    std::memcpy(to + 2 * i, &upper, 2);
  }
  std::memset(to + size, 0, (size_t)(m.sizes[CODES] - size));
  return 0;
}

}  // namespace

int put_blocks(const BlockMatrix& m, const uint8_t* raw, uint8_t* record) {
  if (is_bias(m)) return put_values(m, raw, record);
  const Layout& layout = kLayouts[m.kind];
  Matrix matrix{raw, m.rows, m.width, m.down != 0, {}};
  if (m.width % layout.weights) return -1;
  for (int f = 0; f < FIELDS; f++) {
    const int64_t size = size_of(layout, m, f);
    if (size > m.sizes[f]) return 1 + f;
    matrix.parts[f] = record + m.places[f];
    if (m.sizes[f] > size) std::memset(matrix.parts[f] + size, 0, (size_t)(m.sizes[f] - size));
  }
  switch (m.kind) {
    case Q8_0: put<Q8_0>(matrix); break;
    case Q4_0: put<Q4_0>(matrix); break;
    case Q4_1: put<Q4_1>(matrix); break;
    case Q5_0: put<Q5_0>(matrix); break;
    case Q5_1: put<Q5_1>(matrix); break;
    case Q4_K: put<Q4_K>(matrix); break;
    case Q5_K: put<Q5_K>(matrix); break;
    case Q6_K: put<Q6_K>(matrix); break;
    default: put<MXFP4>(matrix);
  }
  return 0;
}

const char* wrong_numbers(const BlockMatrix& m, const uint8_t* record) {
  if (is_bias(m)) {  // the upper 16 bits of each say it
    const int item = m.kind == AS_BF16 ? 2 : 4;
    const uint8_t* at = record + m.places[CODES] + item - 2;
    for (int64_t i = 0; i < m.rows * m.width; i++, at += item) {
      uint16_t upper;
      std::memcpy(&upper, at, 2);
      if ((upper & 0x7F80) == 0x7F80) return "a bias has values that are NaN or infinite";
    }
    return nullptr;
  }
  constexpr const char* kScales = "a matrix has scales that are NaN or infinite";
  const Layout& layout = kLayouts[m.kind];
  for (int f = SCALES; f < FIELDS; f++) {
    const int64_t size = size_of(layout, m, f);
    const uint8_t* const at = record + m.places[f];
    if (m.kind == MXFP4) {  // powers of two
      if (std::find(at, at + size, 0xFF) != at + size) return kScales;
    } else if (layout.numbers[f].item == 2) {  // float16
      bool found = false;
      for (int64_t i = 1; i < size; i += 2) found |= (at[i] & 0x7C) == 0x7C;
      if (found) return kScales;
    }
  }
  return nullptr;
}

}  // namespace moejax

// As put_blocks, with the matrix's places from `record` on.
MOEJAX_EXPORT int32_t moejax_put_blocks(const moejax::BlockMatrix* matrix, const uint8_t* raw,
                                        uint8_t* record) {
  return moejax::put_blocks(*matrix, raw, record);
}
