/* Causal grouped-query attention over the paged cache. Contract: kernels/paged_attention/__init__.py.
 *
 * A query's result is the same chain of operations wherever it is computed: scores sum over the head's dimensions in
 * ascending order, the softmax goes by absolute positions, values are added in ascending order of position. So decoding
 * a token and computing it within a prefill chunk give the same bits. */
#include "native/parallel.h"
#include "packed_linear/tile.h"
#include "paged_attention/softmax.h"

#define QUERY_TILE 8 /* tokens of a chunk that share what is read of the cache */
#define HALF 16      /* keys of one vector load group; divides the block size */

typedef struct {
    crew *crew;
    const float *query;
    int64_t query_stride;
    const float *key_cache, *value_cache;
    const int32_t *block_tables, *query_starts, *kv_lens;
    float scale;
    float *out;
    int64_t sequences, max_blocks, heads, kv_heads, dim, value_dim, block_size;
    float *scores;        /* decode rows: one row of score_width per (sequence, head) */
    int64_t score_width;
} attention_args;

/* One (sequence, KV head). */
typedef struct {
    const attention_args *a;
    const int32_t *table;
    int64_t sequence, kv_head, length;
} context;

INLINE context context_of(const attention_args *a, int64_t sequence, int64_t kv_head)
{
    return (context){a, a->block_tables + sequence * a->max_blocks, sequence, kv_head, a->kv_lens[sequence]};
}

/* The 16 keys at positions j ..: [dim][block_size], keys along the lanes. */
INLINE const float *keys_at(const context *c, int64_t j)
{
    const attention_args *a = c->a;
    int64_t block = c->table[j / a->block_size];
    return a->key_cache + (block * a->kv_heads + c->kv_head) * a->dim * a->block_size + j % a->block_size;
}

/* The values at positions j .. up to the block's end: [..][value_dim]. */
INLINE const float *values_at(const context *c, int64_t j)
{
    const attention_args *a = c->a;
    int64_t block = c->table[j / a->block_size];
    return a->value_cache + ((block * a->kv_heads + c->kv_head) * a->block_size + j % a->block_size) * a->value_dim;
}

/* Scores of `rows` (1 to 3, a constant) queries with the 32 keys at j ... What lies past the context is rubbish. */
INLINE void score_rows(const int rows, const context *c, int64_t j, const float *const *query, float *const *scores)
{
    const attention_args *a = c->a;
    const float *keys[2] = {keys_at(c, j), j + HALF < c->length ? keys_at(c, j + HALF) : keys_at(c, j)};
    f8 sum[ROWS][VECTORS];
#pragma GCC unroll 3
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++)
            sum[r][v] = splat8(0.0f);
    for (int64_t i = 0; i < a->dim; i++) {
        f8 key[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++)
            key[v] = load8(keys[v / 2] + i * a->block_size + v % 2 * LANES);
#pragma GCC unroll 3
        for (int r = 0; r < rows; r++) {
            f8 factor = splat8(query[r][i]);
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++)
                sum[r][v] += factor * key[v];
        }
    }
#pragma GCC unroll 3
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++)
            store8(scores[r] + j + v * LANES, sum[r][v] * splat8(a->scale));
}

/* Scores of the heads of one token's group with the 32 keys at j. */
static void score_token(const context *c, int64_t token, int64_t j, float *scores, int64_t width)
{
    const attention_args *a = c->a;
    int64_t members = a->heads / a->kv_heads;
    const float *query = a->query + token * a->query_stride + c->kv_head * members * a->dim;
    for (int64_t m = 0; m < members; m += ROWS) {
        const float *from[ROWS] = {query + m * a->dim, query + (m + 1) * a->dim, query + (m + 2) * a->dim};
        float *to[ROWS] = {scores + m * width, scores + (m + 1) * width, scores + (m + 2) * width};
        if (members - m >= 3)
            score_rows(3, c, j, from, to);
        else if (members - m == 2)
            score_rows(2, c, j, from, to);
        else
            score_rows(1, c, j, from, to);
    }
}

