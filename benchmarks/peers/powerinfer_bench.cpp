// SPDX-License-Identifier: Apache-2.0
// Decode speed of PowerInfer from raw token ids, greedy; prints the line that the other contenders
// print, and the tokens. Its API is llama.cpp's of the end of 2023.
//
//     powerinfer_bench MODEL.gguf PROMPT_FILE NEW_TOKENS THREADS VERSION
//
// PROMPT_FILE is a JSON list of token ids.
#include "llama.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <vector>

static double now() {
    using namespace std::chrono;
    return duration<double>(steady_clock::now().time_since_epoch()).count();
}

static int fail(const char * what) {
    std::fprintf(stderr, "powerinfer_bench: %s\n", what);
    return 1;
}

static std::vector<llama_token> numbers_in(const char * path) {
    std::ifstream file(path);
    std::vector<llama_token> found;
    for (char c; file.get(c);) {
        if (c >= '0' && c <= '9') {
            file.unget();
            llama_token id = 0;
            file >> id;
            found.push_back(id);
        }
    }
    return found;
}

int main(int argc, char ** argv) {
    if (argc != 6) {
        return fail("expected MODEL PROMPT_FILE NEW_TOKENS THREADS VERSION");
    }
    std::vector<llama_token> prompt = numbers_in(argv[2]);
    const int new_tokens = std::atoi(argv[3]);
    const int threads    = std::atoi(argv[4]);
    if (prompt.empty() || new_tokens < 2 || threads < 1) {
        return fail("expected a prompt, at least 2 new tokens and 1 thread");
    }
    llama_backend_init(false);
    const double start = now();
    llama_context_params context_params = llama_context_default_params();
    context_params.n_ctx           = prompt.size() + new_tokens;
    context_params.n_batch         = prompt.size();
    context_params.n_threads       = threads;
    context_params.n_threads_batch = threads;
    llama_model * model = llama_load_model_from_file_with_context(
        argv[1], llama_model_default_params(), &context_params);
    if (model == nullptr) {
        return fail("the model does not load");
    }
    if (!llama_use_sparse_inference(model)) {
        return fail("the model has no predictors");
    }
    llama_context * context = llama_new_context_with_model(model, context_params);
    if (context == nullptr) {
        return fail("the context cannot be made");
    }
    const double load_seconds = now() - start;

    const int vocab_size = llama_n_vocab(model);
    std::vector<llama_token> tokens;
    tokens.reserve(new_tokens); // batches point into it
    std::vector<double> seconds;
    llama_batch batch = llama_batch_get_one(prompt.data(), prompt.size(), 0, 0);
    for (int i = 0; i < new_tokens; i++) {
        const double since = now();
        if (llama_decode(context, batch) != 0) {
            return fail("a step cannot be decoded");
        }
        // The logits of a batch are those of its last token, unless all were asked for.
        const float * logits = llama_get_logits(context);
        tokens.push_back(std::max_element(logits, logits + vocab_size) - logits);
        seconds.push_back(now() - since);
        batch = llama_batch_get_one(&tokens.back(), 1, prompt.size() + i, 0);
    }

    std::printf("PEER {\"peer\": \"powerinfer\", \"version\": \"%s\", \"load_seconds\": %.6f, "
                "\"prefill_seconds\": %.6f, \"model_bytes\": %llu, \"resident_bytes\": null, "
                "\"batch\": 1, \"tokens\": [[", argv[5], load_seconds, seconds[0],
                (unsigned long long) llama_model_size(model));
    for (size_t i = 0; i < tokens.size(); i++) {
        std::printf("%s%d", i == 0 ? "" : ", ", tokens[i]);
    }
    std::printf("]], \"seconds_per_token\": [");
    for (size_t i = 1; i < seconds.size(); i++) {
        std::printf("%s%.6f", i == 1 ? "" : ", ", seconds[i]);
    }
    std::puts("]}");
    llama_free(context);
    llama_free_model(model);
    llama_backend_free();
    return 0;
}
