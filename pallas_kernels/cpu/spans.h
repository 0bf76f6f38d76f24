// What ops took, where somebody records it; otherwise one atomic read an op.
#pragma once
#include <atomic>
#include <cstdint>

namespace moejax {

// Laid out as pallas_kernels/cpu/spans.py reads it.
struct OpRecord {
  double begin, end;  // seconds of CLOCK_MONOTONIC
  int32_t layer;      // of the model; −1: the op did not say
  char op[28];        // the target's name, cut off
};

extern std::atomic<bool> recording_ops;

// Lives as long as an op runs. op: lives forever.
class OpSpan {
 public:
  explicit OpSpan(const char* op) {
    if (recording_ops.load(std::memory_order_relaxed)) start(op);
  }
  ~OpSpan() {
    if (op_) end();
  }
  OpSpan(const OpSpan&) = delete;
  OpSpan& operator=(const OpSpan&) = delete;

  // Says the layer of the op that runs in this thread.
  static void layer(int64_t number);

 private:
  void start(const char* op);
  void end();

  const char* op_ = nullptr;
  double begin_ = 0;
  int32_t layer_ = -1;
};

}  // namespace moejax
