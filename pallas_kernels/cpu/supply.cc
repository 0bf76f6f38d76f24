#include "pallas_kernels/cpu/supply.h"

#include <algorithm>
#include <cstdlib>
#include <new>
#include <numeric>
#include <utility>

#include "pallas_kernels/cpu/arena.h"
#include "pallas_kernels/cpu/ops.h"

namespace moejax {
namespace {

constexpr int64_t kPage = 4096;  // a file's bytes go straight to memory where places agree modulo it

}  // namespace

const SourceRecord* Sources::find(int64_t version, int64_t layer, int64_t expert) const {
  if (version < 0 || version >= versions || layer < 0 || layer >= layers || expert < 0 ||
      expert >= experts) {
    return nullptr;
  }
  const SourceRecord& record =
      records[static_cast<size_t>((version * layers + layer) * experts + expert)];
  return record.file[0] == kNowhere ? nullptr : &record;
}

int64_t Sources::bytes(int64_t version) const {
  const auto& sizes = parts[static_cast<size_t>(version)];
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
}

Supply::Supply(std::shared_ptr<TransferQueue> queue, Sources given, SupplyCauses causes,
               int64_t buffers)
    : queue(std::move(queue)), sources(std::move(given)), causes_(causes) {
  int64_t most = 0;
  for (int64_t v = 0; v < sources.versions; v++) most = std::max(most, sources.bytes(v));
  const int64_t size = (most + kPage - 1) / kPage * kPage + kPage;
  for (int64_t i = 0; i < buffers; i++) {
    void* memory = std::aligned_alloc(kPage, static_cast<size_t>(size));
    if (!memory) {
      for (uint8_t* buffer : buffers_) std::free(buffer);
      throw std::bad_alloc();
    }
    buffers_.push_back(static_cast<uint8_t*>(memory));
  }
}

Supply::~Supply() {
  if (!close()) return;
  for (uint8_t* buffer : buffers_) std::free(buffer);
}

void Supply::bring(int64_t version, int64_t layer, int64_t expert, int64_t cell, void* to,
                   bool ahead) {
  const SourceRecord& record = *sources.find(version, layer, expert);
  const auto& parts = sources.parts[static_cast<size_t>(version)];
  TransferRequest request{};
  request.cell = cell;
  request.destination = reinterpret_cast<int64_t>(to);
  request.checksum = record.checksum;
  request.layer = static_cast<int32_t>(layer), request.expert = static_cast<int32_t>(expert);
  request.version = static_cast<int32_t>(version);
  request.cause = ahead ? causes_.ahead : causes_.demand;
  request.check = record.check;
  request.parts = static_cast<int32_t>(parts.size());
  Pieces pieces;
  pieces.blocks = sources.blocks[static_cast<size_t>(version)];
  const size_t apart = pieces.blocks ? pieces.blocks->size() : parts.size();
  for (size_t p = 0; p < apart; p++) pieces.parts.push_back({record.file[p], record.place[p]});
  const int64_t* const turned = &sources.turned[static_cast<size_t>(3 * version)];
  pieces.row = turned[0], pieces.item = turned[1], pieces.exponent = turned[2];
  std::string why;  // the cell has it, too
  queue->replace(request, parts.data(), &why, {}, std::move(pieces));
}

void Supply::unpack(const Format& packed, int64_t layer, int64_t expert, const uint16_t* from,
                    int64_t cell, void* to) {
  const int64_t row_bytes = packed.hidden * 2, part = packed.width * row_bytes;
  const int64_t parts[] = {part, part, part};
  const int first_matrix = has_gate(packed) ? GATE : UP;
  TransferRequest request{};
  request.cell = cell, request.destination = reinterpret_cast<int64_t>(to);
  request.source = reinterpret_cast<int64_t>(from);
  request.layer = static_cast<int32_t>(layer), request.expert = static_cast<int32_t>(expert);
  request.cause = causes_.ahead, request.file = kMemory, request.check = Check::NONE;
  request.parts = DOWN + 1 - first_matrix;
  const Kernels& kernels = *select_kernels();
  std::string why;  // the cell has it, too
  queue->replace(request, parts, &why, [=, &kernels](uint8_t* out, int64_t first, int64_t bytes) {
    for (int64_t at = first, end = first + bytes; at < end;) {
      const int64_t row = at / row_bytes, column = at % row_bytes;
      const int64_t n = std::min(row_bytes - column, end - at);
      kernels.decode(packed, from, static_cast<int>(row / packed.width) + first_matrix,
                     row % packed.width, column / 2, n / 2, nullptr, out);
      at += n, out += n;
    }
  });
}

const uint16_t* Supply::bring_into_buffer(int64_t version, int64_t layer, int64_t expert,
                                          int64_t buffer) {
  const SourceRecord& record = *sources.find(version, layer, expert);
  uint8_t* to = buffers_[static_cast<size_t>(buffer)];
  if (record.file[0] >= 0) to += record.place[0] % kPage & ~int64_t{63};
  bring(version, layer, expert, buffer_cell(buffer), to, false);
  return reinterpret_cast<const uint16_t*>(to);
}

void Supply::failed(const SupplyFailure& failure) {
  std::lock_guard<std::mutex> lock(mutex_);
  failures_.push_back(failure);
}

std::vector<SupplyFailure> Supply::failures(uint32_t writes) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto later = std::stable_partition(
      failures_.begin(), failures_.end(), [writes](const SupplyFailure& failure) {
        return static_cast<int32_t>(writes - failure.writes) >= 0;
      });
  std::vector<SupplyFailure> told(std::make_move_iterator(failures_.begin()),
                                  std::make_move_iterator(later));
  failures_.erase(failures_.begin(), later);
  return told;
}

