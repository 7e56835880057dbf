// SPDX-License-Identifier: Apache-2.0
// Codecs: how weights are stored, and how they are loaded as vectors of floats.
//
// From position j of a row on, `block` loads kVectors * kWidth weights, `vector` kWidth, and
// `scalar` one. A 4-bit code is its nibble less 8.
#pragma once

#include "vectors.h"

namespace tiered {

// Base of most codecs: a block is one vector.
template <class Codec>
struct OneVector {
    static constexpr int kVectors = 1;
    static void block(const uint8_t* row, int64_t j, Vector (&w)[1]) {
        w[0] = Codec::vector(row, j);
    }
};

struct Float32 : OneVector<Float32> {
    static Vector vector(const uint8_t* row, int64_t j) { return load((const float*)row + j); }
    static float scalar(const uint8_t* row, int64_t j) { return ((const float*)row)[j]; }
};

struct BFloat16 : OneVector<BFloat16> {
    static Vector vector(const uint8_t* row, int64_t j) {
        return load_bfloat((const uint16_t*)row + j);
    }
    static float scalar(const uint8_t* row, int64_t j) {
        return bfloat_to_float(((const uint16_t*)row)[j]);
    }
};

struct Float16 : OneVector<Float16> {
    static Vector vector(const uint8_t* row, int64_t j) {
        return load_half((const uint16_t*)row + j);
    }
    static float scalar(const uint8_t* row, int64_t j) {
        return half_to_float(((const uint16_t*)row)[j]);
    }
};

struct Int8 : OneVector<Int8> {
    static Vector vector(const uint8_t* row, int64_t j) { return load_int8(row + j); }
    static float scalar(const uint8_t* row, int64_t j) { return float(int8_t(row[j])); }
};

#if defined(__AVX2__) && !defined(__AVX512F__)

// Loads 32 nibbles at a time. Two tables give the upper 16 bits of each code's float; the lower 16
// bits are 0. This takes half the instructions of widening integers, and is exact too.
//
//     bytes, permuted by fours     0-3 8-11 16-19 24-27 | 4-7 12-15 20-23 28-31
//     unpacked to 16 bits          0-3 8-11 | 4-7 12-15    and    16-19 24-27 | 20-23 28-31
//     unpacked to 32 bits          0-7    8-15    16-23    24-31
inline void expand_nibbles(__m256i nibbles, Vector (&w)[4]) {
    const __m256i upper = _mm256_broadcastsi128_si256(_mm_setr_epi8(
        char(0xc1), char(0xc0), char(0xc0), char(0xc0), char(0xc0), char(0xc0), char(0xc0),
        char(0xbf), 0, 0x3f, 0x40, 0x40, 0x40, 0x40, 0x40, 0x40));
    const __m256i lower = _mm256_broadcastsi128_si256(_mm_setr_epi8(
        0, char(0xe0), char(0xc0), char(0xa0), char(0x80), 0x40, 0, char(0x80), 0, char(0x80), 0,
        0x40, char(0x80), char(0xa0), char(0xc0), char(0xe0)));
    const __m256i zero = _mm256_setzero_si256();
    const __m256i high = _mm256_shuffle_epi8(upper, nibbles);
    const __m256i low = _mm256_shuffle_epi8(lower, nibbles);
    const __m256i first = _mm256_unpacklo_epi8(low, high);
    const __m256i second = _mm256_unpackhi_epi8(low, high);
    w[0] = _mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, first));
    w[1] = _mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, first));
    w[2] = _mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, second));
    w[3] = _mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, second));
}

inline __m256i load_by_fours(const uint8_t* from) {
    return _mm256_permutevar8x32_epi32(_mm256_loadu_si256((const __m256i*)from),
                                       _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7));
}

struct LowBlocks {
    static constexpr int kVectors = 4;
    static void block(const uint8_t* row, int64_t j, Vector (&w)[4]) {
        expand_nibbles(_mm256_and_si256(load_by_fours(row + j), _mm256_set1_epi8(15)), w);
    }
};

struct HighBlocks {
    static constexpr int kVectors = 4;
    static void block(const uint8_t* row, int64_t j, Vector (&w)[4]) {
        const __m256i shifted = _mm256_srli_epi16(load_by_fours(row + j), 4);
        expand_nibbles(_mm256_and_si256(shifted, _mm256_set1_epi8(15)), w);
    }
};

#else

struct LowNibbles;
struct HighNibbles;
using LowBlocks = OneVector<LowNibbles>;
using HighBlocks = OneVector<HighNibbles>;

#endif

struct LowNibbles : LowBlocks {
    static Vector vector(const uint8_t* row, int64_t j) { return load_low_nibbles(row + j); }
    static float scalar(const uint8_t* row, int64_t j) { return float((row[j] & 15) - 8); }
};

struct HighNibbles : HighBlocks {
    static Vector vector(const uint8_t* row, int64_t j) { return load_high_nibbles(row + j); }
    static float scalar(const uint8_t* row, int64_t j) { return float((row[j] >> 4) - 8); }
};

}  // namespace tiered
