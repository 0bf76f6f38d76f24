// Where the records of experts lie, and what joins an arena to the queue that brings them there.
#pragma once
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "pallas_kernels/cpu/kernels.h"
#include "pallas_kernels/cpu/transfer_queue.h"

namespace moejax {

constexpr int kPieces = 6;  // of a record, most: three matrices and their biases

// A record, laid out as pallas_kernels/cpu/sources.py passes it.
struct SourceRecord {
  int64_t place[kPieces];  // address, or with a file the place of the first byte in it
  uint64_t checksum;
  int32_t file[kPieces];   // of the queue; kMemory, kNowhere
  Check check;
};
constexpr int32_t kMemory = -1;
constexpr int32_t kNowhere = -2;  // the version lacks the layer

// The records of all versions, layers and experts.
struct Sources {
  int64_t versions, layers, experts;
  std::vector<SourceRecord> records;        // [versions, layers, experts]
  std::vector<std::vector<int64_t>> parts;  // by version: bytes of gate, up, down, or of all at once
  std::vector<int64_t> turned;              // by version: row, item, exponent of `Pieces`
  // By version: of records of blocks, whose matrices lie apart; null: of others.
  std::vector<std::shared_ptr<const std::vector<BlockMatrix>>> blocks;

  // Null where there is no such record.
  const SourceRecord* find(int64_t version, int64_t layer, int64_t expert) const;
  int64_t bytes(int64_t version) const;
};

// An expert that an op could not compute, because its bytes did not come.
struct SupplyFailure {
  int32_t layer, expert;
  uint32_t writes;  // of the arena before the op
  std::string message;
};

// The causes that ops queue with, as the queue was told them.
struct SupplyCauses {
  int32_t demand, ahead;
};

// A queue that fills an arena's cells, each named by its first row, and buffers for records that get
// no cell, named by what `buffer_cell` says.
class Supply {
 public:
  // buffers: of the largest record. Throws std::bad_alloc.
  Supply(std::shared_ptr<TransferQueue> queue, Sources sources, SupplyCauses causes, int64_t buffers);
  ~Supply();  // closes the queue: nothing is written after that, unless reads hang
  // Closes the queue. false: reads hang, which may write for ever.
  bool close() { return close_queue(queue); }
  Supply(const Supply&) = delete;
  Supply& operator=(const Supply&) = delete;

  static int64_t buffer_cell(int64_t buffer) { return -1 - buffer; }
  int64_t buffers() const { return static_cast<int64_t>(buffers_.size()); }

  // Queues a record into a cell, from address `to` on; what still flew there was cancelled or has
  // ended. Where that cannot be, the cell has failed. The record must be there.
  void bring(int64_t version, int64_t layer, int64_t expert, int64_t cell, void* to, bool ahead);
  // As bring, ahead of need, of an expert whose lossless12 record lies in the arena, from `from` on,
  // and stays until then: the queue's threads decode it into a dense cell, without the link.
  void unpack(const Format& packed, int64_t layer, int64_t expert, const uint16_t* from, int64_t cell,
              void* to);
  // As bring, as a demand, into a buffer; returns where the record begins.
  const uint16_t* bring_into_buffer(int64_t version, int64_t layer, int64_t expert, int64_t buffer);
  // The last part of a version's records, and how many there are.
  int64_t parts(int64_t version) const { return static_cast<int64_t>(sources.parts[version].size()); }

  void failed(const SupplyFailure& failure);
  // The failures of ops that began after no more than so many writes; they are told once.
  std::vector<SupplyFailure> failures(uint32_t writes);

  const std::shared_ptr<TransferQueue> queue;
  const Sources sources;
  std::mutex reading;  // held by an op that uses the buffers

 private:
  const SupplyCauses causes_;
  std::vector<uint8_t*> buffers_;
  std::mutex mutex_;
  std::vector<SupplyFailure> failures_;
};

}  // namespace moejax
