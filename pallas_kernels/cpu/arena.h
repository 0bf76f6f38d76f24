// Arenas that this library owns: memory that XLA neither copies, moves nor frees. A compiled step
// carries a token in an arena's place, uint32[2]: which arena, and how many writes came before.
// Readers and writers say the token that they were given, so a read that a later write has overtaken,
// or a write that overtakes a read, is found by its number and refused.
#pragma once
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

namespace moejax {

constexpr int64_t kTokenSize = 2;  // values of a token

class Supply;  // supply.h

class OwnedArena {
 public:
  OwnedArena(int64_t rows, int64_t hidden);  // zeros in whole huge pages; throws std::bad_alloc
  ~OwnedArena();
  OwnedArena(const OwnedArena&) = delete;
  OwnedArena& operator=(const OwnedArena&) = delete;

  // Each returns what is wrong, or empty: then the matching end must follow. writes: of the token.
  std::string begin_read(uint32_t writes);
  void end_read();
  std::string begin_write(uint32_t writes);
  uint32_t end_write();  // the token's number for what comes after
  uint32_t writes();

  // What brings records into cells beside the ops: from before the first op on, for good.
  void attach(std::shared_ptr<Supply> supply) { supply_ = std::move(supply); }
  const std::shared_ptr<Supply>& supply() const { return supply_; }

  const int64_t rows, hidden;  // uint16[rows, hidden]
  uint16_t* data = nullptr;

 private:
  std::string out_of_order(const char* what, uint32_t writes) const;

  std::shared_ptr<Supply> supply_;  // null: ops copy records themselves
  size_t mapped_ = 0;
  std::mutex mutex_;
  uint32_t writes_ = 0;  // from the beginning on; wraps
  int64_t readers_ = 0;
  bool writing_ = false;
};

// The arena of a token's first value, kept alive by whoever holds it; null: it is not there, or it
// was closed.
std::shared_ptr<OwnedArena> find_arena(uint32_t handle);

}  // namespace moejax
