#include <algorithm>
#include <cstring>
#include <set>

#include "pallas_kernels/cpu/ops.h"

namespace moejax {
namespace {

constexpr int64_t kTask = 128 << 10;  // elements that a task copies, or decodes: at least a row

// A record that is decoded on the way.
struct Decoded {
  const StoredVersion& version;
  const uint16_t* record;
  uint16_t* cell;
};

bool decoded_on_the_way(const StoredVersion& v) {
  return v.cell.matrix[GATE].kind != v.held.matrix[GATE].kind;
}

}  // namespace

void copy_all(Pool& pool, const std::vector<Copy>& copies) {
  std::vector<int64_t> ends;  // of each copy's tasks among all
  int64_t tasks = 0, elements = 0;
  for (const Copy& copy : copies) {
    elements += copy.elements;
    ends.push_back(tasks += (copy.elements + kTask - 1) / kTask);
  }
  // A byte copied counts as a multiplication: both some 10 µs for 2^17.
  parallel(pool, tasks, 2 * elements, [&](int64_t task) {
    const int64_t i = std::upper_bound(ends.begin(), ends.end(), task) - ends.begin();
    const Copy& copy = copies[i];
    const int64_t at = (task - (i ? ends[i - 1] : 0)) * kTask;
    std::memcpy(copy.to + at, copy.from + at, std::min(kTask, copy.elements - at) * sizeof(uint16_t));
  });
}

void fill(Pool& pool, const Kernels& k, const Fills& c) {
  const Records& all = c.records;
  std::vector<Copy> copies;
  std::vector<Decoded> decoded;
  std::vector<int64_t> numbers(c.count);
  Awaited awaited;
  for (int64_t i = 0; i < c.count; i++) {
    const int64_t expert = c.expert[i];
    const std::string name = "entry " + std::to_string(i) + ", expert " + std::to_string(expert) +
                             " of layer " + std::to_string(c.layer) + ",";
    numbers[i] = all.versions.size() == 1 ? 0 : c.version[i];
    const StoredVersion& version = all.version(numbers[i], name);
    const bool decodes = decoded_on_the_way(version);
    const uint16_t* record = all.stored(numbers[i], c.layer, expert, decodes, name);
    awaited.add(record);
    uint16_t* cell = all.cell(version, c.row[i], name);
    if (decodes) decoded.push_back({version, record, cell});
    else copies.push_back({record, cell, version.cell.rows * all.hidden});
  }
  awaited.wait();
  // The copying of records is left to the queue, and cells that are written here to us.
  std::set<const uint16_t*> hanging;  // cells that a read may still write into
  for (int64_t i = 0; all.supply && i < c.count; i++) {
    const StoredVersion& version = all.versions[numbers[i]];
    if (decoded_on_the_way(version)) {
      if (!all.supply->queue->vacate(c.row[i])) hanging.insert(all.arena + c.row[i] * all.hidden);
      continue;
    }
    all.supply->bring(numbers[i], c.layer, c.expert[i], c.row[i],
                      all.arena + c.row[i] * all.hidden, c.ahead);
  }
  if (!all.supply) copy_all(pool, copies);
  const int64_t step = std::max<int64_t>(kTask / all.hidden, 1);
  for (const Decoded& d : decoded) {
    if (hanging.count(d.cell)) continue;
    const Format& cell = d.version.cell;
    const int first_matrix = has_gate(cell) ? GATE : UP;
    const auto rows = [&](int64_t first, int64_t last) {
      for (int64_t r = first; r < last; r++) {
        // Rows of biases follow, in every version.
        if (const int64_t bias = r - (DOWN + 1 - first_matrix) * cell.width; bias >= 0) {
          const uint16_t* from = d.record + (d.version.held.bias[GATE] + bias) * all.hidden;
          std::memcpy(d.cell + r * all.hidden, from, all.hidden * sizeof *from);
          continue;
        }
        k.decode(d.version.held, d.record, static_cast<int>(r / cell.width) + first_matrix, r % cell.width, 0,
                 all.hidden, nullptr, d.cell + r * all.hidden);
      }
    };
    parallel_rows(pool, cell.rows, step, cell.rows * all.hidden * 2, rows);
  }
}

}  // namespace moejax
