from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Array, Bool, Float, Int, UInt32

from pallas_kernels.implementations import implementations, pick

IMPLEMENTATIONS = implementations("sample", ("xla", "cpu"))
LOGPROBS = implementations("sample", ("xla", "cpu"), "logprobs")
LIKELIEST = implementations("sample", ("xla", "cpu"), "choose_likeliest")


class Choices(NamedTuple):
    """How the rows' tokens are chosen."""

    temperature: Float[Array, " R"]
    """float32; 0: the likeliest token."""
    top_k: Int[Array, " R"]
    """0 or less keeps all."""
    top_p: Float[Array, " R"]
    """1 keeps all."""
    min_p: Float[Array, " R"]
    """0 keeps all."""
    seed: UInt32[Array, " R"]
    position: Int[Array, " R"]
    """The index of the token that is drawn."""


def sample(
    logits: Float[Array, "R V"],
    choices: Choices,
    wanted: Bool[Array, " R"] | None = None,
    *,
    truncates: bool = True,
    one_row: bool = False,
    truncate: str = "xla",
    implementation: str = "xla",
) -> Int[Array, " R"]:
    """One token per row, drawn after temperature, min-p, top-k and top-p, in vLLM's order.

    - min_p keeps tokens at least min_p times as likely as the likeliest.
    - top_k keeps, of those, the top_k likeliest and whatever equals the last of them.
    - top_p keeps, of those, each token such that the likelier ones together have less than top_p of
      the mass that is left; equals stay or go together, so the result does not depend on a sort.

    The likeliest token is always kept. The draw is Gumbel-max: the same seed, position and logits
    give the same token, whatever the implementation, unless top_p lies within rounding of the mass
    before a token. A row that is drawn and whose largest logit is not finite gives token 0.

    - `wanted`: rows to draw; None: all. Results of others are undefined.
    - `truncates`: False promises that no row truncates (`truncates_any`), and leaves out the two
      searches, which are most of the launches.
    - `one_row`: the shapes have R = 1, and the program itself checks whether the row truncates.
      Neither changes a bit.
    - `truncate`: implementation of the searches, where they are ops of their own.

    Raises ValueError for shapes that do not fit, another dtype, or an unknown implementation.
    """
    if any(values.shape != logits.shape[:1] for values in choices) or logits.ndim != 2:
        shapes = [values.shape for values in choices]
        raise ValueError(f"logits {logits.shape} and choices {shapes} are not [R, V] and [R]")
    _check_dtype(logits)
    draw = pick("sample", IMPLEMENTATIONS, implementation)
    return draw(logits, choices, wanted, truncates=truncates, one_row=one_row, truncate=truncate)


def logprobs(
    logits: Float[Array, "R V"],
    tokens: Int[Array, " R"],
    n: int,
    wanted: Bool[Array, " R"] | None = None,
    *,
    implementation: str = "xla",
) -> tuple[Float[Array, " R"], Int[Array, " R"], Int[Array, "R n"], Float[Array, "R n"]]:
    """Log-probabilities of raw logits, before temperature and truncation (vLLM's raw_logprobs).

    - `tokens`: the chosen ones.
    - `n`: how many of the likeliest tokens to return, at most V.
    - `wanted`: see `sample`.

    Returns (chosen, rank, top_ids, top). A rank is 1 for the likeliest. The likeliest come first,
    the lower id first among equals, and rank follows the same order, so
    ``top_ids[r, rank[r] − 1] == tokens[r]`` where rank ≤ n.

    Raises ValueError as `sample` does.
    """
    if logits.ndim != 2 or tokens.shape != logits.shape[:1] or n > logits.shape[1]:
        raise ValueError(f"logits {logits.shape}, tokens {tokens.shape} and {n} likeliest")
    _check_dtype(logits)
    return pick("sample", LOGPROBS, implementation)(logits, tokens, n, wanted)


def choose_likeliest(
    logits: Float[Array, "R V"],
    tokens: Int[Array, " A"],
    update: Bool[Array, " R"],
    *,
    implementation: str = "xla",
) -> Int[Array, " A"]:
    """Replaces tokens by the likeliest of their row, the lowest id among equals; V − 1 in a row
    with NaN.

    - `tokens`: int32, of at least as many rows as the logits.
    - `update`: the rows to replace.

    Raises ValueError as `sample` does.
    """
    rows = logits.shape[:1]
    if logits.ndim != 2 or tokens.ndim != 1 or update.shape != rows or tokens.shape < rows:
        shapes = f"update {update.shape} and tokens {tokens.shape}"
        raise ValueError(f"logits {logits.shape} do not fit {shapes}: [R, V], [R] and [at least R]")
    _check_dtype(logits)
    return pick("sample", LIKELIEST, implementation)(logits, tokens, update)


def _check_dtype(logits):
    if logits.dtype != "float32":
        raise ValueError(f"logits are float32, not {logits.dtype}")
