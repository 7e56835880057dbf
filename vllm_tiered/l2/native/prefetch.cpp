// SPDX-License-Identifier: Apache-2.0
// Thread that reads cache lines. vllm_tiered/l2/prefetcher.py describes the calls.
#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace {

struct Span {
  const char* base;
  int64_t bytes;
};

constexpr int64_t kLine = 64;
constexpr int64_t kChunk = 4096;  // bytes between two checks for cancellation

class Worker {
 public:
  Worker(const int32_t* cpus, int64_t num_cpus) {
    thread_ = std::thread([this] { run(); });
    if (num_cpus > 0) {
      cpu_set_t mask;
      CPU_ZERO(&mask);
      for (int64_t i = 0; i < num_cpus; ++i) CPU_SET(cpus[i], &mask);
      // A failure is ignored: the thread is then slower, but still correct.
      pthread_setaffinity_np(thread_.native_handle(), sizeof(mask), &mask);
    }
  }

  ~Worker() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      closed_ = true;
      spans_.clear();
      generation_.fetch_add(1);
    }
    wake_.notify_one();
    thread_.join();
  }

  void begin(const Span* spans, int64_t count) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      spans_.insert(spans_.end(), spans, spans + count);
    }
    wake_.notify_one();
  }

  void cancel() {
    int64_t dropped = 0;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (size_t i = next_; i < spans_.size(); ++i) dropped += spans_[i].bytes;
      spans_.clear();
      next_ = 0;
      generation_.fetch_add(1);
    }
    dropped_.fetch_add(dropped);
  }

  bool idle() {
    std::lock_guard<std::mutex> lock(mutex_);
    return next_ == spans_.size() && !busy_;
  }

  void counts(int64_t* out) const {
    out[0] = fetched_.load();
    out[1] = dropped_.load();
  }

 private:
  void run() {
    for (;;) {
      Span span;
      uint64_t generation;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        busy_ = false;
        wake_.wait(lock, [this] { return closed_ || next_ < spans_.size(); });
        if (closed_) return;
        busy_ = true;
        span = spans_[next_++];
        if (next_ == spans_.size()) {
          spans_.clear();
          next_ = 0;
        }
        generation = generation_.load();
      }
      fetch(span, generation);
    }
  }

  void fetch(const Span& span, uint64_t generation) {
    int64_t done = 0;
    while (done < span.bytes && generation_.load(std::memory_order_relaxed) == generation) {
      const int64_t end = done + kChunk < span.bytes ? done + kChunk : span.bytes;
      // Use loads: a Zen 5 drops most prefetch instructions of a burst, and 256 KiB were then read
      // no faster than from memory. This thread may wait for its loads, as it does nothing else.
      for (int64_t at = done; at < end; at += kLine) {
        static_cast<void>(*static_cast<const volatile char*>(span.base + at));
      }
      done = end;
    }
    fetched_.fetch_add(done);
    dropped_.fetch_add(span.bytes - done);
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<Span> spans_;
  size_t next_ = 0;
  bool closed_ = false;
  bool busy_ = false;
  std::atomic<uint64_t> generation_{0};
  std::atomic<int64_t> fetched_{0};
  std::atomic<int64_t> dropped_{0};
  std::thread thread_;
};

}  // namespace

#define API extern "C" __attribute__((visibility("default")))

API void* tiered_l2_open(const int32_t* cpus, int64_t num_cpus) {
  try {
    return new Worker(cpus, num_cpus);
  } catch (...) {
    return nullptr;
  }
}

API void tiered_l2_begin(void* worker, const void* spans, int64_t count) {
  static_cast<Worker*>(worker)->begin(static_cast<const Span*>(spans), count);
}

API void tiered_l2_cancel(void* worker) { static_cast<Worker*>(worker)->cancel(); }

API int32_t tiered_l2_idle(void* worker) { return static_cast<Worker*>(worker)->idle(); }

API void tiered_l2_counts(void* worker, int64_t* out) {
  static_cast<Worker*>(worker)->counts(out);
}

API void tiered_l2_close(void* worker) { delete static_cast<Worker*>(worker); }
