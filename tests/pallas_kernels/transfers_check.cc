// The queue of transfers under random use from several threads, with injected delays, errors and
// short reads, without jax, for sanitizers. Arguments: a seed, a number of rounds, a file to write.
// Prints "ok" and what was done; anything else is a failure.
//
// What holds: bytes are right when a wait says that they are there; an entry flips after the last
// byte; a cell never has two writers; every chunk that begins is the one whose turn it is, so a
// demand waits for no chunk but those under way; what was cancelled leaves cell and entry as they
// were; whoever submitted is told an end, once.
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "pallas_kernels/cpu/transfer_queue.h"
#include "tests/faults.h"

using namespace moejax;

namespace {

constexpr int kCells = 6, kParts = 3;
constexpr int64_t kSource = 200001;

[[noreturn]] void fail(const std::string& what) {
  std::printf("%s\n", what.c_str());
  std::fflush(stdout);
  std::_Exit(1);
}

void expect(bool right, const std::string& what) {
  if (!right) fail(what);
}

using Rng = std::mt19937_64;
int64_t pick(Rng& rng, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(rng);
}

// One cell: in an allocation of exactly its size, behind a pad that moves it off the blocks' grid.
struct Cell {
  std::mutex mutex;  // held while something is put into it, and while it is looked at
  std::vector<uint8_t> memory;
  int64_t pad = 0, size = 0;
  int32_t entry = 0;
  int64_t ticket = 0, from = 0;  // of the last transfer into it, and its place in the source
  std::vector<int64_t> parts;
  std::vector<uint8_t> before;   // of that transfer; empty: not known
  bool ahead = false;            // it was queued ahead of need
  int32_t value = 0;
  uint8_t* bytes() { return memory.data() + pad; }
  int32_t flipped() { return __atomic_load_n(&entry, __ATOMIC_ACQUIRE); }
};

struct Round {
  TransferOptions options;
  TransferFaults faults;
  bool direct;
  const std::vector<uint8_t>& source;
  std::unique_ptr<TransferQueue> queue;
  int32_t file = -1;
  Cell cells[kCells];
  std::mutex mutex;                          // of what follows
  std::map<int64_t, std::pair<int, int64_t>> submitted;  // ticket → cell, bytes
  std::map<int64_t, TransferState> ends;
  std::atomic<bool> over{false}, closing{false};
  std::atomic<int64_t> retried{0};
  explicit Round(const std::vector<uint8_t>& source) : source(source) {}

  // How a transfer ended, observed or not; BEGUN or WAITING where it has not.
  TransferState state(int64_t ticket) {
    TransferRecord record;
    std::string why;
    if (queue->wait(queue->find(ticket), -1, 0, &record, &why) >= 0) return static_cast<TransferState>(record.state);
    std::lock_guard<std::mutex> held(mutex);
    const auto found = ends.find(ticket);
    expect(found != ends.end(), "ticket " + std::to_string(ticket) + " is lost");
    return found->second;
  }

  void observe() {
    std::lock_guard<std::mutex> held(mutex);
    std::vector<TransferRecord> flying, ended;
    const double busy = queue->observe(1 << 20, 1 << 20, &flying, &ended);
    expect(busy >= 0, "busy time");
    int64_t last = 0;
    for (const auto& r : flying) {
      expect(r.ticket > last && r.bytes_left >= 0 && r.bytes_left <= r.bytes, "flying");
      expect(!ends.count(r.ticket), "flies after its end");
      last = r.ticket;
    }
    for (const auto& r : ended) {
      expect(settled(static_cast<TransferState>(r.state)), "settled");
      expect(ends.emplace(r.ticket, static_cast<TransferState>(r.state)).second, "ended twice");
      if (r.state == (int32_t)TransferState::FAILED) {
        expect(faults.errors > 0 || faults.ahead_errors > 0, "failed: " + queue->message(r.ticket));
        expect(!queue->message(r.ticket).empty(), "failed without a word");
      }
    }
  }

  bool same(Cell& cell, int64_t first, int64_t n) {
    return !std::memcmp(cell.bytes() + first, source.data() + cell.from + first, (size_t)n);
  }

