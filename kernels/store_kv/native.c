/* Writes into the paged cache. Contracts: kernels/store_kv/__init__.py. */
#include <string.h>

#include "native/parallel.h"

/* Strides: floats from one token to the next. */
void embergate_store_kv(crew *crew, const float *key, int64_t key_stride, const float *value,
                        int64_t value_stride, float *key_cache, float *value_cache, const int64_t *slots,
                        int64_t tokens, int64_t heads, int64_t dim, int64_t value_dim, int64_t block_size)
{
    (void)crew;
    for (int64_t t = 0; t < tokens; t++) {
        int64_t block = slots[t] / block_size, offset = slots[t] % block_size;
        for (int64_t h = 0; h < heads; h++) {
            const float *k = key + t * key_stride + h * dim;
            float *to = key_cache + (block * heads + h) * dim * block_size + offset;
            for (int64_t i = 0; i < dim; i++)
                to[i * block_size] = k[i];
            memcpy(value_cache + ((block * heads + h) * block_size + offset) * value_dim,
                   value + t * value_stride + h * value_dim, (size_t)value_dim * sizeof(float));
        }
    }
}

void embergate_store_latent(crew *crew, const float *latent, int64_t latent_stride, const float *rope_key,
                            int64_t rope_stride, float *cache, const int64_t *slots, int64_t tokens, int64_t width,
                            int64_t rope_width)
{
    (void)crew;
    for (int64_t t = 0; t < tokens; t++) {
        float *to = cache + slots[t] * (width + rope_width);
        memcpy(to, latent + t * latent_stride, (size_t)width * sizeof(float));
        memcpy(to + width, rope_key + t * rope_stride, (size_t)rope_width * sizeof(float));
    }
}
