// SPDX-License-Identifier: Apache-2.0
// GEMM of a few rows with a few tokens, which a thread computes at a time.
//
//     dots         sums[s][t]  = <row s, x[t]>        rows of gate and up
//     add_rows     out[t]     += sum_r a[r][t] row r  rows of down
//
// A row is computed segment by segment. The weights of a segment share a scale, and are contiguous in
// the stored row and in the hidden state. In rows of 4-bit codes, segments of low nibbles alternate
// with segments of high nibbles, which are the row's second half.
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "codecs.h"

namespace tiered {

struct Segment {
    int64_t begin, end;  // positions in the stored row
    int64_t shift;       // from a position to the feature of the hidden state
    int64_t group;       // index of the segment's scale
    bool is_high;        // the weights are high nibbles
};

// Returns the segments of a row. `num_groups` is 0 where there are no scales.
inline std::vector<Segment> segments(int64_t hidden, int64_t num_groups, bool is_nibbles,
                                     int64_t longest) {
    const int64_t length = is_nibbles ? hidden / 2 : hidden;
    const int64_t group = hidden / std::max<int64_t>(1, num_groups);
    std::vector<Segment> found;
    for (int64_t shift = 0; shift < hidden; shift += length) {
        for (int64_t begin = 0, end; begin < length; begin = end) {
            const int64_t of = (begin + shift) / group;
            end = std::min({length, begin + longest, (of + 1) * group - shift});
            found.push_back({begin, end, shift, of, shift > 0});
        }
    }
    std::stable_sort(found.begin(), found.end(),
                     [](const Segment& a, const Segment& b) { return a.begin < b.begin; });
    return found;
}

enum ScaleType : int32_t { kNoScale, kHalfScale, kBFloatScale, kFloatScale };

// Constants of all GEMMs of a call.
struct Weights {
    std::vector<Segment> segments;
    int32_t scale_type;
    int64_t pair_group;  // see `pair_group`
};

// Returns the length of a group of nibbles if each byte's two nibbles are in groups of whole vectors
// that begin at the same byte; otherwise 0.
inline int64_t pair_group(int64_t hidden, int64_t num_groups) {
    const int64_t group = hidden / std::max<int64_t>(1, num_groups);
    return num_groups % 2 == 0 && num_groups > 0 && group % kWidth == 0 ? group : 0;
}

// Weights and scales of one matrix's row.
struct Row {
    const uint8_t* weights;
    const void* scales;
};

template <int32_t kScaleType>
inline float scale_of(const Row& row, int64_t group) {
    if constexpr (kScaleType == kNoScale)
        return 1.0f;
    else if constexpr (kScaleType == kHalfScale)
        return half_to_float(static_cast<const uint16_t*>(row.scales)[group]);
    else if constexpr (kScaleType == kBFloatScale)
        return bfloat_to_float(static_cast<const uint16_t*>(row.scales)[group]);
    else
        return static_cast<const float*>(row.scales)[group];
}

inline float scale_of(const Weights& weights, const Row& row, int64_t group) {
    switch (weights.scale_type) {
        case kNoScale:
            return scale_of<kNoScale>(row, group);
        case kHalfScale:
            return scale_of<kHalfScale>(row, group);
        case kBFloatScale:
            return scale_of<kBFloatScale>(row, group);
        default:
            return scale_of<kFloatScale>(row, group);
    }
}

// A row of nibbles ends before a processor detects sequential reads. So cache lines are prefetched a
// fixed distance ahead; beyond a row's end this is of no use.
template <class Low, class High>
constexpr bool kIsShort = !std::is_same_v<Low, High>;

template <int R>
inline void prefetch_ahead(const Row* rows, const Segment& segment) {
    constexpr int64_t kAhead = 256;
    for (int64_t at = segment.begin; at < segment.end; at += 64)
        for (int r = 0; r < R; ++r) __builtin_prefetch(rows[r].weights + at + kAhead);
}

template <class Codec, int S, int T>
inline void dot_segment(const Segment& segment, const Row* rows, const float* scales,
                        const float* const* x, Vector (&total)[S][T], float (&rest)[S][T]) {
    Vector found[S][T];
    for (int s = 0; s < S; ++s)
        for (int t = 0; t < T; ++t) found[s][t] = spread(0.0f);
    constexpr int kBlock = Codec::kVectors * kWidth;
    int64_t j = segment.begin;
    if (kBlock > kWidth)
        for (; j + kBlock <= segment.end; j += kBlock)
            for (int s = 0; s < S; ++s) {
                Vector w[Codec::kVectors];
                Codec::block(rows[s].weights, j, w);
                for (int v = 0; v < Codec::kVectors; ++v)
                    for (int t = 0; t < T; ++t)
                        found[s][t] = multiply_add(
                            w[v], load(x[t] + segment.shift + j + v * kWidth), found[s][t]);
            }
    for (; j + kWidth <= segment.end; j += kWidth) {
        Vector x_t[T];
        for (int t = 0; t < T; ++t) x_t[t] = load(x[t] + segment.shift + j);
        for (int s = 0; s < S; ++s) {
            const Vector w = Codec::vector(rows[s].weights, j);
            for (int t = 0; t < T; ++t) found[s][t] = multiply_add(w, x_t[t], found[s][t]);
        }
    }
    for (int s = 0; s < S; ++s) {
        const Vector scale = spread(scales[s]);
        for (int t = 0; t < T; ++t) total[s][t] = multiply_add(found[s][t], scale, total[s][t]);
    }
    if (j == segment.end) return;
    for (int s = 0; s < S; ++s)
        for (int64_t k = j; k < segment.end; ++k) {
            const float w = Codec::scalar(rows[s].weights, k) * scales[s];
            for (int t = 0; t < T; ++t) rest[s][t] += w * x[t][segment.shift + k];
        }
}

// `dots` of nibbles, where `pair_group` is not 0: both of a byte are computed together, so that it is
// loaded and widened once. The same sums, bit by bit. Rows follow one another, so the next S of them
// are prefetched meanwhile.
template <class Low, class High, int S, int T, int32_t kScaleType>
void paired_dots(const Weights& weights, const Row* rows, const float* const* x, float* sums) {
    const int64_t group = weights.pair_group;
    const int64_t num_groups = int64_t(weights.segments.size()), half = num_groups / 2 * group;
    Vector total[S][T];
    for (int s = 0; s < S; ++s)
        for (int t = 0; t < T; ++t) total[s][t] = spread(0.0f);
    for (int64_t g = 0, j = 0; g < num_groups / 2; ++g) {
        Vector low[S][T], high[S][T];
        for (int s = 0; s < S; ++s)
            for (int t = 0; t < T; ++t) low[s][t] = high[s][t] = spread(0.0f);
        for (const int64_t end = j + group; j < end; j += kWidth)
            for (int s = 0; s < S; ++s) {
                __builtin_prefetch(rows[s].weights + j + S * half);
                const Vector w_low = Low::vector(rows[s].weights, j);
                const Vector w_high = High::vector(rows[s].weights, j);
                for (int t = 0; t < T; ++t) {
                    low[s][t] = multiply_add(w_low, load(x[t] + j), low[s][t]);
                    high[s][t] = multiply_add(w_high, load(x[t] + half + j), high[s][t]);
                }
            }
        for (int s = 0; s < S; ++s) {
            const Vector of_low = spread(scale_of<kScaleType>(rows[s], g));
            const Vector of_high = spread(scale_of<kScaleType>(rows[s], num_groups / 2 + g));
            for (int t = 0; t < T; ++t) {
                total[s][t] = multiply_add(low[s][t], of_low, total[s][t]);
                total[s][t] = multiply_add(high[s][t], of_high, total[s][t]);
            }
        }
    }
    for (int s = 0; s < S; ++s)
        for (int t = 0; t < T; ++t) sums[s * T + t] = sum(total[s][t]);
}

template <class Low, class High, int S, int T>
void dots(const Weights& weights, const Row* rows, const float* const* x, float* sums) {
    // A larger tile would not fit the registers.
    if constexpr (kIsShort<Low, High> && Low::kVectors == 1 && S * T <= 8) {
        if (weights.pair_group && weights.scale_type == kBFloatScale)
            return paired_dots<Low, High, S, T, kBFloatScale>(weights, rows, x, sums);
        if (weights.pair_group && weights.scale_type == kHalfScale)
            return paired_dots<Low, High, S, T, kHalfScale>(weights, rows, x, sums);
        if (weights.pair_group && weights.scale_type == kFloatScale)
            return paired_dots<Low, High, S, T, kFloatScale>(weights, rows, x, sums);
    }
    Vector total[S][T];
    float rest[S][T] = {};
    for (int s = 0; s < S; ++s)
        for (int t = 0; t < T; ++t) total[s][t] = spread(0.0f);
    for (const Segment& segment : weights.segments) {
        if (kIsShort<Low, High> && !segment.is_high) prefetch_ahead<S>(rows, segment);
        float scales[S];
        for (int s = 0; s < S; ++s) scales[s] = scale_of(weights, rows[s], segment.group);
        if (segment.is_high)
            dot_segment<High, S, T>(segment, rows, scales, x, total, rest);
        else
            dot_segment<Low, S, T>(segment, rows, scales, x, total, rest);
    }
    for (int s = 0; s < S; ++s)
        for (int t = 0; t < T; ++t) sums[s * T + t] = sum(total[s][t]) + rest[s][t];
}

// Adds V vectors of each row from position j on; `block` loads them.
template <class Codec, int V, int R, int T>
inline void add_vectors(int64_t j, const Row* rows, const Vector (&a)[R][T], float* const* out) {
    Vector w[R][V];
    for (int r = 0; r < R; ++r) {
        if constexpr (V == Codec::kVectors)
            Codec::block(rows[r].weights, j, w[r]);
        else
            w[r][0] = Codec::vector(rows[r].weights, j);
    }
    for (int v = 0; v < V; ++v)
        for (int t = 0; t < T; ++t) {
            float* const into = out[t] + j + v * kWidth;
            Vector found = load(into);
            for (int r = 0; r < R; ++r) found = multiply_add(w[r][v], a[r][t], found);
            store(into, found);
        }
}

template <class Codec, int R, int T>
inline void add_segment(const Segment& segment, const Row* rows, const float (&a)[R][T],
                        float* const* out) {
    Vector a_rt[R][T];
    for (int r = 0; r < R; ++r)
        for (int t = 0; t < T; ++t) a_rt[r][t] = spread(a[r][t]);
    float* out_t[T];
    for (int t = 0; t < T; ++t) out_t[t] = out[t] + segment.shift;
    constexpr int kBlock = Codec::kVectors * kWidth;
    int64_t j = segment.begin;
    for (; j + kBlock <= segment.end; j += kBlock)
        add_vectors<Codec, Codec::kVectors, R, T>(j, rows, a_rt, out_t);
    for (; j + kWidth <= segment.end; j += kWidth)
        add_vectors<Codec, 1, R, T>(j, rows, a_rt, out_t);
    for (; j < segment.end; ++j)
        for (int r = 0; r < R; ++r) {
            const float w = Codec::scalar(rows[r].weights, j);
            for (int t = 0; t < T; ++t) out_t[t][j] += w * a[r][t];
        }
}

// Adds one segment of R rows. `a`: [R][T].
template <class Low, class High, int R, int T>
void add_rows(const Weights& weights, const Segment& segment, const Row* rows, const float* a,
              float* const* out) {
    float scaled[R][T];
    for (int r = 0; r < R; ++r) {
        const float scale = scale_of(weights, rows[r], segment.group);
        for (int t = 0; t < T; ++t) scaled[r][t] = a[r * T + t] * scale;
    }
    if (segment.is_high)
        add_segment<High, R, T>(segment, rows, scaled, out);
    else
        add_segment<Low, R, T>(segment, rows, scaled, out);
}

}  // namespace tiered
