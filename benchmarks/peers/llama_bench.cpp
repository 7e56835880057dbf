// SPDX-License-Identifier: Apache-2.0
// Decode speed of llama.cpp from raw token ids, greedy; prints the line that the other contenders
// print. Used through `python -m benchmarks.peers.llama_cpp`, which holds the defaults. All requests
// have the same prompt but for its first token. With RANDOM 1 the next token is not the best one but
// one at random, as the text of random weights soon repeats itself. "read_bytes" is what the timed
// steps read from the disk, by the kernel's count: page faults with all that was read ahead.
//
// With ROUTING, a text file of "layers steps experts" and then each layer's experts step by step, a
// layer's decode steps want these experts in turn, a row for each request, whatever its router names.
//
//     llama_bench MODEL.gguf PROMPT_TOKENS NEW_TOKENS THREADS FIRST_ID ID_STEP VERSION
//         [BATCH RANDOM [ROUTING]]
#include "llama.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <random>
#include <vector>

#include <sys/resource.h>

static double now() {
    using namespace std::chrono;
    return duration<double>(steady_clock::now().time_since_epoch()).count();
}

static long long read_bytes() {
    rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return 512LL * usage.ru_inblock;
}

static int fail(const char * what) {
    std::fprintf(stderr, "llama_bench: %s\n", what);
    return 1;
}

struct Routing {
    int layers = 0, steps = 0, experts = 0, requests = 1;
    std::vector<int> ids;
    std::vector<int> at; // next step of each layer

    bool read(const char * path) {
        std::ifstream file(path);
        if (!(file >> layers >> steps >> experts)) {
            return false;
        }
        ids.resize(size_t(layers) * steps * experts);
        at.resize(layers);
        for (int & id : ids) {
            file >> id;
        }
        return bool(file);
    }
};

static const char * const CHOSEN = "ffn_moe_topk-";

// llama.cpp asks which nodes it shall stop after, and calls again there.
static bool replace_experts(ggml_tensor * node, bool is_asking, void * user_data) {
    const bool is_chosen = std::strncmp(node->name, CHOSEN, std::strlen(CHOSEN)) == 0;
    Routing & routing = *static_cast<Routing *>(user_data);
    if (is_asking || !is_chosen || node->ne[1] != routing.requests) {
        return !is_asking || is_chosen;
    }
    const int layer = std::atoi(node->name + std::strlen(CHOSEN)) % routing.layers;
    for (int request = 0; request < routing.requests; request++) {
        const int step  = routing.at[layer]++ % routing.steps;
        const int * ids = &routing.ids[(size_t(layer) * routing.steps + step) * routing.experts];
        std::memcpy((char *) node->data + request * node->nb[1], ids, sizeof(int) * routing.experts);
    }
    return true;
}

int main(int argc, char ** argv) {
    if (argc != 8 && argc != 10 && argc != 11) {
        return fail("expected MODEL PROMPT_TOKENS NEW_TOKENS THREADS FIRST_ID ID_STEP VERSION [BATCH RANDOM [ROUTING]]");
    }
    const int prompt_tokens = std::atoi(argv[2]);
    const int new_tokens    = std::atoi(argv[3]);
    const int threads       = std::atoi(argv[4]);
    const int first_id      = std::atoi(argv[5]);
    const int id_step       = std::atoi(argv[6]);
    const int requests      = argc >= 10 ? std::atoi(argv[8]) : 1;
    const bool is_random    = argc >= 10 && std::atoi(argv[9]) == 1;
    if (prompt_tokens < 1 || new_tokens < 2 || threads < 1 || requests < 1) {
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
    context_params.n_ctx           = requests * (prompt_tokens + new_tokens);
    context_params.n_batch         = requests * prompt_tokens;
    context_params.n_seq_max       = requests;
    context_params.kv_unified      = true;
    context_params.n_threads       = threads;
    context_params.n_threads_batch = threads;
    Routing routing;
    routing.requests = requests;
    if (argc == 11) {
        if (!routing.read(argv[10])) {
            return fail("the routing cannot be read");
        }
        context_params.cb_eval           = replace_experts;
        context_params.cb_eval_user_data = &routing;
    }
    llama_context * context = llama_init_from_model(model, context_params);
    if (context == nullptr) {
        return fail("the context cannot be made");
    }
    const double load_seconds = now() - start;

    const int vocab_size = llama_vocab_n_tokens(llama_model_get_vocab(model));
    llama_batch batch = llama_batch_init(requests * prompt_tokens, 0, 1);
    const auto add = [&](llama_token token, int position, int request, bool has_logits) {
        const int i = batch.n_tokens++;
        batch.token[i]     = token;
        batch.pos[i]       = position;
        batch.n_seq_id[i]  = 1;
        batch.seq_id[i][0] = request;
        batch.logits[i]    = has_logits;
    };
    for (int request = 0; request < requests; request++) {
        for (int i = 0; i < prompt_tokens; i++) {
            add(first_id + i * id_step + (i == 0 ? request : 0), i, request, i + 1 == prompt_tokens);
        }
    }
    // The first new token comes out of the prompts' pass, so it counts as prefill.
    double since = now();
    if (llama_decode(context, batch) != 0) {
        return fail("the prompts cannot be decoded");
    }
    double prefill_seconds = 0;
    std::vector<double> seconds_per_token;
    long long read_before = 0;
    std::mt19937 generator(0);
    for (int i = 0; i < new_tokens; i++) {
        std::vector<llama_token> next;
        for (int at = 0; at < batch.n_tokens; at++) {
            if (batch.logits[at]) {
                const float * logits = llama_get_logits_ith(context, at);
                const llama_token best = std::max_element(logits, logits + vocab_size) - logits;
                next.push_back(is_random ? llama_token(generator() % vocab_size) : best);
            }
        }
        const double seconds = now() - since;
        if (i == 0) {
            prefill_seconds = seconds;
            read_before = read_bytes();
        } else {
            seconds_per_token.push_back(seconds);
        }
        since = now();
        batch.n_tokens = 0;
        for (int request = 0; request < requests; request++) {
            add(next[request], prompt_tokens + i, request, true);
        }
        if (i + 1 < new_tokens && llama_decode(context, batch) != 0) {
            return fail("a token cannot be decoded");
        }
    }

    const long long read = read_bytes() - read_before;
    std::printf("PEER {\"peer\": \"llama_cpp\", \"version\": \"%s\", \"load_seconds\": %.6f, "
                "\"prefill_seconds\": %.6f, \"model_bytes\": %llu, \"resident_bytes\": null, "
                "\"batch\": %d, \"read_bytes\": %lld, \"seconds_per_token\": [", argv[7], load_seconds,
                prefill_seconds, (unsigned long long) llama_model_size(model), requests, read);
    for (size_t i = 0; i < seconds_per_token.size(); i++) {
        std::printf("%s%.6f", i == 0 ? "" : ", ", seconds_per_token[i]);
    }
    std::puts("]}");
    llama_batch_free(batch);
    llama_free(context);
    llama_model_free(model);
    llama_backend_free();
    return 0;
}
