// What every handler needs: threads, and comparisons of what XLA gives.
#pragma once
#include <algorithm>
#include <array>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>

#include "pallas_kernels/cpu/arena.h"
#include "pallas_kernels/cpu/ops.h"
#include "pallas_kernels/cpu/spans.h"
#include "pallas_kernels/cpu/workers.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace moejax {

using Any = ffi::AnyBuffer;
using Ints = ffi::Buffer<ffi::S32>;
using Int = ffi::BufferR0<ffi::S32>;
using Floats = ffi::Buffer<ffi::F32>;
using Words = ffi::Buffer<ffi::U32>;
using Flags = ffi::Buffer<ffi::PRED>;
using Numbers = ffi::Span<const int64_t>;

// As many of the library's threads as XLA's pool has, the caller among them.
struct OpPool : Pool {
  explicit OpPool(const ffi::ThreadPool& pool) : threads_(pool.num_threads()) {}
  int64_t threads() const override { return threads_; }
  void schedule(void (*run)(void*), void* data) override {
    Workers::of(threads_ - 1).schedule(run, data);
  }

 private:
  int64_t threads_;
};

// What a handler's operands say is wrong is an error of the call, with the op's name before it.
inline void need(bool fits, const char* otherwise) {
  if (!fits) throw Refused(otherwise);
}

// A dimension that the first buffer that has it says, and the others must have.
struct Size {
  int64_t value = -1;
  operator int64_t() const { return value; }
};

struct Dimension {
  Dimension(Size& size) : size(&size), value(size) {}
  Dimension(int64_t value) : value(value) {}
  Size* size = nullptr;
  int64_t value;
};

// Whether a buffer has exactly these dimensions.
template <class Buffer>
bool is(const Buffer& buffer, std::initializer_list<Dimension> dims) {
  const auto have = buffer.dimensions();
  if (have.size() != dims.size()) return false;
  for (size_t i = 0; i < have.size(); i++) {
    const Dimension& wanted = dims.begin()[i];
    if (wanted.size && *wanted.size < 0) wanted.size->value = have[i];
    else if (have[i] != (wanted.size ? *wanted.size : wanted.value)) return false;
  }
  return true;
}

// The dtype of all of them.
inline Type type_of(std::initializer_list<Any> buffers) {
  const ffi::DataType first = buffers.begin()->element_type();
  for (const Any& buffer : buffers) need(buffer.element_type() == first, "dtypes");
  if (first == ffi::DataType::BF16) return Type::BF16;
  if (first == ffi::DataType::F16) return Type::F16;
  need(first == ffi::DataType::F32, "dtypes");
  return Type::F32;
}

inline int64_t layer_of(Int layer, int64_t layers) {
  const int64_t index = *layer.typed_data();
  if (index < 0 || index >= layers) throw Refused("layer " + std::to_string(index));
  return index;
}

// How many entries of a list are used.
inline int64_t used(Int count, int64_t listed) {
  return std::min<int64_t>(std::max(*count.typed_data(), 0), listed);
}

// A table that is changed: the result's memory, with what the operand holds.
template <class Buffer>
auto* changed(const Buffer& given, ffi::Result<Buffer>& result) {
  if (given.typed_data() != result->typed_data()) {
    std::memcpy(result->typed_data(), given.typed_data(), given.size_bytes());
  }
  return result->typed_data();
}

