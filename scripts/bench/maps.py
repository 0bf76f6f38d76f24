"""fMoE's ablation (section 6.5) and its premise (section 4.2): which searches of expert maps raise
the hit rate, and whether similar maps mean more hits.

python -m scripts.bench maps [--model DIR] [--seeds 3] [--budget 50]

A seed has texts of its own (scripts/texts), one request after the other. The store has maps of the
first 70% of the requests, and figures are of the others' decode steps. Hit rates are of one pool of
cells, simulated, for the later layer's router on this layer's input (speculation), the trajectory
search alone, with the semantic search for the first layers, and with δ, by which less similar maps
bring more experts; LFU fetches on demand. r: Pearson's coefficient between the nearest map's score
and the share of a token's experts that are its top-k. Means over seeds, 95% intervals, Student's t;
`over` is paired with the row before.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from host_offload.control.interface import Moment, Policy, Spec
from host_offload.policies.eviction.eviction_names import POLICIES
from host_offload.policies.prefetch.expert_map.expert_map_policy import ExpertMap, Matching, fit
from host_offload.policies.prefetch.expert_map.map_matcher import MapMatcher, MapPrediction
from host_offload.policies.prefetch.expert_map.map_store import FoundMaps, MapStore
from host_offload.policies.prefetch.next_layers import gate_scores, softmax
from host_offload.simulate.simulator import simulate, spec_of
from host_offload.traces.reader import Trace, read_trace
from host_offload.traces.schema import KINDS
from moejax import LLM, SamplingParams, UserError
from moejax.commands.train_predictor import routers_of
from moejax.evaluate.comparison import over_seeds
from scripts.bench.answers import RESEARCH
from scripts.parts.commands import new_parser, positive, refusing
from scripts.parts.text_table import aligned, show
from scripts.texts.documents import document, require_domains

SHARE = 0.7
"""Share of the requests whose maps are stored, the paper's."""
ARMS = ("LFU", "speculation", "trajectory", "with semantics", "with δ")
COLUMNS = (
    ("", "{name}"),
    ("hit rate, or r", "{value:.3f} [{value_low:.3f}, {value_high:.3f}]"),
    ("over the row before", "{over:+.3f} [{over_low:+.3f}, {over_high:+.3f}]"),
    ("moved / LFU", "{moved:.2f}"),
)


@dataclasses.dataclass(frozen=True)
class Plain:
    """A matcher in the place of the whole one: each prediction brings top-k experts.

    - `semantic`: whether the first layers are predicted.
    """

    matcher: MapMatcher
    semantic: bool

    @property
    def nbytes(self) -> int:
        return self.matcher.nbytes

    @property
    def size(self) -> int:
        return self.matcher.size

    def see(self, seen: Any) -> tuple[Plain, MapPrediction | None]:
        matcher, found = self.matcher.see(seen)
        after = dataclasses.replace(self, matcher=matcher)
        if found is None or (seen.moment == Moment.EMBEDDED and not self.semantic):
            return after, None
        return after, found._replace(scores=np.ones_like(found.scores))


@dataclasses.dataclass(frozen=True)
class Speculation:
    """In the place of the matcher: the router of the layer `distance` later on this one's input."""

    router: np.ndarray
    """float32[L, D, E]"""
    distance: int
    nbytes: int = 0
    size: int = 0

    def see(self, seen: Any) -> tuple[Speculation, MapPrediction | None]:
        later = seen.layer + self.distance
        if seen.moment != Moment.ROUTED or later >= len(self.router):
            return self, None
        likely = softmax(gate_scores(seen.gate_input[:, 0], self.router[later]))
        layers = range(later, later + 1)
        return self, MapPrediction(seen.step, layers, likely[None], np.ones(len(likely), "f4"))


@dataclasses.dataclass(frozen=True)
class Part(ExpertMap):
    """ExpertMap with a part of its searches."""

    arm: str = ARMS[-1]

    @property
    def needs(self) -> frozenset[str]:
        more = {"gate_input", "router"} if self.arm == "speculation" else set()
        return super().needs | more

    def init(self, spec: Spec) -> Matching:
        state = super().init(spec)
        if self.arm == ARMS[-1]:
            return state
        if self.arm == "speculation":
            assert spec.router is not None
            matcher: Any = Speculation(spec.router, self.distance)
        else:
            assert isinstance(state.matcher, MapMatcher)
            matcher = Plain(state.matcher, semantic=self.arm == "with semantics")
        return state._replace(matcher=matcher)


def record(args: argparse.Namespace, seed: int, path: Path) -> Trace:
    """Records requests that continue texts, one after the other."""
    length, arrays = args.prompt + args.tokens, "arrays=gate_input+probs+embedding"
    limits = {"max_num_seqs": 1, "max_model_len": length, "progress": False}
    params = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True)
    with LLM(args.model, trace=f"{path},{arrays}", enable_prefix_caching=False, **limits) as llm:
        tokenizer = llm.get_tokenizer()
        assert tokenizer is not None
        first = seed * args.count
        for i in range(args.count):
            for name in args.domains:
                ids = tokenizer.encode(document(name, first + i))[: args.prompt]
                llm.generate([ids], params, use_tqdm=False)
    return read_trace(path)


def first_left_out(trace: Trace) -> int:
    """The first request whose maps are not stored, see expert_map_policy.fit."""
    requests = np.unique(trace.array("token.request"))
    return int(requests[max(int(SHARE * len(requests)), 1)])


