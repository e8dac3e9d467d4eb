"""How far a result may be from its float32 reference, by the dtype that computed it. Loosening one needs review."""

ATTENTION = {
    "float32": 1e-5,  # same arithmetic in another order
    "bfloat16": 2e-2,  # scores and weights are rounded to 8 bits of mantissa before the second product
    "float16": 4e-3,  # the same with 11 bits
}
LOGITS_FLOAT32 = 1e-4  # a whole tiny model in another order of summation
GROUPED_MATMUL = {  # relative, and of the square root of D, the size of a sum of D products of normal numbers
    "float32": 2e-6,  # same arithmetic in another order
    "bfloat16": 4e-3,  # the result is rounded to 8 bits of mantissa
    "quantized bfloat16": 8e-3,  # with scales of groups the GPU rounds each widened weight, and the result, to 8 bits
}
LOGPROBS_FLOAT32 = 5e-6  # the sum over a vocabulary in another order
RANK = 1e-2  # relative: of a thousand tokens before one some are nearly as likely, and may come after it