/* out[m][column .. +32) += sum over keys j_begin .. j_end-1, for the heads of one token's group. */
static void weigh_token(const context *c, int64_t j_begin, int64_t j_end, int64_t column, const float *scores,
                        int64_t width, float *out)
{
    const attention_args *a = c->a;
    int64_t members = a->heads / a->kv_heads;
    for (int64_t j = j_begin; j < j_end;) {
        int64_t count = a->block_size - j % a->block_size;
        count = count < j_end - j ? count : j_end - j;
        const float *values = values_at(c, j) + column;
        for (int64_t m = 0; m < members; m += ROWS) {
            const float *from[ROWS];
            float *to[ROWS];
            int64_t some = members - m < ROWS ? members - m : ROWS;
            for (int64_t i = 0; i < some; i++) {
                from[i] = scores + (m + i) * width + j;
                to[i] = out + (m + i) * a->value_dim + column;
            }
            mac(some, count, from, values, a->value_dim, to, j == 0);
        }
        j += count;
    }
}

INLINE float *out_of(const context *c, int64_t token)
{
    const attention_args *a = c->a;
    return a->out + (token * a->heads + c->kv_head * (a->heads / a->kv_heads)) * a->value_dim;
}

INLINE int64_t round_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

/* ---- decode: one query per sequence, work cut finely enough for a single sequence to use every thread ---- */

static int is_decode(const attention_args *a, int64_t s) { return a->query_starts[s + 1] - a->query_starts[s] == 1; }

INLINE float *decode_scores(const attention_args *a, int64_t sequence, int64_t head)
{
    return a->scores + (sequence * a->heads + head) * a->score_width;
}

static void decode_score_phase(const attention_args *a, int64_t part, int64_t parts)
{
    int64_t total = 0, at = 0, begin, end, members = a->heads / a->kv_heads;
    for (int64_t s = 0; s < a->sequences; s++)
        total += is_decode(a, s) ? round_up(a->kv_lens[s], TILE) / TILE * a->kv_heads : 0;
    share(total, part, parts, &begin, &end);
    for (int64_t s = 0; s < a->sequences && at < end; s++) {
        int64_t tiles = is_decode(a, s) ? round_up(a->kv_lens[s], TILE) / TILE : 0;
        int64_t items = tiles * a->kv_heads;
        int64_t first = begin > at ? begin - at : 0, last = end - at < items ? end - at : items;
        for (int64_t item = first; item < last; item++) {
            context c = context_of(a, s, item / tiles);
            score_token(&c, a->query_starts[s], item % tiles * TILE, decode_scores(a, s, c.kv_head * members),
                        a->score_width);
        }
        at += items;
    }
}

static void decode_softmax_phase(const attention_args *a, int64_t part, int64_t parts)
{
    int64_t begin, end;
    share(a->sequences * a->heads, part, parts, &begin, &end);
    for (int64_t item = begin; item < end; item++)
        if (is_decode(a, item / a->heads)) {
            float *scores = a->scores + item * a->score_width;
            int64_t length = a->kv_lens[item / a->heads];
            scores[a->score_width - 1] = exponentiate(scores, length);
        }
}

static void decode_value_phase(const attention_args *a, int64_t part, int64_t parts)
{
    int64_t begin, end, slabs = a->value_dim / TILE, members = a->heads / a->kv_heads;
    share(a->sequences * a->kv_heads * slabs, part, parts, &begin, &end);
    for (int64_t item = begin; item < end; item++) {
        int64_t s = item / (a->kv_heads * slabs), column = item % slabs * TILE;
        if (!is_decode(a, s))
            continue;
        context c = context_of(a, s, item / slabs % a->kv_heads);
        const float *scores = decode_scores(a, s, c.kv_head * members);
        float *out = out_of(&c, a->query_starts[s]);
        weigh_token(&c, 0, c.length, column, scores, a->score_width, out);
        for (int64_t m = 0; m < members; m++)
            for (int64_t i = column; i < column + TILE; i++)
                out[m * a->value_dim + i] *= scores[(m + 1) * a->score_width - 1];
    }
}

