// Transfers of experts into cells by threads of their own, beside compute: the native form of
// host_offload/queue, whose order.py specifies which chunk is next and what its end means. Builds
// without jax.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "pallas_kernels/cpu/checksums.h"
#include "pallas_kernels/cpu/gguf.h"

namespace moejax {

enum class TransferState : int32_t {
  UNKNOWN = -1,
  WAITING = 0,
  BEGUN = 1,
  DONE = 2,
  FAILED = 3,
  CANCELLED = 4,
};

inline bool settled(TransferState state) { return state >= TransferState::DONE; }

// What is queued, laid out as host_offload/queue/native.py passes it.
struct TransferRequest {
  int64_t cell;         // names a cell among all; it has one writer at a time
  int64_t destination;  // address of the first byte
  int64_t source;       // address; with a file the place of the first byte in it
  int64_t entry;        // address of an int32 that becomes `value` after the last byte; 0: none
  uint64_t checksum;
  int32_t layer, expert, version;  // for observers
  int32_t cause;                   // 0: a demand; others mean something to observers alone
  int32_t priority;                // the lowest first
  int32_t value;
  int32_t file;   // number of add_file; -1: memory
  Check check;
  int32_t parts;  // gate, up, down; their bytes follow as an array
  int32_t unused;
};

// A transfer as observers see it.
struct TransferRecord {
  int64_t ticket, cell, bytes, bytes_left;
  int32_t layer, expert, version, cause, priority, state;
};

// What happened, in order, where it is recorded.
struct TransferEvent {
  enum Kind : int64_t { SUBMIT, CANCEL, REORDER, START, END, SETTLE };
  int64_t kind, ticket;
  int64_t a, b;  // START, END: first byte, bytes; SUBMIT, REORDER: cause, priority; SETTLE: state
  double seconds;  // of the monotonic clock
};

struct TransferOptions {
  int64_t threads;      // 0: who waits carries chunks out
  int64_t chunk_bytes;
  double rate;          // bytes per second of the link; 0: as fast as it goes
  double latency;       // seconds from a chunk's end on the link until its bytes count as there
  double patience;      // seconds that a chunk may take; 0: for ever
};

// What the queue did since it was made.
struct TransferTotals {
  int64_t demand_bytes, ahead_bytes;  // that arrived, by the cause that they were queued with
  int64_t demands, ahead;             // transfers of them
  int64_t late;                       // of those ahead, that an op had to wait for
  int64_t cancelled, failed;
  int64_t retried;                    // failed ahead of need, and queued once more as demands
  int64_t waits;                      // times that ops waited for bytes
  int64_t flying, bytes_left;         // now
  double wait_seconds;                // with an op waiting
  double busy_seconds;                // with a chunk under way on the link
  int64_t unpacked, unpacked_bytes;   // transfers that were written without it, and their bytes
  double unpack_seconds;              // with a chunk of those under way
};

// Where each part of a transfer lies, where they do not lie one after the other.
struct Pieces {
  struct Piece {
    int32_t file;  // as TransferRequest's
    int64_t source;
  };
  std::vector<Piece> parts;  // empty: the request says it
  // Bytes of a row and of a number of the last part as it lies, which comes transposed; 0: it does not.
  int64_t row = 0, item = 0;
  // Bits that are all set in a number of `item` bytes that is NaN or infinite, of which none may come
  // from a file; 0: it is not looked for.
  int64_t exponent = 0;
  // The matrices of a record of one part, which lie apart in blocks: each of `parts` is one of them.
  std::shared_ptr<const std::vector<BlockMatrix>> blocks;
};

// Writes bytes [first, first + bytes) of a transfer at `to`.
using Unpack = std::function<void(uint8_t* to, int64_t first, int64_t bytes)>;

class TransferQueue {
 public:
  explicit TransferQueue(const TransferOptions& options);
  ~TransferQueue();

  // A regular file to read from, by number; it must stay as it is now. -1 and why where it cannot
  // be read.
  int32_t add_file(const std::string& path, bool direct, std::string* why);
  bool direct(int32_t file);  // past the page cache

  // The ticket, from 1; 0 and why where the cell has a writer or the request is no transfer.
  int64_t submit(const TransferRequest& request, const int64_t* part_bytes, std::string* why);
  // The same for a cell that may have a writer: one that has not begun is cancelled, one that has is
  // waited for. Where it is refused the cell has failed, as if its bytes had not come.
  // unpack: writes the bytes in place of a copy from the source, which it knows, and which stays as
  // it is until then. Such a transfer does not pass the link, so its rate, its latency and its turns
  // are others'.
  int64_t replace(const TransferRequest& request, const int64_t* part_bytes, std::string* why,
                  Unpack unpack = {}, Pieces pieces = {});
  // For who writes a cell in another way: as replace does, and a failure of the cell is forgotten.
  // false: a read into it hangs.
  bool vacate(int64_t cell);
  // Returns when nothing flies but reads that hang: the cells that have failed, which are forgotten
  // as such.
  std::set<int64_t> drain();
  // Transfers that were given up, since no chunk of the queue began or ended within the patience,
  // and whose reads have not returned: they may still write into their cells, which get nothing else.
  int64_t hanging();
  bool cancel(int64_t ticket);
  bool reorder(int64_t ticket, int32_t cause, int32_t priority);

