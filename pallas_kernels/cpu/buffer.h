// Scratch memory of one call.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace moejax {

// Where a thread's buffers lie behind each other, as long as there is room. (glibc joins free blocks at most calls:
// 3% of a decode step in bfloat16.)
struct Scratch {
#ifdef __SANITIZE_ADDRESS__
  static constexpr size_t kBytes = 0;  // every buffer has bounds
#else
  static constexpr size_t kBytes = 1 << 20;
#endif
  char* data = nullptr;
  size_t used = 0;
  int64_t buffers = 0;
  ~Scratch() { std::free(data); }
};
inline thread_local Scratch scratch_of_thread;

// size values, aligned to a cache line and not set. It ends on the thread that made it.
template <class T>
class Buffer {
 public:
  explicit Buffer(int64_t size) : bytes_((static_cast<size_t>(size) * sizeof(T) + 127) / 64 * 64) {
    Scratch& scratch = scratch_of_thread;
    if (!scratch.data && Scratch::kBytes) scratch.data = static_cast<char*>(std::aligned_alloc(64, Scratch::kBytes));
    within_ = scratch.data && bytes_ <= Scratch::kBytes - scratch.used;
    data_ = within_ ? scratch.data + scratch.used : static_cast<char*>(std::aligned_alloc(64, bytes_));
    if (!data_) throw std::bad_alloc();
    if (within_) scratch.used += bytes_, scratch.buffers++;
  }
  ~Buffer() {
    if (!within_) {
      std::free(data_);
      return;
    }
    Scratch& scratch = scratch_of_thread;
    if (data_ + bytes_ == scratch.data + scratch.used) scratch.used -= bytes_;
    if (--scratch.buffers == 0) scratch.used = 0;
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  T* get() { return reinterpret_cast<T*>(data_); }
  T& operator[](int64_t i) { return get()[i]; }

 private:
  size_t bytes_;
  char* data_;
  bool within_;
};

}  // namespace moejax
