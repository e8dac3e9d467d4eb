"""Latent attention from its definition: dense, float32, one token at a time. Slow and obvious; used by tests only.

Shares no code with the fast backends, so that both cannot be wrong in the same way.
"""

import numpy as np


def latent_attention(
    q_latent, q_rope, latent, rope, kv_pages, layer, page_table, kv_lens, cu_q_lens, distribution, *,
    scale, soft_cap=None, tree_mask=None,
):  # fmt: skip
    """Arguments: `api.LatentAttentionFn` in numpy; pages [L, P, B, R + E]. Returns (out in float32, pages)."""
    query = np.concatenate([q_latent, q_rope], axis=-1).astype(np.float32)  # [T, N, R + E]
    new = np.concatenate([latent, rope], axis=-1)
    pages = np.array(kv_pages)
    layer, page_size, latent_dim = int(layer), pages.shape[2], latent.shape[1]
    out = np.zeros(q_latent.shape, np.float32)
    for row in range(int(distribution[2])):
        start, end, kv_len = int(cu_q_lens[row]), int(cu_q_lens[row + 1]), int(kv_lens[row])
        first = kv_len - (end - start)  # index in the cache of the row's first new token
        for token in range(start, end):
            index = first + token - start
            pages[layer, page_table[row][index // page_size], index % page_size] = new[token]
        page = [page_table[row][i // page_size] for i in range(kv_len)]
        slot = [i % page_size for i in range(kv_len)]
        keys = pages[layer, page, slot].astype(np.float32)  # [tokens, R + E]
        for token in range(start, end):
            visible = np.arange(kv_len) <= first + token - start
            if tree_mask is not None and 2 <= end - start <= 32 * tree_mask.shape[1]:
                for i in range(end - start):
                    visible[first + i] = int(tree_mask[token, i // 32]) >> (i % 32) & 1
            seen = keys[visible]
            scores = seen @ query[token].T * np.float32(scale)  # [tokens, N]
            if soft_cap is not None:
                scores = soft_cap * np.tanh(scores / soft_cap)
            weights = np.exp(scores - scores.max(0))
            out[token] = (weights / weights.sum(0)).T @ seen[:, :latent_dim]
    return out, pages
