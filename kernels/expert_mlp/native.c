/* The routed experts. Contract: kernels/expert_mlp/__init__.py.
 *
 * Tokens are sorted by expert; each (expert, tile) multiplies the rows of that expert's tokens. Every output is one
 * chain over the experts in ascending order, so it has the same bits as the product with the stacked weights that
 * is used when every expert is chosen. */
#include "native/parallel.h"
#include "packed_linear/tile.h"
#include "silu_mul/gate.h"

typedef struct {
    crew *crew;
    const float *x, *weights;
    const int32_t *experts;
    packed gate_up, down;
    float *out, *hidden, *active; /* [pairs, 2 * width] and [pairs, width], sorted by expert */
    int64_t tokens, columns, width, num_experts, top_k, accumulate;
    int32_t *first;  /* [num_experts + 1]: where an expert's pairs begin */
    int32_t *token;  /* [pairs]: the pair's token */
    float *factor;   /* [pairs]: the pair's weight */
} expert_args;

/* Counting sort of the (token, place) pairs by expert. */
static void sort_pairs(const expert_args *a)
{
    int64_t pairs = a->tokens * a->top_k;
    memset(a->first, 0, (size_t)(a->num_experts + 1) * sizeof(int32_t));
    for (int64_t p = 0; p < pairs; p++)
        a->first[a->experts[p] + 1]++;
    for (int64_t e = 0; e < a->num_experts; e++)
        a->first[e + 1] += a->first[e];
    for (int64_t p = 0; p < pairs; p++) {
        int32_t place = a->first[a->experts[p]]++;
        a->token[place] = (int32_t)(p / a->top_k);
        a->factor[place] = a->weights[p];
    }
    for (int64_t e = a->num_experts; e > 0; e--)
        a->first[e] = a->first[e - 1];
    a->first[0] = 0;
}

static void gate_up_phase(const expert_args *a, int64_t part, int64_t parts)
{
    int64_t begin, end, tiles = a->width / TILE;
    share(a->num_experts * 2 * tiles, part, parts, &begin, &end);
    for (int64_t item = begin; item < end; item++) {
        int64_t e = item / (2 * tiles), is_up = item / tiles % 2, t = item % tiles, start = a->first[e];
        if (a->first[e + 1] == start)
            continue;
        row_map x = {(float *)a->x, a->token + start, 1, a->columns, 0};
        row_map y = plain_rows(a->hidden + start * 2 * a->width, 2 * a->width);
        embergate_tile(&a->gate_up, (is_up * a->num_experts + e) * tiles + t, 0, a->columns, &x,
                       a->first[e + 1] - start, &y, (is_up * tiles + t) * TILE, TILE, 0);
    }
}

static void active_phase(const expert_args *a, int64_t part, int64_t parts)
{
    int64_t begin, end;
    share(a->tokens * a->top_k, part, parts, &begin, &end);
    for (int64_t p = begin; p < end; p++) {
        const float *gate = a->hidden + p * 2 * a->width;
        silu_mul_row(gate, gate + a->width, a->factor[p], a->active + p * a->width, a->width);
    }
}

static void down_phase(const expert_args *a, int64_t part, int64_t parts)
{
    int64_t begin, end;
    share((a->columns + TILE - 1) / TILE, part, parts, &begin, &end);
    for (int64_t tile = begin; tile < end; tile++) {
        int64_t column = tile * TILE, left = a->columns - column, width = left < TILE ? left : TILE;
        for (int64_t t = 0; t < a->tokens && !a->accumulate; t++)
            memset(a->out + t * a->columns + column, 0, (size_t)width * sizeof(float));
        for (int64_t e = 0; e < a->num_experts; e++) {
            int64_t start = a->first[e], rows = a->first[e + 1] - start;
            if (rows == 0)
                continue;
            /* the tile's columns begin at e * width, the rows of `active` at 0 */
            row_map x = plain_rows(a->active + start * a->width - e * a->width, a->width);
            row_map y = {a->out, a->token + start, 1, a->columns, 0};
            embergate_tile(&a->down, tile, e * a->width, (e + 1) * a->width, &x, rows, &y, column, width, 1);
        }
    }
}

static void routed_part(const void *args, int64_t part, int64_t parts)
{
    const expert_args *a = args;
    gate_up_phase(a, part, parts);
    embergate_meet_parts(a->crew, parts);
    active_phase(a, part, parts);
    embergate_meet_parts(a->crew, parts);
    down_phase(a, part, parts);
}

/* Every expert is chosen: the stacked weights are one SwiGLU layer of width num_experts * width. */
static void stacked_part(const void *args, int64_t part, int64_t parts)
{
    const expert_args *a = args;
    int64_t begin, end, all = a->num_experts * a->width;
    share(2 * all / TILE, part, parts, &begin, &end);
    embergate_tiles(&a->gate_up, begin, end, 2 * all, a->x, a->tokens, a->hidden, 0);
    embergate_meet_parts(a->crew, parts);
    share(a->tokens * a->num_experts, part, parts, &begin, &end);
    for (int64_t item = begin; item < end; item++) {
        int64_t t = item / a->num_experts, e = item % a->num_experts;
        const float *gate = a->hidden + t * 2 * all + e * a->width;
        silu_mul_row(gate, gate + all, a->factor[item], a->active + t * all + e * a->width, a->width);
    }
    embergate_meet_parts(a->crew, parts);
    share((a->columns + TILE - 1) / TILE, part, parts, &begin, &end);
    embergate_tiles(&a->down, begin, end, a->columns, a->active, a->tokens, a->out, (int)a->accumulate);
}

/* scratch: tokens * top_k * 3 * width floats. */
void embergate_expert_mlp(crew *crew, const float *x, const float *weights, const int32_t *experts,
                          const uint32_t *gate_up, const uint32_t *down, float *out, float *scratch, int64_t tokens,
                          int64_t columns, int64_t width, int64_t num_experts, int64_t top_k, int64_t bits,
                          int64_t is_wide, int64_t accumulate)
{
    int64_t pairs = tokens * top_k;
    int32_t *indices = (int32_t *)take_floats(num_experts + 1 + 2 * pairs);
    expert_args args = {crew, x, weights, experts, {gate_up, columns, bits, is_wide},
                        {down, num_experts * width, bits, is_wide}, out, scratch, scratch + pairs * 2 * width,
                        tokens, columns, width, num_experts, top_k, accumulate,
                        indices, indices + num_experts + 1, (float *)(indices + num_experts + 1 + pairs)};
    if (top_k == num_experts) {
        for (int64_t p = 0; p < pairs; p++)
            args.factor[p / top_k * top_k + experts[p]] = weights[p];
        embergate_run_parts(crew, stacked_part, &args);
    } else {
        sort_pairs(&args);
        embergate_run_parts(crew, routed_part, &args);
    }
    free(indices);
}
