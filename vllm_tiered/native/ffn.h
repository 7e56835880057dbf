// SPDX-License-Identifier: Apache-2.0
// The FFN's GEMM over the slots of a cache buffer, with the one function that Python calls.
//
// Each translation unit includes this once; there is one for each instruction set.
#include <cstddef>

#include "gemm.h"
#include "parallel.h"

namespace tiered {

enum Codec : int32_t { kFloat32, kBFloat16, kFloat16, kInt8, kInt4 };

// Arguments of a call. The fields are the same as in `Call` of native/__init__.py.
struct Call {
    const uint8_t* bundles;   // [num_slots, stride]
    const uint16_t* scales;   // [num_slots, num_matrices, num_groups] float16, or null
    const float* up_bias;     // [num_slots], or null
    const float* x;           // [num_tokens, hidden]; null: the activations are read
    float* activations;       // [num_tokens, num_slots], written or read
    float* out;               // [num_tokens, hidden], added to; null: no down GEMM
    int64_t stride, num_slots, hidden, num_matrices, num_groups, num_tokens;
    int32_t codec, both, num_threads;  // both: up has a ReLU too
    float threshold;                   // what the gate (or fc1) has to exceed
};

constexpr int64_t kChunkSlots = 16;       // slots that a thread takes at a time
constexpr int64_t kSegment = 1024;       // weights: sums of 4 tokens fit a core's L1 cache
constexpr int64_t kPartBytes = 1 << 16;  // weights below which one more thread does not pay

// Keeps NaN.
inline float above(float x, float threshold) { return x <= threshold ? 0.0f : x; }

// Prefetches the next row. A processor reads ahead only within a page, and each row has its own page.
inline void prefetch(const uint8_t* from) {
    for (int line = 0; line < 4; ++line) __builtin_prefetch(from + 64 * line);
}

template <class Low, class High>
class Gemm {
   public:
    Gemm(const Call& call, int64_t bytes_per_matrix, bool is_nibbles)
        : call_(call),
          bytes_per_matrix_(bytes_per_matrix),
          weights_{segments(call.hidden, call.num_groups, is_nibbles,
                            call.num_tokens == 1 && !is_nibbles ? call.hidden : kSegment),
                   call.scales != nullptr ? kHalfScale : kNoScale} {}

    void run() const {
        const int64_t bytes = call_.num_slots * call_.num_matrices * bytes_per_matrix_;
        int64_t threads = std::min<int64_t>(call_.num_threads, 1 + bytes / kPartBytes);
        threads = std::max<int64_t>(1, std::min(threads, call_.num_slots / kChunkSlots));
        if (call_.out == nullptr) {
            const int64_t num_chunks = (call_.num_slots + kChunkSlots - 1) / kChunkSlots;
            parallel(num_chunks, int(threads), [&](int64_t chunk) {
                const int64_t begin = chunk * kChunkSlots;
                activations(begin, std::min(begin + kChunkSlots, call_.num_slots));
            });
            return;
        }
        // Each part of the slots has its own sums, so that results do not depend on thread timing.
        const int64_t size = call_.num_tokens * call_.hidden;
        std::vector<float> others(size_t(size * (threads - 1)), 0.0f);
        parallel(threads, int(threads), [&](int64_t part) {
            float* const out = part ? &others[size_t((part - 1) * size)] : call_.out;
            const int64_t end = call_.num_slots * (part + 1) / threads;
            for (int64_t begin = call_.num_slots * part / threads, next; begin < end; begin = next) {
                next = std::min(begin + kChunkSlots, end);
                if (call_.x != nullptr) activations(begin, next);
                down(begin, next, out);
            }
        });
        for (int64_t part = 1; part < threads; ++part)
            for (int64_t i = 0; i < size; ++i) call_.out[i] += others[size_t((part - 1) * size + i)];
    }

   private:
    const float* x(int64_t token) const { return call_.x + token * call_.hidden; }

    Row row(int64_t index, int64_t matrix) const {
        return {call_.bundles + index * call_.stride + matrix * bytes_per_matrix_,
                call_.scales + (index * call_.num_matrices + matrix) * call_.num_groups};
    }

    // Computes the activations of slots begin .. end - 1, for all tokens.
    void activations(int64_t begin, int64_t end) const {
        const int64_t per_row = call_.num_matrices - 1;  // streams
        while (begin < end) {
            const int64_t num = std::min<int64_t>(4 / per_row, end - begin);
            Row rows[4];
            for (int64_t i = 0; i < num; ++i)
                for (int64_t m = 0; m < per_row; ++m) {
                    rows[i * per_row + m] = row(begin + i, m);
                    if (begin + num + i < call_.num_slots) prefetch(row(begin + num + i, m).weights);
                }
            const int streams = int(num * per_row);
            for (int64_t token = 0; token < call_.num_tokens;) {
                const int64_t left = call_.num_tokens - token;
                if (left >= 4)
                    token += tile<4>(begin, rows, streams, token);
                else if (left >= 2)
                    token += tile<2>(begin, rows, streams, token);
                else
                    token += tile<1>(begin, rows, streams, token);
            }
            begin += num;
        }
    }

