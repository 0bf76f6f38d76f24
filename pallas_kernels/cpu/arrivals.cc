#include "pallas_kernels/cpu/arrivals.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>

#define MOEJAX_EXPORT extern "C" __attribute__((visibility("default")))

namespace moejax {

// A store that is being filled: `count` records of `bytes` each from `first` on.
class Arrivals {
 public:
  Arrivals(const char* first, int64_t bytes, int64_t count)
      : name(++names), first_(first), bytes_(bytes), there_(count), asked_(count) {}

  // Never given twice: another store may lie at the same address later.
  const int64_t name;

  // The number of the record at this address; -1: it is none of them.
  int64_t find(const void* record) const {
    const int64_t at = static_cast<const char*>(record) - first_;
    return at >= 0 && at / bytes_ < static_cast<int64_t>(there_.size()) ? at / bytes_ : -1;
  }

  void ask(int64_t number) {
    const std::lock_guard<std::mutex> held(mutex_);
    if (there_[number] || asked_[number]) return;
    asked_[number] = true;
    wanted_.push_back(number);
  }
  void wait(int64_t number) {
    std::unique_lock<std::mutex> held(mutex_);
    changed_.wait(held, [&] { return there_[number] || ended_; });
  }

  void arrive(int64_t number) {
    {
      const std::lock_guard<std::mutex> held(mutex_);
      there_[number] = true;
    }
    changed_.notify_all();
  }
  // A record that is asked for; -1: none. Each is said once.
  int64_t next_wanted() {
    const std::lock_guard<std::mutex> held(mutex_);
    while (!wanted_.empty()) {
      const int64_t number = wanted_.front();
      wanted_.pop_front();
      if (!there_[number]) return number;
    }
    return -1;
  }
  void end() {
    {
      const std::lock_guard<std::mutex> held(mutex_);
      ended_ = true;
    }
    changed_.notify_all();
  }

 private:
  static inline std::atomic<int64_t> names{0};
  const char* const first_;
  const int64_t bytes_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<bool> there_, asked_;
  std::deque<int64_t> wanted_;
  bool ended_ = false;
};

namespace {

std::mutex registry_mutex;
std::atomic<int64_t> filling{0};  // so that ops look for nothing once all stores are full
std::vector<std::shared_ptr<Arrivals>>& registry() {
  static auto* const stores = new std::vector<std::shared_ptr<Arrivals>>();
  return *stores;  // never destroyed: ops may run while the process ends
}

template <class Is>
std::shared_ptr<Arrivals> find_store(Is is) {
  const std::lock_guard<std::mutex> held(registry_mutex);
  const auto found = std::find_if(registry().begin(), registry().end(), is);
  return found == registry().end() ? nullptr : *found;
}

std::shared_ptr<Arrivals> store_named(int64_t name) {
  return find_store([&](const auto& store) { return store->name == name; });
}

}  // namespace

void Awaited::add(const void* record) {
  if (!record || !filling.load(std::memory_order_acquire)) return;
  const auto store = find_store([&](const auto& store) { return store->find(record) >= 0; });
  if (!store) return;
  const int64_t number = store->find(record);
  store->ask(number);
  records_.push_back({store, number});
}

void Awaited::wait() const {
  for (const auto& [store, number] : records_) store->wait(number);
}

}  // namespace moejax

using namespace moejax;

// From before any op may read the store. Returns its name.
MOEJAX_EXPORT int64_t moejax_arrivals_begin(const char* first, int64_t bytes, int64_t count) {
  const auto store = std::make_shared<Arrivals>(first, bytes, count);
  const std::lock_guard<std::mutex> held(registry_mutex);
  registry().push_back(store);
  filling.fetch_add(1, std::memory_order_release);
  return store->name;
}

MOEJAX_EXPORT void moejax_arrivals_arrive(int64_t name, int64_t number) {
  if (const auto store = store_named(name)) store->arrive(number);
}

MOEJAX_EXPORT int64_t moejax_arrivals_next_wanted(int64_t name) {
  const auto store = store_named(name);
  return store ? store->next_wanted() : -1;
}

// Nothing arrives any more; who waits goes on.
MOEJAX_EXPORT void moejax_arrivals_end(int64_t name) {
  std::shared_ptr<Arrivals> ended;
  {
    const std::lock_guard<std::mutex> held(registry_mutex);
    const auto found = std::find_if(registry().begin(), registry().end(),
                                    [&](const auto& store) { return store->name == name; });
    if (found == registry().end()) return;
    ended = *found;
    registry().erase(found);
    filling.fetch_sub(1, std::memory_order_release);
  }
  ended->end();
}