  // Of a cell whose mutex is held: what its entry and the end of its last transfer promise.
  void look(Cell& cell) {
    if (!cell.ticket) return;
    const bool flipped = cell.flipped() == cell.value;
    if (flipped) expect(same(cell, 0, cell.size), "the entry flipped before the last byte");
    const TransferState end = state(cell.ticket);
    if (end == TransferState::DONE) {
      expect(same(cell, 0, cell.size), "bytes are wrong after the end");
      expect(cell.flipped() == cell.value, "the entry did not flip");
    } else if (settled(end)) {
      expect(!flipped, "the entry flipped for nothing");
    }
    if (end == TransferState::CANCELLED && !cell.before.empty()) {
      expect(!std::memcmp(cell.before.data(), cell.bytes(), cell.before.size()),
             "a cancelled transfer left something");
    }
  }

  void submit(Rng& rng) {
    const int number = (int)pick(rng, 0, kCells - 1);
    Cell& cell = cells[number];
    std::lock_guard<std::mutex> held(cell.mutex);
    const bool quiet = !cell.ticket || settled(state(cell.ticket));
    std::vector<int64_t> parts;
    int64_t size = 0;
    for (int i = 0; i < kParts; i++) size += parts.emplace_back(pick(rng, 1, 9000));
    if (quiet) {  // nobody writes: other memory, other contents
      look(cell);
      cell.pad = pick(rng, 0, 1) ? 0 : pick(rng, 1, 64);
      cell.memory.assign((size_t)(cell.pad + size), (uint8_t)pick(rng, 0, 255));
      __atomic_store_n(&cell.entry, 0, __ATOMIC_RELEASE);
    } else {
      parts = cell.parts;
      size = cell.size;
    }
    TransferRequest request{};
    const int64_t from = pick(rng, 0, kSource - size);
    const bool memory = pick(rng, 0, 1);
    request.cell = number;
    request.destination = reinterpret_cast<int64_t>(cell.bytes());
    request.source = memory ? reinterpret_cast<int64_t>(source.data() + from) : from;
    request.file = memory ? -1 : file;
    request.entry = reinterpret_cast<int64_t>(&cell.entry);
    request.value = (int32_t)pick(rng, 1, 1 << 30);
    request.cause = (int32_t)pick(rng, 0, 2);
    request.priority = (int32_t)pick(rng, -2, 2);
    request.check = static_cast<Check>(pick(rng, 0, 2));
    request.parts = kParts;
    if (request.check != Check::NONE) {
      Checksum checksum(request.check);
      checksum.update(source.data() + from, size);
      request.checksum = checksum.value();
    }
    std::string why;
    std::vector<uint8_t> before;
    if (quiet) before.assign(cell.bytes(), cell.bytes() + size);
    const bool replacing = !pick(rng, 0, 3);
    const int64_t ticket = replacing ? queue->replace(request, parts.data(), &why)
                                     : queue->submit(request, parts.data(), &why);
    if (!ticket) {
      expect(!(quiet || replacing) || why == "the queue is closed", "refused: " + why);
      if (quiet || replacing) cell.ticket = 0;  // its memory is another one now, or nobody's
      return;
    }
    std::lock_guard<std::mutex> also(mutex);
    submitted[ticket] = {number, size};
    cell.ticket = ticket;
    cell.from = from;
    cell.parts = parts;
    cell.size = size;
    cell.before = std::move(before);
    cell.value = request.value;
    cell.ahead = request.cause;
  }

  // What failed ahead of need is queued again as a demand, and nothing else is.
  void retry(int number) {
    Cell& cell = cells[number];
    std::lock_guard<std::mutex> held(cell.mutex);
    if (!cell.ticket) return;
    const bool wanted = state(cell.ticket) == TransferState::FAILED && cell.ahead && !closing;
    expect(queue->demand(number) >= -1, "a ticket");
    const int64_t ticket = queue->retry(number);
    if (!ticket) return expect(!wanted || closing, "what failed is not tried again");
    std::lock_guard<std::mutex> also(mutex);
    expect(cell.ahead, "a demand that failed is tried again");
    submitted[ticket] = {number, cell.size};
    cell.ticket = ticket;
    cell.before.clear();
    cell.ahead = false;
    retried++;
  }

