"""A model of the time of a decode step on an H200: what it should take by the launches, bytes,
programs and instructions of the compiled step. Everything it says is **predicted**.

    JAX_PLATFORMS=cpu python -m tests.aot.step_time --out docs/results

What a kernel does is in Work, what an H200 does in the constants, each measured by a probe
(../shared/probes, figures of ../shared/DESIGN.md section 6) or said to be assumed.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import jax

from host_offload.memory.layout import BLOCK_SIZES
from moejax.models.config import parse_config
from moejax.models.model_config import ModelConfig
from moejax.step.parts import DECODE_TILE
from moejax.step.programs import ProgramKey
from pallas_kernels.combine import pallas_triton as combine_kernel
from pallas_kernels.expert_ffn import pallas_triton as expert_kernels
from pallas_kernels.fill_ffn.pallas_triton import COPIES, LATE
from pallas_kernels.linear import pallas_triton as linear_kernels
from pallas_kernels.route import pallas_triton as route_kernel
from tests.aot.cards import MODELS, compile_step
from tests.aot.ptxas import Kernel
from tests.moejax.models.test_published_configs import PUBLISHED

MULTIPROCESSORS = 132
SHARED_BYTES = 227 * 1024
ISSUED_A_SECOND = 4 * 2.0e9
"""Instructions of warps that one multiprocessor issues: four schedulers at 2.0 GHz."""
MEMORY = 4.05e12
"""Bytes a second: gate_up over 128 experts reads 805 MB in 202 µs (probe6), of which START."""
ONE_MULTIPROCESSOR = 42e9
"""Bytes a second that one reads at least: 96 programs of gate_up read 50 MB in 15.6 µs (probe9) of
which START, and the memory may have been their limit: kernels of fewer programs may be faster."""
LINK = 48e9
"""Bytes a second from pinned host memory by a kernel within a step (probe4)."""
LAUNCH = 1.8e-6
"""A kernel that does next to nothing: nine small ones of XLA took 16 µs (probe9)."""
GAP = 0.35e-6
"""Between two kernels of a graph: 0.2 to 0.5 µs (probe8)."""
START = 3.0e-6
"""Of a kernel that streams weights, until the memory is busy: down's 9.1 µs for 25 MB (probe9)."""
DEAD = 1.0e-6
"""Of a program without work: launch and one read of L2. **Assumed**, no probe has it."""
SQUARES = 0.4e-6
"""Of a program that first adds up squares of its rows' tiles: a read of L2, which others have just
written, and some nine sums across lanes, one after the other. **Assumed**."""
LAST = 1.0e-6
"""Of what a program does behind all others: round trips of two atomics, and reads from L2.
**Assumed**."""
STARTS = {
    "kv_write": 2.1e-6,
    "decode_attention_split": 4.1e-6,
    # The split's, and an **assumed** 0.5 µs for norm and rotation before it.
    "decode_attention_write": 4.6e-6,
    "decode_attention_write_merge": 4.6e-6,  # the last program's wait is LAST
    "route": 2.7e-6,
    # Not measured; as long a chain of loads and reductions as route's, and the mask of active
    # experts written and read again.
    "plan": 3.3e-6,
    "route_plan": 4.2e-6,  # both of the above, less a LAUNCH
    "route_record": 2.7e-6,  # as route, whose chain it has
    "route_list": 3.2e-6,  # not measured: route's, and a sum along the experts
    "route_list_last": 3.2e-6,  # likewise; the last program's wait is LAST
    "norm_linear": START + SQUARES,
    "norm_linear_parts": LAUNCH + SQUARES,
    # As above; the last program's wait is LAST, and the rest of its chain route_list's.
    "norm_route_list": LAUNCH + SQUARES,
}
"""Of kernels that wait for a chain of loads: their times in probe9 at one token, less what their
bytes take."""

