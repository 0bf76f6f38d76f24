"""Measures what steps cost: decode steps with forced routing and residency, and prefill steps. Each
case runs in several rounds that alternate with all others, through a normal engine; a figure is
made of medians. moejax.costs.store keeps the figures."""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from host_offload.control.interface import Moment
from host_offload.memory.swap import SWAP_PAGES
from host_offload.queue.native import NativeQueue
from host_offload.queue.transfer import Load, Source, Transfer
from host_offload.sizing.cost_model import CostModel, StepCost, Work, fit_costs
from moejax.costs.cpu_costs import cpu_expert_costs, median_s
from moejax.costs.forced import SLACK, WARM, Case, ForcedSteps, StepSample
from moejax.costs.other_programs import ProcessorWatch, is_busy
from moejax.costs.rates import measure_link_rate
from moejax.costs.store import cost_file, identity, write_cost_model
from moejax.errors import UserError
from moejax.step.executor import Executor
from moejax.step.step_parts import DECODE_TILE
from pallas_kernels.paged_attention import SPAN

log = logging.getLogger("moejax")

ROUNDS, STEPS = 5, 4
"""Rounds over all cases, and least timed steps of a case in each round."""

MORE_STEPS, CASE_SECONDS = 32, 0.06
"""Most timed steps of a case in a round, and the seconds that they take if they are fewer. Of four
steps of a millisecond the mean differed by 30% from round to round on a quiet machine."""

OWN_WEIGHT = 5
"""Weight in the fit of a case that the model routes; of a forced one, whose experts come from cold
memory, it is 1."""

SECONDS = 25.0
"""Seconds for rounds. No round begins later, except for the first LEAST_ROUNDS."""

LEAST_ROUNDS = 3

LONG = 512
"""Most tokens of a long prompt."""

COPY_RATE, COPIED, COPY_ROUNDS = 2e9, 64 << 20, 5
"""Bytes per second of the copy that steps are measured beside, bytes of one of its transfers, and
pairs of steps alone and beside it."""


def calibrate(runner: Executor, report: Callable[[str], None] | None = None) -> CostModel:
    """Measures the costs of a runner's steps and keeps them for this machine, device, versions,
    model and start-up shapes. It takes seconds to a minute, and nothing is resident afterwards.

    - `runner`: a runner that has run nothing.
    - `report`: called with the current activity.

    Raises UserError for an arena that is too small. If the costs cannot be kept, or if other
    programs took much of the processors, it only warns.
    """
    log.info("measuring what steps cost here, once; `moejax calibrate` does it ahead of need")
    model = measure(runner, report=report)
    about = identity(runner.steps)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    model = dataclasses.replace(model, about={**about, **model.about, "created": now})
    if is_busy(others := model.about["others"]):
        log.warning(
            "while costs were measured, other programs took %.0f%% of the processors: times will "
            "be predicted too long; a start on a quiet machine measures again",
            100 * others,
        )
    try:
        write_cost_model(cost_file(about), model)
    except UserError as error:
        log.warning("%s: costs are measured at every start", error)
    return model


