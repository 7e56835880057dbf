// SPDX-License-Identifier: Apache-2.0
// Runs work on the threads that torch computes with.
//
// torch loads an OpenMP runtime. A second runtime, linked here, would have threads that spin at the
// same time as torch's. So the loaded runtime is looked up by the name of its entry point, which
// libgomp, Intel's and LLVM's runtimes have.
#pragma once

#include <dlfcn.h>

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace tiered {

using Fork = void (*)(void (*)(void*), void*, unsigned num_threads, unsigned flags);

inline Fork openmp() {
    static const Fork found = (Fork)dlsym(RTLD_DEFAULT, "GOMP_parallel");
    return found;
}

// Runs work(0) .. work(num_parts - 1), each once. A runtime may give fewer threads than asked for.
template <class Work>
void parallel(int64_t num_parts, int num_threads, const Work& work) {
    struct Shared {
        const Work& work;
        int64_t num_parts;
        std::atomic<int64_t> next;
        static void run(void* data) {
            auto* shared = static_cast<Shared*>(data);
            int64_t part;
            while ((part = shared->next.fetch_add(1, std::memory_order_relaxed)) < shared->num_parts)
                shared->work(part);
        }
    } shared{work, num_parts, {0}};
    if (num_threads > num_parts) num_threads = int(num_parts);
    if (num_threads <= 1) {
        Shared::run(&shared);
    } else if (openmp() != nullptr) {
        openmp()(&Shared::run, &shared, unsigned(num_threads), 0);
    } else {
        std::vector<std::thread> threads;
        for (int i = 1; i < num_threads; ++i) threads.emplace_back(&Shared::run, &shared);
        Shared::run(&shared);
        for (auto& thread : threads) thread.join();
    }
}

}  // namespace tiered
