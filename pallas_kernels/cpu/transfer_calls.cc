// The queue of transfers as host_offload/queue/native.py calls it, and queues by number for ops.
#include <algorithm>
#include <cstring>

#include "pallas_kernels/cpu/transfer_queue.h"

#define MOEJAX_EXPORT extern "C" __attribute__((visibility("default")))

namespace moejax {
namespace {

std::mutex registry_mutex;
std::map<int32_t, std::shared_ptr<TransferQueue>> registry;
int32_t handles = 0;

void copy(const std::string& from, char* to, int64_t size) {
  const size_t n = std::min(from.size(), (size_t)size - 1);
  std::memcpy(to, from.data(), n);
  to[n] = 0;
}

}  // namespace

std::shared_ptr<TransferQueue> find_transfer_queue(int32_t handle) {
  std::lock_guard<std::mutex> held(registry_mutex);
  const auto found = registry.find(handle);
  return found == registry.end() ? nullptr : found->second;
}

}  // namespace moejax

using namespace moejax;

// A handle from 1; -1 and why where threads cannot be started.
MOEJAX_EXPORT int32_t moejax_transfers_new(const TransferOptions* options, char* why, int64_t size) {
  try {
    auto queue = std::make_shared<TransferQueue>(*options);
    std::lock_guard<std::mutex> held(registry_mutex);
    registry[++handles] = std::move(queue);
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
  queue->close();
  std::lock_guard<std::mutex> held(registry_mutex);
  registry.erase(handle);
}

// The other functions are for handles that live: native.py calls none after delete.

MOEJAX_EXPORT int32_t moejax_transfers_add_file(int32_t handle, const char* path, int32_t direct,
                                                char* why, int64_t size) {
  std::string text;
  const int32_t file = find_transfer_queue(handle)->add_file(path, direct != 0, &text);
  copy(text, why, size);
  return file;
}

MOEJAX_EXPORT int32_t moejax_transfers_direct(int32_t handle, int32_t file) {
  return find_transfer_queue(handle)->direct(file);
}

MOEJAX_EXPORT int64_t moejax_transfers_submit(int32_t handle, const TransferRequest* request,
                                              const int64_t* part_bytes, char* why, int64_t size) {
  std::string text;
  const int64_t ticket = find_transfer_queue(handle)->submit(*request, part_bytes, &text);
  copy(text, why, size);
  return ticket;
}

MOEJAX_EXPORT int32_t moejax_transfers_cancel(int32_t handle, int64_t ticket) {
  return find_transfer_queue(handle)->cancel(ticket);
}

MOEJAX_EXPORT int32_t moejax_transfers_reorder(int32_t handle, int64_t ticket, int32_t cause,
                                               int32_t priority) {
  return find_transfer_queue(handle)->reorder(ticket, cause, priority);
}

MOEJAX_EXPORT int32_t moejax_transfers_wait(int32_t handle, int64_t ticket, int64_t part,
                                            double seconds, TransferRecord* record) {
  return find_transfer_queue(handle)->wait(ticket, part, seconds, record);
}

MOEJAX_EXPORT int32_t moejax_transfers_wait_cell(int32_t handle, int64_t cell, int64_t part) {
  return (int32_t)find_transfer_queue(handle)->wait_cell(cell, part);
}

// Both at one moment: how many transfers fly, and how many have settled since the last call. Where
// an array is too small nothing is taken, and both numbers say what is needed.
MOEJAX_EXPORT double moejax_transfers_observe(int32_t handle, TransferRecord* flying,
                                              int64_t* flying_count, TransferRecord* ended,
                                              int64_t* ended_count) {
  std::vector<TransferRecord> fly, end;
  const double busy = find_transfer_queue(handle)->observe(*flying_count, *ended_count, &fly, &end);
  if ((int64_t)fly.size() <= *flying_count) std::copy(fly.begin(), fly.end(), flying);
  if ((int64_t)end.size() <= *ended_count) std::copy(end.begin(), end.end(), ended);
  *flying_count = (int64_t)fly.size();
  *ended_count = (int64_t)end.size();
  return busy;
}

MOEJAX_EXPORT void moejax_transfers_message(int32_t handle, int64_t ticket, char* text, int64_t size) {
  copy(find_transfer_queue(handle)->message(ticket), text, size);
}

MOEJAX_EXPORT int32_t moejax_transfers_step(int32_t handle) {
  return find_transfer_queue(handle)->step();
}

MOEJAX_EXPORT void moejax_transfers_inject(int32_t handle, const TransferFaults* faults) {
  find_transfer_queue(handle)->inject(*faults);
}

MOEJAX_EXPORT void moejax_transfers_record(int32_t handle, int32_t on) {
  find_transfer_queue(handle)->record(on != 0);
}

// So many events as fit, in order; the others are dropped.
MOEJAX_EXPORT int64_t moejax_transfers_events(int32_t handle, TransferEvent* events, int64_t size) {
  const auto found = find_transfer_queue(handle)->events();
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
