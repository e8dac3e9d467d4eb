"""Attention from its definition: dense, float32, one row at a time. Slow and obvious; used by tests only.

Shares no code with the fast backends, so that both cannot be wrong in the same way.
"""

import numpy as np


def ragged_paged_attention(
    q, k, v, kv_pages, layer, page_table, kv_lens, cu_q_lens, distribution, *,
    scale, window=None, soft_cap=None, sinks=None,
):
    """Same arguments as `api.ragged_paged_attention`, as numpy arrays. Returns (out float32, new kv_pages)."""
    q, k, v, kv_pages = (np.array(a) for a in (q, k, v, kv_pages))
    layer = int(layer)
    page_size = kv_pages.shape[4]
    group = q.shape[1] // k.shape[1]
    out = np.zeros(q.shape, np.float32)
    for row in range(int(distribution[2])):
        start, end = int(cu_q_lens[row]), int(cu_q_lens[row + 1])
        kv_len = int(kv_lens[row])
        first = kv_len - (end - start)  # index in the cache of the row's first new token
        for token in range(start, end):
            index = first + token - start
            page = page_table[row][index // page_size]
            kv_pages[layer, page, 0, :, index % page_size] = k[token]
            kv_pages[layer, page, 1, :, index % page_size] = v[token]
        pages = kv_pages[layer, np.asarray(page_table[row][: -(-kv_len // page_size)])].astype(np.float32)
        # [pages, 2, K, B, H] -> [2, tokens, K, H]
        tokens = pages.transpose(1, 0, 3, 2, 4).reshape(2, -1, k.shape[1], q.shape[2])[:, :kv_len]
        for token in range(start, end):
            position = first + token - start
            visible = np.arange(kv_len) <= position
            if window is not None:
                visible &= np.arange(kv_len) > position - window
            for head in range(q.shape[1]):
                keys, values = tokens[0, visible, head // group], tokens[1, visible, head // group]
                scores = keys @ q[token, head].astype(np.float32) * np.float32(scale)
                if soft_cap is not None:
                    scores = soft_cap * np.tanh(scores / soft_cap)
                if sinks is not None:
                    scores = np.append(scores, np.float32(sinks[head]))
                weights = np.exp(scores - scores.max())
                weights /= weights.sum()
                out[token, head] = weights[: len(values)] @ values
    return out, kv_pages
