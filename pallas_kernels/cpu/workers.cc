#include "pallas_kernels/cpu/workers.h"

#include <chrono>
#include <thread>

#include "pallas_kernels/cpu/pool.h"

namespace moejax {
namespace {

// How long a thread looks for work: more than the time between two ops of a step with tasks for it.
constexpr auto kLook = std::chrono::microseconds(100);
constexpr int kPauses = 32;  // between two looks at the clock

// Held for some instructions, so nobody sleeps for it.
struct Lock {
  explicit Lock(std::atomic_flag& flag) : flag(flag) {
    while (flag.test_and_set(std::memory_order_acquire)) pause();
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
  for (; started_ < threads; started_++) std::thread([this] { work(); }).detach();
}

void Workers::schedule(void (*run)(void*), void* data) {
  bool wakes;
  const Work work = {run, data, float_mode()};
  {
    Lock lock(locked_);
    queue_.push_back(work);
    // A thread that stops looking sees queued_ before it sleeps.
    wakes = ++queued_ > looking_ && asleep_ > 0;
  }
  if (wakes) {
    std::lock_guard<std::mutex> guard(mutex_);
    wake_.notify_one();
  }
}

bool Workers::take(Work& work) {
  if (queued_.load(std::memory_order_relaxed) == 0) return false;
  Lock lock(locked_);
  if (queue_.empty()) return false;
  work = queue_.front();
  queue_.pop_front();
  looking_--, queued_--;
  return true;
}

void Workers::work() {
  using Clock = std::chrono::steady_clock;
  for (Work work;;) {
    looking_++;
    bool found = take(work);
    for (const auto until = Clock::now() + kLook; !found && Clock::now() < until;) {
      for (int i = 0; i < kPauses && !(found = take(work)); i++) pause();
    }
    if (found) {
      set_float_mode(work.mode);
      work.run(work.data);
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
