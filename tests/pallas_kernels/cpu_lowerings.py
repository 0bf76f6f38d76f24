"""What Pallas's interpreter lacks on the CPU, so that no kernel body needs a branch for it.

Import it before an interpreted kernel is compiled.
"""

from jax._src import effects
from jax.experimental.pallas import triton as plgpu
from jax.interpreters import mlir


def _barrier(context):
    """The interpreter finishes one operation of a program before the next: nothing to wait for."""
    return []


def _primitive(function):
    """The primitive that a jax function of one equation binds."""
    import jax

    (equation,) = jax.make_jaxpr(function)().eqns
    return equation.primitive, equation.effects


_debug_barrier, _effects = _primitive(plgpu.debug_barrier)
mlir.register_lowering(_debug_barrier, _barrier, platform="cpu")
for effect in _effects:
    effects.lowerable_effects.add_type(type(effect))
