/* Softmax of a row of scores, summed in an order that depends on positions only. */
#ifndef EMBERGATE_SOFTMAX_H
#define EMBERGATE_SOFTMAX_H

#include "native/vector.h"

/* scores[0..count) become exp(score - peak); returns 1 / their sum. The row has room up to a multiple of 8. */
INLINE float exponentiate(float *scores, int64_t count)
{
    int64_t whole = count / LANES * LANES;
    float peak = scores[0];
    if (whole) {
        f8 peaks = load8(scores);
        for (int64_t i = LANES; i < whole; i += LANES)
            peaks = max8(peaks, load8(scores + i));
        peak = peak8(peaks);
    }
    for (int64_t i = whole; i < count; i++)
        peak = scores[i] > peak ? scores[i] : peak;
    f8 sum = splat8(0.0f);
    for (int64_t i = 0; i < whole; i += LANES) {
        f8 power = exp8(load8(scores + i) - splat8(peak));
        sum += power;
        store8(scores + i, power);
    }
    if (whole < count) {
        f8 power = exp8(load8(scores + whole) - splat8(peak));
        for (int64_t i = count - whole; i < LANES; i++)
            power[i] = 0.0f;
        sum += power;
        store8(scores + whole, power);
    }
    return 1.0f / sum8(sum);
}

#endif
