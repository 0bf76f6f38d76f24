// As tests/faults.py calls faults.h.
#include "faults.h"

#include "pallas_kernels/cpu/arena.h"
#include "pallas_kernels/cpu/transfer_queue.h"

#define MOEJAX_EXPORT extern "C" __attribute__((visibility("default")))

using namespace moejax;

MOEJAX_EXPORT void moejax_transfers_inject(int32_t handle, const TransferFaults* wanted) {
  if (const auto queue = find_transfer_queue(handle)) inject(queue.get(), *wanted);
}

MOEJAX_EXPORT void moejax_transfers_injected(int32_t handle, TransferFaultCounts* counts) {
  const auto queue = find_transfer_queue(handle);
  *counts = queue ? injected(queue.get()) : TransferFaultCounts{};
}

MOEJAX_EXPORT void moejax_cpu_arena_delay(uint32_t handle, int64_t microseconds) {
  if (const auto arena = find_arena(handle)) delay_arena(arena.get(), microseconds);
}
