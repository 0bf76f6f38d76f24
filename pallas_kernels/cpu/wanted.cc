// Which experts earlier steps say are needed next, in the order in which they are wanted, on the
// calling thread: for policies that are asked while a step waits.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#define MOEJAX_EXPORT extern "C" __attribute__((visibility("default")))

namespace moejax {
namespace {

struct Wanted {
  double urgency;
  int64_t place;  // layer · experts + expert
};

bool comes_first(const Wanted& a, const Wanted& b) {
  return a.urgency != b.urgency ? a.urgency > b.urgency : a.place < b.place;
}

// The `most` most urgent ones, equal ones by place: as columns [n, 3] of layer, expert and version
// 0, followed by their places [n]. Returns n.
int64_t write_queue(std::vector<Wanted>& wanted, int64_t most, int64_t experts, int64_t* out) {
  const int64_t count = std::min<int64_t>(most, wanted.size());
  std::partial_sort(wanted.begin(), wanted.begin() + count, wanted.end(), comes_first);
  for (int64_t i = 0; i < count; i++) {
    const int64_t place = wanted[i].place;
    out[3 * i] = place / experts, out[3 * i + 1] = place % experts, out[3 * i + 2] = 0;
    out[3 * count + i] = place;
  }
  return count;
}

// map_store.select_experts of a row: wanted[e] becomes the larger of itself and a chosen one's
// probability.
void choose(const float* likely, float score, int64_t experts, int64_t top_k,
            std::vector<int64_t>& order, float* wanted) {
  const float enough = std::min(std::max(1 - score, 0.0f), 1.0f);
  for (int64_t e = 0; e < experts; e++) order[e] = e;
  std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return likely[a] != likely[b] ? likely[a] > likely[b] : a < b;
  });
  float sum = 0;
  int64_t below = 0;  // sums never decrease
  for (; below < experts; below++) {
    sum += likely[order[below]];
    if (!(sum < enough)) break;
  }
  const int64_t count = std::min(std::max(top_k, below + 1), experts);
  for (int64_t i = 0; i < count; i++) {
    float& one = wanted[order[i]];
    one = std::max(one, likely[order[i]]);
  }
}

}  // namespace
}  // namespace moejax

// The queue of host_offload's ExpertMap after layer `now` (write_queue), by wanted [layers,
// experts]: the largest probability over distance first.
//
// Before, the maps that were found for the layers from `first` on change wanted and prior [layers,
// experts]. likely: [count, rows, experts], multiples of 2^-11, and scores: [rows] of them. Layers
// before `from` only get priors. priors: [2^11 + 1], the prior of each probability.
MOEJAX_EXPORT int64_t moejax_want_by_maps(const float* likely, int64_t count, int64_t rows,
                                          const float* scores, int64_t first, int64_t from,
                                          int64_t top_k, const int32_t* priors, float* wanted,
                                          int32_t* prior, int64_t layers, int64_t experts,
                                          int64_t now, int64_t* out) {
  using namespace moejax;
  std::vector<int64_t> order(experts);
  for (int64_t layer = first; layer < first + count; layer++) {
    const float* said = likely + (layer - first) * rows * experts;
    for (int64_t e = 0; e < experts; e++) {
      float largest = 0;
      for (int64_t n = 0; n < rows; n++) largest = std::max(largest, said[n * experts + e]);
      prior[layer * experts + e] = priors[std::min((int64_t)(largest * 2048), (int64_t)2048)];
    }
    if (layer < from) continue;
    float* mine = wanted + layer * experts;
    std::fill_n(mine, experts, 0.0f);
    for (int64_t n = 0; n < rows; n++) {
      choose(said + n * experts, scores[n], experts, top_k, order, mine);
    }
  }
  std::vector<Wanted> queue;
  for (int64_t place = (now + 1) * experts; place < layers * experts; place++) {
    if (wanted[place] == 0) continue;
    queue.push_back({(double)wanted[place] / (double)(place / experts - now), place});
  }
  return write_queue(queue, queue.size(), experts, out);
}

// The queue of host_offload's MoEInfinity after layer `now` (write_queue), at most `most`.
//
// Each of `count` sequences is compared with the `kept` matrices of the collection [kept, layers,
// experts], whose rows have lengths [kept, layers]. The nearest one of each is counted in used
// [kept], and says what its later layers are likely to need.
// sequences: addresses of int32 [layers, experts], tokens routed to each expert so far, which get
//   those of layer `now`, and of float32 [kept, layers], cosines, of which the layer's are replaced.
// ids: [tokens, chosen], experts of the layer; sequence: [tokens], to which each token belongs.
MOEJAX_EXPORT int64_t moejax_want_by_matrices(const float* collection, const float* lengths,
                                              int64_t kept, int64_t layers, int64_t experts,
                                              int64_t now, int64_t* const* sequences,
                                              int64_t count, const int16_t* ids,
                                              const int64_t* sequence, int64_t tokens,
                                              int64_t chosen, int64_t* used, int64_t most,
                                              int64_t* out) {
  using namespace moejax;
  const int64_t first = (now + 1) * experts, all = layers * experts;
  const auto row_of = [&](int64_t s) { return (int32_t*)sequences[2 * s] + now * experts; };
  for (int64_t t = 0; t < tokens; t++) {
    for (int64_t i = 0; i < chosen; i++) row_of(sequence[t])[ids[t * chosen + i]]++;
  }
  std::vector<double> likely(all - first);
  std::vector<float> row(experts);
  for (int64_t s = 0; s < count && kept; s++) {
    const int32_t* mine = row_of(s);
    int64_t sum = 0;
    for (int64_t e = 0; e < experts; e++) sum += mine[e];
    double squares = 0;
    for (int64_t e = 0; e < experts; e++) {
      row[e] = (float)((double)mine[e] / (double)std::max<int64_t>(sum, 1));
      squares += (double)row[e] * row[e];
    }
    const auto length = (float)std::sqrt(squares);
    auto* cosines = (float*)sequences[2 * s + 1];
    int64_t best = 0;
    float nearest = -INFINITY;
    for (int64_t n = 0; n < kept; n++) {
      const float* other = collection + n * all + now * experts;
      double product = 0;
      for (int64_t e = 0; e < experts; e++) product += (double)other[e] * row[e];
      const float both = lengths[n * layers + now] * length;
      cosines[n * layers + now] = (float)product / std::max(both, 1e-12f);
      double mean = 0;
      for (int64_t l = 0; l < layers; l++) mean += cosines[n * layers + l];
      const auto found = (float)(mean / (double)layers);
      if (found > nearest) best = n, nearest = found;
    }
    used[best]++;
    for (int64_t i = first; i < all; i++) likely[i - first] += collection[best * all + i];
  }
  std::vector<Wanted> queue;
  for (int64_t place = first; place < all; place++) {
    const auto ahead = (double)(place / experts - now);
    const double urgency = likely[place - first] * (1 - ahead / (double)(layers + 1));
    if (urgency != 0) queue.push_back({urgency, place});
  }
  return write_queue(queue, most, experts, out);
}
