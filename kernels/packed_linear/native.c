/* Products with packed weights. Contracts: kernels/packed_linear/__init__.py. */
#include "native/parallel.h"
#include "packed_linear/tile.h"

#define CACHED_FLOATS 65536 /* of x: half of a second-level cache of 512 KiB */

/* One row, weights unpacked in registers; four chains of additions hide the latency of one. */
INLINE void one_row_group(const uint32_t *group, int64_t bits, int64_t is_wide, const float *x, f8 *sum)
{
    const uint32_t *words = group + (is_wide ? 2 * TILE : TILE);
    f8 scale[VECTORS], scale_16th[VECTORS], minimum[VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) {
        scale[v] = scale_at(group, is_wide, v);
        minimum[v] = minimum_at(group, is_wide, v);
        scale_16th[v] = scale[v] * 0.0625f;
    }
    for (int i = 0; i < bits; i++) {
        const float *at = x + i * (32 / bits);
        u8 row[VECTORS];
        fetch_ahead(words + i * TILE);
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++)
            row[v] = *(const u8_at *)(words + i * TILE + v * LANES);
#pragma GCC unroll 4
        for (int part = 0; part < 4; part++) {
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) {
                u8 word = row[v];
                if (bits == 4) {
                    sum[v] += nibble_even(word, part, scale[v], minimum[v]) * at[2 * part];
                    sum[v] += nibble_odd(word, part, scale_16th[v], minimum[v]) * at[2 * part + 1];
                } else
                    sum[v] += byte_of(word, part, scale[v], minimum[v]) * at[part];
            }
        }
    }
}

INLINE void one_row_groups(const packed *w, const uint32_t *group, int64_t bits, int64_t is_wide, const float *x,
                           int64_t columns, f8 *out)
{
    int64_t words = group_words(w);
    f8 sum[VECTORS] = {out[0], out[1], out[2], out[3]};
    for (int64_t k = 0; k < columns; k += GROUP, group += words)
        one_row_group(group, bits, is_wide, x + k, sum);
    for (int v = 0; v < VECTORS; v++)
        out[v] = sum[v];
}

static void one_row(const packed *w, const uint32_t *tile, int64_t k_begin, int64_t k_end, const float *x, float *y,
                    int is_fresh)
{
    f8 sum[VECTORS];
    for (int v = 0; v < VECTORS; v++)
        sum[v] = is_fresh ? splat8(0.0f) : load8(y + v * LANES);
    const uint32_t *group = tile + k_begin / GROUP * group_words(w);
    x += k_begin;
    if (w->bits == 4)
        w->is_wide ? one_row_groups(w, group, 4, 1, x, k_end - k_begin, sum)
                   : one_row_groups(w, group, 4, 0, x, k_end - k_begin, sum);
    else
        w->is_wide ? one_row_groups(w, group, 8, 1, x, k_end - k_begin, sum)
                   : one_row_groups(w, group, 8, 0, x, k_end - k_begin, sum);
    for (int v = 0; v < VECTORS; v++)
        store8(y + v * LANES, sum[v]);
}

/* Up to three rows against an unpacked panel; a narrow tile goes through a buffer. */
static void panel_rows(int64_t rows, int64_t count, const float *const *x, const float *panel, float *const *y,
                       int64_t width, int is_fresh)
{
    if (width == TILE) {
        mac(rows, count, x, panel, TILE, y, is_fresh);
        return;
    }
    float edge[ROWS][TILE] __attribute__((aligned(32))) = {{0}};
    float *at[ROWS] = {edge[0], edge[1], edge[2]};
    for (int64_t r = 0; r < rows && !is_fresh; r++)
        memcpy(edge[r], y[r], (size_t)width * sizeof(float));
    mac(rows, count, x, panel, TILE, at, is_fresh);
    for (int64_t r = 0; r < rows; r++)
        memcpy(y[r], edge[r], (size_t)width * sizeof(float));
}

void embergate_tile(const packed *w, int64_t tile, int64_t k_begin, int64_t k_end, const row_map *x, int64_t rows,
                    const row_map *y, int64_t column, int64_t width, int accumulate)
{
    const uint32_t *words = w->data + tile * tile_words(w);
    if (rows == 1 && width == TILE && w->bits <= 8) {
        one_row(w, words, k_begin, k_end, row_at(x, 0), row_at(y, 0) + column, !accumulate);
        return;
    }
    float panel[PANEL_K * TILE] __attribute__((aligned(64)));
    int64_t step = rows > 8 ? PANEL_K : PANEL_K / 2;
    for (int64_t k = k_begin; k < k_end; k += step) {
        int64_t count = k_end - k < step ? k_end - k : step;
        unpack(w, words, k, count, panel);
        for (int64_t r = 0; r < rows; r += ROWS) {
            int64_t some = rows - r < ROWS ? rows - r : ROWS;
            const float *from[ROWS];
            float *to[ROWS];
            for (int64_t i = 0; i < some; i++) {
                from[i] = row_at(x, r + i) + k;
                to[i] = row_at(y, r + i) + column;
            }
            panel_rows(some, count, from, panel, to, width, !accumulate && k == k_begin);
        }
    }
}

