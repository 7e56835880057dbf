// SPDX-License-Identifier: Apache-2.0
// Conversion of KV pages to narrow far pages and back; devices/page_format.py has the format.
//
// A group is in registers while it is converted. All instruction sets, and the kernels of a GPU, give
// the same bits. So no product may be fused with a sum: a clamp lies between them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "vectors.h"

namespace tiered {

enum Element : int32_t { kElementFloat32, kElementBFloat16, kElementFloat16 };
enum NarrowCode : int32_t { kNarrowInt8, kNarrowFp8 };

// Arguments of a call. The fields are the same as in `NarrowCall` of native/__init__.py.
struct NarrowCall {
    uint8_t* near;            // near page i begins at near + near_ids[i] * near_stride
    uint8_t* far;             // and its far page at far + far_ids[i] * far_stride
    const int64_t* near_ids;  // [num_pages]
    const int64_t* far_ids;   // [num_pages]
    int64_t near_stride, far_stride, num_pages, num_elements, far_bytes;
    float inverse_limit;
    int32_t largest_scale, element, code, decodes;
};

constexpr int kGroup = 64;
constexpr int kVectors = kGroup / kWidth;
constexpr int32_t kInfinity = 0x7f800000;  // bits of a float; a larger magnitude is a NaN
constexpr int32_t kSmallest = 0x0d800000;  // 2^-100
constexpr int32_t kNan = 0x7fc00000;

using Ints = int32_t __attribute__((vector_size(4 * kWidth)));

inline Ints bits_of(Vector v) { return (Ints)v; }
inline Vector floats_of(Ints bits) { return (Vector)bits; }
inline int32_t bits_of(float value) {
    int32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}
inline float float_of(int32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// Instruction sets: loads of codes, and stores of numbers that fit 8 or 16 bits --------------------

#if defined(__AVX512F__)

inline Ints load_codes(const uint8_t* from) {
    return (Ints)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from));
}
inline Vector to_floats(Ints numbers) { return _mm512_cvtepi32_ps((__m512i)numbers); }
inline void store_8_bits(uint8_t* into, const Ints (&v)[kVectors]) {
    for (int k = 0; k < kVectors; ++k)
        _mm_storeu_si128((__m128i*)(into + 16 * k), _mm512_cvtepi32_epi8((__m512i)v[k]));
}
inline void store_16_bits(uint16_t* into, const Ints (&v)[kVectors]) {
    for (int k = 0; k < kVectors; ++k)
        _mm256_storeu_si256((__m256i*)(into + 16 * k), _mm512_cvtepi32_epi16((__m512i)v[k]));
}
inline void store_halves(uint16_t* into, const Vector (&x)[kVectors]) {
    for (int k = 0; k < kVectors; ++k)
        _mm256_storeu_si256((__m256i*)(into + 16 * k),
                            _mm512_cvtps_ph(x[k], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

#elif defined(__AVX2__)

inline Ints load_codes(const uint8_t* from) {
    return (Ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from));
}
inline Vector to_floats(Ints numbers) { return _mm256_cvtepi32_ps((__m256i)numbers); }
// Packing takes the lower halves of its arguments first, then the upper ones.
inline void store_8_bits(uint8_t* into, const Ints (&v)[kVectors]) {
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    for (int k = 0; k < kVectors; k += 4) {
        const __m256i first = _mm256_packs_epi32((__m256i)v[k], (__m256i)v[k + 1]);
        const __m256i second = _mm256_packs_epi32((__m256i)v[k + 2], (__m256i)v[k + 3]);
        const __m256i packed = _mm256_packs_epi16(first, second);
        _mm256_storeu_si256((__m256i*)(into + 8 * k), _mm256_permutevar8x32_epi32(packed, order));
    }
}
inline void store_16_bits(uint16_t* into, const Ints (&v)[kVectors]) {
    for (int k = 0; k < kVectors; k += 2) {
        const __m256i packed = _mm256_packs_epi32((__m256i)v[k], (__m256i)v[k + 1]);
        _mm256_storeu_si256((__m256i*)(into + 8 * k), _mm256_permute4x64_epi64(packed, 0xd8));
    }
}
inline void store_halves(uint16_t* into, const Vector (&x)[kVectors]) {
    for (int k = 0; k < kVectors; ++k)
        _mm_storeu_si128((__m128i*)(into + 8 * k),
                         _mm256_cvtps_ph(x[k], _MM_FROUND_TO_NEAREST_INT));
}

#else

inline Ints load_codes(const uint8_t* from) {
    int8_t codes[4];
    std::memcpy(codes, from, 4);
    return Ints{codes[0], codes[1], codes[2], codes[3]};
}
inline Vector to_floats(Ints numbers) { return __builtin_convertvector(numbers, Vector); }
template <class To>
inline void store_bits(To* into, const Ints (&v)[kVectors]) {
    for (int k = 0; k < kVectors; ++k)
        for (int i = 0; i < kWidth; ++i) into[k * kWidth + i] = To(v[k][i]);
}
inline void store_8_bits(uint8_t* into, const Ints (&v)[kVectors]) { store_bits(into, v); }
inline void store_16_bits(uint16_t* into, const Ints (&v)[kVectors]) { store_bits(into, v); }
// Rounds to the nearest half, ties to even; what does not fit is infinite.
inline void store_halves(uint16_t* into, const Vector (&x)[kVectors]) {
    Ints halves[kVectors];
    for (int k = 0; k < kVectors; ++k) {
        const Ints bits = bits_of(x[k]), sign = bits >> 16 & -0x8000, rest = bits & 0x7fffffff;
        // The sum rounds to a multiple of 2^-24, the smallest half.
        const Ints small = bits_of(floats_of(rest) + 0.5f) - 0x3f000000;
        const Ints usual = (rest + 0xfff + (rest >> 13 & 1) - 0x38000000) >> 13;
        const Ints none = rest > kInfinity ? rest - rest + 0x7e00 : rest - rest + 0x7c00;
        const Ints found = rest < 0x38800000 ? small : usual;
        halves[k] = sign | (rest >= 0x47800000 ? none : found);
    }
    store_16_bits(into, halves);
}

#endif

// Groups -------------------------------------------------------------------------------------------

template <int32_t element>
inline void load_group(const uint8_t* from, Vector (&x)[kVectors]) {
    for (int k = 0; k < kVectors; ++k) {
        const int at = k * kWidth;
        if constexpr (element == kElementFloat32)
            x[k] = load((const float*)from + at);
        else if constexpr (element == kElementBFloat16)
            x[k] = load_bfloat((const uint16_t*)from + at);
        else
            x[k] = load_half((const uint16_t*)from + at);
    }
}

template <int32_t element>
inline void store_group(uint8_t* into, const Vector (&x)[kVectors]) {
    if constexpr (element == kElementFloat32) {
        for (int k = 0; k < kVectors; ++k) store((float*)into + k * kWidth, x[k]);
    } else if constexpr (element == kElementBFloat16) {
        Ints rounded[kVectors];
        for (int k = 0; k < kVectors; ++k) {
            const Ints bits = bits_of(x[k]);
            rounded[k] = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        }
        store_16_bits((uint16_t*)into, rounded);
    } else {
        store_halves((uint16_t*)into, x);
    }
}

inline Vector clamped(Vector v, float limit) {
    const Vector most = spread(limit), least = spread(-limit);
    v = v < most ? v : most;
    return v > least ? v : least;
}

// Codes are between -128 and 127: those of fp8 with their sign bit extended.
template <int32_t code>
inline Ints codes_of(Vector x, float inverse) {
    const Ints rest = bits_of(x) & 0x7fffffff;
    if constexpr (code == kNarrowInt8) {
        // The sum's lowest bits are the nearest integer, ties to even.
        const Ints found = bits_of(clamped(x * inverse, 127.0f) + 12582912.0f) - 0x4b400000;
        return rest < kInfinity ? found : rest - rest - 128;
    } else {
        const Ints bits = bits_of(clamped(x * inverse, 448.0f)) & 0x7fffffff;
        // Below 2^-6 codes are multiples of 2^-9, to which the sum rounds; above they keep 3 bits
        // of the mantissa.
        const Ints small = bits_of(floats_of(bits) + 16384.0f) - 0x46800000;
        const Ints large = ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120 << 3);
        const Ints found = bits < 0x3c800000 ? small : large;
        return (bits_of(x) >> 31 & -128) | (rest < kInfinity ? found : rest - rest + 0x7f);
    }
}

template <int32_t code>
inline Vector values_of(Ints codes, float scale) {
    if constexpr (code == kNarrowInt8) {
        const Ints bits = bits_of(to_floats(codes) * scale);
        return floats_of(codes == -128 ? codes - codes + kNan : bits);
    } else {
        const Ints rest = codes & 0x7f;
        const Ints small = bits_of(to_floats(rest) * 0.001953125f);
        const Ints large = (rest << 20) + (120 << 23);
        const Ints value = (rest < 8 ? small : large) | (codes & int32_t(0x80000000));
        const Ints bits = bits_of(floats_of(value) * scale);
        return floats_of(rest == 0x7f ? rest - rest + kNan : bits);
    }
}

template <int32_t code>
inline uint16_t encode_group(const Vector (&x)[kVectors], uint8_t* into, const NarrowCall& call) {
    Ints tops = {};
    for (int k = 0; k < kVectors; ++k) {
        Ints rest = bits_of(x[k]) & 0x7fffffff;
        rest = rest < kInfinity ? rest : rest - rest;
        tops = tops > rest ? tops : rest;
    }
    int32_t top = 0;
    for (int i = 0; i < kWidth; ++i) top = std::max(top, int32_t(tops[i]));
    int32_t scale = 0;
    float inverse = 0.0f;
    if (top >= kSmallest) {
        scale = (bits_of(float_of(top) * call.inverse_limit) + 0x4000) >> 15;
        scale = std::min(scale, call.largest_scale);
        inverse = 1.0f / float_of(scale << 15);
    }
    Ints codes[kVectors];
    for (int k = 0; k < kVectors; ++k) codes[k] = codes_of<code>(x[k], inverse);
    store_8_bits(into, codes);
    return uint16_t(scale);
}

template <int32_t code>
inline void decode_group(const uint8_t* codes, uint16_t stored, Vector (&x)[kVectors]) {
    const float scale = float_of(int32_t(stored) << 15);
    for (int k = 0; k < kVectors; ++k)
        x[k] = values_of<code>(load_codes(codes + k * kWidth), scale);
}

template <int32_t element, int32_t code>
void convert_pages(const NarrowCall& call) {
    constexpr int64_t kBytes = element == kElementFloat32 ? 4 : 2;
    const int64_t num_groups = (call.num_elements + kGroup - 1) / kGroup;
    for (int64_t page = 0; page < call.num_pages; ++page) {
        uint8_t* const near = call.near + call.near_ids[page] * call.near_stride;
        uint8_t* const codes = call.far + call.far_ids[page] * call.far_stride;
        uint8_t* const scales = codes + call.num_elements;
        for (int64_t group = 0; group < num_groups; ++group) {
            const int64_t begin = group * kGroup;
            const int64_t size = std::min<int64_t>(kGroup, call.num_elements - begin);
            Vector x[kVectors];
            alignas(64) uint8_t part[kGroup * 4] = {}, part_codes[kGroup] = {};
            uint8_t* const here = near + begin * kBytes;
            uint16_t scale;
            if (call.decodes) {
                std::memcpy(&scale, scales + 2 * group, 2);
                if (size == kGroup) {
                    decode_group<code>(codes + begin, scale, x);
                    store_group<element>(here, x);
                } else {
                    std::memcpy(part_codes, codes + begin, size);
                    decode_group<code>(part_codes, scale, x);
                    store_group<element>(part, x);
                    std::memcpy(here, part, size * kBytes);
                }
            } else {
                if (size == kGroup) {
                    load_group<element>(here, x);
                    scale = encode_group<code>(x, codes + begin, call);
                } else {
                    std::memcpy(part, here, size * kBytes);
                    load_group<element>(part, x);
                    scale = encode_group<code>(x, part_codes, call);
                    std::memcpy(codes + begin, part_codes, size);
                }
                std::memcpy(scales + 2 * group, &scale, 2);
            }
        }
        const int64_t used = call.num_elements + 2 * num_groups;
        if (!call.decodes) std::memset(codes + used, 0, call.far_bytes - used);
    }
}

template <int32_t element>
int convert_codes(const NarrowCall& call) {
    if (call.code == kNarrowInt8)
        convert_pages<element, kNarrowInt8>(call);
    else
        convert_pages<element, kNarrowFp8>(call);
    return 0;
}

}  // namespace tiered

// Converts pages in the calling thread; returns 0, or 1 for an unknown type.
extern "C" __attribute__((visibility("default"))) int tiered_narrow(const void* arguments) {
    const auto& call = *static_cast<const tiered::NarrowCall*>(arguments);
    switch (call.element) {
        case tiered::kElementFloat32:
            return tiered::convert_codes<tiered::kElementFloat32>(call);
        case tiered::kElementBFloat16:
            return tiered::convert_codes<tiered::kElementBFloat16>(call);
        case tiered::kElementFloat16:
            return tiered::convert_codes<tiered::kElementFloat16>(call);
        default:
            return 1;
    }
}