HITS, FILLED = "expert_gate_up_hits", "expert_gate_up_filled"
"""The products of experts that copy missing ones beside them: gate and up of those, then down."""
COMBINED = "expert_down_combine"
"""The last product of experts, the programs of which combine too."""
LISTING = "route_list_last"
"""Routing by several programs, the last of which lists the experts."""
SCORING = "norm_route_list"
"""The router's product, the last program of which routes and lists."""
EXPERTS = (HITS, FILLED, "expert_gate_up", "expert_down", COMBINED)
LAST_KERNELS = ("combine", COMBINED)
"""That a layer ends with, one of them."""
STREAMING = ("linear", "norm_linear", *EXPERTS)
"""Kernels that START is of. Not linear_parts, alone or with a norm, whose programs load one or two
tiles and wait once for them, as rms_norm's do: a LAUNCH (not measured)."""
SPLIT = 256
"""Tokens of KV that a program of decode attention reads."""
MERGING = "decode_attention_write_merge"
SPLITS = ("decode_attention_split", "decode_attention_write", MERGING)
"""Decode attention's kernels over splits: alone, with kv_write in it, and where the last program of
a row and KV head merges them, too."""

_LINE = re.compile(r"^(?P<indent> *)(?P<place>\d+): (?P<kind>k\w+)(?P<rest>.*)$")
_BEFORE = re.compile(r"\[(?:prev=(\d+)|source)")
_KERNEL = re.compile(r"(\S+) grid: \[([\d, ]+)\] threads: \[([\d, ]+)\]\s+shared_memory: (\d+)")


