"""The whole grid of streaming against its rivals, on the timeline: no bytes move.

python -m scripts.transfers stream_grid [--batch 8,16,32,64,128,256] [--context 1024,2048,4096]
    [--ratios 0.25,0.5,1,2,4] [--residents 0,0.25,0.5] [--paper] [--json]

Four layers of Qwen3-30B's shape (eight where whole layers are in a tier) on a machine of stated
rates, whose link takes ratio × compute for all experts of all layers. A layer's compute is the
longer of its bytes over the memory's rate and its multiplications over the peak; routing is even,
so a step uses E·(1 − (1 − k/E)^B) experts, and of those a paging engine with C of E cells misses
the share 1 − C/E: demands into the cells of experts that the step does not use, and the others
through two buffers, as no expert that a step uses makes room. Arms are those of `stream`, in the
same bytes of experts; what does not fit is left out. Printed: tokens a second by arm, bytes a step
over the link of streaming and of paging, and how busy streaming keeps link and compute; then where
streaming and paging cross, with the bytes that say why.

--paper: the cells that FluxMoE measured, in place of the grid, from the rates of its machine as far
as they are public, beside its figures; and what the timeline says of one H200, from rates that were
measured on one (memory 4.3 TB/s, link 52 GB/s, decoding 2.3 TB/s), where each arm keeps the share
of the experts with which it makes most tokens a second.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence

from moejax.errors import UserError
from scripts.parts.bench_engine import parse_numbers
from scripts.parts.commands import new_parser, refuse
from scripts.transfers.streaming.cells import (
    HERE,
    KAPPA,
    QWEN3_30B,
    Cell,
    Machine,
    Shape,
    arm_seconds,
    compute_seconds,
)


def grid(args: argparse.Namespace) -> Iterator[dict]:
    shape = QWEN3_30B
    for batch, context, ratio, share in itertools.product(
        args.batch, args.context, args.ratios, args.residents
    ):
        compute = compute_seconds(HERE, shape, batch, context)
        rate = shape.experts * shape.record_bytes / (ratio * compute)
        cell = Cell(HERE, shape, batch, context, rate, share * shape.experts)
        seconds = arm_seconds(cell)
        rows = {name: batch / (s * shape.layers) for name, s in seconds.items()}
        streamed = (shape.experts - int(cell.cells)) * shape.record_bytes
        yield {
            "batch": batch,
            "context": context,
            "ratio": ratio,
            "residents": share,
            "tokens_per_s": rows,
            "stream_mb": shape.layers * streamed / 1e6,
            "paging_mb": shape.layers * cell.missed() * shape.record_bytes / 1e6,
            "stream_link_busy": min(streamed / rate / seconds["stream"], 1.0),
            "stream_compute_busy": seconds["resident"] / seconds["stream"],
        }


@dataclasses.dataclass(frozen=True)
class PaperCell:
    """A measurement of FluxMoE's (shared/papers.md 3.5), and what its rates come to here."""

    name: str
    ours: float
    paper: float | None
    """None: it says more than 1, without a figure."""
    missing: str
    """What the comparison lacks, and the smallest setup that has it."""


L40 = Machine(4 * 0.864e12, 4 * 181e12, 4 * 300e9)
"""Four of them; decoding at "hundreds of GB/s" each."""

H200 = Machine(4.3e12, 989e12 / 2, 2.3e12)
H200_LINK, H200_MEMORY = 52e9, 141e9 * 0.9

QWEN3_NEXT = Shape(48, 512, 10, 3 * 2048 * 512 * 2, 24576, 60 << 20)
MIXTRAL = Shape(32, 8, 2, 3 * 4096 * 14336 * 2, 131072, 84 << 20)

PAPER_LINK = 4 * 25e9
"""PCIe 4.0 × 16 to each of four L40."""


def rows_that_fit(shape: Shape, memory: float, experts: float, batch: int, context: int) -> int:
    """Sequences whose KV the memory holds beside so many bytes of experts."""
    left = memory - experts - shape.layers * shape.other_bytes
    return max(min(batch, int(left / (context * shape.kv_bytes))), 0)


