/* One tile (32 output columns) of a product with a packed weight.
 *
 * Every output is one chain of fused multiply-adds over ascending k, starting from zero or from what is there. How
 * many rows are computed together, and how k is cut into panels, changes no bit of it. */
#ifndef EMBERGATE_TILE_H
#define EMBERGATE_TILE_H

#include "native/vector.h"

#define TILE 32
#define VECTORS (TILE / LANES)
#define GROUP 32
#define PANEL_K 128
#define ROWS 3
#define FETCH_AHEAD 1024 /* words */

/* A packed weight as kernels/packed_linear/weight.py lays it out. */
typedef struct {
    const uint32_t *data;
    int64_t columns;   /* in_features */
    int64_t bits;      /* 4, 8, 16, 32 */
    int64_t is_wide;   /* scales and minima in float32, not float16 */
} packed;

/* Where row r lies: base + (r / inner) * outer_stride + (r % inner) * inner_stride, r looked up in `index` first. */
typedef struct {
    float *base;
    const int32_t *index;
    int64_t inner, outer_stride, inner_stride;
} row_map;

INLINE row_map plain_rows(const float *base, int64_t stride)
{
    return (row_map){(float *)base, NULL, 1, stride, 0};
}

INLINE float *row_at(const row_map *map, int64_t r)
{
    if (map->index)
        r = map->index[r];
    if (map->inner == 1)
        return map->base + r * map->outer_stride;
    return map->base + r / map->inner * map->outer_stride + r % map->inner * map->inner_stride;
}

INLINE int64_t header_words(const packed *w) { return w->is_wide ? 2 * TILE : TILE; }

INLINE int64_t group_words(const packed *w) { return header_words(w) + w->bits * TILE; }

/* Words of one tile. */
INLINE int64_t tile_words(const packed *w)
{
    return w->bits > 8 ? w->columns * w->bits : w->columns / GROUP * group_words(w);
}

/* Hardware prefetchers stop at page ends; a weight is one long run that is read once. */
INLINE void fetch_ahead(const uint32_t *row)
{
    __builtin_prefetch(row + FETCH_AHEAD);
    __builtin_prefetch(row + FETCH_AHEAD + TILE / 2);
}

INLINE f8 scale_at(const uint32_t *header, int64_t is_wide, int vector)
{
    return is_wide ? load8((const float *)header + vector * LANES)
                   : load_half8((const uint16_t *)header + vector * LANES);
}

INLINE f8 minimum_at(const uint32_t *header, int64_t is_wide, int vector)
{
    return is_wide ? load8((const float *)header + TILE + vector * LANES)
                   : load_half8((const uint16_t *)header + TILE + vector * LANES);
}

/* Eight weights of one column out of a word per lane. Odd nibbles are masked in place: 16 q times scale / 16 is
 * exactly q times scale. */
INLINE f8 nibble_even(u8 word, int pair, f8 scale, f8 minimum)
{
    return to_float8(word >> (8 * pair) & 15) * scale + minimum;
}

INLINE f8 nibble_odd(u8 word, int pair, f8 scale_16th, f8 minimum)
{
    return to_float8(word >> (8 * pair) & 240) * scale_16th + minimum;
}

INLINE f8 byte_of(u8 word, int place, f8 scale, f8 minimum)
{
    return to_float8(word >> (8 * place) & 255) * scale + minimum;
}

/* One group of 32 columns of a tile into panel[32][TILE]. */
INLINE void unpack_group(const uint32_t *group, int64_t bits, int64_t is_wide, float *panel)
{
    const uint32_t *words = group + (is_wide ? 2 * TILE : TILE);
    for (int i = 0; i < bits; i++)
        fetch_ahead(words + i * TILE);
    for (int v = 0; v < VECTORS; v++) {
        f8 scale = scale_at(group, is_wide, v), minimum = minimum_at(group, is_wide, v);
        float *lane = panel + v * LANES;
        if (bits == 4) {
            f8 scale_16th = scale * 0.0625f;
            for (int i = 0; i < 4; i++) {
                u8 word = *(const u8_at *)(words + i * TILE + v * LANES);
                for (int pair = 0; pair < 4; pair++) {
                    store8(lane + (8 * i + 2 * pair) * TILE, nibble_even(word, pair, scale, minimum));
                    store8(lane + (8 * i + 2 * pair + 1) * TILE, nibble_odd(word, pair, scale_16th, minimum));
                }
            }
        } else {
            for (int i = 0; i < 8; i++) {
                u8 word = *(const u8_at *)(words + i * TILE + v * LANES);
                for (int place = 0; place < 4; place++)
                    store8(lane + (4 * i + place) * TILE, byte_of(word, place, scale, minimum));
            }
        }
    }
}