/* ---- prefill: a unit is (chunk, KV head, up to 8 tokens) ---- */

static void prefill_unit(const context *c, int64_t token, int64_t count, float *scores, int64_t width)
{
    const attention_args *a = c->a;
    int64_t members = a->heads / a->kv_heads, last = a->query_starts[c->sequence + 1];
    int64_t seen[QUERY_TILE], most = c->length - (last - token - count);
    for (int64_t t = 0; t < count; t++)
        seen[t] = c->length - (last - 1 - token - t);
    for (int64_t j = 0; j < most; j += TILE)
        for (int64_t t = 0; t < count; t++)
            if (j < seen[t])
                score_token(c, token + t, j, scores + t * members * width, width);
    for (int64_t t = 0; t < count; t++)
        for (int64_t m = 0; m < members; m++) {
            float *row = scores + (t * members + m) * width;
            row[width - 1] = exponentiate(row, seen[t]);
        }
    int64_t step = 4 * HALF > a->block_size ? 4 * HALF / a->block_size * a->block_size : a->block_size;
    for (int64_t column = 0; column < a->value_dim; column += TILE)
        for (int64_t j = 0; j < most; j += step)
            for (int64_t t = 0; t < count; t++)
                weigh_token(c, j, j + step < seen[t] ? j + step : seen[t], column, scores + t * members * width, width,
                            out_of(c, token + t));
    for (int64_t t = 0; t < count; t++)
        for (int64_t m = 0; m < members; m++)
            for (int64_t i = 0; i < a->value_dim; i++)
                out_of(c, token + t)[m * a->value_dim + i] *= scores[(t * members + m + 1) * width - 1];
}

static void prefill_phase(const attention_args *a, int64_t part, int64_t parts)
{
    int64_t unit = 0, members = a->heads / a->kv_heads;
    for (int64_t s = 0; s < a->sequences; s++) {
        int64_t begin = a->query_starts[s], end = a->query_starts[s + 1];
        if (end - begin < 2)
            continue;
        int64_t width = round_up(a->kv_lens[s], TILE) + TILE;
        float *scores = take_floats(QUERY_TILE * members * width);
        for (int64_t h = 0; h < a->kv_heads; h++)
            for (int64_t token = begin; token < end; token += QUERY_TILE, unit++)
                if (unit % parts == part) {
                    context c = context_of(a, s, h);
                    prefill_unit(&c, token, end - token < QUERY_TILE ? end - token : QUERY_TILE, scores, width);
                }
        free(scores);
    }
}

static void attention_part(const void *args, int64_t part, int64_t parts)
{
    const attention_args *a = args;
    if (a->scores) {
        decode_score_phase(a, part, parts);
        embergate_meet_parts(a->crew, parts);
        decode_softmax_phase(a, part, parts);
        embergate_meet_parts(a->crew, parts);
        decode_value_phase(a, part, parts);
    }
    prefill_phase(a, part, parts);
}

/* query_stride: floats from one token to the next. */
void embergate_paged_attention(crew *crew, const float *query, int64_t query_stride, const float *key_cache,
                               const float *value_cache, const int32_t *block_tables, const int32_t *query_starts,
                               const int32_t *kv_lens, float scale, float *out, int64_t sequences, int64_t max_blocks,
                               int64_t heads, int64_t kv_heads, int64_t dim, int64_t value_dim, int64_t block_size)
{
    attention_args args = {crew, query, query_stride, key_cache, value_cache, block_tables, query_starts, kv_lens, scale,
                           out, sequences, max_blocks, heads, kv_heads, dim, value_dim, block_size, NULL, 0};
    int64_t longest = 0;
    for (int64_t s = 0; s < sequences; s++)
        if (is_decode(&args, s) && kv_lens[s] > longest)
            longest = kv_lens[s];
    if (longest) {
        args.score_width = round_up(longest, TILE) + TILE;
        args.scores = take_floats(sequences * heads * args.score_width);
    }
    embergate_run_parts(crew, attention_part, &args);
    free(args.scores);
}
