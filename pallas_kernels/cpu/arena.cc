#include "pallas_kernels/cpu/arena.h"

#include <sys/mman.h>

#include <map>
#include <new>

#include "pallas_kernels/cpu/faults.h"
#include "pallas_kernels/cpu/supply.h"

namespace moejax {
namespace {

constexpr int64_t kHugePage = 2 << 20;

std::mutex registry_mutex;
uint32_t last_handle = 0;  // handles are never given twice, so a stale one is nobody's

std::map<uint32_t, std::shared_ptr<OwnedArena>>& registry() {
  static auto* const arenas = new std::map<uint32_t, std::shared_ptr<OwnedArena>>();
  return *arenas;  // never destroyed: ops may run while the process ends
}

}  // namespace

OwnedArena::OwnedArena(int64_t rows, int64_t hidden) : rows(rows), hidden(hidden) {
  const int64_t bytes = rows * hidden * static_cast<int64_t>(sizeof(uint16_t));
  const int64_t whole = (bytes + kHugePage - 1) / kHugePage * kHugePage;
  void* mapped = mmap(nullptr, static_cast<size_t>(whole + kHugePage), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) throw std::bad_alloc();
  char* begin = static_cast<char*>(mapped);
  const int64_t before = -reinterpret_cast<int64_t>(begin) & (kHugePage - 1);
  if (before) munmap(begin, static_cast<size_t>(before));
  munmap(begin + before + whole, static_cast<size_t>(kHugePage - before));
  data = reinterpret_cast<uint16_t*>(begin + before);
  mapped_ = static_cast<size_t>(whole);
}

OwnedArena::~OwnedArena() {
  const bool closed = !supply_ || supply_->close();  // the queue writes here
  supply_.reset();
  faults::forget(this);
  if (closed) munmap(data, mapped_);
}

std::string OwnedArena::out_of_order(const char* what, uint32_t writes) const {
  return std::string("a ") + what + " of the arena is out of order: it follows write " +
         std::to_string(writes) + ", the arena is at " + std::to_string(writes_) + " with " +
         std::to_string(readers_) + " readers" + (writing_ ? " and a writer" : "");
}

std::string OwnedArena::begin_read(uint32_t writes) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (writing_ || writes != writes_) return out_of_order("read", writes);
  readers_++;
  return "";
}

void OwnedArena::end_read() {
  faults::hold(this);
  std::lock_guard<std::mutex> lock(mutex_);
  readers_--;
}

std::string OwnedArena::begin_write(uint32_t writes) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (writing_ || readers_ || writes != writes_) return out_of_order("write", writes);
  writing_ = true;
  return "";
}

uint32_t OwnedArena::end_write() {
  faults::hold(this);
  std::lock_guard<std::mutex> lock(mutex_);
  writing_ = false;
  return ++writes_;
}

uint32_t OwnedArena::writes() {
  std::lock_guard<std::mutex> lock(mutex_);
  return writes_;
}

std::shared_ptr<OwnedArena> find_arena(uint32_t handle) {
  std::lock_guard<std::mutex> lock(registry_mutex);
  const auto found = registry().find(handle);
  return found == registry().end() ? nullptr : found->second;
}

// ---- what pallas_kernels/cpu/arena.py calls

#define MOEJAX_CALLED extern "C" __attribute__((visibility("default")))

// A handle, from 1 on; 0: there is no such memory.
MOEJAX_CALLED uint32_t moejax_cpu_arena_new(int64_t rows, int64_t hidden) {
  try {
    auto arena = std::make_shared<OwnedArena>(rows, hidden);
    std::lock_guard<std::mutex> lock(registry_mutex);
    registry()[++last_handle] = std::move(arena);
    return last_handle;
  } catch (const std::bad_alloc&) {
    return 0;
  }
}

MOEJAX_CALLED void* moejax_cpu_arena_data(uint32_t handle) {
  const auto arena = find_arena(handle);
  return arena ? arena->data : nullptr;
}

MOEJAX_CALLED uint32_t moejax_cpu_arena_writes(uint32_t handle) {
  const auto arena = find_arena(handle);
  return arena ? arena->writes() : 0;
}

// The memory goes when the last op that runs on it has ended.
MOEJAX_CALLED void moejax_cpu_arena_close(uint32_t handle) {
  std::shared_ptr<OwnedArena> arena;
  std::lock_guard<std::mutex> lock(registry_mutex);
  const auto found = registry().find(handle);
  if (found == registry().end()) return;
  arena = std::move(found->second);  // destroyed after the lock: declared before it
  registry().erase(found);
}

}  // namespace moejax
