// SPDX-License-Identifier: Apache-2.0
// GEMM of 4-bit weights grouped by expert: each token's input with the weights of its expert.
//
//     out[p]  =  x[rows[p]] w[e]^T + bias[e]        for the pairs p of expert e
//     w       =  (code - zero) * scale,   a scale and a zero for each group along a row
//
// Included once by each translation unit.
#pragma once

#include <memory>
#include <new>

#include "gemm.h"
#include "parallel.h"

namespace tiered {

// Arguments of a call. The fields are the same as in `GroupedCall` of native/__init__.py.
struct GroupedCall {
    const uint8_t* codes;    // [experts, num_rows, length / 2]: row's first half in low nibbles
    const uint8_t* scales;   // [experts, num_rows, num_groups], of `scale_type`
    const uint8_t* zeros;    // [experts, num_rows, num_groups], or null: 8 everywhere
    const float* bias;       // [experts, num_rows], or null
    const float* x;          // [tokens, length]
    const int64_t* rows;     // [num_pairs]: the row of x of each pair; ascending by expert
    const int64_t* experts;  // [num_experts]: the experts that have pairs
    const int64_t* ends;     // [num_experts]: one past each expert's last pair
    float* out;              // [num_pairs, num_rows]
    int64_t num_rows, length, num_groups, num_pairs, num_experts;
    int32_t scale_type, num_threads;
};

class GroupedGemm {
   public:
    explicit GroupedGemm(const GroupedCall& call)
        : call_(call),
          weights_{segments(call.length, call.num_groups, true, call.length), call.scale_type,
                   pair_group(call.length, call.num_groups)} {}

    void run() {
        if (call_.zeros != nullptr) sum_groups();
        const int64_t per_expert = (call_.num_rows + kChunkRows - 1) / kChunkRows;
        const int64_t num_chunks = per_expert * call_.num_experts;
        const int64_t bytes = call_.num_experts * call_.num_rows * call_.length / 2;
        const int64_t threads = std::min<int64_t>(call_.num_threads, 1 + bytes / kPartBytes);
        parallel(num_chunks, int(threads), [&](int64_t chunk) {
            const int64_t index = chunk / per_expert;
            const int64_t begin = chunk % per_expert * kChunkRows;
            compute(index, begin, std::min(begin + kChunkRows, call_.num_rows));
        });
        if (is_out_of_memory_) throw std::bad_alloc();
    }

   private:
    static constexpr int64_t kChunkRows = 16;
    static constexpr int64_t kPartBytes = 1 << 16;  // weights below which a thread does not pay
    // Number of pairs from which a chunk's codes are expanded once, and not for each tile of pairs.
    static constexpr int64_t kExpandFrom = 8;

    // Sums x over each group, because the zeros of a group multiply its sum.
    void sum_groups() {
        const int64_t group = call_.length / call_.num_groups;
        sums_.resize(size_t(call_.num_pairs * call_.num_groups));
        parallel(call_.num_pairs, call_.num_threads, [&](int64_t pair) {
            const float* x = call_.x + call_.rows[pair] * call_.length;
            for (int64_t g = 0; g < call_.num_groups; ++g) {
                float sum = 0.0f;
                for (int64_t k = g * group; k < (g + 1) * group; ++k) sum += x[k];
                sums_[size_t(pair * call_.num_groups + g)] = sum;
            }
        });
    }

    // Computes rows begin .. end - 1 of an expert, for all of its pairs.
    void compute(int64_t index, int64_t begin, int64_t end) {
        const int64_t expert = call_.experts[index];
        const int64_t first = index ? call_.ends[index - 1] : 0, last = call_.ends[index];
        const int64_t num_rows = end - begin;
        const int64_t scale_bytes = call_.scale_type == kFloatScale ? 4 : 2;
        Row rows[kChunkRows];
        for (int64_t r = 0; r < num_rows; ++r) {
            const int64_t row = expert * call_.num_rows + begin + r;
            rows[r] = {call_.codes + row * (call_.length / 2),
                       call_.scales + row * call_.num_groups * scale_bytes};
        }
        if (last - first < kExpandFrom) {
            pairs(rows, num_rows, expert, begin, first, last, [&](auto s, auto t, int64_t r,
                                                                  const float* const* x, float* sums) {
                dots<LowNibbles, HighNibbles, s(), t()>(weights_, rows + r, x, sums);
            });
            return;
        }
        // A thread must not throw.
        const size_t size = size_t(num_rows * call_.length);
        const std::unique_ptr<float[]> expanded(new (std::nothrow) float[size]);
        if (expanded == nullptr) {
            is_out_of_memory_ = true;
            return;
        }
        Row low[kChunkRows], high[kChunkRows];
        for (int64_t r = 0; r < num_rows; ++r) {
            float* const into = expanded.get() + r * call_.length;
            expand(rows[r].weights, into);
            low[r] = {(const uint8_t*)into, rows[r].scales};
            high[r] = {(const uint8_t*)(into + call_.length / 2), rows[r].scales};
        }
        pairs(rows, num_rows, expert, begin, first, last, [&](auto s, auto t, int64_t r,
                                                              const float* const* x, float* sums) {
            expanded_dots<s(), t()>(low + r, high + r, x, sums);
        });
    }

