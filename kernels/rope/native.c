/* Rotary position embedding, in place. Contract: kernels/rope/__init__.py. */
#include "native/parallel.h"
#include "native/vector.h"

typedef struct {
    float *x;
    int64_t stride;
    const float *cos, *sin;
    int64_t tokens, heads, dim, is_interleaved;
} rope_args;

static void rotate(float *x, const float *cos, const float *sin, int64_t half, int64_t step, int64_t apart)
{
    for (int64_t i = 0; i < half; i++) {
        float first = x[i * step], second = x[i * step + apart];
        x[i * step] = first * cos[i] - second * sin[i];
        x[i * step + apart] = first * sin[i] + second * cos[i];
    }
}

static void rope_part(const void *args, int64_t part, int64_t parts)
{
    const rope_args *a = args;
    int64_t begin, end, half = a->dim / 2;
    share(a->tokens, part, parts, &begin, &end);
    for (int64_t t = begin; t < end; t++)
        for (int64_t h = 0; h < a->heads; h++) {
            float *x = a->x + t * a->stride + h * a->dim;
            if (a->is_interleaved)
                rotate(x, a->cos + t * half, a->sin + t * half, half, 2, 1);
            else
                rotate(x, a->cos + t * half, a->sin + t * half, half, 1, half);
        }
}

/* stride: floats from one token to the next. */
void embergate_rope(crew *crew, float *x, int64_t stride, const float *cos, const float *sin, int64_t tokens,
                    int64_t heads, int64_t dim, int64_t is_interleaved)
{
    rope_args args = {x, stride, cos, sin, tokens, heads, dim, is_interleaved};
    embergate_run_parts(tokens < 16 ? NULL : crew, rope_part, &args);
}
