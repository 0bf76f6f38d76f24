"""Routing without a model: drawn, or of an existing trace."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from host_offload.traces.generators import KINDS
from host_offload.traces.reader import Trace, read_trace
from moejax.errors import UserError, user_errors
from moejax.traces.generated_traces import write_generated_trace
from pallas_kernels.option_text import Reader, parse_option, share, whole

EXPERT_BYTES = 9 << 20
"""Bytes of an expert of drawn routing by default: Qwen3-30B-A3B's."""

_SETTINGS: Mapping[str, Reader] = {
    **dict.fromkeys(("layers", "experts", "top_k", "phase_tokens", "expert_bytes"), whole(1)),
    "shared": share,
}


@dataclasses.dataclass(frozen=True)
class GeneratedRouting:
    """Routing as a definition names it."""

    name: str
    kind: str | None
    """A kind of host_offload.traces.generators; None: the routing is of a trace."""
    settings: Mapping[str, Any]
    """Of a trace, `expert_bytes` alone."""
    directory: Path | None
    """Directory of the trace; None: the routing is drawn."""

    def trace(self, root: Path, batch: int, prompt: int, output: int, seed: int) -> Trace:
        """Returns the trace. Routing that is not there yet is drawn below `root`: one prefill step
        of `prompt` tokens of `batch` sequences, then `output` decode steps."""
        if self.directory is not None:
            return self._complete(read_trace(self.directory))
        assert self.kind is not None
        digest = hashlib.sha256(self.name.encode()).hexdigest()[:8]
        path = root / f"{self.kind}-{digest}-{batch}x{prompt}+{output}-seed{seed}"
        if not path.exists():
            root.mkdir(parents=True, exist_ok=True)
            asked = {"layers": 48, "experts": 128, **self.settings}
            size = asked.pop("expert_bytes", EXPERT_BYTES)
            about = _arena(asked["layers"], asked["experts"], size)
            asked |= {"sequences": batch, "tokens": prompt + output, "prompt_tokens": prompt}
            write_generated_trace(path, self.kind, **asked, seed=seed, about=about)
        return read_trace(path)

    def _complete(self, trace: Trace) -> Trace:
        """Returns the trace, with an arena in its spec if no engine wrote it."""
        header = trace.header
        if "slots" in header.spec:
            if self.settings:
                raise UserError(f"routing {self.name!r}: an engine wrote it, with its bytes")
            return trace
        known = header.spec.get("version_bytes", {}).get("dense", EXPERT_BYTES)
        size = self.settings.get("expert_bytes", known)
        spec = {"seed": 0, **header.spec, **_arena(header.layers, header.experts, size)}
        return dataclasses.replace(trace, header=dataclasses.replace(header, spec=spec))


def _arena(layers: int, experts: int, expert_bytes: int) -> dict[str, Any]:
    """Returns what policies are told of an arena that holds every expert and one page."""
    return {
        "driver": "host",
        "hidden": 2048,
        "version_bytes": {"dense": expert_bytes},
        **dict.fromkeys(("page_bytes", "kv_floor_bytes", "slot_bytes"), expert_bytes),
        "page_tokens": 16,
        "slots": layers * experts + 1,
        "shapes": {"blocks": 1},
    }


def read_routing(text: str, home: Path) -> GeneratedRouting:
    """Reads the routing that `text` names: KIND or KIND,KEY=VALUE…, which is drawn, or the
    directory of a trace from `home`, with expert_bytes=N for one that another program recorded.
    Raises UserError for other text, saying what to write."""
    if text.partition(",")[0] in KINDS:
        with user_errors(where=f"routing {text!r}: "):
            found = parse_option("routing", text, dict.fromkeys(KINDS, _SETTINGS))
        return GeneratedRouting(text, found.name, found.settings, None)
    path, _, size = text.partition(",expert_bytes=")
    directory = (home / path).resolve()
    if not directory.is_dir():
        raise UserError(
            f"routing {text!r} is none of {', '.join(KINDS)}, with settings as in "
            f'"{KINDS[0]},layers=12", and no directory of a trace (looked for {directory})'
        )
    settings = {}
    if size:
        with user_errors(where=f"routing {text!r}: expert_bytes "):
            settings = {"expert_bytes": whole(1)(size)}
    found = GeneratedRouting(text, None, settings, directory)
    with user_errors(where=f"routing {text!r}: "):
        trace = found.trace(home, 0, 0, 0, 0)
    if "step.kind" in trace.header.absent:
        raise UserError(
            f"routing {text!r}: the trace does not say which tokens are a prompt's, and a grid "
            "counts decode steps; convert it again with --prompt-tokens N"
        )
    return found