  struct Transfer;
  // For wait, whatever is observed meanwhile; null: there is no such ticket, or it was observed.
  std::shared_ptr<Transfer> find(int64_t ticket);
  // Returns when the part (-1: all, checked) is there, the transfer has settled or the time is over
  // (negative: never), and which of it: 1, or 0 where the time was over first. The last part of a
  // transfer with a checksum is there when that was right. failure: why it failed. -1 where there is
  // no transfer, -2 where it has no such part.
  int wait(const std::shared_ptr<Transfer>& transfer, int64_t part, double seconds,
           TransferRecord* record, std::string* failure);
  // The same for the transfer that writes a cell, from inside an op: DONE where none does. One that
  // was no demand becomes one. FAILED stays until another transfer into the cell. UNKNOWN where it
  // has no such part.
  TransferState wait_cell(int64_t cell, int64_t part);
  // What writes a cell is a demand from now on: its ticket, or that of who failed in it (-1: one that
  // was refused); 0: the cell's bytes are there.
  int64_t demand(int64_t cell);
  // Queues what failed in a cell once more, as a demand, where it was queued ahead of need; nobody
  // reads the cell. Its ticket; 0: what failed was a demand, or was refused, or nothing failed.
  int64_t retry(int64_t cell);
  bool flies(int64_t cell);  // has a writer that has not settled, or one that failed
  std::string failure_of(int64_t cell);  // why a cell has failed

  // Who has not settled, by ticket, and who has since the last observation, in order; returns the
  // busy seconds. Nothing counts as observed where either is more than that many.
  double observe(int64_t most_flying, int64_t most_ended, std::vector<TransferRecord>* flying,
                 std::vector<TransferRecord>* ended);
  std::string message(int64_t ticket);  // of a failed one, until the observation after it was seen
  TransferTotals totals();
  void keep_settled(bool keep);  // whether what settles from now on is kept for `observe`

  bool step();   // carries out one chunk in the caller's thread; false: none waits
  // Cancels what has not begun, ends what has. false: reads hang, whose threads need the queue and
  // the memory that they read into for ever.
  bool close();

  void record(bool on);
  std::vector<TransferEvent> events();

 private:
  struct File;
  struct Chunk {
    int64_t part, first, bytes;
  };
  struct Bounce;
  using Held = std::unique_lock<std::mutex>;
  using Turn = std::tuple<bool, int32_t, int64_t>;  // not a demand, priority, ticket

  void work();
  enum Lane : size_t { LINK, HERE, LANES };  // HERE: unpacked, by the same threads
  static Lane lane_of(const Transfer& transfer);
  bool idle() const { return turns_[LINK].empty() && turns_[HERE].empty(); }
  bool runnable() const;
  double busy(Lane lane) const;
  void wait_as_op(Held& held, Transfer& transfer, int64_t part);
  void carry_out(Held& held, Bounce& bounce);
  void end(Held& held, Transfer& transfer, size_t index, std::string failure);
  void settle(Transfer& transfer, TransferState state);
  std::shared_ptr<Transfer> made(const TransferRequest& request, const int64_t* part_bytes,
                                 Pieces pieces, std::string* why) const;
  std::string refusal(Transfer& transfer);
  void enqueue(const std::shared_ptr<Transfer>& transfer);
  void take_back(Transfer& transfer);
  bool evict(Held& held, int64_t cell);
  bool late() const;
  void give_up_late();
  void give_turn(Transfer& transfer, int32_t cause, int32_t priority);
  bool there(const Transfer& transfer, int64_t part) const;
  bool wait_for(Held& held, Transfer& transfer, int64_t part, double seconds);
  std::string move(Transfer& transfer, const Chunk& chunk, Bounce& bounce);
  std::string move_blocks(Transfer& transfer, const Chunk& chunk, Bounce& bounce);
  std::string move_piece(Transfer& transfer, const Chunk& chunk, uint8_t* to, Bounce& bounce);
  std::string open_file(Transfer& transfer, size_t part);
  std::string read(Transfer& transfer, size_t part, uint8_t* to, int64_t at, int64_t n,
                   Bounce& bounce);
  int64_t read_some(int fd, void* to, int64_t n, int64_t at);
  void note(TransferEvent::Kind kind, int64_t ticket, int64_t a, int64_t b);
  static TransferRecord record_of(const Transfer& transfer);

  const TransferOptions options_;
  std::mutex mutex_;
  std::condition_variable work_, news_;
  std::map<int64_t, std::shared_ptr<Transfer>> transfers_;  // not settled, or not observed since
  std::map<int64_t, std::shared_ptr<Transfer>> cells_;      // by cell: its writer, or who failed
  std::map<int64_t, std::shared_ptr<Transfer>> observed_;   // settled, of the last observation
  std::vector<std::shared_ptr<Transfer>> ended_;            // settled since then
  std::set<Turn> turns_[LANES];                             // who has chunks that have not begun
  std::vector<std::unique_ptr<File>> files_;
  std::atomic<int64_t> concerns_{0};  // cells_.size(): 0 needs no lock to know
  int64_t tickets_ = 0, under_way_[LANES] = {};
  double busy_[LANES] = {}, busy_since_[LANES] = {}, link_free_ = 0;
  double moved_ = 0;     // when a chunk began or ended at last
  int64_t waiting_ = 0;  // ops
  double waiting_since_ = 0;
  TransferTotals totals_{};
  bool link_taken_ = false, stopping_ = false, forgetful_ = false, abandoned_ = false;
  std::vector<std::thread> threads_;

  bool recording_ = false;
  std::vector<TransferEvent> events_;
};

// Closes a queue, and keeps it for ever where its reads hang; whether it is closed.
bool close_queue(const std::shared_ptr<TransferQueue>& queue);

// Queues by number, for ops; null where there is none. Who has one keeps it alive.
std::shared_ptr<TransferQueue> find_transfer_queue(int32_t handle);

}  // namespace moejax
