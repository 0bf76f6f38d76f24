"""The arithmetic int8: one definition, by numpy, and its bits in every format, instruction set and
number of rows."""

import dataclasses
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import resolve_ops
from pallas_kernels.cpu import build
from pallas_kernels.cpu.library import instruction_set
from pallas_kernels.expert_ffn.specs import Spec
from pallas_kernels.implementations import no_integers
from pallas_kernels.linear import CodedWeights, LinearOptions, lay_out, linear
from pallas_kernels.records.format import RecordFormat
from pallas_kernels.records.integers import multiply, quantize
from pallas_kernels.records.reference import read_codes
from tests.pallas_kernels.contract import NATIVE, same_bits
from tests.pallas_kernels.encoded import records
from tests.pallas_kernels.ops import expert_ffn as experts

FORMATS = {
    **dict.fromkeys(("q8_0", "q4_0", "q4_k", "q6_k", "fp4-32-e8m0"), True),
    **dict.fromkeys(("q4_1", "q5_0", "q5_1", "q5_k", "iq4_nl", "int8", "int4", "int2"), False),
    **dict.fromkeys(("int8-channel-bf16", "int4-128-f16-zero", "int8-32-f16-zero"), False),
    "fp4-16-e4m3xf32": False,
}
"""Formats with integers, and whether every run tests them; the others only have other codes."""

EACH = [
    pytest.param(name, marks=() if quick else pytest.mark.nightly)
    for name, quick in FORMATS.items()
]

ROWS = (1, 2, 3, 5, 8, 33, 130)
"""More than 64 pass a block again, more than 128 are several calls."""
FEW_ROWS = (1, 5, 130)


def coded(version: str, inputs: int) -> CodedWeights:
    """Two layers of 52 rows in two parts, which differ by layer and end within 16 rows."""
    layers = [[(version, 42), ("q6_k", 10)], [("q4_0", 42), (version, 10)]]
    placed, count = lay_out(layers, inputs, "bfloat16")
    random, elements = np.random.default_rng(0), np.zeros(count, np.uint16)
    for part in (part for layer in placed for part in layer):
        made = records(random, 1, part.format).reshape(-1)
        elements[part.first : part.first + made.size] = made
    return CodedWeights(jnp.asarray(elements), placed)


def drawn(rows: int, width: int) -> jax.Array:
    """Rows of several sizes, one group of zeros, one of very small numbers."""
    x = np.random.default_rng(rows).standard_normal((rows, width)) * 4.0 ** (
        np.arange(rows)[:, None] % 7
    )
    x[0, :32], x[-1, 32:64] = 0, 1e-34
    return jnp.asarray(x, jnp.bfloat16)


def check_linear(version: str, inputs: int, counts: tuple[int, ...] = ROWS) -> None:
    weights, x = coded(version, inputs), drawn(ROWS[-1], inputs)

    def run(implementation, x, layer):
        options = LinearOptions(implementation=implementation, arithmetic="int8")
        return linear(x, weights, layer, options=options, out_dtype=jnp.float32)

    reference, native = (jax.jit(run, static_argnums=0) for _ in range(2))
    for layer in range(2):
        wanted = reference("xla", x, layer)
        for rows in counts:
            same_bits(native("cpu", x[:rows], layer), wanted[:rows])


def check_experts(version: str, width: int) -> None:
    """By relu: XLA's exponential is not the native one."""
    wide = None
    for tokens in (300, 33, 1):
        spec = Spec(tokens, "bfloat16", hidden=256, width=width, experts=4, versions=(version,))
        case = experts.case(spec, 0)
        found, wanted = (
            experts.run(spec, name, case, activation="relu", arithmetic="int8")
            for name in ("cpu", "xla")
        )
        same_bits(found, wanted)
        exact = experts.run(spec, "cpu", case, activation="relu")
        wide = np.abs(np.asarray(exact)).max() if wide is None else wide
        assert 0 < np.abs(found - exact).max() < 0.05 * wide


@NATIVE
@pytest.mark.parametrize("version", EACH)
def test_native_products_have_the_bits_of_the_reference(version):
    """512: units lie in one plane; 320: in two; 288: planes do not begin at whole vectors; 256: as
    many units as lanes; 2,048: rows of upper bits are whole vectors."""
    quick = FORMATS[version]
    long = (2048,) if version in ("q5_k", "q6_k") else ()
    for inputs in (512, *long) if quick else (512, 320, 288, 256, *long):
        check_linear(version, inputs, FEW_ROWS if quick and version != "q8_0" else ROWS)


