// SPDX-License-Identifier: Apache-2.0
// Decode speed of llama.cpp from raw token ids, greedy, batch 1; prints the line that the other
// contenders print. Used through `python -m benchmarks.peers.llama_cpp`, which holds the defaults.
//
//     llama_bench MODEL.gguf PROMPT_TOKENS NEW_TOKENS THREADS FIRST_ID ID_STEP VERSION
#include "llama.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

static double now() {
    using namespace std::chrono;
    return duration<double>(steady_clock::now().time_since_epoch()).count();
}

static int fail(const char * what) {
    std::fprintf(stderr, "llama_bench: %s\n", what);
    return 1;
}

int main(int argc, char ** argv) {
    if (argc != 8) {
        return fail("expected MODEL PROMPT_TOKENS NEW_TOKENS THREADS FIRST_ID ID_STEP VERSION");
    }
    const int prompt_tokens = std::atoi(argv[2]);
    const int new_tokens    = std::atoi(argv[3]);
    const int threads       = std::atoi(argv[4]);
    const int first_id      = std::atoi(argv[5]);
    const int id_step       = std::atoi(argv[6]);
    if (prompt_tokens < 1 || new_tokens < 2 || threads < 1) {
        return fail("expected at least 1 prompt token, 2 new tokens and 1 thread");
    }
    llama_log_set([](ggml_log_level level, const char * text, void *) {
        if (level >= GGML_LOG_LEVEL_WARN && level != GGML_LOG_LEVEL_CONT) {
            std::fputs(text, stderr);
        }
    }, nullptr);
    llama_backend_init();

    const double start = now();
    llama_model_params model_params = llama_model_default_params();
    model_params.load_mode       = LLAMA_LOAD_MODE_MMAP;
    model_params.use_extra_bufts = false; // repacked weights would be a second copy in memory
    llama_model * model = llama_model_load_from_file(argv[1], model_params);
    if (model == nullptr) {
        return fail("the model does not load");
    }
    llama_context_params context_params = llama_context_default_params();
    context_params.n_ctx           = prompt_tokens + new_tokens;
    context_params.n_batch         = prompt_tokens;
    context_params.n_threads       = threads;
    context_params.n_threads_batch = threads;
    llama_context * context = llama_init_from_model(model, context_params);
    if (context == nullptr) {
        return fail("the context cannot be made");
    }
    const double load_seconds = now() - start;

    std::vector<llama_token> prompt;
    for (int i = 0; i < prompt_tokens; i++) {
        prompt.push_back(first_id + i * id_step);
    }
    const int vocab_size = llama_vocab_n_tokens(llama_model_get_vocab(model));
    // The first new token comes out of the prompt's pass, so it counts as prefill.
    double since = now();
    if (llama_decode(context, llama_batch_get_one(prompt.data(), prompt_tokens)) != 0) {
        return fail("the prompt cannot be decoded");
    }
    double prefill_seconds = 0;
    std::vector<double> seconds_per_token;
    for (int i = 0; i < new_tokens; i++) {
        const float * logits = llama_get_logits_ith(context, -1);
        llama_token token = std::max_element(logits, logits + vocab_size) - logits;
        const double seconds = now() - since;
        if (i == 0) {
            prefill_seconds = seconds;
        } else {
            seconds_per_token.push_back(seconds);
        }
        since = now();
        if (i + 1 < new_tokens && llama_decode(context, llama_batch_get_one(&token, 1)) != 0) {
            return fail("a token cannot be decoded");
        }
    }

    std::printf("PEER {\"peer\": \"llama_cpp\", \"version\": \"%s\", \"load_seconds\": %.6f, "
                "\"prefill_seconds\": %.6f, \"model_bytes\": %llu, \"resident_bytes\": null, "
                "\"seconds_per_token\": [", argv[7], load_seconds, prefill_seconds,
                (unsigned long long) llama_model_size(model));
    for (size_t i = 0; i < seconds_per_token.size(); i++) {
        std::printf("%s%.6f", i == 0 ? "" : ", ", seconds_per_token[i]);
    }
    std::puts("]}");
    llama_free(context);
    llama_model_free(model);
    llama_backend_free();
    return 0;
}
