// One layer's references: hits, victims, fills, and the tables after them.
#pragma once
#include <cstdint>
#include <string>

namespace moejax {

// Tables and results of pallas_kernels/plan/api.py. The layer's rows of those that change are
// changed in place.
struct Plan {
  int64_t layers, cells, experts, layer;
  const int32_t *cell_row, *cell_version;          // [layers, cells]
  int32_t *owner, *last_used;                      // [layers, cells]
  int32_t *address, *version, *frequency;          // [layers, experts]
  const int32_t *fill_version, *prior;             // [layers, experts]
  int32_t* clock;                                  // [layers]
  const int32_t* weights;                          // [3]
  const bool* due;                                 // [experts]: what is active
  int32_t *active, *fill_expert, *fill_row, *fill_list_version;  // [experts]
  int32_t *active_count, *fill_count, *hits, *read_through;
};

// How much a resident expert is worth keeping: pallas_kernels/plan/victim.py.
int32_t victim_key(int32_t age, int32_t frequency, int32_t prior, const int32_t* weights);

// Empty, or what is wrong with the layer or an owner; then nothing was written.
std::string plan(const Plan& call);

}  // namespace moejax
