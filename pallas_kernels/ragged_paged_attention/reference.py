"""Attention from its definition: dense, float32, one row at a time. Slow and obvious; used by tests only.

Shares no code with the fast backends, so that both cannot be wrong in the same way.
"""

import ml_dtypes
import numpy as np


def ragged_paged_attention(
    q, k, v, kv_pages, layer, page_table, kv_lens, cu_q_lens, distribution, *,
    scale, window=None, chunk=None, soft_cap=None, sinks=None, kv_bias=None, tree_mask=None,
):
    """The arguments of `api.AttentionFn` as numpy arrays. Returns (out float32, new kv_pages).

    kv_pages is [L, P, 2, K, B, H], or a pair of that in 8 bits and its scales [L, P, 2, K, B].
    """
    q = np.asarray(q, np.float32)
    new = np.stack([k, v], axis=1)  # [T, 2, K, H]
    quantized = isinstance(kv_pages, tuple)
    paged = [np.array(a) for a in (kv_pages if quantized else (kv_pages,))]
    written = _quantize(new.astype(np.float32), paged[0].dtype) if quantized else (new,)
    layer, page_size, num_kv_heads = int(layer), paged[0].shape[4], k.shape[1]
    out = np.zeros(q.shape, np.float32)
    for row in range(int(distribution[2])):
        start, end, kv_len = int(cu_q_lens[row]), int(cu_q_lens[row + 1]), int(kv_lens[row])
        first = kv_len - (end - start)  # index in the cache of the row's first new token
        for token in range(start, end):
            index = first + token - start
            for array, value in zip(paged, written, strict=True):
                array[layer, page_table[row][index // page_size], :, :, index % page_size] = value[token]
        page = [page_table[row][i // page_size] for i in range(kv_len)]
        slot = [i % page_size for i in range(kv_len)]
        kv = paged[0][layer, page, :, :, slot].astype(np.float32)  # [tokens, 2, K, H]
        if quantized:
            kv *= paged[1][layer, page, :, :, slot][..., None]
        bias = np.zeros((kv_len, num_kv_heads), np.float32)
        if kv_bias is not None:
            bias[:first] = np.asarray(kv_bias)[layer, page, :, slot][:first]
        for token in range(start, end):
            position = first + token - start
            visible = np.arange(kv_len) <= position
            if tree_mask is not None and 2 <= end - start <= 32 * tree_mask.shape[1]:
                for i in range(end - start):
                    visible[first + i] = int(tree_mask[token, i // 32]) >> (i % 32) & 1
            if window is not None:
                visible &= np.arange(kv_len) > position - window
            if chunk is not None:
                visible &= np.arange(kv_len) // chunk == position // chunk
            for head in range(q.shape[1]):
                kv_head = head * num_kv_heads // q.shape[1]
                keys, values = kv[visible, 0, kv_head], kv[visible, 1, kv_head]
                scores = keys @ q[token, head] * np.float32(scale)
                if soft_cap is not None:
                    scores = soft_cap * np.tanh(scores / soft_cap)
                scores += bias[visible, kv_head]
                if sinks is not None:
                    scores = np.append(scores, np.float32(sinks[head]))
                weights = np.exp(scores - scores.max())
                weights /= weights.sum()
                out[token, head] = weights[: len(values)] @ values
    return out, tuple(paged) if quantized else paged[0]


def _quantize(rows: np.ndarray, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """8-bit rows [..., H] and their scales: the largest number of a row becomes the largest of the format."""
    largest = np.float32(127 if dtype == np.int8 else ml_dtypes.finfo(dtype).max)
    scales = np.abs(rows).max(-1) * np.float32(1 / float(largest))
    steps = rows * (np.float32(1) / np.where(scales == 0, np.float32(1), scales))[..., None]
    steps = np.rint(steps) if dtype == np.int8 else steps
    return np.clip(steps, -largest, largest).astype(dtype), scales
