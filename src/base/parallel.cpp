#include "base/parallel.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "base/check.h"

namespace winnow {
namespace {

constexpr int kMaxThreads = 1024;
thread_local bool inside_task = false;
thread_local int steady_threads = 0;  // of SteadyThreads; 0: none

int default_threads() {
  if (const char* text = std::getenv("WINNOW_NUM_THREADS"); text != nullptr && *text != '\0') {
    char* end = nullptr;
    const long n = std::strtol(text, &end, 10);
    WINNOW_CHECK("threads", *end == '\0' && n >= 1 && n <= kMaxThreads,
                 "WINNOW_NUM_THREADS must be a number from 1 to {}, got \"{}\"", kMaxThreads, text);
    return static_cast<int>(n);
  }
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
  return static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
}

// Threads that sleep between loops. The calling thread is worker 0 and takes part.
class Pool {
 public:
  explicit Pool(int workers) {
    try {
      for (int w = 1; w < workers; ++w) threads_.emplace_back([this, w] { serve(w); });
    } catch (const std::system_error& e) {
      const int started = this->workers();
      stop();
      fail(Status::kIo, "threads", "the system must start {} threads, but starts {}: {}", workers,
           started, e.code().message());
    }
  }
  ~Pool() { stop(); }
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int workers() const { return static_cast<int>(threads_.size()) + 1; }

  void run(std::int64_t tasks, detail::TaskFunction function, void* context) {
    {
      const std::lock_guard lock(mutex_);
      function_ = function;
      context_ = context;
      tasks_ = tasks;
      next_.store(0, std::memory_order_relaxed);
      busy_ = static_cast<int>(threads_.size());
      ++generation_;
    }
    wake_.notify_all();
    work(0);
    std::unique_lock lock(mutex_);
    done_.wait(lock, [this] { return busy_ == 0; });
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
  }

 private:
  void stop() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    for (std::thread& t : threads_) t.join();
  }

  void serve(int worker) {
    std::uint64_t seen = 0;
    std::unique_lock lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return stop_ || generation_ != seen; });
      if (stop_) return;
      seen = generation_;
      lock.unlock();
      if (worker < tasks_) work(worker);  // worker numbers stay below the number of tasks
      lock.lock();
      if (--busy_ == 0) done_.notify_one();
    }
  }

  void work(int worker) {
    inside_task = true;
    try {
      for (std::int64_t task = next_.fetch_add(1, std::memory_order_relaxed); task < tasks_;
           task = next_.fetch_add(1, std::memory_order_relaxed)) {
        function_(context_, task, worker);
      }
    } catch (...) {
      next_.store(tasks_, std::memory_order_relaxed);  // nobody starts another task
      const std::lock_guard lock(mutex_);
      if (!error_) error_ = std::current_exception();
    }
    inside_task = false;
  }

  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  bool stop_ = false;
  std::uint64_t generation_ = 0;
  int busy_ = 0;
  detail::TaskFunction function_ = nullptr;
  void* context_ = nullptr;
  std::int64_t tasks_ = 0;
  std::atomic<std::int64_t> next_{0};
  std::exception_ptr error_;
};

std::mutex pool_mutex;  // one loop at a time: several calling threads take turns
std::unique_ptr<Pool> pool;
std::atomic<int> wanted_threads{0};

}  // namespace

SteadyThreads::SteadyThreads() : before_(steady_threads) { steady_threads = num_threads(); }
SteadyThreads::~SteadyThreads() { steady_threads = before_; }

int num_threads() {
  if (steady_threads > 0) return steady_threads;
  int n = wanted_threads.load(std::memory_order_relaxed);
  if (n == 0) wanted_threads.store(n = default_threads(), std::memory_order_relaxed);
  return n;
}

void set_num_threads(int threads) {
  WINNOW_CHECK("threads", threads >= 1 && threads <= kMaxThreads,
               "threads must be from 1 to {}, got {}", kMaxThreads, threads);
  wanted_threads.store(threads, std::memory_order_relaxed);
}

void detail::run_tasks(std::int64_t tasks, TaskFunction function, void* context) {
  if (tasks <= 0) return;
  const int threads = num_threads();
  if (inside_task || threads == 1 || tasks == 1) {
    for (std::int64_t task = 0; task < tasks; ++task) function(context, task, 0);
    return;
  }
  const std::lock_guard lock(pool_mutex);
  if (!pool || pool->workers() != threads) {
    pool.reset();
    pool = std::make_unique<Pool>(threads);
  }
  pool->run(tasks, function, context);
}

}  // namespace winnow
