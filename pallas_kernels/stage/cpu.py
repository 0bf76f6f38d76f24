import functools

from pallas_kernels.fill import cpu
from pallas_kernels.stage import reference

stage = functools.partial(reference.stage, fill=functools.partial(cpu.fill, ahead=True))
"""The decisions of the reference, with native copies."""
