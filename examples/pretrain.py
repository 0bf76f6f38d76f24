"""Train a small Mixture-of-Experts model from token files, with Flax NNX, optax and Orbax.

    python -m scripts.texts tokens DIR --tokenizer moejax/demo --seconds 60
    python -m examples.pretrain --model moejax/demo --data DIR --mix story:1,chat:1 \\
        --seconds 600 --out OUT
    moejax generate "Once upon a time" --model OUT

With --state a run that stopped goes on where it was, and each stop can be evaluated, also while the
next run is under way:

    moejax eval STATE --name-map examples/small_moe.yaml --every-step --task perplexity --data FILE

The folder of --model holds the config.json of a model of examples/small_moe.py and a tokenizer.

Token files are arrays `{domain}-{anything}.npy` (or .npy.xz) of uint16, documents that each end
with token 0. The folder is looked at again between dispatches, so another process may go on writing
to it. Each row starts at the start of a document.

The learning rate follows the clock: warmup, constant, then linear to zero over the last part of
--seconds. So a run ends when it must, at whatever speed the machine has.
"""

from __future__ import annotations

import argparse
import functools
import json
import lzma
import pathlib
import shutil
import signal
import sys
import time
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax import lax

from examples.small_moe import (
    Attention,
    Config,
    Correction,
    Decoder,
    forward,
    load_weights,
    save_weights,
)

CORRECTION_STEP = 1e-3
"""How far the correction of an expert's choice moves a step, DeepSeek-V3's value."""
USER, ASSISTANT = 1, 2
"""Tokens that begin a question and its answer."""
SAVING = 4.0
"""Seconds that are kept for saving at the end."""
REPORT = 3.0
"""Seconds between lines about progress."""


