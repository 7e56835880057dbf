// SPDX-License-Identifier: Apache-2.0
// llama.cpp's formats: writes a model file in another one, and scores texts with a file. Used through
// benchmarks/peers/llama_formats.py.
//
//     llama_formats quantise MODEL.gguf OUT.gguf FORMAT THREADS
//     llama_formats score MODEL.gguf THREADS < TEXTS
//
// FORMAT is a name of `formats` below. TEXTS has one text a line, as token ids. The answer is one
// line, "SCORES {json}": the natural log-probability of each token but a text's first, given those
// before it, texts in order.
#include "llama.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

static const std::map<std::string, llama_ftype> formats = {
    {"Q4_0", LLAMA_FTYPE_MOSTLY_Q4_0},
    {"Q4_K_M", LLAMA_FTYPE_MOSTLY_Q4_K_M},
    {"Q5_K_S", LLAMA_FTYPE_MOSTLY_Q5_K_S},
    {"Q5_K_M", LLAMA_FTYPE_MOSTLY_Q5_K_M},
    {"Q6_K", LLAMA_FTYPE_MOSTLY_Q6_K},
    {"Q8_0", LLAMA_FTYPE_MOSTLY_Q8_0},
};

static int fail(const char * what) {
    std::fprintf(stderr, "llama_formats: %s\n", what);
    return 1;
}

static int quantise(char ** argv) {
    const auto format = formats.find(argv[4]);
    if (format == formats.end()) {
        return fail("this format is not known");
    }
    llama_model_quantize_params params = llama_model_quantize_default_params();
    params.ftype   = format->second;
    params.nthread = std::atoi(argv[5]);
    return llama_model_quantize(argv[2], argv[3], &params) == 0 ? 0 : fail("the file cannot be quantised");
}

static double logprob(const float * logits, int vocab_size, llama_token token) {
    float most = logits[0];
    for (int i = 1; i < vocab_size; i++) {
        most = std::max(most, logits[i]);
    }
    double sum = 0;
    for (int i = 0; i < vocab_size; i++) {
        sum += std::exp(logits[i] - most);
    }
    return logits[token] - most - std::log(sum);
}

static int score(char ** argv) {
    std::vector<std::vector<llama_token>> texts;
    size_t longest = 0;
    for (std::string line; std::getline(std::cin, line);) {
        std::istringstream ids(line);
        texts.emplace_back();
        for (llama_token id; ids >> id;) {
            texts.back().push_back(id);
        }
        longest = std::max(longest, texts.back().size());
    }
    if (longest < 2) {
        return fail("expected texts of at least 2 tokens");
    }
    llama_model_params model_params = llama_model_default_params();
    model_params.use_extra_bufts = false; // the format's own products, as llama_bench has them
    llama_model * model = llama_model_load_from_file(argv[2], model_params);
    if (model == nullptr) {
        return fail("the model does not load");
    }
    llama_context_params context_params = llama_context_default_params();
    context_params.n_ctx = context_params.n_batch = longest;
    context_params.n_threads = context_params.n_threads_batch = std::atoi(argv[3]);
    llama_context * context = llama_init_from_model(model, context_params);
    if (context == nullptr) {
        return fail("the context cannot be made");
    }
    const int vocab_size = llama_vocab_n_tokens(llama_model_get_vocab(model));
    llama_batch batch = llama_batch_init(longest, 0, 1);
    std::printf("SCORES {\"logprobs\": [");
    const char * between = "";
    for (const auto & text : texts) {
        llama_memory_clear(llama_get_memory(context), true);
        batch.n_tokens = text.size();
        for (size_t i = 0; i < text.size(); i++) {
            batch.token[i]     = text[i];
            batch.pos[i]       = i;
            batch.n_seq_id[i]  = 1;
            batch.seq_id[i][0] = 0;
            batch.logits[i]    = true;
        }
        if (llama_decode(context, batch) != 0) {
            return fail("a text cannot be decoded");
        }
        for (size_t i = 0; i + 1 < text.size(); i++) {
            const double found = logprob(llama_get_logits_ith(context, i), vocab_size, text[i + 1]);
            std::printf("%s%.7g", between, found);
            between = ", ";
        }
    }
    std::puts("]}");
    llama_batch_free(batch);
    llama_free(context);
    llama_model_free(model);
    return 0;
}

int main(int argc, char ** argv) {
    llama_log_set([](ggml_log_level level, const char * text, void *) {
        if (level >= GGML_LOG_LEVEL_WARN && level != GGML_LOG_LEVEL_CONT) {
            std::fputs(text, stderr);
        }
    }, nullptr);
    llama_backend_init();
    const std::string what = argc > 1 ? argv[1] : "";
    int status = 2;
    if (what == "quantise" && argc == 6) {
        status = quantise(argv);
    } else if (what == "score" && argc == 4) {
        status = score(argv);
    } else {
        fail("expected quantise MODEL OUT FORMAT THREADS, or score MODEL THREADS");
    }
    llama_backend_free();
    return status;
}
