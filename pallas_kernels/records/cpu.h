// The records of one version: how they lie in cells, and in their store.
#pragma once
#include <vector>

#include "pallas_kernels/cpu/kernels.h"

namespace moejax {

struct StoredVersion {
  Format cell, held;       // held: in the store
  const uint16_t* store;   // [layers, experts, held.rows, hidden]; null: records are in files
  int64_t layers, experts;
  std::vector<int64_t> places;  // layer of the tables → layer of the store, −1: none; empty: equal
};

}  // namespace moejax