    // Calls `dot` for tiles of rows and pairs, a tile of pairs at a time.
    template <class Dot>
    void pairs(const Row* rows, int64_t num_rows, int64_t expert, int64_t begin, int64_t first,
               int64_t last, const Dot& dot) const {
        for (int64_t pair = first; pair < last;) {
            const int64_t left = last - pair;
            if (left >= 4)
                pair += tile<2, 4>(rows, num_rows, expert, begin, pair, dot);
            else if (left >= 2)
                pair += tile<4, 2>(rows, num_rows, expert, begin, pair, dot);
            else
                pair += tile<4, 1>(rows, num_rows, expert, begin, pair, dot);
        }
    }

    template <int S, int T, class Dot>
    int64_t tile(const Row* rows, int64_t num_rows, int64_t expert, int64_t begin, int64_t pair,
                 const Dot& dot) const {
        using Streams = std::integral_constant<int, S>;
        using One = std::integral_constant<int, 1>;
        using Tokens = std::integral_constant<int, T>;
        const float* x[T];
        for (int t = 0; t < T; ++t) x[t] = call_.x + call_.rows[pair + t] * call_.length;
        float sums[S * T];
        for (int64_t r = 0; r < num_rows;) {
            const int64_t num = num_rows - r >= S ? S : 1;
            if (num == S)
                dot(Streams(), Tokens(), r, x, sums);
            else
                dot(One(), Tokens(), r, x, sums);
            for (int64_t s = 0; s < num; ++s, ++r)
                for (int t = 0; t < T; ++t) {
                    const int64_t row = expert * call_.num_rows + begin + r;
                    float sum = sums[s * T + t];
                    if (call_.zeros != nullptr) sum += of_zeros(rows[r], row, pair + t);
                    if (call_.bias != nullptr) sum += call_.bias[row];
                    call_.out[(pair + t) * call_.num_rows + begin + r] = sum;
                }
        }
        return T;
    }

    // Returns what the zeros add: a code's float is the code less 8.
    float of_zeros(const Row& row, int64_t index, int64_t pair) const {
        const uint8_t* const zeros = call_.zeros + index * call_.num_groups;
        const float* const sums = sums_.data() + pair * call_.num_groups;
        float sum = 0.0f;
        for (int64_t g = 0; g < call_.num_groups; ++g)
            sum += float(8 - int(zeros[g])) * scale_of(weights_, row, g) * sums[g];
        return sum;
    }

    void expand(const uint8_t* codes, float* into) const {
        const int64_t half = call_.length / 2;
        int64_t j = 0;
        for (; j + kWidth <= half; j += kWidth) {
            store(into + j, LowNibbles::vector(codes, j));
            store(into + half + j, HighNibbles::vector(codes, j));
        }
        for (; j < half; ++j) {
            into[j] = LowNibbles::scalar(codes, j);
            into[half + j] = HighNibbles::scalar(codes, j);
        }
    }

    // The same sums as `dots` of the codes, bit by bit: in the same order, scaled group by group.
    template <int S, int T>
    void expanded_dots(const Row* low, const Row* high, const float* const* x, float* sums) const {
        Vector total[S][T];
        float rest[S][T] = {};
        for (int s = 0; s < S; ++s)
            for (int t = 0; t < T; ++t) total[s][t] = spread(0.0f);
        for (const Segment& segment : weights_.segments) {
            float scales[S];
            for (int s = 0; s < S; ++s) scales[s] = scale_of(weights_, low[s], segment.group);
            dot_segment<Float32, S, T>(segment, segment.is_high ? high : low, scales, x, total, rest);
        }
        for (int s = 0; s < S; ++s)
            for (int t = 0; t < T; ++t) sums[s * T + t] = sum(total[s][t]) + rest[s][t];
    }

    const GroupedCall& call_;
    const Weights weights_;
    std::vector<float> sums_;
    std::atomic<bool> is_out_of_memory_{false};
};

}  // namespace tiered

// Returns 0, 2 if memory ran out, 3 if no thread could be started.
extern "C" __attribute__((visibility("default"))) int tiered_grouped_gemm(
    const tiered::GroupedCall* call) {
    try {
        tiered::GroupedGemm(*call).run();
        return 0;
    } catch (const std::bad_alloc&) {
        return 2;
    } catch (...) {
        return 3;
    }
}
