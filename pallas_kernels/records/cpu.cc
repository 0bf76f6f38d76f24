#include "pallas_kernels/cpu/ops.h"

namespace moejax {

const StoredVersion& Records::version(int64_t number, const std::string& name) const {
  if (number < 0 || number >= static_cast<int64_t>(versions.size())) {
    throw Refused(name + " has version " + std::to_string(number));
  }
  return versions[number];
}

uint16_t* Records::cell(const StoredVersion& version, int64_t row, const std::string& name) const {
  if (row < 0 || row > arena_rows - version.cell.rows) {
    throw Refused(name + " has row " + std::to_string(row) + " of an arena of " +
                  std::to_string(arena_rows) + " rows");
  }
  return arena + row * hidden;
}

const uint16_t* Records::stored(int64_t number, int64_t layer, int64_t expert, bool read_here,
                                const std::string& name) const {
  const StoredVersion& v = versions[number];
  const int64_t layers = v.places.empty() ? v.layers : static_cast<int64_t>(v.places.size());
  int64_t place = layer < 0 || layer >= layers ? -1 : layer;
  if (place >= 0 && !v.places.empty()) place = v.places[layer];
  if (place < 0 || place >= v.layers || expert < 0 || expert >= v.experts) {
    throw Refused(name + " is not in its version's store");
  }
  const int64_t elements = v.held.rows * hidden;
  if (!v.store && (!supply || read_here)) {
    throw Refused(name + " is in a file, and no queue reads it");
  }
  if (supply && (!supply->sources.find(number, layer, expert) ||
                 supply->sources.bytes(number) != elements * 2)) {
    throw Refused(name + " is not where its queue looks");
  }
  return v.store ? v.store + (place * v.experts + expert) * elements : nullptr;
}

}  // namespace moejax