/* Columns k .. k+count-1 of a tile into panel[count][TILE]. Affine weights: k and count are multiples of 32. */
INLINE void unpack(const packed *w, const uint32_t *tile, int64_t k, int64_t count, float *panel)
{
    if (w->bits == 32) {
        memcpy(panel, tile + k * TILE, (size_t)(count * TILE) * sizeof(float));
        return;
    }
    if (w->bits == 16) {
        for (int64_t i = 0; i < count / 2; i++)
            for (int v = 0; v < VECTORS; v++) {
                u8 word = *(const u8_at *)(tile + (k / 2 + i) * TILE + v * LANES);
                store8(panel + 2 * i * TILE + v * LANES, as_float8(word << 16));
                store8(panel + (2 * i + 1) * TILE + v * LANES, as_float8(word & 0xffff0000u));
            }
        return;
    }
    const uint32_t *group = tile + k / GROUP * group_words(w);
    for (int64_t done = 0; done < count; done += GROUP, group += group_words(w), panel += GROUP * TILE) {
        if (w->bits == 4)
            w->is_wide ? unpack_group(group, 4, 1, panel) : unpack_group(group, 4, 0, panel);
        else
            w->is_wide ? unpack_group(group, 8, 1, panel) : unpack_group(group, 8, 0, panel);
    }
}

/* y[r][0..31] (+)= sum_k x[r][k] * panel[k][0..31] for `rows` rows, a compile-time constant up to 3. */
INLINE void mac_rows(const int rows, int64_t count, const float *const *x, const float *panel, int64_t stride,
                     float *const *y, int is_fresh)
{
    f8 sum[ROWS][VECTORS];
#pragma GCC unroll 3
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++)
            sum[r][v] = is_fresh ? splat8(0.0f) : load8(y[r] + v * LANES);
    for (int64_t k = 0; k < count; k++) {
        f8 w[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++)
            w[v] = load8(panel + k * stride + v * LANES);
#pragma GCC unroll 3
        for (int r = 0; r < rows; r++) {
            f8 factor = splat8(x[r][k]);
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++)
                sum[r][v] += factor * w[v];
        }
    }
#pragma GCC unroll 3
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++)
            store8(y[r] + v * LANES, sum[r][v]);
}

/* mac_rows for a number of rows known at run time, 1 to 3. */
INLINE void mac(int64_t rows, int64_t count, const float *const *x, const float *panel, int64_t stride,
                float *const *y, int is_fresh)
{
    if (rows == 3)
        mac_rows(3, count, x, panel, stride, y, is_fresh);
    else if (rows == 2)
        mac_rows(2, count, x, panel, stride, y, is_fresh);
    else
        mac_rows(1, count, x, panel, stride, y, is_fresh);
}

/* Tiles begin .. end-1 of a plain product y (+)= x W^T of `rows` rows. Rows go in blocks whose x stays in a core's
 * second cache while the tiles pass by. */
void embergate_tiles(const packed *w, int64_t begin, int64_t end, int64_t out_features, const float *x, int64_t rows,
                     float *y, int accumulate);

/* One tile times columns k_begin .. k_end-1 of `rows` rows: y[r][column ..] (+)= sum. `width` columns of the tile are
 * written (32, fewer at the edge). Defined in kernels/packed_linear/native.c. */
void embergate_tile(const packed *w, int64_t tile, int64_t k_begin, int64_t k_end, const row_map *x, int64_t rows,
                    const row_map *y, int64_t column, int64_t width, int accumulate);

#endif
