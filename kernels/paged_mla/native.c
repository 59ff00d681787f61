/* Absorbed latent attention, one query per sequence. Contract: kernels/paged_mla/__init__.py. */
#include "native/parallel.h"
#include "packed_linear/tile.h"
#include "paged_attention/softmax.h"

typedef struct {
    crew *crew;
    const float *query_latent, *query_rope;
    int64_t rope_stride;
    const float *cache;
    const int32_t *block_tables, *kv_lens;
    float scale;
    float *out;
    int64_t sequences, max_blocks, heads, latent, part, rope_groups, block_size;
    float *scores; /* one row of score_width per (sequence, head); its last element is 1 / sum */
    int64_t score_width;
} mla_args;

INLINE int64_t row_width(const mla_args *a) { return a->latent + a->part * a->rope_groups; }

INLINE const float *row_of(const mla_args *a, int64_t sequence, int64_t j)
{
    int64_t block = a->block_tables[sequence * a->max_blocks + j / a->block_size];
    return a->cache + (block * a->block_size + j % a->block_size) * row_width(a);
}

/* width is a multiple of 32. */
INLINE float dot(const float *x, const float *y, int64_t width)
{
    f8 sum[VECTORS] = {splat8(0.0f), splat8(0.0f), splat8(0.0f), splat8(0.0f)};
    for (int64_t i = 0; i < width; i += TILE)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++)
            sum[v] += load8(x + i + v * LANES) * load8(y + i + v * LANES);
    return sum8((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

static void score_token(const mla_args *a, int64_t s, int64_t j)
{
    const float *row = row_of(a, s, j);
    int64_t members = a->heads / a->rope_groups;
    for (int64_t h = 0; h < a->heads; h++) {
        const float *rope = a->query_rope + s * a->rope_stride + h * a->part;
        float score = dot(rope, row + a->latent + h / members * a->part, a->part);
        if (a->query_latent)
            score += dot(a->query_latent + (s * a->heads + h) * a->latent, row, a->latent);
        a->scores[(s * a->heads + h) * a->score_width + j] = score * a->scale;
    }
}

static void score_phase(const mla_args *a, int64_t part, int64_t parts)
{
    int64_t total = 0, at = 0, begin, end;
    for (int64_t s = 0; s < a->sequences; s++)
        total += a->kv_lens[s];
    share(total, part, parts, &begin, &end);
    for (int64_t s = 0; s < a->sequences && at < end; at += a->kv_lens[s], s++) {
        int64_t first = begin > at ? begin - at : 0, last = end - at < a->kv_lens[s] ? end - at : a->kv_lens[s];
        for (int64_t j = first; j < last; j++)
            score_token(a, s, j);
    }
}

static void softmax_phase(const mla_args *a, int64_t part, int64_t parts)
{
    int64_t begin, end;
    share(a->sequences * a->heads, part, parts, &begin, &end);
    for (int64_t item = begin; item < end; item++) {
        float *scores = a->scores + item * a->score_width;
        scores[a->score_width - 1] = exponentiate(scores, a->kv_lens[item / a->heads]);
    }
}

/* out[.., column .. +32) of every head of a sequence: block after block, so that latents are read from memory once. */
static void latent_slabs(const mla_args *a, int64_t s, int64_t first, int64_t last)
{
    int64_t length = a->kv_lens[s];
    const float *scores = a->scores + s * a->heads * a->score_width;
    float *out = a->out + s * a->heads * a->latent;
    for (int64_t j = 0; j < length; j += a->block_size) {
        int64_t count = length - j < a->block_size ? length - j : a->block_size;
        const float *rows = row_of(a, s, j);
        for (int64_t slab = first; slab < last; slab++)
            for (int64_t h = 0; h < a->heads; h += ROWS) {
                const float *from[ROWS];
                float *to[ROWS];
                int64_t some = a->heads - h < ROWS ? a->heads - h : ROWS;
                for (int64_t i = 0; i < some; i++) {
                    from[i] = scores + (h + i) * a->score_width + j;
                    to[i] = out + (h + i) * a->latent + slab * TILE;
                }
                mac(some, count, from, rows + slab * TILE, row_width(a), to, j == 0);
            }
    }
    for (int64_t h = 0; h < a->heads; h++)
        for (int64_t i = first * TILE; i < last * TILE; i++)
            out[h * a->latent + i] *= scores[(h + 1) * a->score_width - 1];
}

static void latent_phase(const mla_args *a, int64_t part, int64_t parts)
{
    int64_t begin, end, slabs = a->latent / TILE;
    share(a->sequences * slabs, part, parts, &begin, &end);
    while (begin < end) {
        int64_t s = begin / slabs, stop = end < (s + 1) * slabs ? end : (s + 1) * slabs;
        latent_slabs(a, s, begin - s * slabs, stop - s * slabs);
        begin = stop;
    }
}

static void mla_part(const void *args, int64_t part, int64_t parts)
{
    const mla_args *a = args;
    score_phase(a, part, parts);
    embergate_meet_parts(a->crew, parts);
    softmax_phase(a, part, parts);
    embergate_meet_parts(a->crew, parts);
    latent_phase(a, part, parts);
}

/* query_latent may be null; part: width of the rope key's part that a head reads. */
void embergate_paged_mla_decode(crew *crew, const float *query_latent, const float *query_rope,
                                int64_t rope_stride, const float *cache, const int32_t *block_tables,
                                const int32_t *kv_lens, float scale, float *out, int64_t sequences,
                                int64_t max_blocks, int64_t heads, int64_t latent, int64_t part, int64_t rope_groups,
                                int64_t block_size)
{
    int64_t longest = 0;
    for (int64_t s = 0; s < sequences; s++)
        longest = kv_lens[s] > longest ? kv_lens[s] : longest;
    int64_t width = (longest + LANES) / LANES * LANES + LANES;
    mla_args args = {crew, query_latent, query_rope, rope_stride, cache, block_tables, kv_lens, scale, out, sequences,
                     max_blocks, heads, latent, part, rope_groups, block_size,
                     take_floats(sequences * heads * width), width};
    embergate_run_parts(crew, mla_part, &args);
    free(args.scores);
}
