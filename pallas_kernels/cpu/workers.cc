#include "pallas_kernels/cpu/workers.h"

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

#include <chrono>
#include <condition_variable>
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

#if defined(__linux__)
// A thread that sleeps wakes on the core on which it fell asleep, and of few cores that have been busy Linux looks for
// no idle one: both threads of a step had one of two cores until they were balanced, 1 to 4 ms later. So it wakes on
// another core than its waker's, and then may run where it might before.
struct Cores {
  pthread_t thread = pthread_self();
  cpu_set_t allowed;
  bool narrowed = false;

  void leave_mine() {
    const int mine = sched_getcpu();
    if (mine < 0 || mine >= CPU_SETSIZE || pthread_getaffinity_np(thread, sizeof allowed, &allowed)) return;
    cpu_set_t others = allowed;
    CPU_CLR(mine, &others);
    narrowed = CPU_COUNT(&others) && !pthread_setaffinity_np(thread, sizeof others, &others);
  }
  void widen() {
    if (narrowed) pthread_setaffinity_np(thread, sizeof allowed, &allowed);
  }
};
#else
struct Cores {
  void leave_mine() {}
  void widen() {}
};
#endif

}  // namespace

struct Workers::Sleeper {
  Sleeper* next;
  bool woken = false;
  std::condition_variable wake;
  Cores cores;
};

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
    wakes = ++queued_ > looking_ && asleep_;
  }
  if (wakes) {
    std::lock_guard<std::mutex> guard(mutex_);
    if (Sleeper* const sleeper = asleep_) {
      asleep_ = sleeper->next;
      sleeper->cores.leave_mine();
      sleeper->woken = true;
      sleeper->wake.notify_one();
    }
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
      Sleeper me{asleep_};
      asleep_ = &me;
      if (queued_ > 0) asleep_ = me.next;
      else me.wake.wait(lock, [&] { return me.woken; });
      lock.unlock();
      me.cores.widen();
    }
  }
}

}  // namespace moejax
