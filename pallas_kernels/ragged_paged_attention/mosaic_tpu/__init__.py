"""Ragged paged attention for TPUs, in Pallas. See `wrapper` for the entry points and the data flow."""

from pallas_kernels.ragged_paged_attention.mosaic_tpu.wrapper import layout, ragged_paged_attention, unsupported

__all__ = ["layout", "ragged_paged_attention", "unsupported"]
