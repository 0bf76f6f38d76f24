#include "pallas_kernels/fill/cpu.h"

#include <algorithm>
#include <cstring>

namespace moejax {
namespace {

constexpr int64_t kTaskBytes = 256 << 10;  // of a cell, at least a row

struct Entry {
  const uint16_t* record;
  uint16_t* cell;
  const StoredVersion* version;
  int64_t number;         // of the version
  bool decoded;           // on the way
  int64_t first, tasks;   // its tasks among all, each of `step` rows
  int64_t step;
};

// Sets what an entry copies. Returns what is wrong.
std::string entry_of(const Fills& c, int64_t i, Entry& out) {
  const int64_t versions = static_cast<int64_t>(c.versions.size());
  const int64_t expert = c.expert[i], row = c.row[i], number = versions == 1 ? 0 : c.version[i];
  const std::string name = "entry " + std::to_string(i) + ", expert " + std::to_string(expert) +
                           " of layer " + std::to_string(c.layer) + ", ";
  if (number < 0 || number >= versions) return name + "has version " + std::to_string(number);
  const StoredVersion& version = c.versions[number];
  const int64_t layers = static_cast<int64_t>(version.places.size());
  const int64_t place = c.layer < 0 || c.layer >= layers ? -1 : version.places[c.layer];
  if (place < 0 || place >= version.layers || expert < 0 || expert >= version.experts) {
    return name + "is not in its version's store";
  }
  out.decoded = version.cell.version != version.held.version;
  if (!version.store && (!c.supply || out.decoded)) {
    return name + "is in a file, and no queue reads it";
  }
  if (row < 0 || row > c.arena_rows - version.cell.rows) {
    return name + "goes to row " + std::to_string(row) + " of an arena of " +
           std::to_string(c.arena_rows) + " rows";
  }
  if (version.store) {
    out.record = version.store + (place * version.experts + expert) * version.held.rows * c.hidden;
  }
  out.cell = c.arena + row * c.hidden, out.version = &version, out.number = number;
  out.step = std::max<int64_t>(kTaskBytes / (c.hidden * 2), 1);
  out.tasks = (version.cell.rows + out.step - 1) / out.step;
  if (!c.supply) return "";
  if (!c.supply->sources.find(number, c.layer, expert) ||
      c.supply->sources.bytes(number) != version.held.rows * c.hidden * 2) {
    return name + "is not where its queue looks";
  }
  if (!out.decoded) out.tasks = 0;
  return "";
}

// Leaves the copying of records to the queue, and cells that are written here to us.
void hand_over(const Fills& c, const std::vector<Entry>& entries) {
  for (int64_t i = 0; i < c.count; i++) {
    const Entry& e = entries[i];
    if (e.decoded) c.supply->queue->vacate(c.row[i]);
    else c.supply->bring(e.number, c.layer, c.expert[i], c.row[i], e.cell, c.ahead);
  }
}

}  // namespace

std::string fill(Pool& pool, const Kernels& k, const Fills& c) {
  std::vector<Entry> entries(c.count);
  int64_t tasks = 0, bytes = 0;
  for (int64_t i = 0; i < c.count; i++) {
    const std::string wrong = entry_of(c, i, entries[i]);
    if (!wrong.empty()) return wrong;
    entries[i].first = tasks, tasks += entries[i].tasks;
    bytes += entries[i].version->cell.rows * c.hidden * 2;
  }
  if (c.supply) hand_over(c, entries);
  // A byte copied counts as a multiplication: both some 10 µs for 2^17.
  parallel(pool, tasks, bytes, [&](int64_t task) {
    const auto after = std::upper_bound(entries.begin(), entries.end(), task,
                                        [](int64_t t, const Entry& e) { return t < e.first; });
    const Entry& e = *(after - 1);
    const Format& cell = e.version->cell;
    const int64_t begin = (task - e.first) * e.step;
    const int64_t end = std::min(begin + e.step, cell.rows);
    if (!e.decoded) {
      const int64_t at = begin * c.hidden;
      std::memcpy(e.cell + at, e.record + at, (end - begin) * c.hidden * sizeof(uint16_t));
      return;
    }
    for (int64_t r = begin; r < end; r++) {
      k.decode(e.version->held, e.record, static_cast<int>(r / cell.width), r % cell.width, 0,
               c.hidden, nullptr, e.cell + r * c.hidden);
    }
  });
  return "";
}

}  // namespace moejax
