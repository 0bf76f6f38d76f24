// The queue of transfers as host_offload/queue/native.py calls it, and queues by number for ops.
#include <algorithm>
#include <cstring>

#include "pallas_kernels/cpu/transfer_queue.h"

#define MOEJAX_EXPORT extern "C" __attribute__((visibility("default")))

namespace moejax {
namespace {

std::mutex registry_mutex;
int32_t handles = 0;
std::map<int32_t, std::shared_ptr<TransferQueue>>& registry() {
  static auto* const queues = new std::map<int32_t, std::shared_ptr<TransferQueue>>();
  return *queues;  // never destroyed: ops may run while the process ends
}
const char* const kClosed = "the queue is closed";

void copy(const std::string& from, char* to, int64_t size) {
  const size_t n = std::min(from.size(), (size_t)size - 1);
  std::memcpy(to, from.data(), n);
  to[n] = 0;
}

}  // namespace

std::shared_ptr<TransferQueue> find_transfer_queue(int32_t handle) {
  std::lock_guard<std::mutex> held(registry_mutex);
  const auto found = registry().find(handle);
  return found == registry().end() ? nullptr : found->second;
}

}  // namespace moejax

using namespace moejax;

// A handle from 1; -1 and why where threads cannot be started.
MOEJAX_EXPORT int32_t moejax_transfers_new(const TransferOptions* options, char* why, int64_t size) {
  try {
    auto queue = std::make_shared<TransferQueue>(*options);
    std::lock_guard<std::mutex> held(registry_mutex);
    registry()[++handles] = std::move(queue);
    return handles;
  } catch (const std::exception& error) {
    copy(error.what(), why, size);
    return -1;
  }
}

// Ops that wait are answered first: they keep the queue until they return.
MOEJAX_EXPORT void moejax_transfers_delete(int32_t handle) {
  const auto queue = find_transfer_queue(handle);
  if (!queue) return;
  close_queue(queue);
  std::lock_guard<std::mutex> held(registry_mutex);
  registry().erase(handle);
}

// The other functions answer as a closed, empty queue would where there is none of that number.

MOEJAX_EXPORT int32_t moejax_transfers_add_file(int32_t handle, const char* path, int32_t direct,
                                                char* why, int64_t size) {
  std::string text = kClosed;
  const auto queue = find_transfer_queue(handle);
  const int32_t file = queue ? queue->add_file(path, direct != 0, &text) : -1;
  copy(text, why, size);
  return file;
}

MOEJAX_EXPORT int32_t moejax_transfers_direct(int32_t handle, int32_t file) {
  const auto queue = find_transfer_queue(handle);
  return queue && queue->direct(file);
}

MOEJAX_EXPORT int64_t moejax_transfers_submit(int32_t handle, const TransferRequest* request,
                                              const int64_t* part_bytes, char* why, int64_t size) {
  std::string text = kClosed;
  const auto queue = find_transfer_queue(handle);
  int64_t ticket = 0;
  try {
    if (queue) ticket = queue->submit(*request, part_bytes, &text);
  } catch (const std::exception& error) {
    text = error.what();
  }
  copy(text, why, size);
  return ticket;
}

MOEJAX_EXPORT int32_t moejax_transfers_cancel(int32_t handle, int64_t ticket) {
  const auto queue = find_transfer_queue(handle);
  return queue && queue->cancel(ticket);
}

MOEJAX_EXPORT int32_t moejax_transfers_reorder(int32_t handle, int64_t ticket, int32_t cause,
                                               int32_t priority) {
  const auto queue = find_transfer_queue(handle);
  return queue && queue->reorder(ticket, cause, priority);
}

using Waited = std::shared_ptr<TransferQueue::Transfer>;

