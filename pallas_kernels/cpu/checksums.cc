// SHA-256 (FIPS 180-4) and CRC-32C (RFC 3720, polynomial 0x1EDC6F41), with the CPU's instructions for
// them where it has some.
#include "pallas_kernels/cpu/checksums.h"

#include <algorithm>
#include <array>
#include <cstring>

#ifdef MOEJAX_X86
#include <immintrin.h>

#include "pallas_kernels/cpu/instruction_sets.h"
#endif

namespace moejax {
namespace {

alignas(16) constexpr uint32_t kRounds[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

uint32_t turned(uint32_t x, int by) { return x >> by | x << (32 - by); }

void sha_blocks(uint32_t* state, const uint8_t* p, int64_t n) {
  for (; n > 0; n--, p += 64) {
    uint32_t w[64], s[8];
    for (int i = 0; i < 16; i++) {
      w[i] = (uint32_t)p[4 * i] << 24 | p[4 * i + 1] << 16 | p[4 * i + 2] << 8 | p[4 * i + 3];
    }
    for (int i = 16; i < 64; i++) {
      const uint32_t a = w[i - 15], b = w[i - 2];
      w[i] = w[i - 16] + w[i - 7] + (turned(a, 7) ^ turned(a, 18) ^ a >> 3) +
             (turned(b, 17) ^ turned(b, 19) ^ b >> 10);
    }
    std::memcpy(s, state, sizeof s);
    for (int i = 0; i < 64; i++) {
      const uint32_t one = s[7] + (turned(s[4], 6) ^ turned(s[4], 11) ^ turned(s[4], 25)) +
                           ((s[4] & s[5]) ^ (~s[4] & s[6])) + kRounds[i] + w[i];
      const uint32_t two = (turned(s[0], 2) ^ turned(s[0], 13) ^ turned(s[0], 22)) +
                           ((s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]));
      std::copy_backward(s, s + 7, s + 8);
      s[4] += one;
      s[0] = one + two;
    }
    for (int i = 0; i < 8; i++) state[i] += s[i];
  }
}

const std::array<std::array<uint32_t, 256>, 8> kCrc = [] {
  std::array<std::array<uint32_t, 256>, 8> t{};
  for (uint32_t i = 0; i < 256; i++) {
    uint32_t c = i;
    for (int k = 0; k < 8; k++) c = c & 1 ? c >> 1 ^ 0x82f63b78 : c >> 1;
    t[0][i] = c;
  }
  for (int k = 1; k < 8; k++) {
    for (int i = 0; i < 256; i++) t[k][i] = t[k - 1][i] >> 8 ^ t[0][t[k - 1][i] & 255];
  }
  return t;
}();

uint32_t crc_table(uint32_t crc, const uint8_t* p, int64_t n) {
  for (; n >= 8; n -= 8, p += 8) {
    const uint32_t low = crc ^ (p[0] | p[1] << 8 | p[2] << 16 | (uint32_t)p[3] << 24);
    crc = kCrc[7][low & 255] ^ kCrc[6][low >> 8 & 255] ^ kCrc[5][low >> 16 & 255] ^
          kCrc[4][low >> 24] ^ kCrc[3][p[4]] ^ kCrc[2][p[5]] ^ kCrc[1][p[6]] ^ kCrc[0][p[7]];
  }
  for (; n > 0; n--) crc = crc >> 8 ^ kCrc[0][(crc ^ *p++) & 255];
  return crc;
}

#ifdef MOEJAX_X86
__attribute__((target("sha,sse4.1,ssse3"))) void sha_blocks_x86(uint32_t* state, const uint8_t* p,
                                                                int64_t n) {
  const __m128i big = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
  const __m128i dcba = _mm_loadu_si128((const __m128i*)state);
  const __m128i hgfe = _mm_loadu_si128((const __m128i*)(state + 4));
  const __m128i cdab = _mm_shuffle_epi32(dcba, 0xb1), efgh = _mm_shuffle_epi32(hgfe, 0x1b);
  __m128i abef = _mm_alignr_epi8(cdab, efgh, 8), cdgh = _mm_blend_epi16(efgh, cdab, 0xf0);
  for (; n > 0; n--, p += 64) {
    const __m128i abef_before = abef, cdgh_before = cdgh;
    __m128i w[4];
    for (int i = 0; i < 4; i++) {
      w[i] = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i*)(p + 16 * i)), big);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {  // four rounds each
      __m128i& now = w[i & 3];
      if (i >= 4) {
        const __m128i &next = w[(i + 1) & 3], &third = w[(i + 2) & 3], &last = w[(i + 3) & 3];
        now = _mm_sha256msg1_epu32(now, next);
        now = _mm_add_epi32(now, _mm_alignr_epi8(last, third, 4));
        now = _mm_sha256msg2_epu32(now, last);
      }
      const __m128i sum = _mm_add_epi32(now, _mm_load_si128((const __m128i*)(kRounds + 4 * i)));
      cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sum);
      abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(sum, 0x0e));
    }
    abef = _mm_add_epi32(abef, abef_before);
    cdgh = _mm_add_epi32(cdgh, cdgh_before);
  }
  const __m128i feba = _mm_shuffle_epi32(abef, 0x1b), dchg = _mm_shuffle_epi32(cdgh, 0xb1);
  _mm_storeu_si128((__m128i*)state, _mm_blend_epi16(feba, dchg, 0xf0));
  _mm_storeu_si128((__m128i*)(state + 4), _mm_alignr_epi8(dchg, feba, 8));
}