  void wait_ticket(Rng& rng, Cell& cell) {
    std::lock_guard<std::mutex> held(cell.mutex);
    if (!cell.ticket) return;
    const int64_t part = pick(rng, -1, kParts - 1);
    TransferRecord record;
    std::string why;
    if (queue->wait(queue->find(cell.ticket), part, -1, &record, &why) < 0) return look(cell);
    const auto end = static_cast<TransferState>(record.state);
    if (end == TransferState::FAILED || end == TransferState::CANCELLED) return look(cell);
    int64_t first = 0;
    for (int64_t i = 0; i < part; i++) first += cell.parts[(size_t)i];
    const bool right = part < 0 ? same(cell, 0, cell.size)
                                : same(cell, first, cell.parts[(size_t)part]);
    expect(right, "bytes are wrong after a wait for part " + std::to_string(part));
    look(cell);
  }

  void wait_cell(Rng& rng, int number) {
    Cell& cell = cells[number];
    std::lock_guard<std::mutex> held(cell.mutex);
    if (!cell.ticket) return;
    const int64_t part = pick(rng, -1, kParts - 1);
    const TransferState said = queue->wait_cell(number, part);
    if (said == TransferState::DONE && part == 0 && state(cell.ticket) != TransferState::CANCELLED) {
      expect(same(cell, 0, cell.parts[0]), "an op would have read a wrong part");
    }
    if (part < 0) {
      const TransferState end = state(cell.ticket);
      expect(settled(end), "an op would not have waited");
      // A cell in which one failed has failed again where the next one was cancelled.
      if (end == TransferState::FAILED) expect(said == end, "an op's status");
      if (said == TransferState::FAILED) {
        expect(end == said || end == TransferState::CANCELLED, "an op's status");
      }
    }
    look(cell);
  }

