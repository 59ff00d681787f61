/* SwiGLU's gate. Contract: kernels/silu_mul/__init__.py. */
#include "silu_mul/gate.h"

#include "native/parallel.h"

typedef struct {
    const float *gate_up;
    float *out;
    int64_t rows, width;
} silu_args;

static void silu_part(const void *args, int64_t part, int64_t parts)
{
    const silu_args *a = args;
    int64_t begin, end;
    share(a->rows, part, parts, &begin, &end);
    for (int64_t r = begin; r < end; r++) {
        const float *gate = a->gate_up + 2 * r * a->width;
        silu_mul_row(gate, gate + a->width, 1.0f, a->out + r * a->width, a->width);
    }
}

void embergate_silu_mul(crew *crew, const float *gate_up, float *out, int64_t rows, int64_t width)
{
    silu_args args = {gate_up, out, rows, width};
    embergate_run_parts(rows < 8 ? NULL : crew, silu_part, &args);
}
