#include "pallas_kernels/cpu/workers.h"

#include <chrono>
#include <cstdio>
#include <memory>
#include <system_error>
#include <thread>

#include "pallas_kernels/cpu/pool.h"

namespace moejax {
namespace {

using Clock = std::chrono::steady_clock;

// How long a thread looks for work: more than the time between two ops of a step with tasks for it.
constexpr auto kLook = std::chrono::microseconds(100);
constexpr int kPauses = 32;  // between two looks at the clock
constexpr auto kRetry = std::chrono::milliseconds(100);  // after the system refused a thread

// Held for some instructions, without allocations, so no thread sleeps for it. Its holder may have lost its core.
struct Lock {
  explicit Lock(std::atomic_flag& flag) : flag(flag) {
    for (int pauses = 0; flag.test_and_set(std::memory_order_acquire); pauses++) {
      if (pauses < kPauses) pause();
      else std::this_thread::yield();
    }
  }
  ~Lock() { flag.clear(std::memory_order_release); }
  std::atomic_flag& flag;
};

}  // namespace

Workers& Workers::of(int64_t threads) {
  static auto* const workers = new Workers();
  if (workers->started_.load(std::memory_order_acquire) < threads) workers->start(threads);
  return *workers;
}

void Workers::start(int64_t threads) {
  std::lock_guard<std::mutex> guard(mutex_);
  if (!refusal_ || Clock::now() >= refused_ + kRetry) {
    try {
      for (; started_ < threads; started_++) std::thread([this] { work(); }).detach();
    } catch (const std::system_error& error) {
      if (!refusal_) {
        std::fprintf(stderr,
                     "moejax: native ops have %lld threads of %lld and are slower (%s). Raise the limit on threads "
                     "(ulimit -u; a container's pids limit) or ask for fewer (--threads).\n",
                     static_cast<long long>(started_ + 1), static_cast<long long>(threads + 1), error.what());
      }
      refusal_ = std::current_exception(), refused_ = Clock::now();
    }
  }
  if (started_ == 0) std::rethrow_exception(refusal_);
}

void Workers::schedule(void (*run)(void*), void* data) {
  bool wakes;
  auto* const work = new Work{run, data, float_mode(), nullptr};
  {
    Lock lock(locked_);
    *last_ = work;
    last_ = &work->next;
    // A thread that stops looking sees queued_ before it sleeps.
    wakes = ++queued_ > looking_ && asleep_ > 0;
  }
  if (wakes) {
    std::lock_guard<std::mutex> guard(mutex_);
    wake_.notify_one();
  }
}

Workers::Work* Workers::take() {
  if (queued_.load(std::memory_order_relaxed) == 0) return nullptr;
  Lock lock(locked_);
  Work* const work = first_;
  if (!work) return nullptr;
  first_ = work->next;
  if (!first_) last_ = &first_;
  looking_--, queued_--;
  return work;
}

void Workers::work() {
  for (;;) {
    looking_++;
    std::unique_ptr<Work> work(take());
    for (const auto until = Clock::now() + kLook; !work && Clock::now() < until;) {
      for (int i = 0; i < kPauses && !work; i++, work.reset(take())) pause();
    }
    if (work) {
      set_float_mode(work->mode);
      work->run(work->data);
    } else {
      looking_--;
      std::unique_lock<std::mutex> lock(mutex_);
      asleep_++;
      wake_.wait(lock, [this] { return queued_ > 0; });
      asleep_--;
    }
  }
}

}  // namespace moejax
