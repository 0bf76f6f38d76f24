// What tests put in the way of a queue's chunks, and of ops on an arena: what
// pallas_kernels/cpu/faults.h is in the builds of tests/faults.py and of the tests' own.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <random>
#include <thread>

namespace moejax {

// The most seconds, and shares of 1.
struct TransferFaults {
  uint64_t seed;
  double delay, errors, short_reads;
  double delayed;  // share of the places for a delay, two a chunk, that have one
  // The same of chunks that were not queued as demands, besides.
  double ahead_errors, ahead_delayed;
};

// How often that happened.
struct TransferFaultCounts {
  int64_t delays, errors, short_reads;
};

namespace faults {

struct Wanted {
  TransferFaults faults{};
  TransferFaultCounts counts{};
  std::mt19937_64 random;
};

inline std::mutex mutex;
// Never destroyed: transfers may run while the process ends.
inline auto& by_queue = *new std::map<const void*, Wanted>();
inline auto& by_arena = *new std::map<const void*, int64_t>();

inline double draw(Wanted& wanted) {
  return std::uniform_real_distribution<double>(0, 1)(wanted.random);
}

// Whether a fault that has this share of all happens, which is counted.
inline bool strikes(Wanted& wanted, double share, int64_t TransferFaultCounts::*count) {
  const bool now = draw(wanted) < share;
  wanted.counts.*count += now;
  return now;
}

inline void delay(const void* queue, bool ahead) {
  double seconds = 0;
  {
    std::lock_guard<std::mutex> lock(mutex);
    const auto found = by_queue.find(queue);
    if (found == by_queue.end() || found->second.faults.delay <= 0) return;
    Wanted& wanted = found->second;
    const auto count = &TransferFaultCounts::delays;
    if (strikes(wanted, wanted.faults.delayed, count) ||
        (ahead && strikes(wanted, wanted.faults.ahead_delayed, count))) {
      seconds = draw(wanted) * wanted.faults.delay;
    }
  }
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}

// Why a chunk fails; null: it does not.
inline const char* error(const void* queue, bool ahead) {
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = by_queue.find(queue);
  if (found == by_queue.end()) return nullptr;
  Wanted& wanted = found->second;
  const auto count = &TransferFaultCounts::errors;
  const bool fails = strikes(wanted, wanted.faults.errors, count) ||
                     (ahead && strikes(wanted, wanted.faults.ahead_errors, count));
  return fails ? "an injected error" : nullptr;
}

// How many of the bytes that were read are said to have been.
inline int64_t cut(const void* queue, int64_t got) {
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = by_queue.find(queue);
  if (found == by_queue.end() || got <= 1) return got;
  Wanted& wanted = found->second;
  if (!strikes(wanted, wanted.faults.short_reads, &TransferFaultCounts::short_reads)) return got;
  return 1 + (int64_t)(draw(wanted) * (double)(got - 1));
}

inline void hold(const void* arena) {
  int64_t microseconds = 0;
  {
    std::lock_guard<std::mutex> lock(mutex);
    const auto found = by_arena.find(arena);
    if (found != by_arena.end()) microseconds = found->second;
  }
  if (microseconds) std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
}

inline void forget(const void* gone) {
  std::lock_guard<std::mutex> lock(mutex);
  by_queue.erase(gone);
  by_arena.erase(gone);
}

}  // namespace faults

// From the next chunk of a queue (a TransferQueue*) on.
inline void inject(const void* queue, const TransferFaults& wanted) {
  std::lock_guard<std::mutex> lock(faults::mutex);
  auto& found = faults::by_queue[queue];
  found.faults = wanted;
  found.random.seed(wanted.seed);
}

// What happened since the queue was made.
inline TransferFaultCounts injected(const void* queue) {
  std::lock_guard<std::mutex> lock(faults::mutex);
  return faults::by_queue[queue].counts;
}

// Readers and writers of an arena (an OwnedArena*) hold it for so much longer.
inline void delay_arena(const void* arena, int64_t microseconds) {
  std::lock_guard<std::mutex> lock(faults::mutex);
  faults::by_arena[arena] = microseconds;
}

}  // namespace moejax