@NATIVE
@pytest.mark.slow
@pytest.mark.parametrize("version", EACH)
def test_native_experts_have_the_bits_of_the_reference(version):
    for width in (320,) if FORMATS[version] else (256, 320, 96):
        check_experts(version, width)


@NATIVE
@pytest.mark.parametrize(
    "version",
    ["q5_k", *(pytest.param(one, marks=pytest.mark.nightly) for one in ("q8_0", "iq4_nl"))],
)
def test_columns_behind_whole_vectors_have_the_bits_of_the_reference(version):
    """Only beside other gates, since those of integers need whole groups. Of an x with one number,
    dense products have one order."""
    hidden = 112 if version == "q5_k" else 88  # its upper bits are of 16 planes
    spec = Spec(
        20, "bfloat16", hidden=hidden, width=256, experts=2, versions=(f"dense+dense+{version}",)
    )
    case = experts.case(spec, 0)
    case.x[:, 1:] = 0
    for rows in (20, 3):
        active = case.active
        ids = np.where(np.arange(20)[:, None] < rows, case.ids, spec.experts)
        some = dataclasses.replace(case, ids=ids.astype(np.int32))
        found, wanted = (
            experts.run(spec, name, some, active, activation="relu", arithmetic="int8")
            for name in ("cpu", "xla")
        )
        same_bits(found, wanted)
        assert np.abs(np.asarray(wanted)[: rows * spec.top_k, -8:]).max() > 0


def filled(record: np.ndarray, fmt: RecordFormat, largest: dict[str, bool]) -> None:
    """Every code of a matrix its largest integer, or its smallest; one scale for all."""
    for name, (first, rows) in fmt.parts.items():
        matrix, _, field = name.partition("_")
        encoding = fmt.encodings[matrix]
        integers, up = encoding.integers[0], largest[matrix]
        code = int(np.argmax(integers) if up else np.argmin(integers))
        low, high = code & (1 << encoding.bits) - 1, code >> encoding.bits
        each = {"codes": (low, encoding.bits), "highs": (high, encoding.high), "zeros": (0, 8)}
        # A number in every type of a scale.
        value, bits = each.get(field, (0x7F if "e8m0" in encoding.scale else 0x34, 8))
        if field == "zeros" and not up:
            value = (1 << encoding.bits) - 1
        record[..., first : first + rows, :] = sum(value << i for i in range(0, 16, bits))


@NATIVE
@pytest.mark.parametrize("version", EACH)
def test_sums_of_the_largest_integers_fit(version):
    """Of activations that are all ± 127, beside numpy's whole numbers, and of hidden values too."""
    placed, count = lay_out([[(version, 48)]], 512, "bfloat16")
    fmt, x = placed[0][0].format, np.full((5, 512), 3, np.float32)
    x[::2] = -3
    for up in (True, False):
        record = np.zeros((fmt.rows, 512), np.uint16)
        filled(record, fmt, {"up": up})
        weights = CodedWeights(jnp.asarray(record.reshape(-1)[:count]), placed)
        wanted = by_numpy(jnp.asarray(x), jnp.asarray(record), fmt)
        for rows in (3, 5):
            options = LinearOptions(implementation="cpu", arithmetic="int8")
            some = jnp.asarray(x[:rows], jnp.bfloat16)
            found = linear(some, weights, 0, options=options, out_dtype=jnp.float32)
            same_bits(found, wanted[:rows])
    spec = Spec(6, "bfloat16", hidden=256, width=256, experts=4, versions=(version,))
    case = experts.case(spec, 0, resident=())
    ids = np.zeros((6, 2), np.int32)
    ids[:, 1] = 1, 1, 1, 2, 2, 3  # of 6, 3, 2 and 1 tokens
    case = dataclasses.replace(case, ids=ids, x=jnp.full((6, 256), 3, jnp.bfloat16))
    for up, down in ((True, True), (True, False), (False, True), (False, False)):
        filled(case.stores[0], case.formats[0].store, {"gate": True, "up": up, "down": down})
        found, wanted = (
            np.asarray(experts.run(spec, name, case, activation="relu", arithmetic="int8"))
            for name in ("cpu", "xla")
        )
        same_bits(found, wanted)
        assert np.abs(found[0]).min() > 0


@NATIVE
@pytest.mark.slow
@pytest.mark.parametrize(
    "isa",
    ["portable", *(pytest.param(one, marks=pytest.mark.nightly) for one in (*build.X86, "amx"))],
)
def test_every_instruction_set_has_them(isa):
    """In a process of its own: kernels are chosen once."""
    code = f"from {__name__} import check_everything; check_everything()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "MOEJAX_CPU_ISA": isa},
        capture_output=True,
        text=True,
    )
    here = re.findall(f"MOEJAX_CPU_ISA is {isa}; this machine runs (.*)", done.stderr)
    assert done.stdout == f"{isa}\n" or isa not in here[0].split(", "), done.stderr


