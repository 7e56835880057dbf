// SPDX-License-Identifier: Apache-2.0
// A vector of floats on each instruction set, and how stored weights are loaded into one.
//
// Each translation unit is compiled for one instruction set (setup.py), and includes this once.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace tiered {

inline float half_to_float(uint16_t half) {
#if defined(__F16C__)
    return _cvtsh_ss(half);
#else
    const uint32_t sign = uint32_t(half & 0x8000) << 16;
    const uint32_t rest = half & 0x7fff;
    uint32_t bits;
    float found;
    if (rest >= 0x7c00) {
        bits = sign | 0x7f800000 | (rest & 0x3ff) << 13;
    } else if (rest >= 0x400) {
        bits = sign | ((rest << 13) + (112u << 23));
    } else {  // subnormal: exact in float
        found = float(rest) * 5.9604644775390625e-8f;
        std::memcpy(&bits, &found, 4);
        bits |= sign;
    }
    std::memcpy(&found, &bits, 4);
    return found;
#endif
}

inline float bfloat_to_float(uint16_t bfloat) {
    const uint32_t bits = uint32_t(bfloat) << 16;
    float found;
    std::memcpy(&found, &bits, 4);
    return found;
}

#if defined(__AVX512F__)

constexpr int kWidth = 16;
using Vector = __m512;
inline Vector load(const float* from) { return _mm512_loadu_ps(from); }
inline void store(float* into, Vector v) { _mm512_storeu_ps(into, v); }
inline Vector spread(float value) { return _mm512_set1_ps(value); }
inline Vector multiply_add(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
inline float sum(Vector v) { return _mm512_reduce_add_ps(v); }

inline Vector load_bfloat(const uint16_t* from) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
inline Vector load_half(const uint16_t* from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
}
inline Vector load_int8(const uint8_t* from) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
}
// The permutation uses only the lowest 4 bits of each index. So one instruction masks the codes and
// looks up their values.
inline Vector float_of_nibbles(__m512i codes) {
    const Vector values = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
    return _mm512_permutexvar_ps(codes, values);
}
inline Vector load_low_nibbles(const uint8_t* from) {
    return float_of_nibbles(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from)));
}
inline Vector load_high_nibbles(const uint8_t* from) {
    const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from));
    return float_of_nibbles(_mm512_srli_epi32(wide, 4));
}

#elif defined(__AVX2__)

constexpr int kWidth = 8;
using Vector = __m256;
inline Vector load(const float* from) { return _mm256_loadu_ps(from); }
inline void store(float* into, Vector v) { _mm256_storeu_ps(into, v); }
inline Vector spread(float value) { return _mm256_set1_ps(value); }
inline Vector multiply_add(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
inline float sum(Vector v) {
    __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    quarter = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
    return _mm_cvtss_f32(_mm_add_ss(quarter, _mm_movehdup_ps(quarter)));
}

inline Vector load_bfloat(const uint16_t* from) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
inline Vector load_half(const uint16_t* from) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
}
inline Vector load_int8(const uint8_t* from) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
}
inline Vector load_low_nibbles(const uint8_t* from) {
    const __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from));
    const __m256i nibbles = _mm256_and_si256(wide, _mm256_set1_epi32(15));
    return _mm256_cvtepi32_ps(_mm256_sub_epi32(nibbles, _mm256_set1_epi32(8)));
}
inline Vector load_high_nibbles(const uint8_t* from) {
    const __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from));
    const __m256i nibbles = _mm256_srli_epi32(wide, 4);
    return _mm256_cvtepi32_ps(_mm256_sub_epi32(nibbles, _mm256_set1_epi32(8)));
}

#else  // any processor: the compiler's vectors

constexpr int kWidth = 4;
using Vector = float __attribute__((vector_size(16)));
inline Vector load(const float* from) {
    Vector v;
    std::memcpy(&v, from, sizeof v);
    return v;
}
inline void store(float* into, Vector v) { std::memcpy(into, &v, sizeof v); }
inline Vector spread(float value) { return Vector{value, value, value, value}; }
inline Vector multiply_add(Vector a, Vector b, Vector c) { return a * b + c; }
inline float sum(Vector v) { return (v[0] + v[2]) + (v[1] + v[3]); }

template <class From, class Convert>
inline Vector each(const From* from, Convert convert) {
    return Vector{convert(from[0]), convert(from[1]), convert(from[2]), convert(from[3])};
}
inline Vector load_bfloat(const uint16_t* from) { return each(from, bfloat_to_float); }
inline Vector load_half(const uint16_t* from) { return each(from, half_to_float); }
inline Vector load_int8(const uint8_t* from) {
    return each(from, [](uint8_t code) { return float(int8_t(code)); });
}
inline Vector load_low_nibbles(const uint8_t* from) {
    return each(from, [](uint8_t code) { return float((code & 15) - 8); });
}
inline Vector load_high_nibbles(const uint8_t* from) {
    return each(from, [](uint8_t code) { return float((code >> 4) - 8); });
}

#endif

}  // namespace tiered
