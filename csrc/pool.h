// Threads and scratch memory for one expert-layer call at a time.
//
// The caller is worker 0. Other workers spin for a short while after a job, then sleep: idle costs no CPU. Tasks are handed out
// by one atomic ticket; nothing about a result may depend on who runs a task. The caller waits only for workers that have
// entered the job: one that was woken but got no core (torch's own threads spin there for a while) is not missed. Calls from
// several threads are served one after the other (Pool::call_mutex). After fork the child gets a pool of its own.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace ktft {

// Memory that is kept between calls and grows to the largest call; pages are touched only when used.
class Arena {
 public:
  // At least `bytes`, 64-byte aligned, contents undefined. Invalidates what earlier calls returned. Throws std::bad_alloc.
  char* reserve(size_t bytes);

 private:
  char* data_ = nullptr;
  size_t capacity_ = 0;
};

// Ask for huge pages for memory that is about to be written for the first time: page faults of 4 KiB cost more than clearing
// the pages (23,000 of them, 40 ms of 650, in one layer's step at 2048 tokens). Does nothing below 4 MiB.
void advise_huge_pages(void* data, size_t bytes);

class Pool {
 public:
  static Pool& instance();

  std::mutex call_mutex;
  Arena arena;

  // f(task, worker) for every task in [0, tasks), on up to `threads` threads including the caller. The first exception is
  // rethrown.
  template <class Function>
  void run(int threads, int64_t tasks, Function f) {
    run_job(
        threads, tasks, [](void* context, int64_t task, int worker) { (*static_cast<Function*>(context))(task, worker); }, &f);
  }

 private:
  using Task = void (*)(void* context, int64_t task, int worker);

  Pool() = default;
  void run_job(int threads, int64_t tasks, Task task, void* context);
  void grow(int threads);
  void worker_loop(int index, uint64_t seen);
  void work(int worker);

  std::vector<std::thread> workers_;
  // job number << 32 | participants << 16 | closed << 15 | workers inside. A worker enters by adding 1 and may touch the job
  // only if the value it added to was open; the caller changes the job only while it is closed and nobody is inside.
  std::atomic<uint64_t> state_{kClosed};
  static constexpr uint64_t kClosed = 1 << 15, kInside = kClosed - 1;
  static uint64_t job_number(uint64_t state) { return state >> 32; }
  static int participants(uint64_t state) { return int(state >> 16 & 0xffff); }
  std::atomic<int> sleepers_{0};
  std::mutex sleep_mutex_;
  std::condition_variable wake_;

  Task task_ = nullptr;
  void* context_ = nullptr;
  int64_t tasks_ = 0;
  std::atomic<int64_t> ticket_{0};
  std::exception_ptr error_;
  std::mutex error_mutex_;
};

}  // namespace ktft
