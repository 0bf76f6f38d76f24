"""The blocks of GGUF files, made again of the records that hold their codes and scales."""

from __future__ import annotations

import jax
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from host_offload.versions.quantized import numbers_dtype
from moejax.models.gguf_header import read_gguf


def halves(codes, width):
    low, high = np.moveaxis(codes.reshape(*codes.shape[:2], -1, 2, width) & 15, 3, 0)
    return (low | high << 4).reshape(*codes.shape[:2], -1)


def fifth_bits(codes):
    return np.packbits(codes >> 4, -1, "little")


def six_bits(scales, mins):
    rows = [(each[..., :4] | each[..., 4:] >> 4 << 6) for each in (scales, mins)]
    return np.concatenate([*rows, scales[..., 4:] & 15 | mins[..., 4:] << 4], -1)


def upper_bits(codes, parts, bits):
    grouped = codes.reshape(*codes.shape[:2], -1, parts, 32) >> 4
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return np.bitwise_or.reduce(grouped << shifts, -2).reshape(*codes.shape[:2], -1)


def scale_and_halves(q, scales):
    return scales, halves(q, 16)


BLOCKS = {
    "Q8_0": lambda q, scales: (scales, q ^ 0x80),
    **dict.fromkeys(("Q4_0", "IQ4_NL", "MXFP4"), scale_and_halves),
    "Q4_1": lambda q, scales, mins: (scales, mins, halves(q, 16)),
    "Q5_0": lambda q, scales: (scales, fifth_bits(q), halves(q, 16)),
    "Q5_1": lambda q, scales, mins: (scales, mins, fifth_bits(q), halves(q, 16)),
    "Q4_K": lambda q, scales, supers, mins, min_supers: (
        *(supers, min_supers, six_bits(scales, mins), halves(q, 32)),
    ),
    "Q5_K": lambda q, scales, supers, mins, min_supers: (
        *(supers, min_supers, six_bits(scales, mins), upper_bits(q, 8, 1), halves(q, 32)),
    ),
    "Q6_K": lambda q, scales, supers: (halves(q, 64), upper_bits(q, 4, 2), scales, supers),
}
"""Type → the parts of blocks as ggml-common.h has them, of codes and the other fields."""


def file_bytes(record, fmt, matrix, type_):
    """The blocks of a matrix in its file, from the fields of its record."""
    encoding, down = fmt.encodings[matrix], matrix == "down"
    planes = {"codes": encoding.bits, "highs": encoding.high}
    codes, shift, found = np.zeros((fmt.width, fmt.hidden), np.uint8), 0, {}
    block = GGML_QUANT_SIZES[GGMLQuantizationType[type_]][0]
    for field in encoding.fields:
        first, count = fmt.parts[f"{matrix}_{field}"]
        part = record[first : first + count].reshape(-1)
        if bits := planes.get(field):
            part = part[: fmt.width * fmt.hidden * bits // 16]
            part = part.reshape((-1, fmt.hidden) if down else (fmt.width, -1))
            every = [part >> j & (1 << bits) - 1 for j in range(0, 16, bits)]
            codes |= np.concatenate(every, 0 if down else 1).astype(np.uint8) << shift
            shift += bits
            continue
        shape = fmt.field_shape(matrix, field)
        values = part.view(numbers_dtype(encoding.dtype_of(field)))[: shape[0] * shape[1]].reshape(
            shape
        )
        values = np.ascontiguousarray(values.T if down else values)
        found[field] = values.reshape(len(values), codes.shape[not down] // block, -1)
    codes = np.ascontiguousarray(codes.T if down else codes).reshape(
        len(codes[0] if down else codes), -1, block
    )
    parts = BLOCKS[type_](codes, **found)
    return np.concatenate([np.ascontiguousarray(each).view(np.uint8) for each in parts], -1)


def assert_bytes_come_back(path, store):
    """Every tensor of experts in a model's files equals the blocks of its records."""
    found = 0
    for header in read_gguf(path):
        for name, tensor in header.tensors.items():
            if "_exps.weight" not in name:
                continue
            layer, matrix = int(name.split(".")[1]), name.split("_")[1]
            ((version, place),) = (
                (version, layer if places is None else places[layer])
                for version in store.arrays
                if (places := store.places(version)) is None or places[layer] >= 0
            )
            records, fmt = np.asarray(store.arrays[version][place]), store.layouts[version]
            mine = [file_bytes(each, fmt, matrix, tensor.type).tobytes() for each in records]
            with header.path.open("rb") as file:
                file.seek(tensor.begin)
                assert b"".join(mine) == file.read(tensor.nbytes), name
            found += 1
    assert found and found % 3 == 0


def leaves(loaded):
    """Name → array of a model's params."""
    found = jax.tree_util.tree_leaves_with_path(loaded.params)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in found}
