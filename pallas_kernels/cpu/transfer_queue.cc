// The queue of transfers: see transfer_queue.h, and docs/explanation/transfers.md for why it is as it is.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE  // O_DIRECT
#endif
#include "pallas_kernels/cpu/transfer_queue.h"

#include "pallas_kernels/cpu/copy.h"
#include "pallas_kernels/cpu/faults.h"
#include "pallas_kernels/cpu/transpose.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#ifdef __linux__
#include <sys/prctl.h>
#endif

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <iterator>

namespace moejax {
namespace {

// What O_DIRECT wants of places in files, of addresses and of sizes; 512 would do on many disks.
constexpr int64_t kBlock = 4096;

// A pipe in a file's place does not wait for a writer: it is no regular file, or another one.
constexpr int kOpen = O_RDONLY | O_CLOEXEC | O_NONBLOCK;

// Reads of a block in pieces, none of which is the wanted one.
constexpr int kStuck = 100;

// A late thread is caught up with by the link's rate, up to this long.
constexpr double kLate = 300e-6;

double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

void sleep_until(double when) {
  for (double left; (left = when - now()) > 0;) {
    const auto whole = (time_t)left;
    const timespec t{whole, (long)((left - (double)whole) * 1e9)};
    nanosleep(&t, nullptr);
  }
}

int64_t down(int64_t n) { return n / kBlock * kBlock; }

std::string reason(int error) {
  char text[128];
#ifdef __GLIBC__
  return strerror_r(error, text, sizeof text);
#else
  return strerror_r(error, text, sizeof text) ? "error " + std::to_string(error) : text;
#endif
}

int64_t nanoseconds(const struct timespec& t) { return t.tv_sec * 1'000'000'000 + t.tv_nsec; }

// What must not change of a file: device, number, size, time of the last write. A program can set
// that time back, so where no checksum is compared, the time of the last change counts as well.
struct Identity {
  uint64_t device, number;
  int64_t size, written, changed;
  explicit Identity(const struct stat& s)
      : device(s.st_dev), number(s.st_ino), size(s.st_size), written(nanoseconds(s.st_mtim)),
        changed(nanoseconds(s.st_ctim)) {}
  bool same(const struct stat& s, bool checked) const {
    const Identity o(s);
    return device == o.device && number == o.number && size == o.size && written == o.written &&
           (checked || changed == o.changed);
  }
};

}  // namespace

struct TransferQueue::File {
  std::string path;
  bool direct;
  Identity identity;
};

struct TransferQueue::Transfer {
  int64_t ticket = 0;
  TransferRequest request;
  int32_t asked = 0;          // the cause that it was queued with
  bool late = false;          // an op waited for it
  bool hangs = false;         // given up, though its read has not returned
  std::vector<int64_t> parts; // their bytes
  std::vector<int64_t> left;  // bytes of each part that are not there
  std::vector<Chunk> chunks;
  std::vector<char> ended;    // by chunk
  size_t next = 0;            // the first chunk that has not begun
  size_t hashed = 0;          // chunks in the checksum
  bool hashing = false;
  int64_t bytes = 0, under_way = 0;
  double submitted = 0;
  TransferState state = TransferState::WAITING;
  std::string failure;
  std::unique_ptr<Checksum> checksum;
  Unpack unpack;
  Pieces pieces;
  struct Opened {
    const File* file = nullptr;
    int fd = -1;
  };
  std::vector<Opened> opened;  // by part; parts of one file have the descriptor of the first
  std::mutex opening;
  std::shared_ptr<Transfer> before;  // that failed in this cell: it has again if this is cancelled

