"""Named real shapes, for checks that compile without the hardware."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LatentShape:
    """A step of T tokens in S rows; heads of one device; layers and pages of the cache; M pages of the longest row."""

    num_heads: int
    page_size: int
    num_tokens: int
    num_rows: int = 64
    latent_dim: int = 512
    rope_dim: int = 64
    num_layers: int = 61
    num_pages: int = 1024
    row_pages: int = 64


SHAPES: dict[str, LatentShape] = {
    f"deepseek-v3{devices}/{step}/page{page_size}": LatentShape(
        num_heads=heads, page_size=page_size, num_tokens=tokens, row_pages=8192 // page_size
    )
    for devices, heads in (("", 128), ("-over-8", 16))
    for step, tokens in (("decode", 64), ("mixed", 576))  # 64 rows of one token, and a chunk of 512
    for page_size in (64, 128)
}
