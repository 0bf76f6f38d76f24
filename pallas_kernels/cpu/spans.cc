#include "pallas_kernels/cpu/spans.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <mutex>
#include <vector>

namespace moejax {
namespace {

constexpr size_t kMost = 1 << 20;  // records that are kept until somebody takes them

struct Log {
  std::mutex mutex;
  std::vector<OpRecord> records;
  int64_t dropped = 0;
};

// Never destroyed: ops may run while the process ends.
Log& the_log() {
  static Log* const log = new Log;
  return *log;
}

thread_local int32_t* layer_of_op = nullptr;

double now() {
  const auto since = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(since).count();
}

}  // namespace

std::atomic<bool> recording_ops{false};

void OpSpan::layer(int64_t number) {
  if (layer_of_op) *layer_of_op = static_cast<int32_t>(number);
}

void OpSpan::start(const char* op) {
  op_ = op, layer_of_op = &layer_, begin_ = now();
}

void OpSpan::end() {
  OpRecord record = {begin_, now(), layer_, {}};
  std::strncpy(record.op, op_, sizeof record.op - 1);
  layer_of_op = nullptr;
  Log& log = the_log();
  std::lock_guard<std::mutex> lock(log.mutex);
  if (log.records.size() < kMost) log.records.push_back(record);
  else log.dropped++;
}

// ---- what pallas_kernels/cpu/spans.py calls

#define MOEJAX_CALLED extern "C" __attribute__((visibility("default")))

MOEJAX_CALLED void moejax_cpu_spans_record(int32_t on) { recording_ops.store(on != 0); }

// Moves the oldest records there, at most so many, and returns how many; dropped: how many there was
// no room for since the last call.
MOEJAX_CALLED int64_t moejax_cpu_spans_take(OpRecord* records, int64_t most, int64_t* dropped) {
  Log& log = the_log();
  std::lock_guard<std::mutex> lock(log.mutex);
  const auto count = std::min<int64_t>(most, static_cast<int64_t>(log.records.size()));
  std::copy_n(log.records.begin(), count, records);
  log.records.erase(log.records.begin(), log.records.begin() + count);
  *dropped = log.dropped, log.dropped = 0;
  return count;
}

}  // namespace moejax