// ---- what pallas_kernels/cpu/sources.py and arena.py call

#define MOEJAX_CALLED extern "C" __attribute__((visibility("default")))

// 1; 0: there is no such arena or queue, or no memory.
MOEJAX_CALLED int32_t moejax_cpu_arena_attach(uint32_t handle, int32_t queue, const int64_t* shape,
                                              const SourceRecord* records, const int64_t* parts,
                                              int64_t most_parts, const int64_t* turned,
                                              const BlockMatrix* blocks, int32_t ahead,
                                              int64_t buffers) {
  const auto arena = find_arena(handle);
  const auto found = find_transfer_queue(queue);
  if (!arena || !found) return 0;
  Sources sources{shape[0], shape[1], shape[2], {}, {}, {turned, turned + 3 * shape[0]}, {}};
  sources.records.assign(records, records + shape[0] * shape[1] * shape[2]);
  for (int64_t v = 0; v < shape[0]; v++) {
    const int64_t* mine = parts + v * most_parts;
    const auto end = std::find(mine, mine + most_parts, 0);
    sources.parts.emplace_back(mine, end);
    std::vector<BlockMatrix> matrices;
    for (const auto* m = blocks + kPieces * v; m < blocks + kPieces * (v + 1); m++) {
      if (m->bytes) matrices.push_back(*m);
    }
    if (matrices.empty()) sources.blocks.emplace_back();
    else sources.blocks.push_back(std::make_shared<const std::vector<BlockMatrix>>(matrices));
  }
  try {
    arena->attach(std::make_shared<Supply>(found, std::move(sources), SupplyCauses{0, ahead}, buffers));
    return 1;
  } catch (const std::bad_alloc&) {
    return 0;
  }
}

// How many failures there are of ops after no more than so many writes, of which the first `most`
// are told: layer, expert and `size` characters each.
MOEJAX_CALLED int64_t moejax_cpu_arena_failures(uint32_t handle, uint32_t writes, int64_t most,
                                                int32_t* layer, int32_t* expert, char* text,
                                                int64_t size) {
  const auto arena = find_arena(handle);
  if (!arena || !arena->supply()) return 0;
  const auto told = arena->supply()->failures(writes);
  const auto count = static_cast<int64_t>(told.size());
  for (int64_t i = 0; i < std::min(count, most); i++) {
    const auto& failure = told[static_cast<size_t>(i)];
    layer[i] = failure.layer, expert[i] = failure.expert;
    const auto n = std::min(static_cast<int64_t>(failure.message.size()), size - 1);
    failure.message.copy(text + i * size, static_cast<size_t>(n));
    text[i * size + n] = 0;
  }
  return count;
}

}  // namespace moejax
