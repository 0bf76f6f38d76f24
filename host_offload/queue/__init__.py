"""Transfers of experts into cells, beside compute: a queue of chunks and its backends.

`transfer.py` defines the types, `order.py` the queue without threads or clock, `virtual.py` the
same queue over a clock. `native.py` copies and reads by threads
(pallas_kernels/cpu/transfer_queue.h), `device.py` by jax's own copies of pinned arrays
(`pinned.py`), which `cached.py` fills from files.
"""