    template <int T>
    int64_t tile(int64_t begin, const Row* rows, int streams, int64_t token) const {
        const float* x_t[T];
        for (int t = 0; t < T; ++t) x_t[t] = x(token + t);
        // Compute as many dot products at a time as registers can hold sums.
        constexpr int kStreams = T == 4 ? 2 : 4;
        float sums[4 * T];
        for (int s = 0; s < streams;) {
            if (streams - s >= kStreams) {
                dots<Low, High, kStreams, T>(weights_, rows + s, x_t, sums + s * T);
                s += kStreams;
            } else if (streams - s >= 2) {
                dots<Low, High, 2, T>(weights_, rows + s, x_t, sums + s * T);
                s += 2;
            } else {
                dots<Low, High, 1, T>(weights_, rows + s, x_t, sums + s * T);
                s += 1;
            }
        }
        const int per_row = int(call_.num_matrices) - 1;
        for (int i = 0; i < streams / per_row; ++i)
            for (int t = 0; t < T; ++t) {
                float* const into = call_.activations + (token + t) * call_.num_slots + begin + i;
                const float first = sums[i * per_row * T + t];
                if (per_row == 2) {
                    const float up = sums[(i * per_row + 1) * T + t];
                    *into = above(first, call_.threshold) * (call_.both ? above(up, 0.0f) : up);
                } else {
                    *into = above(
                        call_.up_bias != nullptr ? first + call_.up_bias[begin + i] : first,
                        call_.threshold);
                }
            }
        return T;
    }

    // Adds slots begin .. end - 1 to the output; slots whose activations are all 0 are not read.
    void down(int64_t begin, int64_t end, float* out) const {
        for (int64_t token = 0; token < call_.num_tokens;) {
            const int64_t left = call_.num_tokens - token;
            if (left >= 4)
                token += down_tile<4>(begin, end, token, out);
            else if (left >= 2)
                token += down_tile<2>(begin, end, token, out);
            else
                token += down_tile<1>(begin, end, token, out);
        }
    }

    template <int T>
    int64_t down_tile(int64_t begin, int64_t end, int64_t token, float* out) const {
        Row rows[kChunkSlots];
        float a[kChunkSlots * T];
        float* out_t[T];
        for (int t = 0; t < T; ++t) out_t[t] = out + (token + t) * call_.hidden;
        int64_t num = 0;
        for (int64_t i = begin; i < end; ++i) {
            bool adds = false;
            for (int t = 0; t < T; ++t) {
                const float value = call_.activations[(token + t) * call_.num_slots + i];
                a[num * T + t] = value;
                adds |= value != 0.0f;
            }
            if (adds) rows[num++] = row(i, call_.num_matrices - 1);
        }
        for (const Segment& segment : weights_.segments) {
            int64_t r = 0;
            for (; r + 4 <= num; r += 4) {
                const bool is_first = segment.begin == 0 && !segment.is_high;
                if (!kIsShort<Low, High> || is_first)
                    for (int64_t k = r + 4; k < std::min(r + 8, num); ++k)
                        prefetch(rows[k].weights + segment.begin);
                if (kIsShort<Low, High> && !segment.is_high) prefetch_ahead<4>(rows + r, segment);
                add_rows<Low, High, 4, T>(weights_, segment, rows + r, a + r * T, out_t);
            }
            for (; r < num; ++r)
                add_rows<Low, High, 1, T>(weights_, segment, rows + r, a + r * T, out_t);
        }
        return T;
    }

    const Call& call_;
    const int64_t bytes_per_matrix_;
    const Weights weights_;
};

}  // namespace tiered

// Returns 0, 1 for an unknown codec, 2 if memory ran out, 3 if no thread could be started.
extern "C" __attribute__((visibility("default"))) int tiered_ffn(const tiered::Call* call) {
    using namespace tiered;
    try {
        switch (call->codec) {
            case kFloat32:
                Gemm<Float32, Float32>(*call, 4 * call->hidden, false).run();
                return 0;
            case kBFloat16:
                Gemm<BFloat16, BFloat16>(*call, 2 * call->hidden, false).run();
                return 0;
            case kFloat16:
                Gemm<Float16, Float16>(*call, 2 * call->hidden, false).run();
                return 0;
            case kInt8:
                Gemm<Int8, Int8>(*call, call->hidden, false).run();
                return 0;
            case kInt4:
                Gemm<LowNibbles, HighNibbles>(*call, call->hidden / 2, true).run();
                return 0;
            default:
                return 1;
        }
    } catch (const std::bad_alloc&) {
        return 2;
    } catch (...) {
        return 3;
    }
}
