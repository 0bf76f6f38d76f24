// Scratch memory of one call.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <utility>

namespace moejax {

// A thread's last block of such a size, for its next buffer. glibc joins all free blocks when it is given a large one
// back: 2% of a step of 4-bit codes.
struct SpareBlock {
  static constexpr size_t kLeast = 64 << 10, kMost = 1 << 20;
  void* data = nullptr;
  size_t bytes = 0;
  ~SpareBlock() { std::free(data); }
};
inline thread_local SpareBlock spare_block;

// size values, aligned to a cache line and not set.
template <class T>
class Buffer {
 public:
  explicit Buffer(int64_t size) : bytes_((static_cast<size_t>(size) * sizeof(T) + 127) / 64 * 64) {
    if (SpareBlock::kLeast <= bytes_ && bytes_ <= spare_block.bytes) {
      data_ = std::exchange(spare_block.data, nullptr), bytes_ = std::exchange(spare_block.bytes, 0);
    } else {
      data_ = std::aligned_alloc(64, bytes_);
    }
    if (!data_) throw std::bad_alloc();
  }
  ~Buffer() {
    if (spare_block.bytes < bytes_ && SpareBlock::kLeast <= bytes_ && bytes_ <= SpareBlock::kMost) {
      std::swap(data_, spare_block.data), std::swap(bytes_, spare_block.bytes);
    }
    std::free(data_);
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  T* get() { return static_cast<T*>(data_); }
  T& operator[](int64_t i) { return get()[i]; }

 private:
  size_t bytes_;
  void* data_;
};

}  // namespace moejax