__attribute__((target("sse4.2,crc32"))) uint32_t crc_x86(uint32_t crc, const uint8_t* p, int64_t n) {
  uint64_t wide = crc;
  for (; n >= 8; n -= 8, p += 8) {
    uint64_t eight;
    std::memcpy(&eight, p, 8);
    wide = _mm_crc32_u64(wide, eight);
  }
  crc = (uint32_t)wide;
  for (; n > 0; n--) crc = _mm_crc32_u8(crc, *p++);
  return crc;
}

#endif

}  // namespace

Checksum::Checksum(Check kind) : kind_(kind) {
  const uint32_t start[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                             0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::memcpy(state_, start, sizeof state_);
}

void Checksum::blocks(const uint8_t* p, int64_t n) {
#ifdef MOEJAX_X86
  if (features().sha) return sha_blocks_x86(state_, p, n);
#endif
  sha_blocks(state_, p, n);
}

void Checksum::update(const uint8_t* p, int64_t n) {
  if (kind_ == Check::CRC32C) {
#ifdef MOEJAX_X86
    crc_ = features().sse42 ? crc_x86(crc_, p, n) : crc_table(crc_, p, n);
#else
    crc_ = crc_table(crc_, p, n);
#endif
    return;
  }
  const int64_t held = bytes_ % 64;
  bytes_ += n;
  if (held) {
    const int64_t more = std::min<int64_t>(n, 64 - held);
    std::memcpy(rest_ + held, p, (size_t)more);
    if (held + more < 64) return;
    blocks(rest_, 1);
    p += more;
    n -= more;
  }
  blocks(p, n / 64);
  std::memcpy(rest_, p + n / 64 * 64, (size_t)(n % 64));
}

uint64_t Checksum::value() {
  if (kind_ == Check::CRC32C) return ~crc_;
  const uint64_t bits = (uint64_t)bytes_ * 8;
  const int64_t held = bytes_ % 64;
  uint8_t end[128] = {0x80};
  const int64_t padding = (held < 56 ? 56 : 120) - held;
  for (int i = 0; i < 8; i++) end[padding + i] = (uint8_t)(bits >> (56 - 8 * i));
  update(end, padding + 8);
  return (uint64_t)state_[0] << 32 | state_[1];
}

}  // namespace moejax