def share_named(store: MapStore, found: FoundMaps, layer: int, ids: np.ndarray) -> np.ndarray:
    """float[N]: the share of the experts int[N, k] that are the top-k of the maps that were
    found."""
    likely = store.maps[layer, found.place]
    best = np.argsort(-likely, axis=1, kind="stable")[:, : ids.shape[1]]
    return (ids[:, :, None] == best[:, None]).any(axis=2).mean(axis=1)


def similarity(trace: Trace, store: MapStore, distance: int) -> tuple[float, float]:
    """Pearson's r of scores and shares: of tokens, over the first layers (semantic), and of tokens
    and later layers (trajectory)."""
    tokens: list[np.ndarray] = []
    layers: list[np.ndarray] = []
    first, decode = first_left_out(trace), KINDS.index("decode")
    for step in trace.step_traces():
        mine = (step.request >= first) & (step.phase == decode)
        if not mine.any():
            continue
        assert step.embedding is not None and step.probabilities is not None
        embedding, maps, ids = (x[mine] for x in (step.embedding, step.probabilities, step.ids))
        found = store.nearest_embedding(embedding)
        shares = [share_named(store, found, x, ids[:, x]) for x in range(distance)]
        tokens.append(np.stack([found.score, np.mean(shares, axis=0)]))
        seen = store.trajectory(len(ids))
        for layer in range(trace.header.layers - distance):
            seen, found = store.nearest_map(seen, layer, maps[:, layer])
            later = layer + distance
            layers.append(np.stack([found.score, share_named(store, found, later, ids[:, later])]))
    both = (np.corrcoef(np.concatenate(pairs, axis=1))[0, 1] for pairs in (tokens, layers))
    semantic, trajectory = map(float, both)
    return semantic, trajectory


def measure(args: argparse.Namespace, seed: int, folder: Path) -> np.ndarray:
    """Returns float64[arms + 2, 2]: hit rate and experts moved of each arm, then r of each
    search."""
    trace = record(args, seed, folder / str(seed))
    router = routers_of(args.model, trace.header.config_digest)
    spec = dataclasses.replace(spec_of(trace.header), router=router)
    learned = fit(trace, capacity=args.capacity, distance=args.distance, share=SHARE)
    first = first_left_out(trace)
    begun = next(step.number for step in trace.step_traces() if (step.request >= first).any())
    settings = {name: getattr(learned, name) for name in ("fitted", "capacity", "distance")}
    rows = []
    for arm in ARMS:
        policy: Policy = POLICIES["global-lfu"]()
        if arm != "LFU":
            policy = Part(**settings, learns=False, arm=arm)
        cells = max(round(args.budget / 100 * spec.experts), 1)
        run = simulate(trace, policies=[policy], cells=cells, driver="host", spec=spec)
        steps = run.of_kind("decode") & (run.number >= begun)
        hits, misses = int(run.hits[steps].sum()), int(run.misses[steps].sum())
        rows.append((hits / (hits + misses), float(run.transfers[steps].sum())))
    store = learned.begin_store(spec)
    return np.array([*rows, *((r, np.nan) for r in similarity(trace, store, args.distance))])


def rows_of(found: np.ndarray) -> list[dict[str, Any]]:
    """Returns a row of each arm and search.

    - `found`: float64[seeds, arms + 2, 2].
    """
    rows = []
    names = (*ARMS, "r, semantic", "r, trajectory")
    for number, name in enumerate(names):
        values, over, moved = found[:, number, 0], (None,) * 3, None
        if 0 < number < len(ARMS):
            over = over_seeds((values - found[:, number - 1, 0]).tolist())
            moved = float(np.mean(found[:, number, 1] / found[:, 0, 1]))
        row: dict[str, Any] = {"name": name, "moved": moved}
        for key, ends in (("value", over_seeds(values.tolist())), ("over", over)):
            row |= dict(zip((key, f"{key}_low", f"{key}_high"), ends, strict=True))
        rows.append(row)
    return rows


@refusing(ValueError)
def main(arguments: Sequence[str] | None = None) -> int:
    parser = new_parser(__name__, __doc__ or "")
    add = parser.add_argument
    add("--model", default=str(RESEARCH), help="(default: examples/models/research)")
    add("--domains", nargs="+", default=["story"], help="(default: %(default)s)")
    add("--count", type=int, default=14, help="texts of a domain (default: %(default)s)")
    add("--seeds", type=int, default=3, help="(default: %(default)s)")
    add("--prompt", type=int, default=64, help="tokens of a prompt (default: %(default)s)")
    add("--tokens", type=int, default=32, help="of an answer (default: %(default)s)")
    add("--capacity", type=int, default=128, help="maps (default: %(default)s)")
    add("--distance", type=int, default=3, help="layers ahead (default: %(default)s)")
    add("--budget", type=int, default=50, help="percent of the experts (default: %(default)s)")
    add("--json", action="store_true", help="one JSON object a line")
    args = parser.parse_args(arguments)
    positive(args, "count", "seeds", "prompt", "tokens", "capacity", "distance", "budget")
    if args.tokens < 2 or args.count < 2 or args.budget > 99:
        raise UserError("--tokens and --count must be at least 2, --budget at most 99")
    require_domains(args.domains)
    with tempfile.TemporaryDirectory() as directory:
        found = [measure(args, seed, Path(directory)) for seed in range(args.seeds)]
    rows = rows_of(np.array(found))
    show(args.json, rows, aligned(COLUMNS, rows))
    return 0
