// Threads that help one calling thread with a loop.
//
// A step has a hundred and fifty short parallel loops, one after the other, so a helper that has just worked
// watches for the next loop for a moment before it sleeps, and the caller waits at the end only for helpers that
// have joined: one that was asleep or has lost its core costs nothing, the others do its part. No helper runs
// between steps. Each calling thread has a team of its own, made when it is first needed.
//
// Where the cores are divided with other workers of the host, a loop begins with as many threads as this
// worker's part has at that moment, and helpers leave it, between two of its pieces, when another worker begins
// to compute: a loop over a long prompt takes milliseconds, and whoever decodes beside it should not wait so long.

#include <linux/futex.h>
#include <signal.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <x86intrin.h>

#include <atomic>
#include <system_error>
#include <thread>
#include <type_traits>
#include <vector>

namespace {

// How the cores are divided: each of the other workers says in a word of its own whether it computes.
struct Division {
  static constexpr long MAX_OTHERS = 63;
  long num_cores = 0;  // 0: they are not divided
  long rank = 0;       // of this worker: how many of the others come before it
  long num_others = 0;
  const uint64_t* others[MAX_OTHERS];

  long num_threads() const {
    long num_busy = 0, num_before = 0;
    for (long i = 0; i < num_others; i++) {
      if (!__atomic_load_n(others[i], __ATOMIC_RELAXED)) continue;
      num_busy++;
      num_before += i < rank;
    }
    const long part = num_cores / (num_busy + 1) + (num_before < num_cores % (num_busy + 1));
    return part > 1 ? part : 1;
  }
};

class Team {
 public:
  Division division;  // written by the calling thread between loops

  ~Team() {
    if (getpid() != pid_) {  // a forked child has no helpers, only their names
      new std::vector<std::thread>(std::move(helpers_));
      return;
    }
    is_ending_.store(true);
    ring();
    for (std::thread& helper : helpers_) helper.join();
  }

  // body(i) for each i below count, in any order, on the caller and up to threads - 1 helpers; where the cores
  // are divided, their number is what the division says.
  template <class Body>
  void each(long threads, long count, Body&& body) {
    if (division.num_cores) threads = division.num_threads();
    if (threads <= 1 || count <= 1) {
      for (long i = 0; i < count; i++) body(i);
      return;
    }
    using B = std::remove_reference_t<Body>;
    run(threads - 1, count, [](void* it, long i) { (*static_cast<B*>(it))(i); }, &body);
  }

 private:
  using Call = void (*)(void*, long);

  // `state_` is the number of helpers inside the loop, and whether it is open to more.
  static constexpr uint32_t OPEN = 1u << 31;
  static constexpr uint64_t WATCH_CYCLES = 100'000;  // some 40 microseconds

  void run(long num_helpers, long count, Call call, void* body) {
    call_ = call;
    body_ = body;
    count_ = count;
    limit_ = static_cast<uint32_t>(num_helpers);
    next_.store(0, std::memory_order_relaxed);
    if (helpers_.size() < static_cast<size_t>(num_helpers)) grow(num_helpers);
    state_.store(OPEN, std::memory_order_release);
    ring();
    work();
    state_.fetch_and(~OPEN, std::memory_order_acq_rel);
    // nobody can join any more
    while (true) {
      const uint32_t num_gone = gone_.load();
      if (state_.load(std::memory_order_acquire) == 0) return;
      if (watch([&] { return gone_.load(std::memory_order_relaxed) != num_gone; })) continue;
      is_caller_asleep_.store(true);
      sleep_while(gone_, num_gone);
      is_caller_asleep_.store(false);
    }
  }

  // Where there are no more threads to be had, the loop runs on those that there are.
  void grow(size_t num_helpers) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for the other threads of the process
    try {
      while (helpers_.size() < num_helpers) helpers_.emplace_back([this, seen = bell_.load()] { help(seen); });
    } catch (const std::system_error&) {
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  void work() {
    for (long i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < count_;) call_(body_, i);
  }

  void help(uint32_t seen) {
    while (true) {
      if (!watch([&] { return bell_.load(std::memory_order_relaxed) != seen; })) {
        num_asleep_.fetch_add(1);
        sleep_while(bell_, seen);
        num_asleep_.fetch_sub(1);
      }
      seen = bell_.load();
      if (is_ending_.load()) return;
      if (!join()) continue;
      if (!help_out()) state_.fetch_sub(1, std::memory_order_release);
      gone_.fetch_add(1);
      if (is_caller_asleep_.load()) wake(gone_);
    }
  }

  // Work as long as there is room beside other workers; whether it has left for want of that.
  bool help_out() {
    while (true) {
      if (division.num_cores && leave_if_crowded(division.num_threads() - 1)) return true;
      const long i = next_.fetch_add(1, std::memory_order_relaxed);
      if (i >= count_) return false;
      call_(body_, i);
    }
  }

  bool leave_if_crowded(long max_helpers) {
    uint32_t state = state_.load(std::memory_order_relaxed);
    while (static_cast<long>(state & ~OPEN) > max_helpers)
      if (state_.compare_exchange_weak(state, state - 1, std::memory_order_release, std::memory_order_relaxed))
        return true;
    return false;
  }

  // What run() wrote before it opened the loop is seen by who has joined, and stays until all have left.
  bool join() {
    uint32_t state = state_.load(std::memory_order_relaxed);
    while ((state & OPEN) && (state & ~OPEN) < limit_.load(std::memory_order_relaxed))
      if (state_.compare_exchange_weak(state, state + 1, std::memory_order_acquire, std::memory_order_relaxed))
        return true;
    return false;
  }

  void ring() {
    bell_.fetch_add(1);
    if (num_asleep_.load()) wake(bell_);
  }

  template <class Condition>
  static bool watch(Condition&& holds) {
    for (const uint64_t start = __rdtsc(); __rdtsc() - start < WATCH_CYCLES; _mm_pause())
      if (holds()) return true;
    return false;
  }

  static void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
    syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
  }

  static void wake(std::atomic<uint32_t>& word) {
    syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, 1 << 30, nullptr, nullptr, 0);
  }

  const pid_t pid_ = getpid();
  std::vector<std::thread> helpers_;
  Call call_ = nullptr;
  void* body_ = nullptr;
  long count_ = 0;
  std::atomic<uint32_t> limit_{0};
  alignas(64) std::atomic<long> next_{0};
  alignas(64) std::atomic<uint32_t> state_{0};
  alignas(64) std::atomic<uint32_t> bell_{0};  // rings at each loop
  std::atomic<uint32_t> num_asleep_{0};
  std::atomic<uint32_t> gone_{0};  // helpers that have left, in all
  std::atomic<bool> is_caller_asleep_{false}, is_ending_{false};
};

// A helper's own team has nobody in it.
inline Team& team() {
  thread_local Team of_this_thread;
  return of_this_thread;
}

}  // namespace

// The calling thread's loops take their part of `num_cores`, beside `num_others` workers in the order of their
// names; 0 cores: they take what each is called with. The words must live until the next call.
extern "C" inline __attribute__((used, visibility("default"))) void baton_divide(
    long num_cores, long rank, long num_others, const uint64_t* const* others) {
  Division& division = team().division;
  division.num_cores = num_cores;
  division.rank = rank;
  division.num_others = num_others < Division::MAX_OTHERS ? num_others : Division::MAX_OTHERS;
  for (long i = 0; i < division.num_others; i++) division.others[i] = others[i];
}
