// The choice of each token's experts.
#pragma once
#include "pallas_kernels/cpu/kernels.h"
#include "pallas_kernels/cpu/pool.h"

namespace moejax {

enum class Scoring : int32_t { Softmax, Sigmoid, Sparsemixer };

// A RouteRule of pallas_kernels/route/rule.py; a group's score is the sum of its `group_best` best.
struct Rule {
  Scoring scoring;
  int64_t top_k, groups, top_groups, group_best;
  bool normalize;
  float scale, jitter;
};

// logits float[tokens, experts] → ids and weights [tokens, top_k], ids ascending. correction:
// float[experts] or null. The rule must fit the number of experts.
void route(Pool& pool, const Rule& rule, const float* logits, const bool* valid,
           const float* correction, int64_t tokens, int64_t experts, int32_t* ids, float* weights);

}  // namespace moejax