@dataclasses.dataclass(frozen=True)
class Launch:
    """One entry of XLA's list of launches."""

    name: str
    """Without XLA's number behind it; a copy's is `copy`."""
    grid: tuple[int, ...]
    threads: int
    shared_bytes: int
    in_layer: bool
    """Once a layer: in the loop over layers or its condition; otherwise once a step."""
    code: str
    """Name of the kernel with XLA's number."""
    layers: int = 1
    """For how many layers it is launched once: a loop's condition for all of a turn."""
    times_more: int = 0
    """A loop's condition before the first turn."""
    order: tuple[int, int | None] | None = None
    """Of XLA's graph: its place, and the last one that it waits for, None if there is none. None:
    it waits for all before it."""
    last: bool = False
    """Whether nobody in the graph waits for it."""

    @property
    def programs(self) -> int:
        return math.prod(self.grid)

    @property
    def resident(self) -> int:
        """Programs that the device holds at a time."""
        by_shared = SHARED_BYTES // max(self.shared_bytes + 1024, 1)
        return MULTIPROCESSORS * max(1, min(by_shared, 2048 // self.threads, 32))


def launches(thunks: str) -> list[Launch]:
    """XLA's list, in order, of one layer where a turn of the loop has several. thunks: of
    Compiled."""
    found, condition = [], False
    conditions: set[int] = set()
    for text in thunks.splitlines():
        line = _LINE.match(text)
        if line is None:
            condition = text.strip() == "condition:" or (condition and text.strip() != "body:")
            continue
        if condition:
            conditions.add(len(found))
        inside = len(line["indent"]) > 0
        graph: dict = {}
        if not inside and (before := _BEFORE.search(line["rest"])):
            waits = None if before[1] is None else int(before[1])
            graph = {"order": (int(line["place"]), waits), "last": " sink " in line["rest"]}
        if line["kind"] == "kCopy":
            found.append(Launch("copy", (1,), 32, 0, inside, "copy", **graph))
        elif kernel := _KERNEL.search(line["rest"]):
            grid, threads = (tuple(map(int, kernel[i].split(","))) for i in (2, 3))
            name = re.sub(r"__?\d+$", "", kernel[1])
            shared = int(kernel[4])
            threads = math.prod(threads)
            found.append(Launch(name, grid, threads, shared, inside, kernel[1], **graph))
    return _one_layer(found, conditions)


def _one_layer(found: list[Launch], conditions: set[int]) -> list[Launch]:
    """The launches without those of the other layers of a turn, each of which ends with one of
    LAST_KERNELS. conditions: places of those of the loop's condition."""
    body = [i for i, launch in enumerate(found) if launch.in_layer and i not in conditions]
    layers = max(1, sum(found[i].name in LAST_KERNELS for i in body))
    each, rest = divmod(len(body), layers)
    names = [found[i].name for i in body]
    if rest or names != names[:each] * layers:
        raise ValueError(f"the layers of a turn differ: {names}")
    kept = [launch for i, launch in enumerate(found) if i not in body[each:]]
    at = {id(found[i]) for i in conditions}
    condition = {"layers": layers, "times_more": 1}
    return [dataclasses.replace(w, **condition) if id(w) in at else w for w in kept]


@dataclasses.dataclass(frozen=True)
class Load:
    """What a step has to do, in every layer the same."""

    tokens: int
    context: int
    """Tokens of KV of each sequence."""
    cells: int | None = None
    """Of each layer; None: all experts are resident. Routing is uniform, so that an expert is
    missing with probability 1 − cells/E: real routers miss less."""

    def active(self, config: ModelConfig) -> float:
        """Expected number of experts of a layer that some token is routed to."""
        experts = config.num_experts
        return experts * (1 - (1 - config.num_experts_per_tok / experts) ** self.tokens)

    def missing(self, config: ModelConfig) -> float:
        if self.cells is None:
            return 0.0
        return self.active(config) * max(0.0, 1 - self.cells / config.num_experts)

    def filled(self, config: ModelConfig) -> float:
        """Of those missing the ones that get a cell; hits keep theirs."""
        missing = self.missing(config)
        hits = self.active(config) - missing
        return 0.0 if self.cells is None else min(missing, max(0.0, self.cells - hits))


@dataclasses.dataclass(frozen=True)
class Work:
    """What one launch does."""

    launch: Launch
    live: float
    """Programs that have work."""
    nbytes: float
    """Read and written in device memory."""
    instructions: float = 0
    """PTX instructions of a warp of a live program; 0: not counted."""
    link_bytes: float = 0
    live_first: bool = True
    """Whether all live programs start before any other."""
    waiting: int = 0
    """Programs that copy, before the live ones, and have nothing to copy."""
    behind: float = 0
    """Seconds that the last program takes when all others are through."""

    @property
    def waves(self) -> float:
        """Live programs for each that a device has room for."""
        return self.live / self.launch.resident

    @property
    def seconds(self) -> float:
        """Of the kernel alone. Dead programs run beside the live ones' tail where those are first,
        and before the last of them where they are not."""
        name, busy = self.launch.name, min(max(self.live, 1), MULTIPROCESSORS)
        memory = self.nbytes / min(MEMORY, busy * ONE_MULTIPROCESSOR)
        warps = self.live * self.launch.threads / 32
        issue = warps * self.instructions / (busy * ISSUED_A_SECOND)
        streams = name in STREAMING and self.live > 0
        start = STARTS.get(name, START if streams else LAUNCH)
        start += self.waiting / self.launch.resident * DEAD
        dead = max(0, self.launch.programs - self.live - self.waiting)
        dead = dead / self.launch.resident * DEAD
        # What crosses the link and what is computed beside it do not wait for each other.
        run = max(start + max(memory, issue), LAUNCH + self.link_bytes / LINK)
        run = max(run, start + dead) if self.live_first else run + dead
        return run + self.behind


def step_work(
    config: ModelConfig, load: Load, step: Sequence[Launch], kernels: Mapping[str, Kernel]
) -> list[Work]:
    """Each launch's work; kernels: by Launch.code, those that are missing have no instructions."""
    head = config.head_dim
    qkv = (config.num_attention_heads + 2 * config.num_key_value_heads) * head
    products = iter(
        [
            (qkv, config.hidden_size),
            (config.hidden_size, config.num_attention_heads * head),
            (config.num_experts, config.hidden_size),
            (config.vocab_size, config.hidden_size),
        ]
    )
    work = [_work(config, load, launch, kernels.get(launch.code), products) for launch in step]
    if any(launch.name == "route_record" for launch in step):  # experts are not listed by it
        work = [
            dataclasses.replace(w, live_first=False) if w.launch.name in EXPERTS else w
            for w in work
        ]
    return work


def _work(
    config: ModelConfig,
    load: Load,
    launch: Launch,
    kernel: Kernel | None,
    products: Iterator[tuple[int, int]],
) -> Work:
    """products: outputs and inputs of the step's products, in order."""
    tokens, hidden = load.tokens, config.hidden_size
    width = config.moe_intermediate_size
    pairs, splits = tokens * config.num_experts_per_tok, math.ceil(load.context / SPLIT)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    filled, record = load.filled(config), 6 * hidden * width
    name, live, link = launch.name, float(launch.programs), 0.0
    nbytes, turns, behind = 0.0, 1.0, 0.0
    if name in ("linear", "norm_linear"):
        outputs, inputs = next(products)
        nbytes = 2 * outputs * inputs + 2 * tokens * (inputs + outputs)
        turns = -(-inputs // linear_kernels.configuration(16, outputs, "bfloat16").depth)
    elif name in ("linear_parts", "norm_linear_parts", SCORING):
        outputs, inputs = next(products)
        rows = 1 if name == "linear_parts" else 2  # x, and what is normalised
        nbytes = 2 * outputs * inputs + tokens * (2 * rows * inputs + _logit_bytes(config))
        turns = linear_kernels.parts_of(outputs, inputs, "bfloat16").turns
        if name == SCORING:
            behind = LAST + STARTS["route_list"] - LAUNCH
            behind += tokens * _logit_bytes(config) / ONE_MULTIPROCESSOR
    elif name in ("route", "route_record", LISTING):  # padding's logits too
        nbytes = launch.programs * route_kernel.configuration().rows * _logit_bytes(config)
        behind = LAST if name == LISTING else 0.0
    elif name in ("route_plan", "route_list"):
        nbytes = tokens * _logit_bytes(config)
    elif name in EXPERTS:
        work = _expert_work(config, load, launch)
        counted = 0.0 if kernel is None else _instructions(kernel, work.instructions, False)
        return dataclasses.replace(work, instructions=counted)
    elif name == "fill" and filled:
        live, link = min(launch.programs, filled * record / 32768), filled * record
        nbytes = filled * record
    elif name == "fill":
        live = 0.0
    elif name == "kv_write":
        live = tokens * launch.grid[1]
        nbytes = 4 * tokens * (heads + 2 * kv_heads) * config.head_dim
    elif name in SPLITS:
        live = tokens * kv_heads * splits
        nbytes = 4 * tokens * load.context * kv_heads * config.head_dim
        if name != SPLITS[0]:  # kv_write's too; each split reads its queries
            columns = splits * heads + 4 * kv_heads
            nbytes += 2 * tokens * columns * config.head_dim
        if name == MERGING:
            sums = 4 * heads // kv_heads * splits * config.head_dim  # of one program
            nbytes += tokens * kv_heads * sums
            behind = LAST + sums / ONE_MULTIPROCESSOR
    elif name == "decode_attention_merge":
        live, nbytes = tokens * heads, 4 * tokens * heads * splits * config.head_dim
    elif name == "combine":
        nbytes = 4 * pairs * hidden
    elif name.startswith("input_") and launch.programs > MULTIPROCESSORS and not launch.in_layer:
        nbytes = 4 * tokens * config.vocab_size  # the greedy choice reads the logits
    counted = 0.0
    if kernel is not None:
        counted = _instructions(kernel, turns, searches=load.missing(config) > 0)
    nbytes += 4 * tokens * _square_tiles(config, launch)
    return Work(launch, live, nbytes, counted, link, behind=behind)


def _square_tiles(config: ModelConfig, launch: Launch) -> int:
    """Of a row, those whose squares the kernel writes or reads, if it is one of a layer of so few
    rows that there are."""
    projection = linear_kernels.configuration(16, config.hidden_size, "bfloat16").columns
    columns = {
        "combine": combine_kernel.SQUARES_TILE,
        COMBINED: combine_kernel.SQUARES_TILE,
        "norm_linear": combine_kernel.SQUARES_TILE,
        "linear": projection,
        "norm_linear_parts": projection,
        SCORING: projection,
    }.get(launch.name)
    return -(-config.hidden_size // columns) if columns and launch.in_layer else 0


def _expert_work(config: ModelConfig, load: Load, launch: Launch) -> Work:
    """Of one of EXPERTS; `instructions` are the turns of its loop. What is read through crosses the
    link where it is computed."""
    name, hidden, width = launch.name, config.hidden_size, config.moe_intermediate_size
    active, missing, filled = load.active(config), load.missing(config), load.filled(config)
    tiles = expert_kernels.configuration(hidden, width, "bfloat16", 16)
    down = name in ("expert_down", COMBINED)
    tile, depth = (tiles.down, width) if down else (tiles.gate_up, hidden)
    columns = -(-(hidden if down else width) // tile.columns)
    computed = {HITS: active - filled, FILLED: filled}.get(name, active)
    copied = {HITS: 2 / 3 * filled, FILLED: 1 / 3 * filled}.get(name, 0.0)
    matrices, record = (1 if down else 2), 6 * hidden * width
    through = 0.0 if name == FILLED else missing - filled
    pairs = load.tokens * config.num_experts_per_tok * computed / active
    nbytes = 2 * matrices * (computed - through) * hidden * width + copied * record
    nbytes += pairs * (2 * width + (4 if down else 2) * hidden)
    behind = 0.0
    if name == COMBINED:  # y again, and the last program its tokens'
        nbytes += 4 * (pairs + load.tokens) * hidden
        nbytes += 4 * load.tokens * _square_tiles(config, launch)
        rows = pairs / active * config.num_experts_per_tok
        behind = LAST + 4 * rows * tiles.down.columns / ONE_MULTIPROCESSOR
    live, turns = computed * columns, float(-(-depth // tile.depth))
    if name == FILLED and live > LATE:  # in turns
        turns, live = turns * live / LATE, float(LATE)
    return Work(
        launch,
        live,
        nbytes,
        turns,
        link_bytes=(copied + through * matrices / 3) * record,
        live_first=name in (HITS, FILLED) or launch.grid[1] == columns,  # experts the slowest axis
        waiting=COPIES[227] if name in (HITS, FILLED) and not copied else 0,
        behind=behind,
    )


def _logit_bytes(config: ModelConfig) -> int:
    """Of the parts of one token's router logits."""
    parts = linear_kernels.parts_of(config.num_experts, config.hidden_size, "bfloat16")
    return 4 * parts.count * config.num_experts


def _instructions(kernel: Kernel, turns: float, searches: bool) -> float:
    """Of a warp of a program: the longest loop turns so often, of others that are as long (bodies
    for another place of a record) none. searches: plan's loops over blocks of cells run."""
    loops = kernel.loops()
    straight = _static(kernel) - sum(loops)
    if kernel.name in ("plan", "route_plan"):
        return straight + (PLAN_TURNS * sum(loops) if searches else 0)
    return straight + (turns * loops[0] if loops else 0)


PLAN_TURNS = 8
"""Blocks of cells that plan compares with all others, 16 of 128 each (its configuration)."""


def _static(kernel: Kernel) -> int:
    lines = (line.strip() for line in kernel.ptx.splitlines())
    return sum(line.endswith(";") and not line.startswith((".", "//")) for line in lines)


def step_seconds(config: ModelConfig, work: Sequence[Work]) -> float:
    """Of the whole step on the device, gaps included; the host's dispatch (65 µs, 260 µs with
    reading the ids back, probe1) is not in it."""
    begin = end = 0.0
    ends: list[tuple[Launch, float]] = []  # of what need not wait for each other
    for each in work:
        seconds = (each.seconds + GAP) * _times(config, each)
        if each.launch.in_layer or each.launch.order is None:
            begin = end = end + seconds
            ends = []
        else:
            waits = (e for other, e in ends if _waits(each.launch, other))
            ends.append((each.launch, max(waits, default=begin) + seconds))
            end = max(end, ends[-1][1])
    return end


def _waits(launch: Launch, other: Launch) -> bool:
    """Whether a launch of XLA's graph may have to wait for an earlier one: its list names the last
    one that it waits for, and all before that are taken for such."""
    assert launch.order is not None and other.order is not None
    before = launch.order[1]
    return before is not None and other.order[0] <= before and not other.last


def _times(config: ModelConfig, work: Work) -> float:
    """How often a step launches it."""
    launch = work.launch
    turns = sum(config.moe_layers) / launch.layers if launch.in_layer else 1
    return turns + launch.times_more


def floor_seconds(config: ModelConfig, work: Sequence[Work]) -> tuple[float, float]:
    """Seconds that the step's bytes of memory and of the link take at least."""
    times = [_times(config, w) for w in work]
    memory = sum(n * w.nbytes for n, w in zip(times, work, strict=True)) / MEMORY
    return memory, sum(n * w.link_bytes for n, w in zip(times, work, strict=True)) / LINK


def savings(config: ModelConfig, load: Load, work: Sequence[Work]) -> dict[str, float]:
    """Seconds a step less by each change that issue 26 plans, the others left as they are."""
    now = step_seconds(config, work)

    def without(names: str) -> list[Work]:
        return [w for w in work if not (w.launch.in_layer and re.search(names, w.launch.name))]

    def each(change: Callable[[Work], Work]) -> list[Work]:
        return [change(w) for w in work]

    def no_dead(w: Work) -> Work:
        launch = dataclasses.replace(w.launch, grid=(math.ceil(w.live),))
        return dataclasses.replace(w, launch=launch) if w.launch.programs > w.live else w

    def short_splits(w: Work) -> Work:
        split = w.launch.name in SPLITS
        return dataclasses.replace(w, live=4 * w.live) if split else w

    def int4(w: Work) -> Work:
        matrices = {HITS: 2, "expert_gate_up": 2, "expert_down": 1, COMBINED: 1}.get(w.launch.name)
        if matrices is None:
            return w
        weights = load.active(config) * matrices * config.hidden_size
        weights *= config.moe_intermediate_size
        a_warp = weights * INT4_INSTRUCTIONS / (w.live * w.launch.threads)
        nbytes = w.nbytes - (2 - INT4_BYTES) * weights
        return dataclasses.replace(w, nbytes=nbytes, instructions=a_warp)

    plans = {
        "no launch of XLA's in a layer": without("fusion|wrapped|copy"),
        "grids by context and by active experts": each(no_dead),
        f"attention in splits of {SPLIT // 4} tokens": each(short_splits),
        f"int4 experts, {INT4_INSTRUCTIONS} instructions a weight": each(int4),
    }
    return {name: now - step_seconds(config, plan) for name, plan in plans.items()}


INT4_BYTES, INT4_INSTRUCTIONS = 0.516, 3.9
"""A weight's, docs/kernels.md "Versions"."""


def kernel_table(config: ModelConfig, work: Sequence[Work]) -> list[str]:
    """A row for each launch of a layer and for those of once a step."""
    lines = [
        "| kernel | programs | live | waves | MB | PTX instructions a warp | µs | ms a step |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (name, inside), group in itertools.groupby(
        sorted(work, key=lambda w: (not w.launch.in_layer, w.launch.name)),
        key=lambda w: (w.launch.name, w.launch.in_layer),
    ):
        for w in group:
            each = w.seconds + GAP
            where = name if inside else f"{name} (once)"
            lines.append(
                f"| {where} | {w.launch.programs} | {w.live:.0f} | {w.waves:.2f} | "
                f"{w.nbytes / 1e6:.2f} | {w.instructions:.0f} | {each * 1e6:.1f} | "
                f"{each * 1e3 * _times(config, w):.3f} |"
            )
    return lines


ROWS = {1: 1, 8: 8, 32: 32}
"""Tokens → rows of the decode step that is compiled for them."""
CONTEXT = 1024
"""Tokens, of which a decode step has a program of its own (moejax.start.decide.shapes)."""
BLOCK = BLOCK_SIZES[0]
PAGED = (64, 16)
LONG, LONG_CONTEXTS = 32768, (1024, 8192, 32768)
"""The longest context of the table of contexts, and those that steps have there."""


def context_table(model: str) -> list[str]:
    """Steps where a context may be LONG: compiled for all of it and a tile of rows, and compiled
    for their context and rows."""
    config = parse_config(PUBLISHED[model].raw)
    lines = [
        "",
        f"## {model} with up to {LONG} tokens of context",
        "",
        "Milliseconds a step with one program for all contexts and no fewer than 16 rows; with "
        "programs by context; by rows too.",
        "",
        "| tokens | context | one program | by context | by context and rows |",
        "|---|---|---|---|---|",
    ]

    @functools.cache
    def compiled(rows: int, context: int) -> tuple[list[Launch], dict[str, Kernel]]:
        pages = None if context == LONG else context // BLOCK
        key = ProgramKey("decode", rows, context=pages, resident=True)
        step, kernels = compile_step("h200", model, key, LONG)
        return launches(step.thunks), kernels

    for (tokens, rows), context in itertools.product(ROWS.items(), LONG_CONTEXTS):
        tile = max(rows, DECODE_TILE)
        # As moejax.start.decide.shapes has them of this length: a quarter of it, and again.
        fitting = next(n for n in (LONG // 16, LONG // 4, LONG) if n >= context)
        forms = (tile, LONG), (tile, fitting), (rows, fitting)
        times = [
            step_seconds(config, step_work(config, Load(tokens, context), *compiled(*form)))
            for form in forms
        ]
        lines.append(f"| {tokens} | {context} | {' | '.join(f'{t * 1e3:.2f}' for t in times)} |")
    return lines


def page(models: Sequence[str]) -> str:
    """Tables of all models."""
    summary, details = [], []
    for model in models:
        config = parse_config(PUBLISHED[model].raw)
        steps = {}
        for rows, resident in itertools.product(sorted(set(ROWS.values())), (False, True)):
            key = ProgramKey("decode", rows, context=CONTEXT // BLOCK, resident=resident)
            compiled, kernels = compile_step("h200", model, key)
            steps[rows, resident] = launches(compiled.thunks), kernels
        for tokens, rows in ROWS.items():
            for cells in (None, *(c for c in PAGED if c < config.num_experts)):
                step = steps[rows, cells is None]
                work = step_work(config, Load(tokens, CONTEXT, cells), *step)
                total, (memory, link) = step_seconds(config, work), floor_seconds(config, work)
                worst = max(work, key=lambda w, c=config: w.seconds * _times(c, w))
                a_layer = [w for w in work if w.launch.in_layer]
                summary.append(
                    f"| {model} | {tokens} | {'all' if cells is None else cells} | "
                    f"{len(a_layer)} | {memory * 1e3:.1f} | {link * 1e3:.1f} | "
                    f"{total * 1e3:.1f} | {total / max(memory, link):.2f} | {worst.launch.name} |"
                )
                if cells is None:
                    details += ["", f"## {model}, {tokens} tokens", "", *kernel_table(config, work)]
                    less = savings(config, Load(tokens, CONTEXT), work)
                    details += ["", "Less by what is planned, ms a step: "]
                    details[-1] += "; ".join(f"{k} {v * 1e3:.2f}" for k, v in less.items()) + "."
    return "\n".join(
        [
            "# Predicted time of a decode step on an H200",
            "",
            "**Predicted, nothing here was measured.** `python -m tests.aot.step_time`, jax "
            f"{jax.__version__}, {datetime.date.today().isoformat()}. {CONTEXT} tokens of context, "
            "uniform routing (the most experts, the most misses), bfloat16. Memory and link: the "
            "time of the bytes alone. Constants and their sources: tests/aot/step_time.py.",
            "",
            "| model | tokens | cells a layer | launches a layer | memory, ms | link, ms | "
            "**step, ms** | step over the larger floor | most time in |",
            "|---|---|---|---|---|---|---|---|---|",
            *summary,
            *context_table(models[0]),
            *details,
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS[:3], default=MODELS[:3])
    parser.add_argument("--out", type=Path, help="folder for step_time.md; default: stdout")
    args = parser.parse_args()
    text = page(args.models)
    if args.out is None:
        print(text)
    else:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "step_time.md").write_text(text)


if __name__ == "__main__":
    main()