def measure(runner: Executor, *, report: Callable[[str], None] | None = None) -> CostModel:
    """Measures a runner that nothing else uses. Its tables are as before, with nothing resident.

    Raises UserError for an arena that is too small, and for experts of several versions or in
    files.
    """
    if len(runner.stores) > 1:
        raise UserError(
            "costs are measured with one version of the experts, the same in all layers; name one "
            "as precision and measure each of a mix by itself, or state a placement's costs: "
            "per_token, startup, load, accelerator, attention=TIME"
        )
    if runner.steps.store == "file":
        raise UserError("costs are measured with experts in memory; leave out store='file'")
    if runner.steps.queue is not None:
        raise UserError(
            "costs are measured without a link, which predictions take as given: leave out "
            "transfers, link_rate and link_latency, or `moejax calibrate` first"
        )
    say = report or (lambda _: None)
    runner.store.wait()  # reading from a disk is no cost of a step
    before = jax.tree.map(np.asarray, runner.tables)
    try:
        forced = ForcedSteps(runner, _most_pages(runner))
        say("link")
        link_rate = measure_link_rate(runner)
        cases = _decode_cases(runner, forced.cells)
        decoded: dict[Case, list[list[StepSample]]] = {}
        swept: dict[tuple[int, int, int, bool], list[StepSample]] = {}
        say("compiling")
        _round(forced, dict.fromkeys(cases, 1), {}, {})  # is not kept
        steps = {case: _steps_of(forced, case) for case in cases}
        started, watch = time.perf_counter(), ProcessorWatch()
        for number in range(1, ROUNDS + 1):
            if number > LEAST_ROUNDS and time.perf_counter() - started > SECONDS:
                break
            say(f"round {number} of {ROUNDS}")
            _round(forced, steps, decoded, swept)
        others, figures = watch.others(), _figures(runner, decoded, swept)
        if runner.steps.owned:
            say("beside a queue")
            plain = [c for c in decoded if c == Case(1, c.active)]
            case = max(plain, key=lambda case: case.active)
            figures["beside_per_byte"] = _beside_per_byte(forced, case)
        say("KV")
        swap = _swap_per_byte(runner)
    finally:
        runner.tables = jax.device_put(before, runner.buffers.sharding)
    config = runner.config
    return CostModel(
        **figures,
        kv_swap_per_byte=swap,
        link_per_byte=1 / link_rate,
        cpu_expert=cpu_expert_costs(runner),
        about={
            "others": others,
            "sizes": {
                "layers": sum(config.moe_layers),
                "experts": config.num_experts,
                "top_k": config.num_experts_per_tok,
                "hidden": config.hidden_size,
                "width": config.moe_intermediate_size,
                "vocabulary": config.vocab_size,
            },
        },
    )


def _steps_of(forced: ForcedSteps, case: Case) -> int:
    """Returns the timed steps of a case in a round, for which its sequences have room."""
    runner, found = forced.runner, MORE_STEPS
    shapes, page = runner.shapes, runner.layout.page
    most = max(math.ceil(CASE_SECONDS / forced.measure(case, STEPS)[0].seconds), STEPS)

    def fits(steps: int) -> bool:
        tokens = case.prompt + WARM + steps + 1 + SLACK
        few = case.rows * page.pages(tokens) <= forced.pages
        return few and tokens <= shapes.blocks * page.block_size

    while found > STEPS and (found > most or not fits(found)):
        found -= 1
    return found


def _round(forced: ForcedSteps, steps: Mapping[Case, int], decoded, swept) -> None:
    for case, timed in steps.items():
        decoded.setdefault(case, []).append(forced.measure(case, timed))
    for prompts, tokens in _prefill_shapes(forced.runner):
        for cells, cold in ((forced.cells, False), (forced.cells, True), (0, True)):
            if not cold:  # so that it is not
                forced.prefill(prompts, tokens, cells, cold=False)
            sample = forced.prefill(prompts, tokens, cells, cold=cold)
            swept.setdefault((prompts, tokens, cells, cold), []).append(sample)


def _long_prompt(runner: Executor) -> int:
    """Returns the tokens of a long prompt, whose steps attend to more than one span; 0 where there
    is no room for that."""
    shapes, page, more = runner.shapes, runner.layout.page, WARM + MORE_STEPS + 1 + SLACK
    longest = shapes.blocks * page.block_size - more
    found = min(LONG, longest, shapes.prefill_chunks * shapes.chunk)
    experts = len(runner.tables.address) * runner.config.num_experts_per_tok
    room = (runner.slots - experts) * runner.layout.pages_per_slot
    while found >= SPAN and min(4, shapes.rows) * page.pages(found + more) > room:
        found -= SPAN
    return found if found >= SPAN else 0


def _most_pages(runner: Executor) -> int:
    """Returns the most KV pages that a case needs at a time."""
    page, rows, steps = runner.layout.page, runner.shapes.rows, WARM + STEPS + 1
    sequences = [(rows, 1 + steps)]
    if long := _long_prompt(runner):
        sequences.append((min(4, rows), long + WARM + MORE_STEPS + 1))
    sequences += _prefill_shapes(runner)
    return max(count * page.pages(tokens + SLACK) for count, tokens in sequences)


def _own_case(runner: Executor, rows: int, cells: int) -> Case:
    """Returns steps that the model routes, with prompts as long as there is room for."""
    shapes, page, pages = runner.shapes, runner.layout.page, _most_pages(runner)
    more = WARM + MORE_STEPS + 1 + SLACK
    longest = min(LONG, shapes.blocks * page.block_size - more)
    while longest > 1 and rows * page.pages(longest + more) > pages:
        longest -= 1
    return Case(rows, cells, own=True, prompt=max(longest, 1))


