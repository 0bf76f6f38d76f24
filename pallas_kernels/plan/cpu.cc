#include <algorithm>
#include <map>
#include <tuple>
#include <vector>

#include "pallas_kernels/cpu/ops.h"
#include "pallas_kernels/plan/log2.h"

namespace moejax {
namespace {

// Sums wrap as the other implementations' do.
int32_t wrapped(int64_t value) { return static_cast<int32_t>(static_cast<uint32_t>(value)); }

// How much a resident expert is worth keeping: pallas_kernels/plan/victim.py.
int32_t victim_key(int32_t age, int32_t frequency, int32_t prior, const int32_t* weights) {
  const int64_t worth = static_cast<int64_t>(weights[1]) * log2_fixed(wrapped(frequency + 1LL));
  const int64_t old = static_cast<int64_t>(weights[0]) * log2_fixed(age);
  return wrapped(worth - old + static_cast<int64_t>(weights[2]) * prior);
}

// The order in which misses take a layer's cells: free ones, then by what their owners are worth.
using Order = std::tuple<bool, int32_t, int32_t, int32_t, int64_t>;

Order order_of(const Plan& p, int32_t clock, int64_t cell) {
  const int64_t c = p.layer * p.cells + cell;
  const int32_t owner = p.owner[c], used = p.last_used[c];
  if (owner < 0) return {false, 0, 0, owner, cell};
  const int64_t e = p.layer * p.experts + owner;
  const int32_t age = wrapped(static_cast<int64_t>(clock) - used);
  return {true, victim_key(age, p.frequency[e], p.prior[e], p.weights), used, owner, cell};
}

void require_owners(const Plan& p) {
  for (int64_t c = 0; c < p.cells; c++) {
    const int32_t owner = p.owner[p.layer * p.cells + c];
    if (owner < p.experts) continue;
    throw Refused("cell " + std::to_string(c) + " has the owner " + std::to_string(owner));
  }
}

}  // namespace

void plan(const Plan& p) {
  if (p.layer < 0 || p.layer >= p.layers) throw Refused("layer " + std::to_string(p.layer));
  const int64_t c0 = p.layer * p.cells, e0 = p.layer * p.experts;
  const int32_t *cell_row = p.cell_row + c0, *cell_version = p.cell_version + c0;
  int32_t *owner = p.owner + c0, *last_used = p.last_used + c0;
  int32_t *address = p.address + e0, *version = p.version + e0, *frequency = p.frequency + e0;
  const int32_t* fill_version = p.fill_version + e0;
  require_owners(p);
  const int32_t clock = wrapped(p.clock[p.layer] + 1LL);
  // Only the copy that the address points to is read: another one of the expert is not pinned.
  const auto current = [&](int64_t c) {
    return owner[c] >= 0 && cell_row[c] == address[owner[c]];
  };
  std::vector<char> pinned(p.cells), missing(p.experts);
  for (int64_t c = 0; c < p.cells; c++) pinned[c] = current(c) && p.due[owner[c]];
  int32_t active = 0, hits = 0, fills = 0;
  bool wanting = false;
  for (int64_t e = 0; e < p.experts; e++) {
    missing[e] = p.due[e] && address[e] < 0;
    hits += p.due[e] && !missing[e];
    wanting |= missing[e] && fill_version[e] >= 0;
    if (p.due[e]) p.active[active++] = static_cast<int32_t>(e);
  }

  // Candidates of each version, the first victim first.
  std::map<int32_t, std::vector<Order>> candidates;
  for (int64_t c = 0; wanting && c < p.cells; c++) {
    if (cell_row[c] < 0 || pinned[c]) continue;
    candidates[cell_version[c]].push_back(order_of(p, clock, c));
  }
  for (auto& [of_version, cells] : candidates) std::sort(cells.begin(), cells.end());

  // The n-th miss of a version takes its n-th candidate.
  std::map<int32_t, size_t> next;
  std::vector<std::pair<int64_t, int64_t>> taken;  // expert, cell
  for (int64_t e = 0; wanting && e < p.experts; e++) {
    if (!missing[e] || fill_version[e] < 0) continue;
    const auto found = candidates.find(fill_version[e]);
    size_t& n = next[fill_version[e]];
    if (found == candidates.end() || n == found->second.size()) continue;
    const int64_t c = std::get<4>(found->second[n++]);
    taken.emplace_back(e, c);
    p.fill_expert[fills] = static_cast<int32_t>(e), p.fill_row[fills] = cell_row[c];
    p.fill_list_version[fills++] = fill_version[e];
  }

  // What was computed in is known, so the tables may change.
  for (int64_t c = 0; c < p.cells; c++) {
    if (pinned[c]) last_used[c] = clock;
  }
  int32_t missed = 0;
  for (int64_t e = 0; e < p.experts; e++) {
    missed += missing[e];
    // What is missing is computed in the version that it would fill, with or without a cell.
    if (missing[e]) version[e] = fill_version[e] >= 0 ? fill_version[e] : -1 - fill_version[e];
    frequency[e] = wrapped(static_cast<int64_t>(frequency[e]) + p.due[e]);
  }
  for (const auto& [e, c] : taken) {
    if (current(c)) address[owner[c]] = -1;
  }
  for (const auto& [e, c] : taken) {
    address[e] = cell_row[c], owner[c] = static_cast<int32_t>(e), last_used[c] = clock;
  }
  p.clock[p.layer] = clock;
  std::fill(p.active + active, p.active + p.experts, -1);
  for (int32_t* list : {p.fill_expert, p.fill_row, p.fill_list_version}) {
    std::fill(list + fills, list + p.experts, -1);
  }
  *p.active_count = active, *p.fill_count = fills, *p.hits = hits, *p.read_through = missed - fills;
}

}  // namespace moejax

