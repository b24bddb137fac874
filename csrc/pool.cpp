#include "pool.h"

#include <sys/mman.h>
#include <unistd.h>
#include <xmmintrin.h>

#include <chrono>
#include <new>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

namespace ktft {

namespace {

// Long enough to cover the gap between two phases of a call, short enough that an idle process stays idle.
constexpr auto kSpin = std::chrono::microseconds(50);

inline void pause() { __builtin_ia32_pause(); }

// Round to nearest, denormals kept, exceptions masked, for as long as it lives.
class FloatEnvironment {
 public:
  FloatEnvironment() : saved_(_mm_getcsr()) { _mm_setcsr(0x1F80); }
  ~FloatEnvironment() { _mm_setcsr(saved_); }
  FloatEnvironment(const FloatEnvironment&) = delete;
  FloatEnvironment& operator=(const FloatEnvironment&) = delete;

 private:
  unsigned saved_;
};

// Spin until done() or kSpin has passed.
template <class Done>
bool spin_until(Done done) {
  const auto start = std::chrono::steady_clock::now();
  do {
    for (int i = 0; i < 64; ++i) {
      if (done()) return true;
      pause();
    }
  } while (std::chrono::steady_clock::now() - start < kSpin);
  return done();
}

}  // namespace

void advise_huge_pages(void* data, size_t bytes) {
  constexpr size_t kHuge = size_t(2) << 20;
  if (bytes < 2 * kHuge) return;
  const uintptr_t begin = (uintptr_t(data) + kHuge - 1) & ~(kHuge - 1), end = (uintptr_t(data) + bytes) & ~(kHuge - 1);
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // advice: if it is not taken, nothing is lost
}

char* Arena::reserve(size_t bytes) {
  if (bytes > capacity_) {
    if (data_) munmap(data_, capacity_);
    data_ = nullptr;
    capacity_ = 0;
    const size_t rounded = (bytes + bytes / 4 + 4095) & ~size_t(4095);  // room to grow: a slowly growing batch remaps rarely
    void* memory = mmap(nullptr, rounded, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    data_ = static_cast<char*>(memory);
    capacity_ = rounded;
    advise_huge_pages(data_, capacity_);
  }
  return data_;
}

Pool& Pool::instance() {
  static std::mutex mutex;
  static Pool* pool = nullptr;
  static pid_t owner = 0;
  const std::lock_guard<std::mutex> lock(mutex);
  if (owner != getpid()) {  // first use, or a forked child, which has none of the parent's threads
    pool = new Pool;        // never destroyed: workers may be asleep in it when the process exits
    owner = getpid();
  }
  return *pool;
}

void Pool::grow(int threads) {
  while (int(workers_.size()) + 1 < threads) {
    const int index = int(workers_.size()) + 1;
    try {
      workers_.emplace_back(&Pool::worker_loop, this, index, job_number(state_.load()));
    } catch (const std::system_error& error) {
      throw std::runtime_error("cannot start thread " + std::to_string(index + 1) + " of " + std::to_string(threads) + " (" +
                               error.what() + "); set KTFT_THREADS to a smaller number");
    }
    workers_.back().detach();
  }
}

void Pool::work(int worker) {
  // Workers keep the floating-point environment they were born with, the caller has its own, e.g. after
  // torch.set_flush_denormal(True). Results must not depend on who takes a task: everybody runs with the default one.
  const FloatEnvironment environment;
  try {
    for (int64_t task; (task = ticket_.fetch_add(1, std::memory_order_relaxed)) < tasks_;) task_(context_, task, worker);
  } catch (...) {
    const std::lock_guard<std::mutex> lock(error_mutex_);
    if (!error_) error_ = std::current_exception();
    ticket_.store(tasks_);
  }
}

void Pool::run_job(int threads, int64_t tasks, Task task, void* context) {
  if (tasks <= 0) return;
  if (threads > tasks) threads = int(tasks);
  grow(threads);
  task_ = task;
  context_ = context;
  tasks_ = tasks;
  error_ = nullptr;
  ticket_.store(0, std::memory_order_relaxed);
  if (threads == 1) {
    work(0);
  } else {
    // Latecomers of the last job may be inside for an instant, until they see that it is closed.
    uint64_t idle, opened;
    do {
      const auto left = [&] { return ((idle = state_.load(std::memory_order_relaxed)) & kInside) == 0; };
      while (!spin_until(left)) std::this_thread::yield();
      opened = (job_number(idle) + 1) << 32 | uint64_t(threads) << 16;
    } while (!state_.compare_exchange_weak(idle, opened));
    if (sleepers_.load() > 0) {
      {
        const std::lock_guard<std::mutex> lock(sleep_mutex_);
      }
      wake_.notify_all();
    }
    work(0);
    state_.fetch_or(kClosed);
    while (!spin_until([&] { return (state_.load(std::memory_order_acquire) & kInside) == 0; })) std::this_thread::yield();
  }
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

void Pool::worker_loop(int index, uint64_t seen) {
  for (;;) {
    const auto wanted = [&] {
      const uint64_t state = state_.load();
      return job_number(state) != seen && !(state & kClosed) && index < participants(state);
    };
    if (!spin_until(wanted)) {
      std::unique_lock<std::mutex> lock(sleep_mutex_);
      sleepers_.fetch_add(1);
      wake_.wait(lock, wanted);
      sleepers_.fetch_sub(1);
    }
    const uint64_t state = state_.fetch_add(1);  // it may be another job by now, or none
    if (!(state & kClosed) && index < participants(state)) {
      seen = job_number(state);
      work(index);
    }
    state_.fetch_sub(1, std::memory_order_release);
  }
}

}  // namespace ktft