// A transfer that is waited for, in one call or several; null where there is none. It stays, and so
// does its end, until moejax_transfers_waited.
MOEJAX_EXPORT Waited* moejax_transfers_find(int32_t handle, int64_t ticket) {
  const auto queue = find_transfer_queue(handle);
  auto found = queue ? queue->find(ticket) : nullptr;
  return found ? new Waited(std::move(found)) : nullptr;
}

MOEJAX_EXPORT void moejax_transfers_waited(Waited* transfer) { delete transfer; }

MOEJAX_EXPORT int32_t moejax_transfers_wait(int32_t handle, const Waited* transfer, int64_t part,
                                            double seconds, TransferRecord* record, char* text,
                                            int64_t size) {
  std::string failure;
  const auto queue = find_transfer_queue(handle);
  const int32_t there = queue ? queue->wait(*transfer, part, seconds, record, &failure) : -1;
  copy(failure, text, size);
  return there;
}

MOEJAX_EXPORT int32_t moejax_transfers_wait_cell(int32_t handle, int64_t cell, int64_t part) {
  const auto queue = find_transfer_queue(handle);
  return queue ? (int32_t)queue->wait_cell(cell, part) : (int32_t)TransferState::UNKNOWN;
}

// Both at one moment: how many transfers fly, and how many have settled since the last call. Where
// an array is too small nothing is taken, and both numbers say what is needed.
MOEJAX_EXPORT double moejax_transfers_observe(int32_t handle, TransferRecord* flying,
                                              int64_t* flying_count, TransferRecord* ended,
                                              int64_t* ended_count) {
  std::vector<TransferRecord> fly, end;
  const auto queue = find_transfer_queue(handle);
  const double busy = queue ? queue->observe(*flying_count, *ended_count, &fly, &end) : 0;
  if ((int64_t)fly.size() <= *flying_count) std::copy(fly.begin(), fly.end(), flying);
  if ((int64_t)end.size() <= *ended_count) std::copy(end.begin(), end.end(), ended);
  *flying_count = (int64_t)fly.size();
  *ended_count = (int64_t)end.size();
  return busy;
}

MOEJAX_EXPORT void moejax_transfers_message(int32_t handle, int64_t ticket, char* text, int64_t size) {
  const auto queue = find_transfer_queue(handle);
  copy(queue ? queue->message(ticket) : kClosed, text, size);
}

MOEJAX_EXPORT void moejax_transfers_totals(int32_t handle, TransferTotals* totals) {
  const auto queue = find_transfer_queue(handle);
  *totals = queue ? queue->totals() : TransferTotals{};
}

MOEJAX_EXPORT int64_t moejax_transfers_hanging(int32_t handle) {
  const auto queue = find_transfer_queue(handle);
  return queue ? queue->hanging() : 0;
}

MOEJAX_EXPORT void moejax_transfers_keep_settled(int32_t handle, int32_t keep) {
  if (const auto queue = find_transfer_queue(handle)) queue->keep_settled(keep);
}

MOEJAX_EXPORT int32_t moejax_transfers_step(int32_t handle) {
  const auto queue = find_transfer_queue(handle);
  return queue && queue->step();
}

MOEJAX_EXPORT void moejax_transfers_record(int32_t handle, int32_t on) {
  if (const auto queue = find_transfer_queue(handle)) queue->record(on != 0);
}

// So many events as fit, in order; the others are dropped.
MOEJAX_EXPORT int64_t moejax_transfers_events(int32_t handle, TransferEvent* events, int64_t size) {
  const auto queue = find_transfer_queue(handle);
  const auto found = queue ? queue->events() : std::vector<TransferEvent>();
  const auto n = std::min(size, (int64_t)found.size());
  std::copy(found.begin(), found.begin() + n, events);
  return n;
}

// The value of a checksum, for tests and for its rate.
MOEJAX_EXPORT uint64_t moejax_checksum(int32_t kind, const uint8_t* bytes, int64_t n) {
  Checksum checksum(static_cast<Check>(kind));
  checksum.update(bytes, n);
  return checksum.value();
}
