// Checksums of bytes that come piece by piece, in order.
#pragma once
#include <cstdint>

namespace moejax {

enum class Check : int32_t { NONE = 0, SHA256 = 1, CRC32C = 2 };

// value() of SHA256: the first 64 bits, as the 16 hex digits of moejax.json say them; of CRC32C: all 32.
class Checksum {
 public:
  explicit Checksum(Check kind);
  void update(const uint8_t* p, int64_t n);
  uint64_t value();  // once, after the last update

 private:
  void blocks(const uint8_t* p, int64_t n);  // n blocks of 64 bytes
  Check kind_;
  uint32_t state_[8], crc_ = ~0u;
  uint8_t rest_[64];  // bytes that fill no block yet
  int64_t bytes_ = 0;
};

}  // namespace moejax
