"""Ring attention from its definition: all devices' tokens in one place, dense, float32. Slow, obvious, for tests only.

Shares no code with the fast backends. Every array has a leading device axis D.
"""

import numpy as np


def ring_attention(
    q, k, v, tokens, layer, slot_positions, page_table, kv_lens, cu_q_lens, positions, *,
    scale, window=None, soft_cap=None, sinks=None,
):
    """q[D,T,N,H], k and v[D,T,K,H], tokens[D,L,P,B,2,K,H], slot_positions[D,P,B], page_table[D,S,M], kv_lens[D,S],
    cu_q_lens[D,S+1], positions[D,T]. tokens are the pages in canonical order; they and slot_positions are without the
    new tokens. Returns (out float32, tokens)."""
    tokens, slot_positions = np.array(tokens), np.array(slot_positions)
    devices, page_size = q.shape[0], slot_positions.shape[2]
    group = q.shape[2] // k.shape[2]
    out = np.zeros(q.shape, np.float32)
    for device in range(devices):
        for row in range(kv_lens.shape[1]):
            start, end = cu_q_lens[device, row], cu_q_lens[device, row + 1]
            for token in range(start, end):
                index = kv_lens[device, row] - (end - token)
                page, offset = page_table[device, row, index // page_size], index % page_size
                tokens[device, layer, page, offset] = k[device, token], v[device, token]
                slot_positions[device, page, offset] = positions[device, token]
    for row in range(kv_lens.shape[1]):
        keys, values, places = [], [], []
        for device in range(devices):
            for index in range(kv_lens[device, row]):
                page, offset = page_table[device, row, index // page_size], index % page_size
                key, value = tokens[device, layer, page, offset]
                keys.append(key)
                values.append(value)
                places.append(slot_positions[device, page, offset])
        places = np.array(places)
        for device in range(devices):
            for token in range(cu_q_lens[device, row], cu_q_lens[device, row + 1]):
                position = positions[device, token]
                seen = places <= position
                if window is not None:
                    seen &= places > position - window
                seen = np.flatnonzero(seen)
                for head in range(q.shape[2]):
                    query = q[device, token, head].astype(np.float32)
                    scores = np.array([keys[i][head // group] @ query for i in seen]) * np.float32(scale)
                    if soft_cap is not None:
                        scores = soft_cap * np.tanh(scores / soft_cap)
                    if sinks is not None:
                        scores = np.append(scores, np.float32(sinks[head]))
                    weights = np.exp(scores - scores.max())
                    weights /= weights.sum()
                    out[device, token, head] = sum(
                        w * values[i][head // group] for w, i in zip(weights[: len(seen)], seen, strict=True))
    return out, tokens