  Turn turn() const { return {request.cause != 0, request.priority, ticket}; }
  // The first part of the same file.
  size_t slot(size_t part) const {
    size_t first = 0;
    while (opened[first].file != opened[part].file) first++;
    return first;
  }
  int64_t first_of(int64_t part) const {
    int64_t first = 0;
    for (int64_t p = 0; p < part; p++) first += parts[(size_t)p];
    return first;
  }
  bool turned(int64_t part) const { return pieces.row && part + 1 == (int64_t)parts.size(); }
  ~Transfer() {
    for (const Opened& each : opened) {
      if (each.fd >= 0) ::close(each.fd);
    }
  }
};

// Memory of a thread for what a direct read cannot put where it belongs.
struct TransferQueue::Bounce {
  explicit Bounce(int64_t chunk) : size(down(chunk + kBlock - 1) + 2 * kBlock) {}
  uint8_t* get() {
    if (!data) data = static_cast<uint8_t*>(std::aligned_alloc((size_t)kBlock, (size_t)size));
    if (!data) throw std::bad_alloc();
    return data;
  }
  ~Bounce() { std::free(data); }
  const int64_t size;
  uint8_t* data = nullptr;
};

TransferQueue::TransferQueue(const TransferOptions& options) : options_(options) {
  try {
    for (int64_t i = 0; i < options_.threads; i++) threads_.emplace_back([this] { work(); });
  } catch (...) {
    close();
    throw;
  }
}

TransferQueue::~TransferQueue() {
  close();
  faults::forget(this);
}

int32_t TransferQueue::add_file(const std::string& path, bool direct, std::string* why) {
  int flags = kOpen;
#ifdef O_DIRECT
  int fd = ::open(path.c_str(), flags | (direct ? O_DIRECT : 0));
  if (fd < 0 && direct && errno == EINVAL) {  // a filesystem without it
    direct = false;
    fd = ::open(path.c_str(), flags);
  }
#else
  direct = false;
  int fd = ::open(path.c_str(), flags);
#endif
  struct stat s {};
  if (fd < 0 || fstat(fd, &s)) {
    *why = path + ": " + reason(errno);
    if (fd >= 0) ::close(fd);
    return -1;
  }
  ::close(fd);
  if (!S_ISREG(s.st_mode)) {
    *why = path + ": not a regular file";
    return -1;
  }
  Held held(mutex_);
  files_.push_back(std::make_unique<File>(File{path, direct, Identity(s)}));
  return (int32_t)files_.size() - 1;
}

bool TransferQueue::direct(int32_t file) {
  Held held(mutex_);
  return file >= 0 && (size_t)file < files_.size() && files_[(size_t)file]->direct;
}

std::shared_ptr<TransferQueue::Transfer> TransferQueue::made(const TransferRequest& request,
                                                              const int64_t* part_bytes,
                                                              Pieces pieces,
                                                              std::string* why) const {
  auto transfer = std::make_shared<Transfer>();
  transfer->request = request;
  transfer->asked = request.cause;
  const bool apart = !pieces.parts.empty();
  for (int32_t part = 0; part < request.parts; part++) {
    if (part_bytes[part] < 1) break;
    transfer->parts.push_back(part_bytes[part]);
    if (!apart) pieces.parts.push_back({request.file, request.source + transfer->bytes});
    if (pieces.blocks) {  // a matrix at once, however long
      const auto count = (int64_t)pieces.blocks->size(), each = part_bytes[part] / count;
      for (int64_t i = 0; i < count; i++) {
        const int64_t n = i + 1 < count ? each : part_bytes[part] - i * each;
        transfer->chunks.push_back({part, i * each, n});
      }
      transfer->bytes += part_bytes[part];
      continue;
    }
    const int64_t row = part + 1 == request.parts ? pieces.row : 0;  // whole ones are transposed
    const int64_t unit = row ? row : std::max(pieces.item, int64_t{1});
    const int64_t most = std::max(options_.chunk_bytes / unit, int64_t{1}) * unit;
    for (int64_t at = 0; at < part_bytes[part]; at += most) {
      const int64_t n = std::min(most, part_bytes[part] - at);
      transfer->chunks.push_back({part, transfer->bytes + at, n});
    }
    transfer->bytes += part_bytes[part];
  }
  if (request.parts < 1 || (int32_t)transfer->parts.size() < request.parts) {
    *why = "a transfer needs bytes in each part";
    return nullptr;
  }
  transfer->pieces = std::move(pieces);
  transfer->left = transfer->parts;
  transfer->ended.resize(transfer->chunks.size());
  if (request.check != Check::NONE) transfer->checksum = std::make_unique<Checksum>(request.check);
  transfer->submitted = now();
  return transfer;
}

// Why a transfer cannot be queued, or empty; sets its files.
std::string TransferQueue::refusal(Transfer& transfer) {
  if (stopping_) return "the queue is closed";
  const auto& pieces = transfer.pieces;
  transfer.opened.assign(pieces.parts.size(), {});
  for (size_t part = 0; part < pieces.parts.size(); part++) {
    const auto [file, source] = pieces.parts[part];
    const int64_t nbytes = pieces.blocks ? (*pieces.blocks)[part].bytes : transfer.parts[part];
    if (file >= (int32_t)files_.size()) return "there is no file " + std::to_string(file);
    if (file < 0) continue;
    const File& found = *files_[(size_t)file];
    transfer.opened[part].file = &found;
    if (source < 0 || source > found.identity.size - nbytes) {
      return found.path + " has " + std::to_string(found.identity.size) + " bytes, not " +
             std::to_string(nbytes) + " from " + std::to_string(source) + " on";
    }
  }
  return "";
}

// Of a cell that has no writer.
void TransferQueue::enqueue(const std::shared_ptr<Transfer>& transfer) {
  auto& writer = cells_[transfer->request.cell];
  if (writer) writer->before = nullptr;
  transfer->before = std::move(writer);
  writer = transfer;
  concerns_ = (int64_t)cells_.size();
  transfer->ticket = ++tickets_;
  transfers_[transfer->ticket] = transfer;
  turns_[lane_of(*transfer)].insert(transfer->turn());
  note(TransferEvent::SUBMIT, transfer->ticket, transfer->request.cause, transfer->request.priority);
}

int64_t TransferQueue::submit(const TransferRequest& request, const int64_t* part_bytes,
                              std::string* why) {
  const auto transfer = made(request, part_bytes, {}, why);
  if (!transfer) return 0;
  Held held(mutex_);
  *why = refusal(*transfer);
  if (!why->empty()) return 0;
  const auto found = cells_.find(request.cell);
  if (found != cells_.end() && !settled(found->second->state)) {
    *why = "cell " + std::to_string(request.cell) + " has a transfer under way, ticket " +
           std::to_string(found->second->ticket) + "; wait for it, or cancel it";
    return 0;
  }
  enqueue(transfer);
  held.unlock();
  work_.notify_all();
  return transfer->ticket;
}

int64_t TransferQueue::replace(const TransferRequest& request, const int64_t* part_bytes,
                               std::string* why, Unpack unpack, Pieces pieces) {
  auto transfer = made(request, part_bytes, std::move(pieces), why);
  if (transfer) transfer->unpack = std::move(unpack);
  Held held(mutex_);
  if (!evict(held, request.cell)) {
    *why = cells_[request.cell]->failure;
    totals_.failed++;
    return 0;
  }
  if (transfer) *why = refusal(*transfer);
  if (!why->empty()) {
    if (!transfer) transfer = std::make_shared<Transfer>();
    transfer->request = request;
    transfer->failure = *why;
    transfer->state = TransferState::FAILED;
    totals_.failed++;
    cells_[request.cell] = transfer;
    concerns_ = (int64_t)cells_.size();
    return 0;
  }
  enqueue(transfer);
  held.unlock();
  work_.notify_all();
  return transfer->ticket;
}

bool TransferQueue::vacate(int64_t cell) {
  Held held(mutex_);
  if (!evict(held, cell)) return false;
  cells_.erase(cell);
  concerns_ = (int64_t)cells_.size();
  return true;
}

// Leaves no writer of the cell that has not settled; false: its read hangs.
bool TransferQueue::evict(Held& held, int64_t cell) {
  for (auto found = cells_.find(cell); found != cells_.end() && !settled(found->second->state);
       found = cells_.find(cell)) {
    const auto writer = found->second;
    if (writer->hangs) return false;
    if (writer->state == TransferState::WAITING) {
      take_back(*writer);
      continue;
    }
    if (writer->request.cause) give_turn(*writer, 0, writer->request.priority);
    wait_as_op(held, *writer, -1);
  }
  return true;
}

std::set<int64_t> TransferQueue::drain() {
  Held held(mutex_);
  const auto flying = [this] {
    for (const auto& [cell, transfer] : cells_) {
      if (!settled(transfer->state) && !transfer->hangs) return transfer;
    }
    return std::shared_ptr<Transfer>();
  };
  while (const auto transfer = flying()) wait_as_op(held, *transfer, -1);
  std::set<int64_t> failed;
  for (auto it = cells_.begin(); it != cells_.end();) {
    failed.insert(it->first);
    it = it->second->hangs && !settled(it->second->state) ? std::next(it) : cells_.erase(it);
  }
  concerns_ = (int64_t)cells_.size();
  return failed;
}

int64_t TransferQueue::hanging() {
  Held held(mutex_);
  int64_t count = 0;
  for (const auto& [ticket, transfer] : transfers_) {
    count += transfer->hangs && !settled(transfer->state);
  }
  return count;
}

// Whether what is under way has not moved for too long.
bool TransferQueue::late() const {
  const double chunk = options_.rate > 0 ? (double)options_.chunk_bytes / options_.rate : 0;
  return options_.patience > 0 && under_way_[LINK] + under_way_[HERE] > 0 &&
         now() - moved_ > options_.patience + options_.latency + chunk;
}

// Nothing can end a read of a disk that does not answer: whoever waits is told that its bytes do not
// come, and what is under way settles when its read returns.
void TransferQueue::give_up_late() {
  std::string why = "no answer";
  std::vector<std::shared_ptr<Transfer>> all;
  for (const auto& [ticket, transfer] : transfers_) {
    if (settled(transfer->state)) continue;
    if (transfer->under_way && !transfer->hangs) {
      for (const auto& [file, fd] : transfer->opened) {
        if (file && all.empty()) why = file->path + ": no answer";
      }
      all.insert(all.begin(), transfer);
    } else if (!transfer->hangs) {
      all.push_back(transfer);
    }
  }
  char text[64];
  snprintf(text, sizeof text, " within %g s", options_.patience);
  why += text;
  for (const auto& transfer : all) {
    turns_[lane_of(*transfer)].erase(transfer->turn());
    transfer->next = transfer->chunks.size();
    transfer->failure = why;
    if (transfer->under_way) transfer->hangs = true;
    else settle(*transfer, TransferState::FAILED);
  }
  news_.notify_all();
}

void TransferQueue::take_back(Transfer& transfer) {
  turns_[lane_of(transfer)].erase(transfer.turn());
  note(TransferEvent::CANCEL, transfer.ticket, 0, 0);
  settle(transfer, TransferState::CANCELLED);
}

int64_t TransferQueue::retry(int64_t cell) {
  Held held(mutex_);
  const auto found = cells_.find(cell);
  if (found == cells_.end()) return 0;
  const Transfer& failed = *found->second;
  if (failed.state != TransferState::FAILED || !failed.asked) return 0;
  TransferRequest request = failed.request;
  request.cause = 0;
  std::string why;
  const auto transfer = made(request, failed.parts.data(), failed.pieces, &why);
  if (!transfer || !refusal(*transfer).empty()) return 0;
  transfer->unpack = failed.unpack;
  totals_.retried++;
  enqueue(transfer);
  held.unlock();
  work_.notify_all();
  return transfer->ticket;
}

bool TransferQueue::cancel(int64_t ticket) {
  Held held(mutex_);
  const auto found = transfers_.find(ticket);
  if (found == transfers_.end() || found->second->state != TransferState::WAITING) return false;
  const auto transfer = found->second;
  take_back(*transfer);
  return true;
}

bool TransferQueue::reorder(int64_t ticket, int32_t cause, int32_t priority) {
  Held held(mutex_);
  const auto found = transfers_.find(ticket);
  if (found == transfers_.end() || settled(found->second->state)) return false;
  give_turn(*found->second, cause, priority);
  return true;
}

void TransferQueue::give_turn(Transfer& transfer, int32_t cause, int32_t priority) {
  auto& turns = turns_[lane_of(transfer)];
  const bool waits = turns.erase(transfer.turn());
  transfer.request.cause = cause;
  transfer.request.priority = priority;
  if (waits) turns.insert(transfer.turn());
  note(TransferEvent::REORDER, transfer.ticket, cause, priority);
}

// ---- carrying out

TransferQueue::Lane TransferQueue::lane_of(const Transfer& transfer) {
  return transfer.unpack ? HERE : LINK;
}

bool TransferQueue::runnable() const {
  return (!turns_[LINK].empty() && !link_taken_) || !turns_[HERE].empty();
}

double TransferQueue::busy(Lane lane) const {
  return busy_[lane] + (under_way_[lane] ? now() - busy_since_[lane] : 0);
}

void TransferQueue::work() {
#ifdef __linux__
  prctl(PR_SET_NAME, "transfers");
  prctl(PR_SET_TIMERSLACK, 1);
#endif
  Bounce bounce(options_.chunk_bytes);
  Held held(mutex_);
  for (;;) {
    work_.wait(held, [this] { return runnable() || (stopping_ && idle()); });
    if (idle()) return;
    carry_out(held, bounce);
  }
}

bool TransferQueue::step() {
  Bounce bounce(options_.chunk_bytes);
  Held held(mutex_);
  if (!runnable()) return false;
  carry_out(held, bounce);
  return true;
}

// Takes the chunk whose turn it is, moves it without the lock, and notes its end.
void TransferQueue::carry_out(Held& held, Bounce& bounce) {
  const bool link = !turns_[LINK].empty() && !link_taken_;
  // A link of some rate is reserved first: who carries its chunk waits, and others unpack meanwhile.
  const bool first = turns_[HERE].empty() || options_.rate > 0 ||
                     (link && *turns_[LINK].begin() < *turns_[HERE].begin());
  const Lane lane = link && first ? LINK : HERE;
  auto& turns = turns_[lane];
  const auto transfer = transfers_.at(std::get<2>(*turns.begin()));
  const size_t index = transfer->next++;
  const Chunk chunk = transfer->chunks[index];
  if (transfer->next == transfer->chunks.size()) turns.erase(turns.begin());
  transfer->state = TransferState::BEGUN;
  transfer->under_way++;
  const double began = moved_ = now();
  if (!under_way_[lane]++) busy_since_[lane] = began;
  double there = began;
  const bool limited = lane == LINK && options_.rate > 0;
  if (limited) {
    // The link is reserved before the copy and by one chunk at a time: a demand waits for one.
    link_taken_ = true;
    const double ready = std::max(link_free_, transfer->submitted);
    there = link_free_ = std::max(ready, began - kLate) + (double)chunk.bytes / options_.rate;
  }
  note(TransferEvent::START, transfer->ticket, chunk.first, chunk.bytes);
  if (idle() && stopping_) work_.notify_all();
  held.unlock();
  std::string failure;
  try {
    failure = move(*transfer, chunk, bounce);
  } catch (const std::bad_alloc&) {
    failure = "no memory to read through";
  }
  if (limited) {
    sleep_until(there);
    held.lock();
    link_taken_ = false;
    held.unlock();
    work_.notify_one();
  }
  if (lane == LINK && options_.latency > 0) sleep_until(there + options_.latency);
  held.lock();
  end(held, *transfer, index, std::move(failure));
}

void TransferQueue::end(Held& held, Transfer& transfer, size_t index, std::string failure) {
  const Chunk& chunk = transfer.chunks[index];
  moved_ = now();
  note(TransferEvent::END, transfer.ticket, chunk.first, failure.empty() ? chunk.bytes : 0);
  if (failure.empty()) {
    transfer.left[(size_t)chunk.part] -= chunk.bytes;
    transfer.ended[index] = 1;
    if (!transfer.left[(size_t)chunk.part]) news_.notify_all();
    // Checksums go through the bytes in order; who ends a chunk takes all that are next.
    while (transfer.checksum && !transfer.hashing && transfer.hashed < transfer.chunks.size() &&
           transfer.ended[transfer.hashed]) {
      const Chunk& next = transfer.chunks[transfer.hashed];
      transfer.hashing = true;
      held.unlock();
      const auto bytes = reinterpret_cast<const uint8_t*>(transfer.request.destination) + next.first;
      transfer.checksum->update(bytes, next.bytes);
      held.lock();
      transfer.hashing = false;
      transfer.hashed++;
    }
  } else {
    if (transfer.failure.empty()) transfer.failure = std::move(failure);
    turns_[lane_of(transfer)].erase(transfer.turn());
    transfer.next = transfer.chunks.size();
    if (idle() && stopping_) work_.notify_all();
  }
  if (!options_.threads) news_.notify_all();  // who waits may carry out the next one
  const Lane lane = lane_of(transfer);
  if (!--under_way_[lane]) busy_[lane] += now() - busy_since_[lane];
  if (--transfer.under_way || transfer.next < transfer.chunks.size()) return;
  if (transfer.failure.empty() && transfer.checksum &&
      transfer.checksum->value() != transfer.request.checksum) {
    transfer.failure = "the bytes do not have their checksum";
    const File* const file = transfer.opened[0].file;
    if (file) transfer.failure = file->path + ": " + transfer.failure;
  }
  for (auto& [file, fd] : transfer.opened) {
    if (fd < 0) continue;
    struct stat s {};
    if (transfer.failure.empty() &&
        (fstat(fd, &s) || !file->identity.same(s, transfer.checksum != nullptr))) {
      transfer.failure = file->path + ": changed while it was read";
    }
    ::close(fd);
    fd = -1;
  }
  settle(transfer, transfer.failure.empty() ? TransferState::DONE : TransferState::FAILED);
}

void TransferQueue::settle(Transfer& transfer, TransferState state) {
  transfer.state = state;
  const auto& request = transfer.request;
  if (state == TransferState::DONE && request.entry) {
    __atomic_store_n(reinterpret_cast<int32_t*>(request.entry), request.value, __ATOMIC_RELEASE);
  }
  if (state == TransferState::CANCELLED && transfer.before) {
    transfer.before->asked = 0;  // it is not tried again: its place was wanted for something else
    cells_[request.cell] = transfer.before;
  } else if (state != TransferState::FAILED) {
    cells_.erase(request.cell);
  }
  transfer.before = nullptr;
  concerns_ = (int64_t)cells_.size();
  if (state == TransferState::DONE) {
    if (transfer.unpack) {
      totals_.unpacked++, totals_.unpacked_bytes += transfer.bytes;
    } else {
      (transfer.asked ? totals_.ahead : totals_.demands)++;
      (transfer.asked ? totals_.ahead_bytes : totals_.demand_bytes) += transfer.bytes;
    }
    totals_.late += transfer.asked && transfer.late && !transfer.unpack;
  } else {
    (state == TransferState::FAILED ? totals_.failed : totals_.cancelled)++;
  }
  note(TransferEvent::SETTLE, transfer.ticket, (int64_t)state, 0);
  const auto found = transfers_.find(transfer.ticket);
  if (!forgetful_) ended_.push_back(found->second);
  else transfers_.erase(found);  // its caller keeps it
  news_.notify_all();
}

std::string TransferQueue::move(Transfer& transfer, const Chunk& chunk, Bounce& bounce) {
  faults::delay(this, transfer.asked);
  const auto part = (size_t)chunk.part;
  const File* const file = transfer.opened[part].file;
  if (const char* const error = faults::error(this, transfer.asked)) {
    return (file ? file->path : "memory") + ": " + error;
  }
  auto* const to = reinterpret_cast<uint8_t*>(transfer.request.destination) + chunk.first;
  std::string failure;
  if (transfer.unpack) {
    transfer.unpack(to, chunk.first, chunk.bytes);
  } else if (transfer.pieces.blocks) {
    failure = move_blocks(transfer, chunk, bounce);
  } else if (transfer.turned(chunk.part)) {
    std::vector<uint8_t> rows((size_t)chunk.bytes);
    failure = move_piece(transfer, chunk, rows.data(), bounce);
    const int64_t row = transfer.pieces.row, first = transfer.first_of(chunk.part);
    if (failure.empty()) {
      const int64_t item = transfer.pieces.item;
      transpose(rows.data(), chunk.bytes / row, row, row / item, item,
                to - (chunk.first - first), (chunk.first - first) / row,
                transfer.parts[part] / row);
    }
  } else {
    failure = move_piece(transfer, chunk, to, bounce);
  }
  faults::delay(this, transfer.asked);
  return failure;
}

// A matrix of blocks, into its places in the record.
std::string TransferQueue::move_blocks(Transfer& transfer, const Chunk& chunk, Bounce& bounce) {
  const auto& matrices = *transfer.pieces.blocks;
  const auto part = (size_t)(chunk.first / (transfer.bytes / (int64_t)matrices.size()));
  const BlockMatrix& matrix = matrices[part];
  const auto [file, source] = transfer.pieces.parts[part];
  static thread_local std::vector<uint8_t> memory;  // of this thread, for one matrix after the other
  const uint8_t* raw = reinterpret_cast<const uint8_t*>(source);
  if (transfer.opened[part].file) {
    if ((int64_t)memory.size() < matrix.bytes + 2 * kBlock) {
      memory.resize((size_t)(matrix.bytes + 2 * kBlock));
    }
    // Where places in memory and in the file agree, bytes come straight.
    const auto begin = reinterpret_cast<intptr_t>(memory.data());
    auto* const to = memory.data() + ((source - begin) % kBlock + kBlock) % kBlock;
    const size_t slot = transfer.slot(part);
    std::string failure = open_file(transfer, slot);
    if (failure.empty()) failure = read(transfer, slot, to, source, matrix.bytes, bounce);
    if (!failure.empty()) return failure;
    raw = to;
  }
  auto* const record = reinterpret_cast<uint8_t*>(transfer.request.destination);
  if (put_blocks(matrix, raw, record)) return "the record has no room for a matrix";
  const char* const wrong = wrong_numbers(matrix, record);
  if (!wrong) return "";
  const File* const from = transfer.opened[part].file;
  return (from ? from->path + " is damaged: " : "") + wrong;
}

// Whether numbers of 2 or 4 bytes are neither NaN nor infinite, in which all bits of `exponent` are
// set. Eight bytes at once: the highest bit of a lane of `every` goes at the first such number.
static bool all_finite(const uint8_t* at, int64_t bytes, int64_t item, int64_t exponent) {
  const uint64_t ones = item == 2 ? 0x0001000100010001u : 0x0000000100000001u;
  const uint64_t bits = ones * (uint64_t)exponent, high = ones << (8 * item - 1);
  uint64_t every = high;
  const auto look = [&](uint64_t numbers) { every &= (~numbers & bits) + (high - ones); };
  const int64_t whole = bytes / 8 * 8;
  for (int64_t i = 0; i < whole; i += 8) {
    uint64_t numbers;
    std::memcpy(&numbers, at + i, sizeof numbers);
    look(numbers);
  }
  uint64_t rest = 0;
  std::memcpy(&rest, at + whole, (size_t)(bytes - whole));
  look(rest);
  return every == high;
}

// A chunk's bytes as they lie, to `to`.
std::string TransferQueue::move_piece(Transfer& transfer, const Chunk& chunk, uint8_t* to,
                                      Bounce& bounce) {
  const auto part = (size_t)chunk.part;
  const int64_t within = chunk.first - transfer.first_of(chunk.part);
  const int64_t from = transfer.pieces.parts[part].source + within;
  if (!transfer.opened[part].file) {
    copy(to, reinterpret_cast<const uint8_t*>(from), chunk.bytes);
    return "";
  }
  const size_t slot = transfer.slot(part);
  std::string failure = open_file(transfer, slot);
  if (failure.empty()) failure = read(transfer, slot, to, from, chunk.bytes, bounce);
  const int64_t exponent = transfer.pieces.exponent;
  if (!failure.empty() || !exponent) return failure;
  if (all_finite(to, chunk.bytes, transfer.pieces.item, exponent)) return "";
  return transfer.opened[part].file->path + ": a matrix has values that are NaN or infinite";
}

// ---- files

std::string TransferQueue::open_file(Transfer& transfer, size_t part) {
  const File& file = *transfer.opened[part].file;
  Held held(transfer.opening);
  if (transfer.opened[part].fd >= 0) return "";
  int flags = kOpen;
#ifdef O_DIRECT
  if (file.direct) flags |= O_DIRECT;
#endif
  const int fd = ::open(file.path.c_str(), flags);
  struct stat s {};
  const int error = fd < 0 ? errno : 0;
  // What is no file any more may not open as one: a pipe takes no O_DIRECT.
  if ((fd < 0 ? ::stat(file.path.c_str(), &s) : fstat(fd, &s)) == 0 &&
      !file.identity.same(s, transfer.checksum != nullptr)) {
    if (fd >= 0) ::close(fd);
    return file.path + ": changed since it was opened first";
  }
  if (fd < 0) return file.path + ": " + reason(error);
  transfer.opened[part].fd = fd;
  return "";
}

// Fills n bytes at `to` from the file's place `at`: directly where places agree, by way of the
// bounce buffer, in whole blocks, where they do not.
std::string TransferQueue::read(Transfer& transfer, size_t part, uint8_t* to, int64_t at, int64_t n,
                                Bounce& bounce) {
  const auto [file, fd] = transfer.opened[part];
  const int64_t until = at + n;
  const bool agree = (reinterpret_cast<intptr_t>(to) - at) % kBlock == 0;
  bool partial = false;  // a block came in pieces
  int stuck = 0;
  while (at < until) {
    const bool whole = agree && at % kBlock == 0 && until - at >= kBlock && !partial;
    int64_t got;
    if (!file->direct) {
      got = read_some(fd, to, until - at, at);
    } else if (whole) {
      got = read_some(fd, to, down(until - at), at);
      partial = got > 0 && got < kBlock;
      if (partial) continue;
      if (got > 0) got = down(got);
    } else {
      const int64_t first = down(at), last = agree ? std::min(until, first + kBlock) : until;
      const int64_t size = std::min(down(last - first + kBlock - 1), bounce.size);
      got = read_some(fd, bounce.get(), size, first);
      if (got > 0) got = std::max<int64_t>(std::min(first + got, last) - at, 0);
      else stuck = kStuck;
      if (!got && ++stuck < kStuck) continue;  // it came short of `at`, though there may be more
      if (got > 0) std::memcpy(to, bounce.get() + (at - first), (size_t)got);
      partial = false;
    }
    if (got < 0) return file->path + ": " + reason((int)-got);
    if (!got) {
      return file->path + ": a short read: it ends at byte " + std::to_string(at) + ", " +
             std::to_string(until) + " are needed";
    }
    to += got;
    at += got;
  }
  return "";
}

// Bytes read, fewer than n at the end of the file; -errno.
int64_t TransferQueue::read_some(int fd, void* to, int64_t n, int64_t at) {
  ssize_t got;
  do got = pread(fd, to, (size_t)n, (off_t)at);
  while (got < 0 && errno == EINTR);
  return got < 0 ? -errno : faults::cut(this, got);
}

// ---- waiting and seeing

bool TransferQueue::there(const Transfer& transfer, int64_t part) const {
  if (settled(transfer.state) || transfer.hangs) return true;
  if (part < 0) return false;
  const bool last = part + 1 == (int64_t)transfer.left.size();
  return !transfer.left[(size_t)part] && !(last && transfer.checksum);
}

bool TransferQueue::wait_for(Held& held, Transfer& transfer, int64_t part, double seconds) {
  Bounce bounce(options_.chunk_bytes);
  const double until = now() + seconds;
  const auto come = [&] { return there(transfer, part); };
  const auto mine = [&] { return !options_.threads && runnable(); };
  while (!come()) {
    const double left = seconds < 0 ? 1 : until - now();
    if (left <= 0) break;
    if (mine()) {
      carry_out(held, bounce);
    } else if (late()) {
      give_up_late();
    } else if (seconds < 0) {
      news_.wait_for(held, std::chrono::seconds(1), [&] { return come() || mine(); });
    } else {
      news_.wait_for(held, std::chrono::duration<double>(left));
    }
  }
  return come();
}

std::shared_ptr<TransferQueue::Transfer> TransferQueue::find(int64_t ticket) {
  Held held(mutex_);
  const auto found = transfers_.find(ticket);
  return found == transfers_.end() ? nullptr : found->second;
}

int TransferQueue::wait(const std::shared_ptr<Transfer>& transfer, int64_t part, double seconds,
                        TransferRecord* record, std::string* failure) {
  if (!transfer) return -1;
  Held held(mutex_);
  if (!settled(transfer->state) && part >= (int64_t)transfer->left.size()) return -2;
  const bool come = wait_for(held, *transfer, part, seconds);
  *record = record_of(*transfer);
  *failure = transfer->failure;
  return come;
}

TransferState TransferQueue::wait_cell(int64_t cell, int64_t part) {
  if (!concerns_.load(std::memory_order_acquire)) return TransferState::DONE;
  Held held(mutex_);
  const auto found = cells_.find(cell);
  if (found == cells_.end()) return TransferState::DONE;
  const auto transfer = found->second;
  if (!settled(transfer->state) && part >= (int64_t)transfer->left.size()) {
    return TransferState::UNKNOWN;
  }
  // Whatever it was queued for, it is needed now.
  if (!there(*transfer, part) && transfer->request.cause) {
    give_turn(*transfer, 0, transfer->request.priority);
  }
  wait_as_op(held, *transfer, part);
  if (transfer->hangs) return TransferState::FAILED;
  return settled(transfer->state) ? transfer->state : TransferState::DONE;
}

// wait_for without an end, counted.
void TransferQueue::wait_as_op(Held& held, Transfer& transfer, int64_t part) {
  if (there(transfer, part)) return;
  transfer.late = true;
  totals_.waits++;
  if (!waiting_++) waiting_since_ = now();
  wait_for(held, transfer, part, -1);
  if (!--waiting_) totals_.wait_seconds += now() - waiting_since_;
}

int64_t TransferQueue::demand(int64_t cell) {
  if (!concerns_.load(std::memory_order_acquire)) return 0;
  Held held(mutex_);
  const auto found = cells_.find(cell);
  if (found == cells_.end()) return 0;
  Transfer& transfer = *found->second;
  if (!settled(transfer.state) && transfer.request.cause) {
    give_turn(transfer, 0, transfer.request.priority);
  }
  return transfer.ticket ? transfer.ticket : -1;
}

bool TransferQueue::flies(int64_t cell) {
  if (!concerns_.load(std::memory_order_acquire)) return false;
  Held held(mutex_);
  return cells_.count(cell);
}

std::string TransferQueue::failure_of(int64_t cell) {
  Held held(mutex_);
  const auto found = cells_.find(cell);
  return found == cells_.end() ? "" : found->second->failure;
}

TransferTotals TransferQueue::totals() {
  Held held(mutex_);
  TransferTotals found = totals_;
  for (const auto& [cell, transfer] : cells_) {
    if (settled(transfer->state)) continue;
    found.flying++;
    for (int64_t n : transfer->left) found.bytes_left += n;
  }
  found.busy_seconds = busy(LINK);
  found.unpack_seconds = busy(HERE);
  if (waiting_) found.wait_seconds += now() - waiting_since_;
  return found;
}

void TransferQueue::keep_settled(bool keep) {
  Held held(mutex_);
  forgetful_ = !keep;
  if (keep) return;
  observed_.clear();
  for (const auto& transfer : ended_) transfers_.erase(transfer->ticket);
  ended_.clear();
}

TransferRecord TransferQueue::record_of(const Transfer& transfer) {
  const auto& r = transfer.request;
  int64_t left = 0;
  for (int64_t n : transfer.left) left += n;
  const TransferState state = transfer.hangs ? TransferState::FAILED : transfer.state;
  return {transfer.ticket, r.cell, transfer.bytes, left, r.layer, r.expert, r.version, r.cause,
          r.priority, (int32_t)state};
}

double TransferQueue::observe(int64_t most_flying, int64_t most_ended,
                              std::vector<TransferRecord>* flying,
                              std::vector<TransferRecord>* ended) {
  Held held(mutex_);
  for (const auto& transfer : ended_) ended->push_back(record_of(*transfer));
  for (const auto& [ticket, transfer] : transfers_) {
    if (!settled(transfer->state)) flying->push_back(record_of(*transfer));
  }
  if ((int64_t)flying->size() <= most_flying && (int64_t)ended->size() <= most_ended) {
    observed_.clear();
    for (const auto& transfer : ended_) {
      observed_[transfer->ticket] = transfer;
      transfers_.erase(transfer->ticket);
    }
    ended_.clear();
  }
  return busy(LINK);
}

std::string TransferQueue::message(int64_t ticket) {
  Held held(mutex_);
  for (const auto* among : {&transfers_, &observed_}) {
    const auto found = among->find(ticket);
    if (found != among->end()) return found->second->failure;
  }
  return "";
}

bool TransferQueue::close() {
  Held held(mutex_);
  if (abandoned_) return false;
  stopping_ = true;
  for (auto& turns : turns_) {
    for (auto it = turns.begin(); it != turns.end();) {
      const auto transfer = transfers_.at(std::get<2>(*it));
      if (transfer->state != TransferState::WAITING) {
        ++it;
        continue;
      }
      it = turns.erase(it);
      note(TransferEvent::CANCEL, transfer->ticket, 0, 0);
      settle(*transfer, TransferState::CANCELLED);
      // Ops that still run must not take the cell for one whose bytes are there.
      transfer->failure = "the queue was closed";
      cells_[transfer->request.cell] = transfer;
      concerns_ = (int64_t)cells_.size();
    }
  }
  work_.notify_all();
  // What has begun ends, also in the hands of callers, who may be in no hurry to take the rest.
  Bounce bounce(options_.chunk_bytes);
  while (under_way_[LINK] || under_way_[HERE] || !idle()) {
    if (!options_.threads && runnable()) {
      carry_out(held, bounce);
    } else if (late()) {
      give_up_late();
      abandoned_ = true;
      break;
    } else {
      news_.wait_for(held, std::chrono::milliseconds(10));
    }
  }
  auto threads = std::move(threads_);
  held.unlock();
  work_.notify_all();
  for (auto& thread : threads) {
    if (abandoned_) thread.detach();
    else thread.join();
  }
  return !abandoned_;
}

bool close_queue(const std::shared_ptr<TransferQueue>& queue) {
  if (queue->close()) return true;
  static std::mutex mutex;
  static auto* const kept = new std::vector<std::shared_ptr<TransferQueue>>();
  const std::lock_guard<std::mutex> lock(mutex);
  kept->push_back(queue);
  return false;
}

// ---- what happened

void TransferQueue::record(bool on) {
  Held held(mutex_);
  recording_ = on;
}

void TransferQueue::note(TransferEvent::Kind kind, int64_t ticket, int64_t a, int64_t b) {
  if (recording_) events_.push_back({kind, ticket, a, b, now()});
}

std::vector<TransferEvent> TransferQueue::events() {
  Held held(mutex_);
  return std::move(events_);
}

}  // namespace moejax
