#include "pallas_kernels/move/cpu.h"

#include <algorithm>
#include <cstring>

namespace moejax {
namespace {

constexpr int64_t kTask = 128 << 10;  // elements

struct Copy {
  const uint16_t* from;
  uint16_t* to;
  int64_t elements;
  int64_t first;  // of its tasks among all
};

std::string outside(const Rows& memory, int64_t row, int64_t rows) {
  if (row >= 0 && rows >= 0 && row <= memory.count - rows) return "";
  return std::to_string(rows) + " rows from " + std::to_string(row) + " on are not among " +
         std::to_string(memory.count);
}

void carry_out(Pool& pool, std::vector<Copy>& copies) {
  int64_t tasks = 0, elements = 0;
  for (Copy& copy : copies) {
    copy.first = tasks, tasks += (copy.elements + kTask - 1) / kTask, elements += copy.elements;
  }
  parallel(pool, tasks, 2 * elements, [&](int64_t task) {
    const auto after = std::upper_bound(copies.begin(), copies.end(), task,
                                        [](int64_t t, const Copy& c) { return t < c.first; });
    const Copy& copy = *(after - 1);
    const int64_t at = (task - copy.first) * kTask;
    std::memcpy(copy.to + at, copy.from + at,
                std::min(kTask, copy.elements - at) * sizeof(uint16_t));
  });
}

}  // namespace

std::string move(Pool& pool, const Rows& memory, const int32_t* source, const int32_t* target,
                 const int32_t* rows, int64_t entries) {
  std::vector<Copy> copies;
  for (int64_t i = 0; i < entries; i++) {
    if (!rows[i]) continue;
    for (const int64_t row : {source[i], target[i]}) {
      const std::string wrong = outside(memory, row, rows[i]);
      if (!wrong.empty()) return wrong;
    }
    bool repeated = false;  // two threads must not write one place
    for (int64_t j = 0; j < i; j++) repeated |= rows[j] && target[j] == target[i];
    if (repeated) continue;
    copies.push_back({memory.data + source[i] * memory.width, memory.data + target[i] * memory.width,
                      rows[i] * memory.width, 0});
  }
  carry_out(pool, copies);
  return "";
}

std::string read(Pool& pool, const Rows& memory, const int32_t* first, int64_t rows,
                 const std::vector<uint16_t*>& to) {
  std::vector<Copy> copies;
  for (size_t i = 0; i < to.size(); i++) {
    const std::string wrong = outside(memory, first[i], rows);
    if (!wrong.empty()) return wrong;
    copies.push_back({memory.data + first[i] * memory.width, to[i], rows * memory.width, 0});
  }
  carry_out(pool, copies);
  return "";
}

std::string write(Pool& pool, const Rows& memory, const int32_t* first, int64_t rows,
                  const std::vector<const uint16_t*>& from) {
  std::vector<Copy> copies;
  for (size_t i = 0; i < from.size(); i++) {
    const std::string wrong = outside(memory, first[i], rows);
    if (!wrong.empty()) return wrong;
    if (std::find(first, first + i, first[i]) != first + i) continue;
    copies.push_back({from[i], memory.data + first[i] * memory.width, rows * memory.width, 0});
  }
  carry_out(pool, copies);
  return "";
}

}  // namespace moejax
