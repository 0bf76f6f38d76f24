"""The library of native CPU ops: found, loaded once, and called."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from pallas_kernels.cpu.build import COMMAND, HERE, LIBRARY, digest, is_whole

TARGETS = (
    *(
        "linear",
        "linear_codes",
        "head_linear",
        "expert_ffn",
        "decode_attention",
        "prefill_attention",
    ),
    *("rms_norm", "route", "plan", "kv_write", "latent_write", "combine", "gated_delta"),
    *("short_conv", "selective_scan", "draw", "rank", "likeliest"),
    *("fill", "move", "unpack", "read", "write", "drain"),
)
"""The library's handlers: each is the symbol moejax_cpu_NAME and the FFI target of that name."""

DTYPES = ("bfloat16", "float16", "float32")


@functools.cache
def _load() -> tuple[str, str]:
    """Loads the library and registers its handlers. Returns (name of the instruction set, ""), or
    ("", what is wrong)."""
    if not (HERE / LIBRARY).is_file():
        return "", f"the native CPU ops are not built; `{COMMAND}` builds them"
    if not is_whole(HERE / LIBRARY):
        return "", f"the native CPU ops are damaged; `{COMMAND}` builds them again"
    try:
        functions = ctypes.CDLL(str(HERE / LIBRARY))
        text = {name: getattr(functions, f"moejax_cpu_{name}") for name in _TEXTS}
    except (OSError, AttributeError) as error:
        return "", f"the native CPU ops do not load ({error}); `{COMMAND}` builds them again"
    for function in text.values():
        function.restype = ctypes.c_char_p
    if text["sources"]().decode() != digest():
        return (
            "",
            f"the native CPU ops were built from other sources; `{COMMAND}` builds them again",
        )
    isa = text["isa"]().decode()
    if not isa:
        return "", text["isa_error"]().decode()
    for name in TARGETS:
        handler = jax.ffi.pycapsule(getattr(functions, f"moejax_cpu_{name}"))
        jax.ffi.register_ffi_target(f"moejax_cpu_{name}", handler, platform="cpu")
    return isa, ""


_TEXTS = ("sources", "isa", "isa_error")


def why_not_cpu() -> str | None:
    """Why the native ops cannot run in this process, and what to do about it; None: they can."""
    return _load()[1] or None


def instruction_set() -> str | None:
    """The instruction set whose kernels run, such as "avx2"; None: no native kernel runs. The
    environment variable MOEJAX_CPU_ISA chooses another one."""
    return _load()[0] or None


def library() -> ctypes.CDLL:
    """The loaded library, for functions that are not ops. Raises ValueError as `call`."""
    if reason := why_not_cpu():
        raise ValueError(reason)
    return ctypes.CDLL(str(HERE / LIBRARY))


@functools.cache
def bind(name: str, arguments: str, returns: Any = ctypes.c_int64) -> Callable[..., Any] | None:
    """A function of the library; None: the library cannot run here.

    - `arguments`: a letter for each: "a", an address, or "s", an int64.
    - `returns`: a type of ctypes, or None.
    """
    if why_not_cpu():
        return None
    function = getattr(library(), name)
    letters = {"a": ctypes.c_void_p, "s": ctypes.c_int64}
    function.argtypes = [letters[each] for each in arguments]
    function.restype = returns
    return function


def address_of(array: np.ndarray) -> int:
    """The address of an array's data. Its ctypes.data takes ten times as long, which is most of a
    short native call."""
    return _data(id(array) + object.__basicsize__).value


_data = ctypes.c_size_t.from_address
"""Of an array the first of numpy's own fields, as every compiled extension relies on."""


def call(
    target: str,
    result: Any,
    *operands: Any,
    aliases: Mapping[int, int] | None = None,
    **attributes: Any,
) -> Any:
    """Calls a handler within a traced function.

    - `operands`: arrays, or an OwnedArena, which passes its token.
    - `result`: shapes and dtypes of what comes back, one or several.
    - `aliases`: operand → result that uses the same memory.
    - `attributes`: numpy scalars or arrays.

    Raises ValueError if the library cannot run here.
    """
    if reason := why_not_cpu():
        raise ValueError(reason)
    leaves, tree = jax.tree.flatten(result)
    function = jax.ffi.ffi_call(
        f"moejax_cpu_{target}",
        [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves],
        input_output_aliases=dict(aliases or {}),
    )
    return tree.unflatten(function(*jax.tree.leaves(operands), **attributes))


def check_dtypes(op: str, **arrays: jax.Array | None) -> None:
    """Raises ValueError unless all arrays have one dtype that the native ops compute in."""
    names = {name: array.dtype.name for name, array in arrays.items() if array is not None}
    if len(set(names.values())) > 1 or not set(names.values()) <= set(DTYPES):
        said = ", ".join(f"{name} is {dtype}" for name, dtype in names.items())
        raise ValueError(
            f"op {op!r}: {said}; the native CPU op takes one of {', '.join(DTYPES)}, 'xla' others"
        )


def int32(value: Any) -> jax.Array:
    return jax.numpy.asarray(value, np.int32)
