/* silu(gate) * up, the same bits wherever it is computed. */
#ifndef EMBERGATE_GATE_H
#define EMBERGATE_GATE_H

#include "native/vector.h"

INLINE f8 silu_mul8(f8 gate, f8 up) { return gate / (splat8(1.0f) + exp8(-gate)) * up; }

/* out[i] = silu(gate[i]) * up[i] * factor for `width` elements. */
INLINE void silu_mul_row(const float *gate, const float *up, float factor, float *out, int64_t width)
{
    int64_t whole = width / LANES * LANES, rest = width - whole;
    for (int64_t i = 0; i < whole; i += LANES)
        store8(out + i, silu_mul8(load8(gate + i), load8(up + i)) * splat8(factor));
    if (rest) {
        float tail[3][LANES] = {{0}};
        memcpy(tail[0], gate + whole, (size_t)rest * sizeof(float));
        memcpy(tail[1], up + whole, (size_t)rest * sizeof(float));
        store8(tail[2], silu_mul8(load8(tail[0]), load8(tail[1])) * splat8(factor));
        memcpy(out + whole, tail[2], (size_t)rest * sizeof(float));
    }
}

#endif
