// Work shared over threads: each begins with tasks that follow each other and helps others when its own are
// done. Which thread does a task decides no result.
#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <thread>
#include <vector>

namespace moejax {

// Between two looks at what another core will write.
inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Threads to ask for help: the library's own, or a test's.
struct Pool {
  virtual ~Pool() = default;
  virtual int64_t threads() const = 0;
  virtual void schedule(void (*run)(void*), void* data) = 0;  // run(data), once, at some time; or throws
  // Multiplications below which asking for help takes longer than the work: some 10 µs of one core.
  virtual int64_t small_work() const { return 1 << 17; }
};

// At most so many of a pool's threads, the caller among them; 0: all. Two ops that run at once are
// two groups of threads this way.
struct PartOfPool : Pool {
  PartOfPool(Pool& pool, int64_t most) : pool_(pool), most_(most) {}
  int64_t threads() const override {
    const int64_t all = pool_.threads();
    return most_ > 0 && most_ < all ? most_ : all;
  }
  void schedule(void (*run)(void*), void* data) override { pool_.schedule(run, data); }
  int64_t small_work() const override { return pool_.small_work(); }

 private:
  Pool& pool_;
  int64_t most_;
};

namespace internal {
struct alignas(64) Range {
  std::atomic<int64_t> next;
  int64_t end;
};

struct Shared {
  std::atomic<int64_t> begun{0}, done{0};  // threads; tasks
  std::vector<Range> ranges;  // of tasks, one for each thread
  void (*task)(const void*, int64_t);
  const void* context;
  std::atomic<bool> failed{false};
  std::exception_ptr error;  // the first; set before its task counts as done

  void work() {
    const int64_t count = static_cast<int64_t>(ranges.size());
    const int64_t own = begun.fetch_add(1, std::memory_order_relaxed);
    int64_t finished = 0;
    for (int64_t k = 0; k < count; k++) {
      Range& range = ranges[(own + k) % count];
      for (int64_t i; (i = range.next.fetch_add(1, std::memory_order_relaxed)) < range.end; finished++) {
        try {
          task(context, i);
        } catch (...) {
          if (!failed.exchange(true)) error = std::current_exception();
        }
      }
    }
    if (finished) done.fetch_add(finished, std::memory_order_release);
  }
};
}  // namespace internal

// f(0) … f(tasks − 1), in any order and on any thread; returns when all are done. The caller works
// too and waits for tasks only, so a pool whose threads are busy delays nothing; a helper that comes
// late finds no task and touches nothing of the caller's. work: multiplications of all tasks, about.
// Throws what the first task that failed threw, after all others.
//
// A thread's tasks follow each other, so that what they read ahead is theirs: two cores of a Zen 5 get codes of 4
// and 6 bits from memory 1.05 to 1.2 times as fast as where each takes the next task of all.
template <class F>
void parallel(Pool& pool, int64_t tasks, int64_t work, const F& f) {
  int64_t helpers = pool.threads() < tasks ? pool.threads() : tasks;
  if (--helpers < 1 || work < pool.small_work()) {
    for (int64_t i = 0; i < tasks; i++) f(i);
    return;
  }
  auto shared = std::make_shared<internal::Shared>();
  shared->ranges = std::vector<internal::Range>(helpers + 1);
  for (int64_t i = 0; i <= helpers; i++) {
    shared->ranges[i].next = i * tasks / (helpers + 1);
    shared->ranges[i].end = (i + 1) * tasks / (helpers + 1);
  }
  shared->context = &f;
  shared->task = [](const void* context, int64_t i) { (*static_cast<const F*>(context))(i); };
  using Mine = std::unique_ptr<std::shared_ptr<internal::Shared>>;
  try {
    for (int64_t i = 0; i < helpers; i++) {
      Mine mine(new std::shared_ptr<internal::Shared>(shared));
      pool.schedule(
          [](void* data) {
            Mine mine(static_cast<std::shared_ptr<internal::Shared>*>(data));
            (*mine)->work();
          },
          mine.get());
      (void)mine.release();  // it is the helper's now, which may have deleted it
    }
  } catch (...) {
    // No more helpers, of threads or of memory for them: those that are there, and the caller, do all tasks.
  }
  shared->work();
  // A sleep takes 70 µs however short it should be, and most helpers end sooner.
  constexpr int kPauses = 1 << 13;
  for (int pauses = 0; shared->done.load(std::memory_order_acquire) < tasks; pauses++) {
    if (pauses < kPauses) pause();
    // A helper may have lost its core to another program: leave ours to it, too.
    else std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
  if (shared->failed) std::rethrow_exception(shared->error);
}

// f(first, last) of parts of `rows` rows, at most `step` of them each; else as `parallel`.
template <class F>
void parallel_rows(Pool& pool, int64_t rows, int64_t step, int64_t work, const F& f) {
  parallel(pool, (rows + step - 1) / step, work, [&](int64_t i) {
    f(i * step, rows < (i + 1) * step ? rows : (i + 1) * step);
  });
}

}  // namespace moejax