def orthogonalize(x: jax.Array) -> jax.Array:
    """The nearest matrix with singular values near 1, of the last two axes: five Newton-Schulz
    steps of Muon (Keller Jordan, 2024)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    is_wide = x.shape[-2] <= x.shape[-1]
    x = x if is_wide else jnp.swapaxes(x, -1, -2)
    x = x / (jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + 1e-7)
    for _ in range(5):
        square = x @ jnp.swapaxes(x, -1, -2)
        x = a * x + (b * square + c * square @ square) @ x
    return x if is_wide else jnp.swapaxes(x, -1, -2)


def scale_by_muon(momentum: float = 0.95) -> optax.GradientTransformation:
    """Orthogonalized momentum with a root mean square of 0.2, that of AdamW's steps
    (arXiv:2502.16982), so that both share one learning rate."""

    def update(updates, state, params=None):
        del params
        state = jax.tree.map(lambda m, g: momentum * m + (1 - momentum) * g, state, updates)
        ahead = jax.tree.map(lambda m, g: momentum * m + (1 - momentum) * g, state, updates)
        scaled = jax.tree.map(lambda m: 0.2 * max(m.shape[-2:]) ** 0.5 * orthogonalize(m), ahead)
        return scaled, state

    def init(params):
        return jax.tree.map(jnp.zeros_like, params)

    return optax.GradientTransformation(init, update)


def make_optimizer(kind: str) -> optax.GradientTransformation:
    """Steps of learning rate 1. Muon is for the layers' matrices, AdamW, at half the rate, for the
    rest. kind: `muon`, or `adamw` for all."""
    adam = optax.scale_by_adam(b1=0.9, b2=0.95)

    def labels(params):
        def label(path, leaf):
            name = jax.tree_util.keystr(path)
            if leaf.ndim < 3 and "embed" not in name:
                return "norm"
            return kind if leaf.ndim >= 3 and "router" not in name else "adamw"

        return jax.tree_util.tree_map_with_path(label, params)

    decayed, half = optax.add_decayed_weights(0.1), optax.scale(0.5)
    kinds: dict[Hashable, optax.GradientTransformation] = {
        "norm": optax.chain(adam, half),
        "adamw": optax.chain(adam, decayed, half),
        "muon": optax.chain(scale_by_muon(), decayed),
    }
    return optax.chain(optax.clip_by_global_norm(1.0), optax.partition(kinds, labels))


class TrainState(NamedTuple):
    """What a step reads and writes; all of it is in a checkpoint."""

    params: Any
    correction: Any
    optimizer: Any
    step: jax.Array


def weigh_targets(targets: jax.Array, question_weight: float) -> jax.Array:
    """The weight of each token's loss, float32[B, T]: `question_weight` within questions, else 1.

    targets: int32[B, T]. Tables and stories in questions are random; learning to write them
    takes up what learning to answer needs.
    """
    questions, answers = (jnp.cumsum(targets == token, axis=-1) for token in (USER, ASSISTANT))
    return jnp.where(questions > answers, question_weight, 1.0)


def make_trainer(
    c: Config,
    graph: Any,
    optimizer: Any,
    dtype: Any,
    attention: Attention,
    question_weight: float = 1.0,
) -> Any:
    """The jitted (state, rows uint16[steps, B, T + 1], rates float32[steps]) ->
    (state, losses [steps], loads [steps, L, E])."""

    def loss_of(params, correction, row):
        params = jax.tree.map(lambda x: x.astype(dtype), params)
        model = nnx.merge(graph, params, correction)
        tokens = row.astype(jnp.int32)
        logits, routing = forward(c, model, tokens[:, :-1], attention)
        targets = tokens[:, 1:]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        loss = jnp.average(losses, weights=weigh_targets(targets, question_weight))
        return loss + routing.balance.sum(), (loss, routing.load)

    def step(state, given):
        row, rate = given
        gradient = jax.grad(loss_of, has_aux=True)
        grads, (loss, load) = gradient(state.params, state.correction, row)
        updates, of_optimizer = optimizer.update(grads, state.optimizer, state.params)
        params = jax.tree.map(lambda p, u: p - rate * u, state.params, updates)
        correction = state.correction
        if c["model_type"] == "glm4_moe":
            towards = CORRECTION_STEP * jnp.sign(load.mean(axis=-1, keepdims=True) - load)
            correction = jax.tree.map(lambda b: b + towards, correction)
        return TrainState(params, correction, of_optimizer, state.step + 1), (loss, load)

    @functools.partial(jax.jit, donate_argnums=0)
    def run(state, rows, rates):
        state, (losses, loads) = lax.scan(step, state, (rows, rates))
        return state, losses, loads

    return run


class Rows:
    """Rows of tokens from the files of a folder, by the shares of their domains.

    mix: domain -> share. length: tokens a row.
    """

    def __init__(self, folders: list[pathlib.Path], mix: dict[str, float], length: int, seed: int):
        self.folders, self.length = folders, length
        self.shares = np.array(list(mix.values())) / sum(mix.values())
        self.files: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {name: [] for name in mix}
        self.seen: set[pathlib.Path] = set()
        self.random = np.random.default_rng(seed)

    def look(self) -> None:
        """Reads files that are new."""
        for folder in self.folders:
            for path in sorted([*folder.glob("*.npy"), *folder.glob("*.npy.xz")]):
                domain = path.name.split("-")[0]
                if path in self.seen or domain not in self.files:
                    continue
                self.seen.add(path)
                with lzma.open(path) if path.suffix == ".xz" else path.open("rb") as file:
                    tokens = np.load(file)
                starts = np.flatnonzero(tokens[: -self.length] == 0) + 1
                self.files[domain].append((tokens, starts))

    def wait(self) -> None:
        """Returns when there is a file of each domain."""
        self.look()
        while not all(self.files.values()):
            time.sleep(0.5)
            self.look()

    @property
    def tokens(self) -> int:
        """How many tokens the files hold that were read."""
        return sum(len(tokens) for files in self.files.values() for tokens, _ in files)

    def draw(self, *shape: int) -> np.ndarray:
        """uint16[*shape, length]."""
        count = int(np.prod(shape))
        out = np.empty((count, self.length), np.uint16)
        domains = self.random.choice(len(self.shares), size=count, p=self.shares)
        for number, files in enumerate(self.files.values()):
            rows = np.flatnonzero(domains == number)
            sizes = np.array([len(starts) for _, starts in files], float)
            chosen = self.random.choice(len(files), size=len(rows), p=sizes / sizes.sum())
            for index, (tokens, starts) in enumerate(files):
                of_file = rows[chosen == index]
                first = starts[self.random.integers(0, len(starts), size=len(of_file))]
                out[of_file] = tokens[first[:, None] + np.arange(self.length)]
        return out.reshape(*shape, self.length)


def rate_at(done: float, step: int, peak: float, decay: float) -> float:
    """The learning rate: warmup over 100 steps, constant, linear to zero over the last part.

    done: the fraction of time that is over. decay: the size of the last part.
    """
    return peak * min(1.0, (step + 1) / 100) * min(1.0, max(0.0, 1 - done) / decay)


KEPT_STATES = 3
"""Training states that stay, so that `moejax eval --every-step` has time to read each."""


def named_state(c: Config, state: TrainState) -> dict[str, Any]:
    """What a checkpoint holds: weights by the names in examples/small_moe.yaml, and the rest."""
    rest = jax.tree.leaves((state.optimizer, state.step))
    named = {"params": nnx.to_pure_dict(state.params)}
    if c["model_type"] == "glm4_moe":
        named |= nnx.to_pure_dict(state.correction)
    return {**named, "rest": {str(i): leaf for i, leaf in enumerate(rest)}}


def save_state(directory: pathlib.Path, c: Config, state: TrainState) -> None:
    """Adds a checkpoint to the directory."""
    options = ocp.CheckpointManagerOptions(max_to_keep=KEPT_STATES)
    with ocp.CheckpointManager(directory.absolute(), options=options) as manager:
        manager.save(int(state.step), args=ocp.args.StandardSave(named_state(c, state)))


def restore_state(directory: pathlib.Path, c: Config, state: TrainState) -> TrainState:
    """The newest checkpoint in the directory, in the shape of `state`."""
    like = named_state(c, state)
    with ocp.CheckpointManager(directory.absolute()) as manager:
        found = manager.restore(manager.latest_step(), args=ocp.args.StandardRestore(like))
    nnx.replace_by_pure_dict(state.params, found["params"])
    if "correction" in found:
        nnx.replace_by_pure_dict(state.correction, {"correction": found["correction"]})
    rest = [found["rest"][str(i)] for i in range(len(found["rest"]))]
    optimizer, step = jax.tree.unflatten(jax.tree.structure((state.optimizer, state.step)), rest)
    return TrainState(state.params, state.correction, optimizer, step)


def read_arguments(arguments: list[str]) -> argparse.Namespace:
    """The options of a run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=pathlib.Path, required=True, help="folder of config.json")
    parser.add_argument("--data", type=pathlib.Path, nargs="+", required=True, help="folders")
    parser.add_argument("--mix", default="story:1", help="shares of domains: story:2,chat:1")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--seconds", type=float, required=True, help="all in all, start included")
    parser.add_argument("--steps", type=float, default=float("inf"), help="stop after so many")
    parser.add_argument("--rows", type=int, default=64, help="sequences a step")
    parser.add_argument("--length", type=int, default=512, help="tokens a sequence")
    parser.add_argument("--dispatch", type=int, default=32, help="steps a dispatch")
    parser.add_argument("--rate", type=float, default=5e-3, help="peak learning rate")
    parser.add_argument("--decay", type=float, default=0.3, help="part of the time it falls")
    parser.add_argument(
        "--question-weight", type=float, default=1.0, help="of the loss of tokens in questions"
    )
    parser.add_argument("--optimizer", choices=("muon", "adamw"), default="muon")
    parser.add_argument("--dtype", default="", help="of products; bfloat16 on GPUs, else float32")
    parser.add_argument("--attention", choices=("xla", "cudnn"), default="xla")
    parser.add_argument("--resume", type=pathlib.Path, help="a folder that --out wrote")
    parser.add_argument("--state", type=pathlib.Path, help="where Orbax keeps the training state")
    parser.add_argument("--limit", type=float, default=15e6, help="bytes a weights file")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


