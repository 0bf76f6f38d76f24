// Stores that are filled while steps run: an op says which records it needs and waits for them.
#pragma once
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace moejax {

class Arrivals;

// Records that an op needs.
class Awaited {
 public:
  // Asks for the record at this address, if its store is being filled.
  void add(const void* record);
  // Returns when all are there. Where a store's filling ended too early, some are not: the reader of
  // the step's results must ask for that before it uses them.
  void wait() const;

 private:
  std::vector<std::pair<std::shared_ptr<Arrivals>, int64_t>> records_;
};

}  // namespace moejax