void embergate_tiles(const packed *w, int64_t begin, int64_t end, int64_t out_features, const float *x, int64_t rows,
                     float *y, int accumulate)
{
    int64_t block = CACHED_FLOATS / w->columns / ROWS * ROWS;
    block = block < 16 * ROWS ? 16 * ROWS : block;
    for (int64_t r = 0; r < rows; r += block) {
        row_map from = plain_rows(x + r * w->columns, w->columns), to = plain_rows(y + r * out_features, out_features);
        int64_t some = rows - r < block ? rows - r : block;
        for (int64_t tile = begin; tile < end; tile++) {
            int64_t left = out_features - tile * TILE;
            embergate_tile(w, tile, 0, w->columns, &from, some, &to, tile * TILE, left < TILE ? left : TILE,
                           accumulate);
        }
    }
}

typedef struct {
    packed weight;
    const float *x;
    float *y;
    int64_t rows, out_features, accumulate;
} linear_args;

static void linear_part(const void *args, int64_t part, int64_t parts)
{
    const linear_args *a = args;
    int64_t begin, end;
    share((a->out_features + TILE - 1) / TILE, part, parts, &begin, &end);
    embergate_tiles(&a->weight, begin, end, a->out_features, a->x, a->rows, a->y, (int)a->accumulate);
}

void embergate_packed_linear(crew *crew, const float *x, const uint32_t *data, float *y, int64_t rows,
                             int64_t columns, int64_t out_features, int64_t bits, int64_t is_wide,
                             int64_t accumulate)
{
    linear_args args = {{data, columns, bits, is_wide}, x, y, rows, out_features, accumulate};
    embergate_run_parts(crew, linear_part, &args);
}

typedef struct {
    packed weight;
    const float *x;
    float *y;
    int64_t tokens, heads, width, groups;
} head_args;

static void head_part(const void *args, int64_t part, int64_t parts)
{
    const head_args *a = args;
    int64_t begin, end, tiles = a->width / TILE, members = a->heads / a->groups, columns = a->weight.columns;
    share(a->groups * tiles, part, parts, &begin, &end);
    for (int64_t item = begin; item < end; item++) {
        int64_t head = item / tiles * members;
        row_map x = {(float *)a->x + head * columns, NULL, members, a->heads * columns, columns};
        row_map y = {a->y + head * a->width, NULL, members, a->heads * a->width, a->width};
        embergate_tile(&a->weight, item, 0, columns, &x, a->tokens * members, &y, item % tiles * TILE, TILE, 0);
    }
}

/* width: rows of the weight per group, a multiple of 32. */
void embergate_packed_head_linear(crew *crew, const float *x, const uint32_t *data, float *y, int64_t tokens,
                                  int64_t heads, int64_t columns, int64_t width, int64_t groups, int64_t bits,
                                  int64_t is_wide)
{
    head_args args = {{data, columns, bits, is_wide}, x, y, tokens, heads, width, groups};
    embergate_run_parts(crew, head_part, &args);
}

static float half_to_float(const uint16_t *at)
{
    uint16_t eight[LANES] = {*at};
    return load_half8(eight)[0];
}

/* One row of a tile. */
static void unpack_row(const packed *w, const uint32_t *tile, int64_t lane, float *out)
{
    if (w->bits > 8) {
        for (int64_t k = 0; k < w->columns; k++) {
            uint32_t bits = w->bits == 32 ? tile[k * TILE + lane]
                            : k % 2       ? tile[k / 2 * TILE + lane] & 0xffff0000u
                                          : tile[k / 2 * TILE + lane] << 16;
            memcpy(out + k, &bits, sizeof bits);
        }
        return;
    }
    int64_t per_word = 32 / w->bits;
    uint32_t mask = (1u << w->bits) - 1;
    for (int64_t k = 0; k < w->columns; k += GROUP, tile += group_words(w)) {
        const float *wide = (const float *)tile;
        const uint16_t *narrow = (const uint16_t *)tile;
        float scale = w->is_wide ? wide[lane] : half_to_float(narrow + lane);
        float minimum = w->is_wide ? wide[TILE + lane] : half_to_float(narrow + TILE + lane);
        const uint32_t *words = tile + header_words(w) + lane;
        for (int64_t i = 0; i < GROUP; i++) {
            uint32_t code = words[i / per_word * TILE] >> (i % per_word * w->bits) & mask;
            out[k + i] = (float)(int32_t)code * scale + minimum;
        }
    }
}

void embergate_packed_embedding(crew *crew, const int64_t *token_ids, const uint32_t *data, float *out,
                                int64_t tokens, int64_t columns, int64_t bits, int64_t is_wide)
{
    (void)crew;
    packed weight = {data, columns, bits, is_wide};
    for (int64_t t = 0; t < tokens; t++)
        unpack_row(&weight, data + token_ids[t] / TILE * tile_words(&weight), token_ids[t] % TILE, out + t * columns);
}
