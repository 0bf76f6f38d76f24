// What every handler needs: XLA's thread pool as ours, and comparisons of what XLA gives.
#pragma once
#include <algorithm>
#include <exception>
#include <initializer_list>
#include <memory>
#include <string>

#include "pallas_kernels/cpu/arena.h"
#include "pallas_kernels/cpu/kernels.h"
#include "pallas_kernels/cpu/pool.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace moejax {

using Any = ffi::AnyBuffer;
using Ints = ffi::Buffer<ffi::S32>;
using Int = ffi::BufferR0<ffi::S32>;
using Numbers = ffi::Span<const int64_t>;

struct XlaPool : Pool {
  explicit XlaPool(ffi::ThreadPool& pool) : pool_(pool), threads_(pool.num_threads()) {}
  int64_t threads() const override { return threads_; }
  void schedule(void (*run)(void*), void* data) override {
    pool_.Schedule([run, data] { run(data); });
  }

 private:
  ffi::ThreadPool& pool_;
  int64_t threads_;
};

inline ffi::Error invalid(const std::string& why) { return ffi::Error::InvalidArgument(why); }

// Whether a buffer has exactly these dimensions.
template <class Buffer>
bool is(const Buffer& buffer, std::initializer_list<int64_t> dims) {
  const auto have = buffer.dimensions();
  return have.size() == dims.size() && std::equal(dims.begin(), dims.end(), have.begin());
}

inline bool type_of(ffi::DataType have, Type& type) {
  if (have == ffi::DataType::BF16) type = Type::BF16;
  else if (have == ffi::DataType::F16) type = Type::F16;
  else if (have == ffi::DataType::F32) type = Type::F32;
  else return false;
  return true;
}

inline const char* at(const void* p, int64_t elements, Type type) {
  return static_cast<const char*>(p) + elements * size_of(type);
}

// An arena as an operand: uint16[rows, D], or the token of an owned one, which is held while this
// lives. The one place that tells them apart.
class Arena {
 public:
  // Of an op that only reads.
  explicit Arena(const Any& operand) {
    if (find(operand) && owned_) wrong = owned_->begin_read(token_[1]);
  }
  // Of an op that writes: the result is the operand's memory, or the token of what comes after.
  Arena(const Any& operand, Any& result) {
    if (!find(operand)) return;
    if (!owned_) {
      // A copy of an arena is never what was asked for.
      if (operand.untyped_data() != result.untyped_data()) wrong = "the arena is not written in place";
      return;
    }
    result_ = static_cast<uint32_t*>(result.untyped_data());
    wrong = owned_->begin_write(token_[1]);
  }
  ~Arena() {
    if (!owned_ || !wrong.empty()) return;
    if (!result_) {
      owned_->end_read();
      return;
    }
    const uint32_t handle = token_[0], writes = owned_->end_write();  // the result may be the operand
    result_[0] = handle, result_[1] = writes;
  }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // What brings records beside the ops; null: nothing does.
  Supply* supply() const { return owned_ ? owned_->supply().get() : nullptr; }
  uint32_t writes() const { return owned_ ? token_[1] : 0; }

  int64_t bytes() const { return rows * hidden * static_cast<int64_t>(sizeof(uint16_t)); }

  std::string wrong;  // empty, or why this is no arena to use now
  uint16_t* data = nullptr;
  int64_t rows = 0, hidden = 0;

 private:
  bool find(const Any& operand) {
    const auto dims = operand.dimensions();
    if (operand.element_type() == ffi::DataType::U16 && dims.size() == 2) {
      data = static_cast<uint16_t*>(operand.untyped_data()), rows = dims[0], hidden = dims[1];
      return true;
    }
    if (operand.element_type() != ffi::DataType::U32 || !is(operand, {kTokenSize})) {
      wrong = "the arena is neither uint16[rows, D] nor a token";
      return false;
    }
    token_ = static_cast<const uint32_t*>(operand.untyped_data());
    if (!(owned_ = find_arena(token_[0]))) {
      wrong = "there is no arena " + std::to_string(token_[0]) + ", or it was closed";
      return false;
    }
    data = owned_->data, rows = owned_->rows, hidden = owned_->hidden;
    return true;
  }

  std::shared_ptr<OwnedArena> owned_;  // null: XLA's
  const uint32_t* token_ = nullptr;
  uint32_t* result_ = nullptr;
};

// Runs an op with the pool and the selected kernels; what it throws becomes an error.
template <class F>
ffi::Error run(ffi::ThreadPool& threads, F f) {
  const Kernels* kernels = select_kernels();
  if (!kernels) return invalid(select_error());
  XlaPool pool(threads);
  try {
    const std::string wrong = f(pool, *kernels);
    return wrong.empty() ? ffi::Error::Success() : invalid(wrong);
  } catch (const std::exception& error) {
    return ffi::Error::Internal(error.what());
  }
}

#define MOEJAX_EXPORT extern "C" __attribute__((visibility("default")))

#define MOEJAX_HANDLER(symbol, function, binding)                               \
  MOEJAX_EXPORT XLA_FFI_Error* symbol(XLA_FFI_CallFrame* frame) {               \
    static auto* const handler = (binding).To(function).release();              \
    return handler->Call(frame);                                                \
  }

}  // namespace moejax