def _decode_cases(runner: Executor, cells: int) -> list[Case]:
    """Returns the cases of decode steps.

    - `cells`: most cells of a layer.
    """
    k, experts, shapes = runner.config.num_experts_per_tok, runner.config.num_experts, runner.shapes
    buckets, powers = shapes.buckets or (shapes.rows,), [1 << i for i in range(20)]
    found = []
    for rows in sorted({1, *buckets, *(bucket + 1 for bucket in buckets[:-1])}):
        most = min(experts, rows * k)
        counts = {k, most, *(n for n in powers if k < n < most)}
        found += [Case(rows, active) for active in sorted(counts) if active <= cells]
    few = min(4, shapes.rows)
    if prompt := _long_prompt(runner):
        found.append(Case(few, k, prompt=prompt))
    # In the bucket of a whole tile, whose steps may miss as many experts as there are.
    rows = shapes.bucket(min(DECODE_TILE, shapes.rows))
    # The model's own routing, whose experts are used again soon and lie in the processor's caches.
    found += [_own_case(runner, rows, cells) for rows in sorted({1, few, *buckets})]
    found += [_own_case(runner, rows, cells // part) for part in (2, 4) if cells // part]
    found.append(Case(rows, cells, own=True))
    found.append(Case(rows, k, watched=(Moment.STEP_END,)))
    if runner.driver == "host":
        found.append(Case(rows, k, watched=(Moment.STEP_END, Moment.ROUTED)))
    for missing in (n for n in powers if n <= min(experts, rows * k)):
        active = max(k, missing)
        if active <= min(cells, experts - missing):
            found.append(Case(rows, active, missing))
        found.append(Case(rows, active, missing, read_through=True))
    return found


def _prefill_shapes(runner: Executor) -> list[tuple[int, int]]:
    """Returns (prompts, tokens of each prompt) of the prefill steps."""
    shapes = runner.shapes
    longest = shapes.blocks * runner.layout.page.block_size - 1
    chunk, chunks = shapes.chunk, shapes.prefill_chunks
    # One prompt among others gets a quarter of a prefill step.
    alone = min(LONG, longest // chunk * chunk, max(chunks // 4, 1) * chunk)
    many = min(shapes.rows, chunks)
    sizes = [(1, 8), (1, chunk), (1, alone), (min(4, many), chunk), (many, chunk), (many, 8)]
    return list(dict.fromkeys((p, min(t, longest)) for p, t in sizes if p and t))


def _figures(runner, decoded, swept) -> dict[str, Any]:
    """Returns the fields of a CostModel from samples."""
    layers, experts = runner.tables.address.shape
    shapes = runner.shapes
    steps = {case: _median(itertools.chain(*rounds)) for case, rounds in decoded.items()}
    prefill_steps = {key: _median(samples) for key, samples in swept.items()}
    prefill = _fit_step([*prefill_steps.values()])
    plain = [case for case in steps if not case.watched]
    weighted = [case for case in plain for _ in range(OWN_WEIGHT if case.own else 1)]
    costs = _fit_decode([(shapes.bucket(c.rows), not c.own, *steps[c]) for c in weighted])
    # One of them has steps that miss. Where there are hardly more experts than a token takes, no
    # step can be made that fills a few cells.
    first = costs[shapes.bucket(min(DECODE_TILE, shapes.rows))]
    filled = first if first.filling or first.fill else prefill
    moves = {"filling": filled.filling, "fill": filled.fill}
    moves |= {"reading": first.reading, "read": first.read}

    def extra(case: Case, base: Case) -> float:
        """Returns the seconds that a case takes beyond another case, at least 0. It is the median
        over rounds, since a disturbance of the machine slows both cases of a round."""
        pairs = zip(decoded[case], decoded[base], strict=True)
        found = np.median([_median(these)[0] - _median(those)[0] for these, those in pairs])
        return max(float(found), 0.0)

    watched, *between = (case for case in steps if case.watched)
    prompts, tokens, *_ = warm = max(
        (key for key in swept if not key[3]), key=lambda key: key[0] * key[1]
    )
    return {
        "layers": layers,
        "experts": experts,
        "top_k": runner.config.num_experts_per_tok,
        "expert_bytes": runner.link_bytes[0],
        "chunk": runner.shapes.chunk,
        "row_tile": min(DECODE_TILE, runner.shapes.rows),
        "decode": {rows: dataclasses.replace(cost, **moves) for rows, cost in costs.items()},
        "prefill": prefill,
        "control": extra(watched, dataclasses.replace(watched, watched=())),
        "look": max((extra(case, watched) / layers for case in between), default=0.0),
        "recompute_per_token": prefill_steps[warm][0] / (prompts * tokens),
    }


def _fit_step(steps: Sequence[tuple[float, Work]]) -> StepCost:
    """Returns the costs that come nearest to the (seconds, work) of steps."""
    return StepCost(*fit_costs([[1, *work] for _, work in steps], [s for s, _ in steps]))


def _fit_decode(steps: Sequence[tuple[int, bool, float, Work]]) -> dict[int, StepCost]:
    """Returns the costs by executable that come nearest to the (rows of the executable, whether its
    routing is forced, seconds, work) of steps.

    A span costs the same in all, since only one executable has steps of rows with several spans. In
    the others rows and spans are as many, and would share their costs. Forced steps have a `step`
    of their own, which is no cost of a run.
    """
    rows, kinds = sorted({rows for rows, *_ in steps}), 2 + len(Work._fields)
    counts, span = np.zeros((len(steps), len(rows), kinds)), 1 + Work._fields.index("spans")
    for i, (of, forced, _, work) in enumerate(steps):
        counts[i, rows.index(of)] = [not forced, *work, forced]
    counts[:, 0, span] = counts[:, :, span].sum(axis=1)
    counts[:, 1:, span] = 0
    each = counts.reshape(len(steps), -1).tolist()
    found = fit_costs(each, [seconds for *_, seconds, _ in steps])
    costs = np.reshape(found, (len(rows), kinds))
    costs[:, span] = costs[0, span]
    return {of: StepCost(*cost[:-1]) for of, cost in zip(rows, costs.tolist(), strict=True)}


def _beside_per_byte(forced: ForcedSteps, case: Case) -> float:
    """Returns the seconds that steps lose by each byte that a queue copies beside them: the median
    of pairs."""
    source, target = np.ones(COPIED, np.uint8), np.zeros(COPIED, np.uint8)
    load = Load((COPIED,), Source(address=source.ctypes.data), target.ctypes.data)

    lost = []
    with NativeQueue(rate=COPY_RATE) as queue:
        for _ in range(COPY_ROUNDS):
            alone, _ = _median(forced.measure(case, STEPS))
            tickets = [queue.submit(Transfer(0, 0, 0, cell, "copy"), load) for cell in range(64)]
            beside, _ = _median(forced.measure(case, STEPS))
            begun = [ticket for ticket in tickets if not queue.cancel(ticket)]
            for ticket in begun:
                queue.wait(ticket)
            if len(begun) == len(tickets):
                raise RuntimeError("the copy ended before the steps that were measured beside it")
            queue.observe()
            lost.append((1 - alone / beside) / COPY_RATE)
    return max(float(np.median(lost)), 0.0)


def _median(samples: Iterable[StepSample]) -> tuple[float, Work]:
    """Returns (median seconds, mean work) of samples that are alike."""
    found: Sequence[StepSample] = list(samples)
    work = np.mean([sample.work for sample in found], axis=0)
    return float(np.median([sample.seconds for sample in found])), Work(*work.tolist())


def _swap_per_byte(runner: Executor) -> float:
    """Returns the seconds a byte of pages that go to the host or come back, the mean of
    both ways."""
    layout = runner.layout
    per_slot = layout.pages_per_slot
    pages = min(SWAP_PAGES, runner.slots * per_slot)
    rows = [layout.page_row(runner.slots - 1 - i // per_slot, i % per_slot) for i in range(pages)]

    def there_and_back(_: int) -> jax.Array:
        copies = jax.block_until_ready(runner.read_pages(rows))
        runner.write_pages(copies, rows)
        return jax.tree.leaves(runner.arena)[0]  # the array, or an owned one's token

    return median_s(there_and_back) / (2 * pages * layout.page.nbytes)
