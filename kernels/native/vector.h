/* Vectors of eight floats in the compiler's own vector extension: AVX2 where there is AVX2, the best the
 * target has elsewhere. Products and sums on one line are contracted to fused multiply-adds where the CPU has them. */
#ifndef EMBERGATE_VECTOR_H
#define EMBERGATE_VECTOR_H

#include <stdint.h>
#include <string.h>
#ifdef __F16C__
#include <immintrin.h>
#endif

#define LANES 8
#define INLINE static inline __attribute__((always_inline))

typedef float f8 __attribute__((vector_size(32)));
typedef int32_t i8 __attribute__((vector_size(32)));
typedef uint32_t u8 __attribute__((vector_size(32)));
typedef float f8_at __attribute__((vector_size(32), aligned(4), may_alias));
typedef uint32_t u8_at __attribute__((vector_size(32), aligned(4), may_alias));

INLINE f8 load8(const float *at) { return *(const f8_at *)at; }
INLINE void store8(float *at, f8 value) { *(f8_at *)at = value; }
INLINE f8 splat8(float value) { return (f8){value, value, value, value, value, value, value, value}; }
INLINE f8 as_float8(u8 bits) { return (f8)bits; }
INLINE f8 to_float8(u8 small) { return __builtin_convertvector((i8)small, f8); }

/* b where neither is greater: a NaN in b wins. */
INLINE f8 max8(f8 a, f8 b)
{
    i8 is_greater = a > b;
    return (f8)((is_greater & (i8)a) | (~is_greater & (i8)b));
}

/* The sum of the lanes, in a fixed order. */
INLINE float sum8(f8 v)
{
    return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

INLINE float peak8(f8 v)
{
    float peak = v[0];
    for (int lane = 1; lane < LANES; lane++)
        peak = v[lane] > peak ? v[lane] : peak;
    return peak;
}

/* Eight float16 values. */
INLINE f8 load_half8(const uint16_t *at)
{
#ifdef __F16C__
    return (f8)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)at));
#else
    f8 out;
    for (int lane = 0; lane < LANES; lane++) {
        uint32_t half = at[lane], exponent = half >> 10 & 31, mantissa = half & 1023;
        float value;
        if (exponent == 0)
            value = (float)mantissa * 0x1p-24f;
        else {
            uint32_t bits = (exponent == 31 ? 255u : exponent + 112u) << 23 | mantissa << 13;
            memcpy(&value, &bits, 4);
        }
        out[lane] = half >> 15 ? -value : value;
    }
    return out;
#endif
}

/* e^x to about 1 unit in the last place (Cody-Waite reduction, polynomial of Cephes), x clamped to -87 .. 88. A NaN
 * stays a NaN. */
INLINE f8 exp8(f8 x)
{
    f8 shift = splat8(12582912.0f);
    x = max8(splat8(-87.0f), x);
    x = -max8(splat8(-88.0f), -x);
    f8 n = (x * splat8(1.44269504088896341f) + shift) - shift;
    f8 r = x - n * splat8(0.693359375f);
    r = r - n * splat8(-2.12194440e-4f);
    f8 p = splat8(1.9875691500e-4f);
    p = p * r + splat8(1.3981999507e-3f);
    p = p * r + splat8(8.3334519073e-3f);
    p = p * r + splat8(4.1665795894e-2f);
    p = p * r + splat8(1.6666665459e-1f);
    p = p * r + splat8(5.0000001201e-1f);
    p = p * (r * r) + r + splat8(1.0f);
    i8 power = __builtin_convertvector(n, i8);
    return p * (f8)((power + 127) << 23);
}

#endif
