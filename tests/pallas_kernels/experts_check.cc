// expert_ffn whose records come by a queue, under random use, without jax: cells are filled on demand
// and ahead of need, chosen again while they fly, records without a cell come through buffers, with
// injected delays and errors. Every sum must have the bits that it has of records that are there, or
// be zeros and said to have failed. Arguments: a seed, a number of rounds. Prints "ok" and what
// happened; anything else is a failure.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "pallas_kernels/cpu/ops.h"
#include "pallas_kernels/cpu/pool.h"
#include "pallas_kernels/cpu/supply.h"
#include "tests/faults.h"

using namespace moejax;

namespace moejax {
extern const Kernels kernels_portable;
const Kernels* select_kernels() { return &kernels_portable; }  // those that this program has
}

namespace {

std::mt19937 rng;

int64_t pick(int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(rng);
}

void expect(bool right, const std::string& what) {
  if (right) return;
  std::printf("%s\n", what.c_str());
  std::fflush(stdout);
  std::_Exit(1);
}

// Threads of its own for each helper; joined at the end.
struct Threads : Pool {
  std::vector<std::thread> started;
  int64_t threads() const override { return 3; }
  int64_t small_work() const override { return 0; }
  void schedule(void (*run)(void*), void* data) override { started.emplace_back(run, data); }
  ~Threads() override {
    for (auto& thread : started) thread.join();
  }
};

constexpr int64_t kLayers = 2, kExperts = 6, kBatch = 5, kTopK = 2;

struct Counts {
  int64_t ahead = 0, failed = 0, retried = 0, waits = 0, cancelled = 0;
};

struct Round {
  Format format{};
  StoredVersion version{};
  int64_t cells = pick(0, 7);
  std::vector<uint16_t> store, arena;
  std::vector<int32_t> address = std::vector<int32_t>(kLayers * kExperts, -1);
  std::vector<int32_t> versions = std::vector<int32_t>(kLayers * kExperts, 0);
  std::vector<int64_t> owner;  // of cells: layer · kExperts + expert, or -1
  TransferFaults faults{};
  std::shared_ptr<TransferQueue> queue;
  std::unique_ptr<Supply> supply;  // last: it closes the queue, which writes into the arena

  Round() {
    format.hidden = 16 * pick(1, 8), format.width = 4 * pick(1, 24), format.type = Type::BF16;
    format.rows = 3 * format.width;
    for (int m : {UP, DOWN}) format.matrix[m].codes = m * format.width;
    store.resize((size_t)(kLayers * kExperts * format.rows * format.hidden));
    for (auto& bits : store) bits = (uint16_t)(pick(0, 1) << 15 | (0x3d00 + pick(0, 0x1ff)));
    arena.assign((size_t)(std::max<int64_t>(cells, 1) * format.rows * format.hidden), 0x7fff);
    owner.assign((size_t)cells, -1);
    version.cell = version.held = format, version.store = store.data();
    version.layers = kLayers, version.experts = kExperts, version.places = {0, 1};
    const int64_t chunks[] = {512, 3000, 1 << 20};
    queue = std::make_shared<TransferQueue>(
        TransferOptions{pick(1, 3), chunks[pick(0, 2)], pick(0, 2) ? 0 : 2e8, 0});
    faults = {rng(), 300e-6, pick(0, 3) ? 0 : 0.01, 0, pick(0, 1) ? 0.9 : 0.1,
              pick(0, 2) ? 0 : 0.3, pick(0, 2) ? 0 : 0.7};
    inject(queue.get(), faults);
    Sources sources{1, kLayers, kExperts, {}, {}, {0, 0, 0}, {nullptr}};
    const int64_t record = format.rows * format.hidden * 2;
    for (int64_t i = 0; i < kLayers * kExperts; i++) {
      const auto place = reinterpret_cast<int64_t>(store.data()) + i * record;
      Checksum sum(Check::CRC32C);
      sum.update(reinterpret_cast<const uint8_t*>(place), record);
      const bool checked = pick(0, 2) == 0;
      sources.records.push_back({{place, place + record / 3, place + record / 3 * 2},
                                 checked ? sum.value() : 0, {kMemory, kMemory, kMemory},
                                 checked ? Check::CRC32C : Check::NONE});
    }
    if (pick(0, 3)) sources.parts = {{record / 3, record / 3, record / 3}};
    else sources.parts = {{record}};
    supply = std::make_unique<Supply>(queue, std::move(sources), SupplyCauses{0, 1}, pick(1, 3));
  }

