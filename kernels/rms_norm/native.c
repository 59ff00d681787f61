/* Root-mean-square normalisation. Contract: kernels/rms_norm/__init__.py. */
#include <math.h>

#include "native/parallel.h"
#include "native/vector.h"

typedef struct {
    const float *x;
    float *residual;
    const float *weight;
    float eps;
    float *out;
    int64_t rows, width;
} norm_args;

static void norm_row(const norm_args *a, const float *x, float *residual, float *out)
{
    int64_t width = a->width, whole = width / LANES * LANES;
    if (residual) {
        for (int64_t i = 0; i < width; i++)
            residual[i] += x[i];
        x = residual;
    }
    f8 squares[2] = {splat8(0.0f), splat8(0.0f)};
    float rest = 0.0f;
    for (int64_t i = 0; i < whole; i += LANES)
        squares[i / LANES % 2] += load8(x + i) * load8(x + i);
    for (int64_t i = whole; i < width; i++)
        rest += x[i] * x[i];
    float factor = 1.0f / sqrtf((sum8(squares[0] + squares[1]) + rest) / (float)width + a->eps);
    if (a->weight)
        for (int64_t i = 0; i < width; i++)
            out[i] = x[i] * factor * a->weight[i];
    else
        for (int64_t i = 0; i < width; i++)
            out[i] = x[i] * factor;
}

static void norm_part(const void *args, int64_t part, int64_t parts)
{
    const norm_args *a = args;
    int64_t begin, end;
    share(a->rows, part, parts, &begin, &end);
    for (int64_t r = begin; r < end; r++)
        norm_row(a, a->x + r * a->width, a->residual ? a->residual + r * a->width : NULL, a->out + r * a->width);
}

/* residual and weight may be null. */
void embergate_rms_norm(crew *crew, const float *x, float *residual, const float *weight, float eps, float *out,
                        int64_t rows, int64_t width)
{
    norm_args args = {x, residual, weight, eps, out, rows, width};
    embergate_run_parts(rows < 16 ? NULL : crew, norm_part, &args);
}
