// Scratch memory of one call.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace moejax {

// size values, aligned to a cache line and not set.
template <class T>
class Buffer {
 public:
  explicit Buffer(int64_t size) {
    const size_t bytes = (static_cast<size_t>(size) * sizeof(T) + 127) / 64 * 64;
    data_ = static_cast<T*>(std::aligned_alloc(64, bytes));
    if (!data_) throw std::bad_alloc();
  }
  ~Buffer() { std::free(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  T* get() { return data_; }
  T& operator[](int64_t i) { return data_[i]; }

 private:
  T* data_;
};

}  // namespace moejax