  // Moves experts of a layer into cells: of those that nobody of `kept` has.
  void bring(int64_t layer, const std::vector<int32_t>& wanted, const std::set<int64_t>& kept,
             bool ahead) {
    std::vector<int32_t> expert, row, number;
    std::set<int64_t> taken;
    for (int32_t e : wanted) {
      const int64_t who = layer * kExperts + e;
      if (address[(size_t)who] >= 0 || !cells) continue;
      const int64_t cell = pick(0, cells - 1);
      const int64_t before = owner[(size_t)cell];
      if (taken.count(cell) || kept.count(before)) continue;
      if (before >= 0) address[(size_t)before] = -1;
      taken.insert(cell);
      owner[(size_t)cell] = who;
      address[(size_t)who] = (int32_t)(cell * format.rows);
      expert.push_back(e), row.push_back((int32_t)(cell * format.rows)), number.push_back(0);
    }
    Threads pool;
    fill(pool, kernels_portable, {records(), layer, expert.data(), row.data(), number.data(),
                                  (int64_t)expert.size(), ahead});
  }

  Records records() {
    return {arena.data(), (int64_t)arena.size() / format.hidden, format.hidden, {version},
            supply.get()};
  }

  Experts call(const std::vector<uint16_t>& x, const std::vector<int32_t>& ids,
               const std::vector<int32_t>& active, int64_t layer, std::vector<float>& y) {
    return {Type::BF16, kBatch, kTopK, format.width, kLayers, kExperts, SILU, x.data(), ids.data(),
            records(), layer, address.data(), versions.data(), active.data(),
            (int64_t)active.size(), y.data(), 7};
  }

  void step() {
    const int64_t layer = pick(0, kLayers - 1);
    std::vector<int32_t> active, ids(kBatch * kTopK);
    for (int32_t e = 0; e < kExperts; e++) {
      if (pick(0, 1)) active.push_back(e);
    }
    for (auto& id : ids) id = (int32_t)pick(0, kExperts);
    std::vector<uint16_t> x((size_t)(kBatch * format.hidden));
    for (auto& bits : x) bits = (uint16_t)(0x3e00 + pick(0, 0x1ff));
    std::set<int64_t> kept;
    for (int32_t e : active) kept.insert(layer * kExperts + e);
    bring(layer, active, kept, false);

    const size_t size = (size_t)(kBatch * kTopK * format.hidden);
    std::vector<float> want(size, 55), got(size, 55);
    {
      const auto resident = std::move(address);
      address.assign(resident.size(), -1);
      Experts c = call(x, ids, active, layer, want);
      c.records.supply = nullptr;
      Threads pool;
      run_experts(pool, kernels_portable, c);
      address = resident;
    }
    {
      Threads pool;
      const Experts c = call(x, ids, active, layer, got);
      run_experts(pool, kernels_portable, c);
    }
    std::set<int64_t> failed;
    for (const auto& failure : supply->failures(7)) {
      expect(faults.errors > 0, "an expert failed, and no demand did: " + failure.message);
      expect(failure.layer == layer && !failure.message.empty(), "whose failure it is");
      failed.insert(failure.expert);
    }
    for (size_t i = 0; i < size; i++) {
      const int32_t e = ids[i / (size_t)format.hidden];
      if (failed.count(e)) want[i] = 0;
      expect(!std::memcmp(&got[i], &want[i], sizeof(float)), "a sum has other bits");
    }
    if (!failed.empty() || !pick(0, 7)) drain();
    const int64_t next = pick(0, kLayers - 1);
    std::vector<int32_t> wanted;
    for (int32_t e = 0; e < kExperts; e++) {
      if (!pick(0, 2)) wanted.push_back(e);
    }
    bring(next, wanted, {}, true);
  }

  void drain() {
    for (int64_t row : queue->drain()) {
      if (row < 0) continue;  // a buffer
      int64_t& who = owner[(size_t)(row / format.rows)];
      address[(size_t)who] = -1, who = -1;
    }
  }
};

}  // namespace

int main(int argc, char** argv) {
  expect(argc == 3, "usage: experts_check SEED ROUNDS");
  rng.seed((unsigned)std::atoi(argv[1]));
  Counts all;
  for (int i = 0; i < std::atoi(argv[2]); i++) {
    Round round;
    for (int step = 0; step < 20; step++) round.step();
    const TransferTotals totals = round.queue->totals();
    all.ahead += totals.ahead, all.failed += totals.failed, all.retried += totals.retried;
    all.waits += totals.waits, all.cancelled += totals.cancelled;
  }
  std::printf("ok %lld ahead, %lld failed, %lld tried again, %lld waits, %lld cancelled\n",
              (long long)all.ahead, (long long)all.failed, (long long)all.retried,
              (long long)all.waits, (long long)all.cancelled);
}