def paper() -> list[PaperCell]:
    """Exp#1 to Exp#3 from stated rates: KV that does not fit waits, so fewer rows run at once."""
    shape, memory = QWEN3_NEXT, 4 * 48e9 * 0.9
    every = shape.layers * shape.experts * shape.record_bytes
    window = 2 * every / shape.layers
    lacks = "the decoder's rate and vLLM's own step time; one L40 with vLLM 0.10.2"

    def tokens(batch: int, context: int, kept: float, arm: str, machine: Machine = L40) -> float:
        rows = rows_that_fit(shape, memory, kept, batch, context)
        if not rows:
            return 0.0
        cell = Cell(machine, shape, rows, context, PAPER_LINK, 0)
        if arm == "resident":
            seconds = compute_seconds(machine, shape, rows, context)
        elif arm == "flux":
            seconds = cell.play([cell.layer(0, shape.experts)] * 4)
        else:
            kept_layers = [cell.layer(shape.experts, 0)] * 7
            seconds = cell.play([*kept_layers, cell.layer(0, 0)])
        return rows / (seconds * shape.layers)

    def flux(batch: int, context: int) -> float:
        return tokens(batch, context, 0.8 * every + window, "flux")

    def vllm(batch: int, context: int) -> float:
        return tokens(batch, context, every, "resident")

    def vllm_o(batch: int, context: int) -> float:
        return tokens(batch, context, 0.875 * every + window, "vllm-o")

    cells = [
        PaperCell(
            f"Exp#1 FluxMoE / {name} ({batch}, 4096)", _over(flux, other, batch, 4096), said, lacks
        )
        for name, other, batch, said in (
            ("vLLM", vllm, 256, 3.0),
            ("vLLM-O", vllm_o, 256, 3.7),
            ("vLLM", vllm, 32, 0.639),
        )
    ]
    shape, memory = MIXTRAL, 2 * 48e9 * 0.9
    two = Machine(2 * 0.864e12, 2 * 181e12, 2 * 300e9)
    for context, said in ((1024, 1.285), (4096, 1.229)):
        cell = Cell(two, shape, 256, context, 2 * 25e9, 0)
        even = cell.play([cell.layer(0, 7)] * 4)
        whole = cell.play([*[cell.layer(0, 8)] * 7, cell.layer(0, 0)])
        cells.append(
            PaperCell(
                f"Exp#2 FluxMoE / FluxMoE-H (256, {context})",
                whole / even,
                said,
                "the decoder's rate, and which rows run where KV is full; two L40",
            )
        )
    return [*cells, *_moves(lacks)]


def _moves(lacks: str) -> Iterator[PaperCell]:
    """Exp#3: seven moves of 48 experts on each of four GPUs, in a quarter of the layers."""
    shape, layers, gone = QWEN3_NEXT, 12, 4 * 7
    cell = Cell(L40, shape, 256, 4096, PAPER_LINK, 0)

    def seconds(host: Sequence[int]) -> float:
        """host: experts of each layer that are not packed any more."""
        return cell.play([cell.layer(0, shape.experts - n) for n in host])

    even = seconds([gone] * layers)
    for name, host, said in (
        ("none", [0] * layers, 1.0),
        ("as many of one layer", [gone * layers, *[0] * (layers - 1)], None),
    ):
        yield PaperCell(
            f"Exp#3 staggered moves / {name} (256, 4096)", seconds(host) / even, said, lacks
        )


@dataclasses.dataclass(frozen=True)
class Best:
    """What an arm does at best on one H200."""

    tokens_per_s: float
    rows: int
    """Sequences at once."""
    kept: float
    """Share of the experts on the device beside a window, packed or in whole layers."""


def on_an_h200(shape: Shape, batch: int, context: int) -> dict[str, Best]:
    """Arm → its best; of an arm that holds no sequence nothing."""
    every = shape.layers * shape.experts * shape.record_bytes
    window = 2 * every / shape.layers
    found: dict[str, Best] = {}

    def consider(arm: str, held: float, kept: float) -> None:
        rows = rows_that_fit(shape, H200_MEMORY, held, batch, context)
        if not rows:
            return
        cell = Cell(H200, shape, rows, context, H200_LINK, 0)
        if arm == "resident":
            seconds = compute_seconds(H200, shape, rows, context)
        elif arm == "FluxMoE":
            seconds = cell.play([cell.layer(0, round(kept * shape.experts))] * 4)
        else:
            whole = round(8 * kept)
            inside = [cell.layer(shape.experts, 0)] * whole
            seconds = cell.play([*inside, *[cell.layer(0, 0)] * (8 - whole)])
        best = Best(rows / (seconds * shape.layers), rows, kept)
        if arm not in found or best.tokens_per_s > found[arm].tokens_per_s:
            found[arm] = best

    consider("resident", every, 1.0)
    for eighths in range(4, 9):  # fewer kept is slower and leaves more rows than there are
        consider("FluxMoE", KAPPA * eighths / 8 * every + window, eighths / 8)
        if eighths < 8:
            consider("vLLM-O", eighths / 8 * every + window, eighths / 8)
    return found


