// What every handler needs: XLA's thread pool as ours, and comparisons of what XLA gives.
#pragma once
#include <algorithm>
#include <exception>
#include <initializer_list>
#include <string>

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