namespace {

// tables: the fields of pallas_kernels.plan.Tables in order, in host memory.
moejax::Plan on_tables(int32_t* const* tables, int64_t layers, int64_t cells, int64_t experts,
                       int64_t layer) {
  return {layers,    cells,     experts,   layer,     tables[0], tables[1], tables[2], tables[3],
          tables[4], tables[5], tables[6], tables[7], tables[8], tables[9], tables[10]};
}

}  // namespace

// plan on tables in host memory. lists: [4, experts]: active experts, fills, their rows and
// versions. counts: of active experts, fills, hits and experts read through. missed, row, version,
// if missed is not null: [experts]; of active experts whether they were absent, and the row and
// version that they are computed from. Returns 0, or 1 for tables that cannot be, which are
// unchanged.
extern "C" __attribute__((visibility("default"))) int moejax_plan(
    int32_t* const* tables, int64_t layers, int64_t cells, int64_t experts, int64_t layer,
    const bool* due, int32_t* lists, int32_t* counts, bool* missed, int32_t* row,
    int8_t* version) {
  moejax::Plan p = on_tables(tables, layers, cells, experts, layer);
  p.due = due;
  p.active = lists, p.fill_expert = lists + experts;
  p.fill_row = lists + 2 * experts, p.fill_list_version = lists + 3 * experts;
  p.active_count = counts, p.fill_count = counts + 1, p.hits = counts + 2;
  p.read_through = counts + 3;
  const int64_t e0 = layer * experts;
  std::vector<char> absent(experts);
  for (int64_t e = 0; missed && e < experts; e++) absent[e] = due[e] && p.address[e0 + e] < 0;
  try {
    moejax::plan(p);
  } catch (const moejax::Refused&) {
    return 1;
  }
  for (int64_t e = 0; missed && e < experts; e++) {
    if (!due[e]) continue;
    missed[e] = missed[e] || absent[e];
    row[e] = p.address[e0 + e], version[e] = static_cast<int8_t>(p.version[e0 + e]);
  }
  return 0;
}

// The granted cells of a layer and version in the order in which the layer's next reference would
// take them. found: [cells]. Returns their number, or -1 for tables that cannot be.
extern "C" __attribute__((visibility("default"))) int64_t moejax_order_cells(
    int32_t* const* tables, int64_t layers, int64_t cells, int64_t experts, int64_t layer,
    int64_t version, int64_t* found) {
  const moejax::Plan p = on_tables(tables, layers, cells, experts, layer);
  try {
    moejax::require_owners(p);
  } catch (const moejax::Refused&) {
    return -1;
  }
  std::vector<moejax::Order> order;
  for (int64_t c = 0; c < cells; c++) {
    const int64_t at = layer * cells + c;
    if (p.cell_row[at] < 0 || p.cell_version[at] != version) continue;
    order.push_back(moejax::order_of(p, moejax::wrapped(p.clock[layer] + 1LL), c));
  }
  std::sort(order.begin(), order.end());
  for (size_t i = 0; i < order.size(); i++) found[i] = std::get<4>(order[i]);
  return static_cast<int64_t>(order.size());
}