def check_everything() -> None:
    for version in (name for name, quick in FORMATS.items() if quick):
        check_linear(version, 320)
    for version in ("q8_0", "q4_k", "q6_k", "fp4-32-e8m0"):
        check_experts(version, 256)
    print(instruction_set())


# ---- the definition


def by_numpy(x, record, fmt, lanes=8, order=1, scaled=True, minimum=True):
    """x · upᵀ, every operation in float32 and alone."""
    q, scales = map(np.asarray, jax.jit(quantize)(x))
    read = jax.jit(read_codes, static_argnums=(1, 2))(record, fmt, "up")
    codes, weight_scales, zeros, mins = (None if e is None else np.asarray(e) for e in read)
    integers, factor = fmt.encodings["up"].integers
    whole = integers[codes.astype(int)] - (0 if zeros is None else zeros.astype(int))
    unit = fmt.integer_unit("up")
    sums = np.zeros((len(x), len(whole), lanes), np.float32)
    for u in range(fmt.hidden // unit)[::order]:
        part = slice(u * unit, (u + 1) * unit)
        product = np.float32(q[:, part] @ whole[:, part].T)
        of_x = scales[:, u * unit // 32, None] if scaled else np.float32(1)
        sums[..., u % lanes] += product * (weight_scales[:, u * unit] * np.float32(factor) * of_x)
        if mins is not None and minimum:
            of_x = np.float32(q[:, part].sum(axis=1))[:, None], of_x
            sums[..., u % lanes] += of_x[0] * (mins[:, u * unit] * of_x[1])
    while (half := sums.shape[-1] // 2) > 0:
        sums = sums[..., :half] + sums[..., half:]
    return sums[..., 0]


@pytest.mark.parametrize("version", ["q8_0", "q4_k", "fp4-32-e8m0"])
def test_the_reference_is_the_definition_and_no_other_one(version):
    fmt = RecordFormat(version, 1024, 24, "float32", gated=False, alone=True)
    record = jnp.asarray(records(np.random.default_rng(0), 1, fmt)[0])
    x = drawn(5, 1024).astype(jnp.float32)
    found = np.asarray(jax.jit(lambda x: multiply(x, record, fmt, "up"))(x))
    same_bits(found, by_numpy(x, record, fmt))
    mistakes = [{"lanes": 4}, {"order": -1}, {"scaled": False}]
    for mistake in mistakes + [{"minimum": False}] * (version == "q4_k"):
        assert not np.array_equal(found, by_numpy(x, record, fmt, **mistake)), mistake


def test_numbers_are_rounded_to_even_and_what_is_not_finite_stays_so():
    x = np.zeros((1, 96), np.float32)
    x[0, :6] = 127, 0.5, 1.5, -2.5, 126.5, -127
    x[0, 32], x[0, 64] = np.inf, np.nan
    q, scales = map(np.asarray, jax.jit(quantize)(x))
    assert q[0, :6].tolist() == [127, 0, 2, -2, 126, -127] and not q[0, 6:].any()
    assert scales[0, 0] == np.float32(127) * (np.float32(1) / np.float32(127))
    assert np.isinf(scales[0, 1]) and np.isnan(scales[0, 2])


def test_formats_say_whether_they_have_integers():
    def unit(version, hidden=256, width=96, matrix="up"):
        return RecordFormat(version, hidden, width, "bfloat16").integer_unit(matrix)

    assert unit("q4_0") == unit("int4-128-bf16") == 32 and unit("q6_k") == 16
    assert unit("q4_0", width=40, matrix="down") == 0 != unit("q4_0", width=40)
    for version in ("dense", "lossless12", "fp8-128x128-f32", "int4-8-bf16"):
        assert unit(version) == 0


def test_ops_without_integers_refuse():
    weights = coded("q8_0", 512)
    options = LinearOptions(implementation="pallas", arithmetic="int8")
    with pytest.raises(ValueError, match=r"linear.*pallas has no integer products; use"):
        linear(drawn(2, 512), weights, 0, options=options)
    spec = Spec(2, "bfloat16", versions=("int8",))
    with pytest.raises(ValueError, match=no_integers("expert_ffn", "pallas")[:30]):
        experts.run(spec, "pallas", experts.case(spec, 0), arithmetic="int8")
    with pytest.raises(ValueError, match=r"'linear': xla on a GPU has no integer products; use"):
        resolve_ops("xla", platform="gpu", arithmetic="int8")
