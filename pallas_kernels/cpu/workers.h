// The library's own threads. Ops of a step follow each other within microseconds, and many end in a
// tenth of a millisecond, which is also what waking a thread takes. So a thread without work looks for
// more for a while before it sleeps. (Measured at batch 1 on two cores: asking one of XLA's threads took
// 15 to 100 µs an op, and a step of 4 bits 11% longer.)
#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <mutex>

namespace moejax {

// How this thread rounds, and whether denormals are zeros to it.
inline uint64_t float_mode() {
#if defined(__x86_64__)
  return __builtin_ia32_stmxcsr() & ~0x3fu;  // without what happened so far
#elif defined(__aarch64__)
  uint64_t mode;
  asm volatile("mrs %0, fpcr" : "=r"(mode));
  return mode;
#else
  return 0;
#endif
}
inline void set_float_mode([[maybe_unused]] uint64_t mode) {
#if defined(__x86_64__)
  __builtin_ia32_ldmxcsr(static_cast<uint32_t>(mode));
#elif defined(__aarch64__)
  asm volatile("msr fpcr, %0" : : "r"(mode));
#endif
}

class Workers {
 public:
  // Those of the process, at least so many if the system grants them; it throws std::system_error if it grants
  // none. They never end: a process ends without waiting for them.
  static Workers& of(int64_t threads);

  // run(data), once, on one of them, in the caller's float_mode: which thread does a task decides no bit.
  // Where it throws, nothing is run.
  void schedule(void (*run)(void*), void* data);

 private:
  struct Work {
    void (*run)(void*);
    void* data;
    uint64_t mode;
    Work* next;
  };
  struct Sleeper;  // a thread that sleeps
  void start(int64_t threads);
  void work();
  Work* take();  // or none; of a thread that looks, which then does not

  std::atomic<int64_t> started_{0}, queued_{0}, looking_{0};
  std::atomic_flag locked_ = ATOMIC_FLAG_INIT;  // of the list of works, which has queued_
  Work* first_ = nullptr;
  Work** last_ = &first_;  // where the next one's address goes
  std::mutex mutex_;  // of starts, of falling asleep and of waking
  std::atomic<Sleeper*> asleep_{nullptr};  // the last one that fell asleep
  std::chrono::steady_clock::time_point refused_;  // when the system last refused a thread
  std::exception_ptr refusal_;
};

}  // namespace moejax
