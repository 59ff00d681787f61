/* The router. Contract: kernels/moe_gate/__init__.py. */
#include "native/parallel.h"
#include "native/vector.h"

typedef struct {
    const float *logits, *bias;
    float *weights;
    int32_t *chosen;
    int64_t tokens, experts, top_k, num_groups, top_groups, is_normalised;
    float scale;
} gate_args;

/* Index of the greatest of values[0..count), the lower one of equals; it is then struck out. */
static int64_t take_best(float *values, int64_t count)
{
    int64_t best = 0;
    for (int64_t i = 1; i < count; i++)
        best = values[i] > values[best] ? i : best;
    values[best] = -__builtin_inff();
    return best;
}

/* Strikes out the experts of all but the best groups. `groups` has room for num_groups. */
static void limit_to_groups(const gate_args *a, float *choice, float *groups)
{
    int64_t size = a->experts / a->num_groups;
    for (int64_t g = 0; g < a->num_groups; g++) {
        float first = -__builtin_inff(), second = first;
        for (int64_t i = 0; i < size; i++) {
            float value = choice[g * size + i];
            second = value > first ? first : value > second ? value : second;
            first = value > first ? value : first;
        }
        groups[g] = size > 1 ? first + second : first;
    }
    for (int64_t kept = 0; kept < a->top_groups; kept++)
        take_best(groups, a->num_groups);
    for (int64_t g = 0; g < a->num_groups; g++)
        for (int64_t i = 0; i < size && groups[g] > -__builtin_inff(); i++)
            choice[g * size + i] = -__builtin_inff();
}

/* scores = sigmoid(logits); scores has room up to a multiple of 8. */
static void squash(const float *logits, int64_t count, float *scores)
{
    int64_t padded = (count + LANES - 1) / LANES * LANES;
    memset(scores, 0, (size_t)padded * sizeof(float));
    memcpy(scores, logits, (size_t)count * sizeof(float));
    for (int64_t i = 0; i < padded; i += LANES)
        store8(scores + i, splat8(1.0f) / (splat8(1.0f) + exp8(-load8(scores + i))));
}

static void gate_token(const gate_args *a, int64_t t, float *scratch)
{
    int64_t padded = (a->experts + LANES - 1) / LANES * LANES;
    float *scores = scratch, *choice = scratch + padded, *groups = scratch + 2 * padded, sum = 0.0f;
    squash(a->logits + t * a->experts, a->experts, scores);
    for (int64_t i = 0; i < a->experts; i++)
        choice[i] = scores[i] + (a->bias ? a->bias[i] : 0.0f);
    if (a->top_groups < a->num_groups)
        limit_to_groups(a, choice, groups);
    for (int64_t k = 0; k < a->top_k; k++) {
        int64_t best = take_best(choice, a->experts);
        a->chosen[t * a->top_k + k] = (int32_t)best;
        a->weights[t * a->top_k + k] = scores[best];
        sum += scores[best];
    }
    float factor = a->is_normalised ? a->scale / (sum + 1e-20f) : a->scale;
    for (int64_t k = 0; k < a->top_k; k++)
        a->weights[t * a->top_k + k] *= factor;
}

static void gate_part(const void *args, int64_t part, int64_t parts)
{
    const gate_args *a = args;
    int64_t begin, end;
    share(a->tokens, part, parts, &begin, &end);
    float *scratch = take_floats(2 * (a->experts + LANES) + a->num_groups);
    for (int64_t t = begin; t < end; t++)
        gate_token(a, t, scratch);
    free(scratch);
}

/* bias may be null. */
void embergate_moe_gate(crew *crew, const float *logits, const float *bias, float *weights, int32_t *chosen,
                        int64_t tokens, int64_t experts, int64_t top_k, int64_t num_groups, int64_t top_groups,
                        int64_t is_normalised, float scale)
{
    gate_args args = {logits, bias, weights, chosen, tokens, experts, top_k, num_groups, top_groups,
                      is_normalised, scale};
    embergate_run_parts(tokens < 16 ? NULL : crew, gate_part, &args);
}

void embergate_moe_weigh_all(crew *crew, const float *logits, float *weights, int64_t tokens, int64_t experts,
                             int64_t num_leading, int64_t is_normalised, float scale)
{
    (void)crew;
    float *scores = take_floats(experts + LANES);
    for (int64_t t = 0; t < tokens; t++) {
        float *row = weights + t * (num_leading + experts), sum = 0.0f;
        squash(logits + t * experts, experts, scores);
        for (int64_t i = 0; i < experts; i++)
            sum += scores[i];
        float factor = is_normalised ? scale / (sum + 1e-20f) : scale;
        for (int64_t i = 0; i < num_leading; i++)
            row[i] = 1.0f;
        for (int64_t i = 0; i < experts; i++)
            row[num_leading + i] = scores[i] * factor;
    }
    free(scores);
}