class Run:
    """One run of the program: model, data and clock."""

    def __init__(self, args: argparse.Namespace):
        self.began = time.monotonic()
        self.args = args
        self.config = c = json.loads((args.model / "config.json").read_text())
        dtype = args.dtype or ("bfloat16" if jax.default_backend() == "gpu" else "float32")
        self.say(f"{jax.devices()[0].device_kind}, {dtype}, attention by {args.attention}")
        model = nnx.jit(lambda: Decoder(c, nnx.Rngs(args.seed)))()
        if args.resume:
            load_weights(args.resume, c, model)
        self.graph, params, correction = nnx.split(model, nnx.Param, Correction)
        self.say(f"{sum(x.size for x in jax.tree.leaves(params)):,} parameters")
        optimizer = make_optimizer(args.optimizer)
        of_optimizer = jax.jit(optimizer.init)(params)
        self.state = TrainState(params, correction, of_optimizer, jnp.zeros((), jnp.int32))
        if args.state and any(args.state.glob("[0-9]*")):
            self.state = restore_state(args.state, c, self.state)
            self.say(f"goes on from step {int(self.state.step)}")
        shape = args.dispatch, args.rows, args.length + 1
        rows = jax.ShapeDtypeStruct(shape, jnp.uint16)
        rates = jax.ShapeDtypeStruct(shape[:1], jnp.float32)
        trainer = make_trainer(
            c, self.graph, optimizer, jnp.dtype(dtype), args.attention, args.question_weight
        )
        self.trainer = trainer.lower(self.state, rows, rates).compile()
        self.say("compiled")
        mix = {name: float(share) for name, share in (p.split(":") for p in args.mix.split(","))}
        # A run that goes on draws other rows than the one before it.
        self.rows = Rows(args.data, mix, args.length + 1, args.seed + int(self.state.step))

    def say(self, text: str) -> None:
        """Prints a line with the time."""
        print(f"{time.monotonic() - self.began:7.1f} s  {text}", flush=True)

    def save(self) -> None:
        """Writes the weights, with the config and the tokenizer."""
        args = self.args
        args.out.mkdir(parents=True, exist_ok=True)
        model = nnx.merge(self.graph, self.state.params, self.state.correction)
        save_weights(args.out, self.config, model, args.limit)
        self.copy_config(args.out)

    def copy_config(self, folder: pathlib.Path) -> None:
        """Puts the config and the tokenizer into the folder."""
        model = self.args.model
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
            if (model / name).exists() and model != folder:
                shutil.copy(model / name, folder / name)

    def train(self, is_stopped: Callable[[], bool]) -> None:
        """Trains until the time or the steps are over, and saves at the half and at the end.

        One dispatch is computed while the next one is prepared.
        """
        args = self.args
        self.rows.wait()
        self.say(f"{self.rows.tokens / 1e6:.1f}M tokens of data")
        start, ends = time.monotonic(), self.began + args.seconds - SAVING
        step = first = int(self.state.step)
        per_step, said, is_half_saved = 0.0, start, False
        running = None
        while not is_stopped() and step - first < args.steps:
            now = time.monotonic()
            if now + 2 * per_step * args.dispatch >= ends:
                break
            times = now - start + per_step * (args.dispatch + np.arange(args.dispatch))
            parts = times / (ends - start)
            rates = [rate_at(p, step + i, args.rate, args.decay) for i, p in enumerate(parts)]
            batch = self.rows.draw(args.dispatch, args.rows)
            self.state, *found = self.trainer(self.state, batch, jnp.asarray(rates, jnp.float32))
            if running is not None:
                jax.block_until_ready(running)
                per_step = (time.monotonic() - start) / (step - first)
                if time.monotonic() - said > REPORT:
                    said = time.monotonic()
                    self.report(step, running, per_step, rates[0])
                    self.rows.look()
            running = found
            step += args.dispatch
            if not is_half_saved and time.monotonic() > (start + ends) / 2:
                is_half_saved = True
                self.save()
                self.say("saved, half of the time")
        if running is not None:
            self.say(f"step {step}: loss {np.mean(running[0]):.4f}, the last")
        self.save()
        self.say(f"{(step - first) * args.rows * args.length:,} tokens, saved to {args.out}")
        if args.state:
            save_state(args.state, self.config, self.state)
            self.copy_config(args.state)

    def report(self, step: int, found: list[jax.Array], per_step: float, rate: float) -> None:
        """Says how far the run is. found: losses and loads of the last dispatch."""
        losses, load = np.asarray(found[0]), np.asarray(found[1][-1])
        speed = self.args.rows * self.args.length / per_step
        spread = load.max(axis=1).mean() / load.mean()
        self.say(
            f"step {step}: loss {losses.mean():.4f}, {speed:,.0f} tokens/s, rate {rate:.1e}, "
            f"fullest expert {spread:.2f} of even, {self.rows.tokens / 1e6:.0f}M tokens of data"
        )


def main(arguments: list[str]) -> None:
    """Trains until the time is over or SIGTERM comes."""
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: stopped.append(number))
    Run(read_arguments(arguments)).train(lambda: bool(stopped))


if __name__ == "__main__":
    main(sys.argv[1:])
