// The library's threads under random use without jax, for sanitizers. Arguments: a seed and a number of
// rounds. Prints "ok"; anything else is a failure.
#include <pthread.h>
#if defined(__linux__)
#include <sched.h>
#endif

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <vector>

#include "pallas_kernels/cpu/pool.h"
#include "pallas_kernels/cpu/workers.h"

using namespace moejax;

namespace {

constexpr int kHelpers = 3;
#if defined(__x86_64__)
constexpr uint64_t kZeros = 0x8040;  // of a float_mode: denormals are zeros
#elif defined(__aarch64__)
constexpr uint64_t kZeros = 1 << 24;
#else
constexpr uint64_t kZeros = 0;
#endif

// They alone do work: a piece that nobody is woken for is never done.
bool all_run(int64_t pieces) {
  struct Count {
    std::atomic<int64_t> left;
  } count{{pieces}};
  for (int64_t i = 0; i < pieces; i++) {
    Workers::of(kHelpers).schedule([](void* data) { static_cast<Count*>(data)->left--; }, &count);
  }
  for (int i = 0; i < 5'000; i++) {
    if (count.left.load() <= 0) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(i ? 1 : 0));
  }
  return count.left == 0;
}

struct Helped : Pool {
  explicit Helped(int64_t granted) : granted(granted) {}
  int64_t granted;  // helpers until one is refused
  int64_t threads() const override { return kHelpers + 1; }
  int64_t small_work() const override { return 0; }
  void schedule(void (*run)(void*), void* data) override {
    if (granted-- <= 0) throw std::runtime_error("no helper");
    Workers::of(kHelpers).schedule(run, data);
  }
};

// Each task is run once, and computes as the caller does.
bool shares_tasks(int64_t tasks, uint64_t mode, int64_t granted = kHelpers) {
  Helped pool(granted);
  std::vector<int> ran(tasks);
  const uint64_t before = float_mode();
  set_float_mode(mode);
  parallel(pool, tasks, 0, [&](int64_t i) { ran[i] += float_mode() == mode ? 1 : 2; });
  set_float_mode(before);
  for (int times : ran) {
    if (times != 1) return false;
  }
  return true;
}

// Without threads the caller does all tasks, and threads are asked for again later.
bool works_alone() {
#if defined(__GLIBC__)
  pthread_attr_t usual, larger;
  pthread_getattr_default_np(&usual);
  pthread_attr_init(&larger);
  pthread_attr_setstacksize(&larger, size_t{1} << 47);  // than memory: no thread starts
  if (pthread_setattr_default_np(&larger)) return false;
  const bool alone = shares_tasks(20, float_mode());
  bool refused = false;
  try {
    Workers::of(kHelpers);
  } catch (const std::system_error&) {
    refused = true;
  }
  pthread_setattr_default_np(&usual);
  if (!alone || !refused) return false;
  for (int i = 0; i < 500; i++) {
    try {
      Workers::of(kHelpers);
      return true;
    } catch (const std::system_error&) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  }
  return false;
#endif
  return true;
}

// A thread that slept begins on another core than its waker's, and may then run on all that it had.
bool wakes_elsewhere() {
#if defined(__linux__)
  cpu_set_t before, mine;
  if (pthread_getaffinity_np(pthread_self(), sizeof before, &before) || CPU_COUNT(&before) < 2) return true;
  const int core = sched_getcpu();
  CPU_ZERO(&mine);
  CPU_SET(core, &mine);
  Workers::of(kHelpers);  // they may run on all cores
  if (pthread_setaffinity_np(pthread_self(), sizeof mine, &mine)) return false;
  static struct Seen {  // of the last piece, which may come late
    cpu_set_t allowed;
    int core;
    std::atomic<bool> done;
  } seen;
  constexpr int kTimes = 20;
  int elsewhere = 0, whole = 0;
  for (int i = 0; i < kTimes; i++) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));  // they sleep by then
    seen.done = false;
    Workers::of(kHelpers).schedule(
        [](void*) {
          seen.core = sched_getcpu();
          pthread_getaffinity_np(pthread_self(), sizeof seen.allowed, &seen.allowed);
          seen.done = true;
        },
        nullptr);
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(2);
    while (!seen.done && std::chrono::steady_clock::now() < until) pause();
    if (!seen.done) return false;
    elsewhere += seen.core != core, whole += CPU_EQUAL(&seen.allowed, &before) != 0;
  }
  pthread_setaffinity_np(pthread_self(), sizeof before, &before);
  return whole == kTimes && elsewhere > kTimes / 2;  // the system may move it, or it slept late
#endif
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return std::printf("usage: workers_check SEED ROUNDS\n"), 2;
  std::atomic<bool> right{works_alone() && wakes_elsewhere()};
  const auto use = [&](unsigned seed) {
    std::mt19937 random(seed);
    const uint64_t modes[] = {float_mode(), float_mode() ^ kZeros};
    for (int i = 0; i < 20 * std::atoi(argv[2]) && right; i++) {
      if (!shares_tasks(random() % 20, modes[random() % 2], random() % (kHelpers + 1)) || !all_run(random() % 5)) right = false;
      // Threads that look for work, fall asleep, or sleep.
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 200));
    }
  };
  std::thread other(use, std::atoi(argv[1]) + 1);
  use(std::atoi(argv[1]));
  other.join();
  std::printf(right ? "ok workers\n" : "work was lost, done twice, or begun on its waker's core\n");
  return right ? 0 : 1;
}