  void client(uint64_t seed, int steps) {
    Rng rng(seed);
    for (int i = 0; i < steps; i++) {
      const int number = (int)pick(rng, 0, kCells - 1);
      int64_t some = 0;
      {
        std::lock_guard<std::mutex> held(mutex);
        if (!submitted.empty()) some = submitted.rbegin()->first - pick(rng, 0, 5);
      }
      switch (pick(rng, 0, 9)) {
        case 0: wait_ticket(rng, cells[number]); break;
        case 1: wait_cell(rng, number); break;
        case 2: queue->cancel(some); break;
        case 3: queue->reorder(some, (int32_t)pick(rng, 0, 2), (int32_t)pick(rng, -2, 2)); break;
        case 4: {
          std::lock_guard<std::mutex> held(cells[number].mutex);
          look(cells[number]);
          break;
        }
        case 5: retry(number); break;
        default: submit(rng);
      }
    }
  }
};

// Follows what was recorded, by the rules of host_offload/queue/order.py.
void replay(const Round& round, const std::vector<TransferEvent>& events) {
  struct Open {
    int64_t cause, priority, next = 0, landed = 0, flying = 0;
    bool begun = false, broken = false;
  };
  std::map<int64_t, Open> open;
  std::map<int, int64_t> writers;
  for (const auto& e : events) {
    const std::string who = "ticket " + std::to_string(e.ticket);
    if (e.kind == TransferEvent::SUBMIT) {
      const int cell = round.submitted.at(e.ticket).first;
      expect(!writers.count(cell), "two writers of a cell: " + who);
      writers[cell] = e.ticket;
      open[e.ticket] = {e.a, e.b};
      continue;
    }
    const auto found = open.find(e.ticket);
    expect(found != open.end(), who + " is not open");
    Open& o = found->second;
    const auto [cell, bytes] = round.submitted.at(e.ticket);
    if (e.kind == TransferEvent::REORDER) {
      o.cause = e.a;
      o.priority = e.b;
    } else if (e.kind == TransferEvent::CANCEL) {
      expect(!o.begun, who + " was cancelled after it began");
    } else if (e.kind == TransferEvent::START) {
      const auto turn = std::make_tuple(o.cause != 0, o.priority, e.ticket);
      for (const auto& [other, t] : open) {
        const bool waits = t.next < round.submitted.at(other).second && !t.broken;
        if (waits) expect(turn <= std::make_tuple(t.cause != 0, t.priority, other), who + " began before its turn");
      }
      expect(e.a == o.next && !o.broken, who + " began another chunk");
      o.begun = true;
      o.next += e.b;
      o.flying++;
    } else if (e.kind == TransferEvent::END) {
      o.flying--;
      o.landed += e.b;
      if (!e.b) o.broken = true;
    } else {
      const auto end = static_cast<TransferState>(e.a);
      expect(!o.flying, who + " settled with chunks under way");
      if (end == TransferState::DONE) expect(o.landed == bytes, who + " is done too early");
      writers.erase(cell);
      open.erase(found);
    }
  }
  expect(open.empty(), "not everything has settled");
}

std::string run(Rng& rng, const std::vector<uint8_t>& source, const char* path, int64_t counts[4]) {
  Round round(source);
  const int64_t threads = pick(rng, 0, 3);
  const int64_t chunks[] = {700, 4096, 5000, 8192, 1 << 20};
  round.options = {threads, chunks[pick(rng, 0, 4)], pick(rng, 0, 2) ? 0 : 3e8, pick(rng, 0, 2) ? 0 : 50e-6};
  round.faults = {rng(), pick(rng, 0, 1) ? 0 : 200e-6, pick(rng, 0, 1) ? 0 : 0.05, pick(rng, 0, 1) ? 0 : 0.3,
                  pick(rng, 0, 1) ? 1.0 : 0.2, pick(rng, 0, 2) ? 0 : 0.2,
                  pick(rng, 0, 2) ? 0 : 0.5};
  round.queue = std::make_unique<TransferQueue>(round.options);
  std::string why;
  round.file = round.queue->add_file(path, pick(rng, 0, 1), &why);
  expect(round.file >= 0, why);
  inject(round.queue.get(), round.faults);
  round.queue->record(true);
  std::vector<std::thread> clients;
  for (int i = 0; i < 3; i++) clients.emplace_back([&round, seed = rng()] { round.client(seed, 60); });
  std::thread observer([&round] {
    while (!round.over) {
      round.observe();
      std::this_thread::sleep_for(std::chrono::microseconds(300));
    }
  });
  if (!pick(rng, 0, 3)) {  // while everybody is at it
    round.closing = true;
    round.queue->close();
  }
  for (auto& client : clients) client.join();
  round.queue->close();
  round.over = true;
  observer.join();
  round.observe();
  for (auto& cell : round.cells) {
    std::lock_guard<std::mutex> held(cell.mutex);
    round.look(cell);
  }
  expect(round.ends.size() == round.submitted.size(), "an end is missing");
  replay(round, round.queue->events());
  for (const auto& [ticket, end] : round.ends) counts[(int)end - (int)TransferState::DONE]++;
  counts[3] += round.retried;
  expect(round.queue->totals().retried == round.retried, "retries are counted");
  return "";
}

}  // namespace

int main(int argc, char** argv) {
  expect(argc == 4, "usage: transfers_check SEED ROUNDS FILE");
  Rng rng(std::strtoull(argv[1], nullptr, 10));
  std::vector<uint8_t> source((size_t)kSource);
  for (auto& byte : source) byte = (uint8_t)rng();
  FILE* file = std::fopen(argv[3], "wb");
  expect(file && std::fwrite(source.data(), 1, source.size(), file) == source.size(), argv[3]);
  std::fclose(file);
  int64_t counts[4] = {};
  for (int64_t i = 0; i < std::strtoll(argv[2], nullptr, 10); i++) run(rng, source, argv[3], counts);
  std::printf("ok %lld done, %lld failed, %lld cancelled, %lld tried again\n", (long long)counts[0],
              (long long)counts[1], (long long)counts[2], (long long)counts[3]);
}
