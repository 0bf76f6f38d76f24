"""Transfers of experts into cells, beside compute: one queue of chunks and what carries it out.

`transfer.py` has the words, `order.py` the queue without threads or clock, `virtual.py` the same
queue over a clock, `native.py` threads that copy and read (pallas_kernels/cpu/transfer_queue.h),
`device.py` jax's own copies of the pinned arrays of `pinned.py`.
"""
