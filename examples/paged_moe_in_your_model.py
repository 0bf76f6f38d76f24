"""A small transformer of your own whose MoE layers page their experts from host memory.

    python examples/paged_moe_in_your_model.py --budget 25%

It generates with random weights, then again with less memory, and shows that the tokens are the
same and what was moved. docs/how-to/paged_moe.md explains the parts.
"""

from __future__ import annotations

import argparse
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moejax.nn import ExpertMemory, HostRecords, PagedExperts, PagedMoE, RouteRule

LAYERS, EXPERTS, TOP_K, HIDDEN, WIDTH, HEADS, VOCABULARY, POSITIONS = 2, 16, 2, 64, 96, 4, 256, 64


class Block(nnx.Module):
    """Attention with a cache, then experts."""

    def __init__(self, experts: PagedExperts, layer: int, rngs: nnx.Rngs):
        self.attention_norm = nnx.RMSNorm(HIDDEN, rngs=rngs)
        self.qkv = nnx.Linear(HIDDEN, 3 * HIDDEN, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(HIDDEN, HIDDEN, use_bias=False, rngs=rngs)
        self.moe_norm = nnx.RMSNorm(HIDDEN, rngs=rngs)
        rule = RouteRule(top_k=TOP_K, normalize=True)
        self.moe = PagedMoE(experts, layer, rule, rngs=rngs)

    def __call__(self, x, position, cache, memory):
        """x [B, D], cache [2, B, S, H, hd] -> (x, cache, memory)."""
        batch = x.shape[0]
        heads = self.qkv(self.attention_norm(x)).reshape(batch, 3, HEADS, -1)
        cache = cache.at[:, :, position].set(heads[:, 1:].swapaxes(0, 1))
        scores = jnp.einsum("bhd,bshd->bhs", heads[:, 0], cache[0]) * heads.shape[-1] ** -0.5
        seen = jnp.arange(POSITIONS) <= position
        attended = jnp.einsum("bhs,bshd->bhd", jax.nn.softmax(scores, where=seen), cache[1])
        x = x + self.out(attended.reshape(batch, -1))
        y, memory = self.moe(self.moe_norm(x), memory)
        return x + y, cache, memory


class Transformer(nnx.Module):
    def __init__(self, experts: PagedExperts, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCABULARY, HIDDEN, rngs=rngs)
        self.blocks = nnx.List([Block(experts, layer, rngs) for layer in range(LAYERS)])
        self.head = nnx.Linear(HIDDEN, VOCABULARY, use_bias=False, rngs=rngs)

    def __call__(self, tokens, position, caches, memory):
        """tokens int32[B] at one position -> (logits [B, V], caches, memory)."""
        x, kept = self.embed(tokens), []
        for block, cache in zip(self.blocks, caches, strict=True):
            x, cache, memory = block(x, position, cache, memory)
            kept.append(cache)
        return self.head(x), kept, memory


def random_layers(seed: int = 0):
    """Weights as a checkpoint would give them: (gate [E, I, D], up [E, I, D], down [E, D, I])."""
    generator = np.random.default_rng(seed)

    def draw(*shape: int) -> np.ndarray:
        return generator.normal(0, 0.3, shape).astype(np.float32)

    wide, narrow = (EXPERTS, WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH)
    return [(draw(*wide), draw(*wide), draw(*narrow)) for _ in range(LAYERS)]


def compile_step(model: Transformer):
    """The jitted step and its parameters. The records are an argument like the others, not donated;
    caches and memory are, so the arena is updated in place."""
    graph, records, params = nnx.split(model, HostRecords, ...)

    def step(records, params, tokens, position, caches, memory):
        model = nnx.merge(graph, records, params)
        logits, caches, memory = model(tokens, position, caches, memory)
        return jnp.argmax(logits, axis=-1).astype(jnp.int32), caches, memory

    # Without this option equal programs may round 16-bit values differently.
    options = {"xla_allow_excess_precision": False}
    jitted = jax.jit(step, donate_argnums=(4, 5), compiler_options=options)
    return functools.partial(jitted, records, params)


def generate(
    step, memory: ExpertMemory, batch: int, length: int
) -> tuple[np.ndarray, ExpertMemory]:
    """(greedy tokens int32[length, B] after one start token for each sequence, memory)."""
    cache = (2, batch, POSITIONS, HEADS, HIDDEN // HEADS)
    tokens, caches, made = jnp.arange(batch), [jnp.zeros(cache) for _ in range(LAYERS)], []
    for position in range(length):
        tokens, caches, memory = step(tokens, position, caches, memory)
        made.append(tokens)
    return np.stack(made), memory


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Generate with paged experts.")
    parser.add_argument("--budget", default="25%", help="of the experts on the device")
    parser.add_argument("--length", type=int, default=32, help=f"tokens, at most {POSITIONS}")
    args = parser.parse_args(argv)

    experts = PagedExperts.from_arrays(random_layers(), "float32")
    step = compile_step(Transformer(experts, nnx.Rngs(0)))
    memory = experts.allocate(args.budget)
    size = f"{memory.arena.nbytes / 2**20:.2f} of {experts.records.get_value().nbytes / 2**20:.2f}"
    print(f"{size} MiB of experts on the device")

    tokens, memory = generate(step, memory, batch=2, length=args.length)
    print("tokens", *tokens[:, 0])
    show(memory)
    # Another budget is another content of the tables: the same executable, the same tokens.
    memory = experts.grant(memory, [1] + [0] * (LAYERS - 1))
    again, memory = generate(step, memory, batch=2, length=args.length)
    print("one cell for the first layer, none for the others:", end=" ")
    print("the same tokens" if np.array_equal(tokens, again) else "OTHER TOKENS")
    show(memory)


def show(memory: ExpertMemory) -> None:
    paging = memory.paging
    counts = {name: int(values.sum()) for name, values in paging._asdict().items()}
    print("so far:", ", ".join(f"{count} {name}" for name, count in counts.items()))


if __name__ == "__main__":
    main()
