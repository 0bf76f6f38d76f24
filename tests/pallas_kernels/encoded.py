"""Records of any version for the contract tests: random ones, what they mean by numpy's decoder."""

import jax.numpy as jnp
import numpy as np

from host_offload.versions.encoders import NUMPY_DTYPES, encode
from pallas_kernels.records.format import RecordFormat
from pallas_kernels.records.versions import VersionFormats
from tests.host_offload.versions.numpy_decoder import decode
from tests.pallas_kernels.contract import POISON


def formats(versions, hidden: int, width: int, dtype: str, places=None, **more: bool):
    """versions: per number a name, or (in a cell, in the store). more: of RecordFormat."""
    made = []
    for number, version in enumerate(versions):
        names = (version,) * 2 if isinstance(version, str) else version
        cell, store = (RecordFormat(name, hidden, width, dtype, **more) for name in names)
        made.append(VersionFormats(cell, store, places and places[number]))
    return tuple(made)


def records(rng: np.random.Generator, count: int, fmt: RecordFormat) -> np.ndarray:
    """uint16[count, rows, D] of weights of the size D^-½ and I^-½; nothing in what no weight reads.

    Codes of int versions are uniform; dense and lossless12 are of normal weights, a thousandth of
    them far smaller, so that there are escapes.
    """
    width, hidden = fmt.width, fmt.hidden
    each = [(width if matrix == "down" else hidden) ** -0.5 for matrix in fmt.matrices]
    sizes = np.repeat(each, width)[:, None]
    if not fmt.lossy:
        weights = rng.standard_normal((count, fmt.weight_rows, hidden))
        weights[:, : len(sizes)] *= sizes
        weights[rng.random(weights.shape) < 1e-3] *= 2.0**-20
        return encode(weights.astype(NUMPY_DTYPES[fmt.dtype]), fmt)
    made = np.full((count, fmt.rows, hidden), POISON, np.uint16)
    for name, (first, rows) in fmt.parts.items():
        matrix, _, kind = name.partition("_")
        if not kind:  # dense
            shape, size = (count, rows, hidden), (width if matrix == "down" else hidden) ** -0.5
            values = (size * rng.standard_normal(shape)).astype(NUMPY_DTYPES[fmt.dtype])
            made[:, first : first + rows] = values.view(np.uint16)
            continue
        if kind == "bias":
            shape = count, fmt.bias_rows(matrix), hidden
            values = rng.standard_normal(shape).astype(NUMPY_DTYPES[fmt.dtype])
            made[:, first : first + rows] = values.view(np.uint16).reshape(count, rows, hidden)
            continue
        if kind in ("codes", "highs"):
            made[:, first : first + rows] = rng.integers(0, 1 << 16, (count, rows, hidden))
            continue
        size = (width if matrix == "down" else hidden) ** -0.5
        values = numbers(rng, count, fmt, matrix, kind, size).reshape(count, -1).view(np.uint8)
        flat = made[:, first : first + rows].reshape(count, -1).view(np.uint8)
        flat[:, : values.shape[1]] = values
        made[:, first : first + rows] = flat.view(np.uint16).reshape(count, rows, hidden)
    if fmt.version.startswith("fp8"):  # two codes are NaN
        made[(made & 0x7F00) == 0x7F00] ^= 0x0100
        made[(made & 0x007F) == 0x007F] ^= 0x0001
    return made


def numbers(rng, count: int, fmt: RecordFormat, matrix: str, field: str, size: float):
    """A field's numbers for weights of about this size. Scales below supers are whole numbers."""
    encoding = fmt.encodings[matrix]
    name = "float32" if field == "global" else encoding.dtype_of(field)
    shape = (1,) if field == "global" else fmt.field_shape(matrix, field)
    drawn = rng.uniform(0.25, 1.75, (count, *shape))
    if field == "zeros":
        return rng.integers(0, 1 << encoding.bits, drawn.shape, np.uint8)
    if name in ("uint8", "int8"):
        return (drawn * 30).astype(name)
    if field == "global":
        return np.float32(drawn * (0.01 if encoding.whole == "times" else 100))
    if name == "float8_e8m0fnu":
        return np.uint8(127 + np.rint(np.log2(size / encoding.largest * drawn)))
    if name == "float8_e4m3fn":
        return np.uint8(0x30 + 8 * drawn)
    whole = 30 if field.endswith("supers") else 1
    return (size / (encoding.largest or encoding.zero) / whole * drawn).astype(jnp.dtype(name))


def recode(stored: np.ndarray, version: VersionFormats) -> np.ndarray:
    """The records as they lie in cells, of those in the store."""
    if not version.in_transit:
        return stored
    return encode(decode(stored, version.store), version.cell)