def _h200(as_json: bool) -> Iterator[str]:
    models = {"Qwen3-30B-A3B": QWEN3_30B, "Qwen3-Next-80B-A3B": QWEN3_NEXT}
    for (name, shape), batch in itertools.product(models.items(), (32, 256)):
        best = on_an_h200(shape, batch, 4096)
        arms = {arm: dataclasses.asdict(one) for arm, one in best.items()}
        if as_json:
            yield json.dumps({"model": name, "batch": batch, "context": 4096, "arms": arms})
            continue
        said = "; ".join(
            f"{arm} {one.tokens_per_s:.0f} ({one.rows} at once, {one.kept:.1%} kept)"
            for arm, one in best.items()
        )
        yield f"one H200, {name} ({batch}, 4096), tokens/s: {said}"


def _over(one, other, batch: int, context: int) -> float:
    below = other(batch, context)
    return one(batch, context) / below if below else float("inf")


def crossovers(found: Sequence[Mapping]) -> list[str]:
    """For each context, ratio and share, from which batch on streaming is ahead of paging."""
    lines = []
    groups: dict[tuple, list[Mapping]] = {}
    for one in found:
        groups.setdefault((one["context"], one["ratio"], one["residents"]), []).append(one)
    for (context, ratio, share), cells in groups.items():
        ahead = [c for c in cells if c["tokens_per_s"]["stream"] > c["tokens_per_s"]["paging"]]
        at = min(ahead, key=lambda c: c["batch"], default=None)
        if at is None:
            last = cells[-1]
            why = f"paging moves {last['paging_mb']:.0f} MB of {last['stream_mb']:.0f} at most"
            lines.append(f"context {context}, ratio {ratio:g}, residents {share:g}: never; {why}")
            continue
        why = f"there paging moves {at['paging_mb']:.0f} MB a step on demand, streaming "
        why += f"{at['stream_mb']:.0f} MB beside compute"
        where = f"context {context}, ratio {ratio:g}, residents {share:g}"
        lines.append(f"{where}: from batch {at['batch']}; {why}")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = new_parser(__name__, __doc__)
    add = parser.add_argument
    add("--batch", default="8,16,32,64,128,256", help="(default: %(default)s)")
    add("--context", default="1024,2048,4096", help="(default: %(default)s)")
    add("--ratios", default="0.25,0.5,1,2,4", help="of loading to computing")
    add("--residents", default="0,0.25,0.5", help="shares of each layer (default: %(default)s)")
    add("--paper", action="store_true", help="the paper's cells in place of the grid")
    add("--json", action="store_true", help="one JSON object per line")
    args = parser.parse_args(arguments)
    try:
        args.batch = parse_numbers(args.batch, "--batch", least=1)
        args.context = parse_numbers(args.context, "--context", least=1)
        args.ratios, args.residents = _shares(args.ratios), _shares(args.residents)
        if min(args.ratios) <= 0 or not 0 <= min(args.residents) <= max(args.residents) < 1:
            raise UserError("--ratios are positive, --residents shares below 1")
        if args.paper:
            for one in paper():
                there = "more than 1" if one.paper is None else f"{one.paper:g}"
                said = f"{one.name:<46} here {one.ours:6.2f} ×, paper {there}"
                print(json.dumps(dataclasses.asdict(one)) if args.json else said)
            for text in _h200(args.json):
                print(text)
            return 0
        found = []
        for one in grid(args):
            found.append(one)
            print(json.dumps(one) if args.json else _line(one), flush=True)
        if not args.json:
            print(*crossovers(found), sep="\n")
    except (UserError, ValueError) as error:
        return refuse(__name__, error)
    return 0


def _shares(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"{text!r} is not numbers with commas") from None


def _line(one: Mapping) -> str:
    rows = ", ".join(f"{name} {value:.1f}" for name, value in one["tokens_per_s"].items())
    return (
        f"batch {one['batch']:>3}, context {one['context']:>4}, ratio {one['ratio']:<4g}, "
        f"residents {one['residents']:.0%}: {rows} tokens/s; {one['stream_mb']:.0f} and "
        f"{one['paging_mb']:.0f} MB; link {one['stream_link_busy']:.2f}, compute "
        f"{one['stream_compute_busy']:.2f} busy"
    )
