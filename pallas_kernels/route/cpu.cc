#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "pallas_kernels/cpu/ops.h"

namespace moejax {
namespace {

constexpr int64_t kRowsOfTask = 16;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

using Choice = std::pair<int32_t, float>;  // an expert and its weight

// Where the largest value is that was not taken, the first of equal ones; there is one.
int64_t best_of(const float* values, const std::vector<char>& taken) {
  int64_t best = -1;
  for (int64_t i = 0; i < static_cast<int64_t>(taken.size()); i++) {
    if (!taken[i] && (best < 0 || values[i] > values[best])) best = i;
  }
  return best;
}

// Takes −∞ for every expert outside of the best groups.
void keep_best_groups(const Rule& rule, std::vector<float>& choice) {
  const int64_t size = static_cast<int64_t>(choice.size()) / rule.groups;
  std::vector<float> score(rule.groups);
  for (int64_t g = 0; g < rule.groups; g++) {
    std::vector<char> taken(size, 0);
    for (int64_t n = 0; n < rule.group_best; n++) {
      const int64_t i = best_of(&choice[g * size], taken);
      taken[i] = 1, score[g] += choice[g * size + i];
    }
  }
  std::vector<char> listed(rule.groups, 0);
  for (int64_t n = 0; n < rule.top_groups; n++) listed[best_of(score.data(), listed)] = 1;
  for (int64_t g = 0; g < rule.groups; g++) {
    if (!listed[g]) std::fill_n(choice.begin() + g * size, size, -kInfinity);
  }
}

// The experts of the largest scores.
void best_experts(const Rule& rule, const float* logits, const float* correction, int64_t experts,
                  std::vector<Choice>& chosen) {
  std::vector<float> score(experts);
  if (rule.scoring == Scoring::Sigmoid) {
    for (int64_t e = 0; e < experts; e++) score[e] = 1 / (1 + std::exp(-logits[e]));
  } else {
    const float top = *std::max_element(logits, logits + experts);
    double total = 0;
    for (int64_t e = 0; e < experts; e++) total += score[e] = std::exp(logits[e] - top);
    for (int64_t e = 0; e < experts; e++) score[e] /= static_cast<float>(total);
  }
  std::vector<float> choice(score);
  for (int64_t e = 0; correction && e < experts; e++) choice[e] += correction[e];
  if (rule.top_groups < rule.groups) keep_best_groups(rule, choice);
  std::vector<char> taken(experts, 0);
  for (int64_t n = 0; n < rule.top_k; n++) {
    const int64_t e = best_of(choice.data(), taken);
    taken[e] = 1;
    chosen.emplace_back(static_cast<int32_t>(e), score[e]);
  }
}

// The largest logit, then the largest of the others, each weighed among those near to it.
void sparsemixer(const Rule& rule, const float* logits, int64_t experts,
                 std::vector<Choice>& chosen) {
  std::vector<char> taken(experts, 0);
  for (int64_t n = 0; n < 2; n++) {
    const int64_t best = best_of(logits, taken);
    const float top = logits[best];
    double total = 0;
    for (int64_t e = 0; e < experts; e++) {
      const float distance = (top - logits[e]) / std::max(std::fabs(logits[e]), top);
      if (!taken[e] && !(distance > 2 * rule.jitter)) total += std::exp(logits[e] - top);
    }
    taken[best] = 1;
    chosen.emplace_back(static_cast<int32_t>(best), static_cast<float>(1 / total));
  }
}

void route_row(const Rule& rule, const float* logits, const float* correction, int64_t experts,
               int32_t* ids, float* weights) {
  std::vector<Choice> chosen;
  chosen.reserve(rule.top_k);
  const bool nan = std::any_of(logits, logits + experts, [](float x) { return std::isnan(x); });
  if (nan) {
    for (int64_t k = 0; k < rule.top_k; k++) chosen.emplace_back(k, std::nanf(""));
  } else if (rule.scoring == Scoring::Sparsemixer) {
    sparsemixer(rule, logits, experts, chosen);
  } else {
    best_experts(rule, logits, correction, experts, chosen);
  }
  std::sort(chosen.begin(), chosen.end(), [](Choice a, Choice b) { return a.first < b.first; });
  float total = 1;
  if (rule.normalize) {
    // Sigmoids may all be near zero, the largest of a softmax is at least 1/E, but a correction may
    // choose others.
    total = rule.scoring == Scoring::Sigmoid ? 1e-20f : 0;
    for (const Choice& one : chosen) total += one.second;
    if (rule.scoring == Scoring::Softmax && correction) total = std::max(total, 1e-12f);
  }
  for (int64_t k = 0; k < rule.top_k; k++) {
    ids[k] = chosen[k].first, weights[k] = chosen[k].second / total * rule.scale;
  }
}

}  // namespace

void route(Pool& pool, const Rule& rule, const float* logits, const bool* valid,
           const float* correction, int64_t tokens, int64_t experts, int32_t* ids,
           float* weights) {
  const int64_t work = tokens * experts * 32;
  parallel_rows(pool, tokens, kRowsOfTask, work, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; t++) {
      int32_t* id = ids + t * rule.top_k;
      float* weight = weights + t * rule.top_k;
      if (valid[t]) {
        route_row(rule, logits + t * experts, correction, experts, id, weight);
      } else {
        std::fill_n(id, rule.top_k, static_cast<int32_t>(experts));
        std::fill_n(weight, rule.top_k, 0.0f);
      }
    }
  });
}

}  // namespace moejax