// An arena as an operand: uint16[rows, D], or the token of an owned one, which is held while this
// lives. The one place that tells them apart.
class Arena {
 public:
  // Of an op that only reads.
  explicit Arena(const Any& operand) {
    find(operand);
    if (owned_) refuse(owned_->begin_read(token_[1]));
  }
  // Of an op that writes: the result is the operand's memory, or the token of what comes after.
  Arena(const Any& operand, Any& result) {
    find(operand);
    // A copy of an arena is never what was asked for.
    const bool in_place = owned_ || operand.untyped_data() == result.untyped_data();
    need(in_place, "the arena is not written in place");
    if (!owned_) return;
    result_ = static_cast<uint32_t*>(result.untyped_data());
    refuse(owned_->begin_write(token_[1]));
  }
  ~Arena() {
    if (!owned_) return;
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

  uint16_t* data = nullptr;
  int64_t rows = 0, hidden = 0;

 private:
  static void refuse(const std::string& wrong) {
    if (!wrong.empty()) throw Refused(wrong);
  }
  void find(const Any& operand) {
    const auto dims = operand.dimensions();
    if (operand.element_type() == ffi::DataType::U16 && dims.size() == 2) {
      data = static_cast<uint16_t*>(operand.untyped_data()), rows = dims[0], hidden = dims[1];
      return;
    }
    need(operand.element_type() == ffi::DataType::U32 && is(operand, {kTokenSize}),
         "the arena is neither uint16[rows, D] nor a token");
    token_ = static_cast<const uint32_t*>(operand.untyped_data());
    owned_ = find_arena(token_[0]);
    if (!owned_) refuse("there is no arena " + std::to_string(token_[0]) + ", or it was closed");
    data = owned_->data, rows = owned_->rows, hidden = owned_->hidden;
  }

  std::shared_ptr<OwnedArena> owned_;  // null: XLA's
  const uint32_t* token_ = nullptr;
  uint32_t* result_ = nullptr;
};

// What an op runs with.
struct Call {
  Pool& pool;
  const Kernels& k;
};

// A function of a Call, operands, attributes and results as XLA calls it. What it throws becomes an
// error.
template <class... Params>
struct Handler {
  const char* op;
  void (*function)(const Call&, Params...);

  ffi::Error operator()(ffi::ThreadPool threads, Params... params) const {
    try {
      const Kernels* kernels = select_kernels();
      if (!kernels) throw Refused(select_error());
      OpPool pool(threads);
      function({pool, *kernels}, params...);
      return ffi::Error::Success();
    } catch (const Refused& refused) {
      return ffi::Error::InvalidArgument(std::string(op) + ": " + refused.what());
    } catch (const std::exception& error) {
      return ffi::Error::Internal(error.what());
    }
  }
};

// What is neither an operand nor a result.
template <class Param>
constexpr bool is_attribute =
    !ffi::internal::is_arg_binding_v<Param> && !ffi::internal::is_ret_binding_v<Param> &&
    !std::is_same_v<Param, ffi::RemainingArgs> && !std::is_same_v<Param, ffi::RemainingRets>;

template <class... Names>
std::array<const char*, sizeof...(Names)> names_of(Names... names) {
  return {names...};
}

// XLA's binding of a handler from its function's own parameters, one after the other (Ffi::BindTo
// knows neither remaining operands nor the pool). What is no buffer is an attribute, of the next name.
template <class Param>
struct Parameter {
  const char* const*& names;
};
template <class Binding, class Param>
auto operator|(Binding binding, Parameter<Param> parameter) {
  if constexpr (ffi::internal::is_arg_binding_v<Param>) {
    return std::move(binding).template Arg<typename ffi::ArgBinding<Param>::Arg>();
  } else if constexpr (ffi::internal::is_ret_binding_v<Param>) {
    return std::move(binding).template Ret<typename ffi::RetBinding<Param>::Ret>();
  } else if constexpr (std::is_same_v<Param, ffi::RemainingArgs>) {
    return std::move(binding).RemainingArgs();
  } else if constexpr (std::is_same_v<Param, ffi::RemainingRets>) {
    return std::move(binding).RemainingRets();
  } else {
    return std::move(binding).template Attr<Param>(*parameter.names++);
  }
}

template <size_t count, class... Params>
ffi::Ffi* handler_of(const char* op, void (*function)(const Call&, Params...),
                     const std::array<const char*, count>& attributes) {
  static_assert(count == (size_t{0} + ... + is_attribute<Params>), "a name for each attribute");
  [[maybe_unused]] const char* const* names = attributes.data();
  auto binding = (ffi::Ffi::Bind().Ctx<ffi::ThreadPool>() | ... | Parameter<Params>{names});
  return std::move(binding).To(Handler<Params...>{op, function}).release();
}

#define MOEJAX_EXPORT extern "C" __attribute__((visibility("default")))

// The symbol of an op, with the names of its function's attributes.
#define MOEJAX_HANDLER(op, function, ...)                                       \
  MOEJAX_EXPORT XLA_FFI_Error* moejax_cpu_##op(XLA_FFI_CallFrame* frame) {      \
    static auto* const handler = handler_of(#op, function, names_of(__VA_ARGS__)); \
    const OpSpan span(#op);                                                     \
    return handler->Call(frame);                                                \
  }

}  // namespace moejax
