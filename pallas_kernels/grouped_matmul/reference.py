"""Grouped matmul from its definition, one row at a time, float32, numpy. Slow and obvious; used by tests only.

Shares no code with the fast backends, so that both cannot be wrong in the same way.
"""

import numpy as np


def grouped_matmul(lhs, rhs, group_sizes, *, scales=None, group_offset=0):
    """lhs [M, D], rhs [E, D, F], scales [E, D // G, F] or None, as numpy arrays. Returns [M, F] float32."""
    num_experts, depth, columns = rhs.shape
    out = np.zeros((lhs.shape[0], columns), np.float32)
    row = 0
    for expert, size in enumerate(group_sizes):
        held = expert - int(group_offset)
        if 0 <= held < num_experts:
            weights = np.asarray(rhs[held], np.float32)
            if scales is not None:
                group = depth // scales.shape[1]
                weights = np.stack([weights[d] * scales[held, d // group] for d in range(depth)])
            for i in range(row, row + int(size)):
                out[i] = np.asarray(lhs[i], np.float32) @ weights
        row += int(size)
    return out
