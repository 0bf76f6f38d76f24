"""transformers as a worker: its model of the checkpoint in bfloat16, with its own cache of KV.

All sequences have the first one's context, so scores are comparable for one sequence alone.
"""

from __future__ import annotations

import copy

import numpy as np
import torch
import transformers

from scripts.cpu.engines.protocol import Task, serve


class TorchEngine:
    def __init__(self, task: Task):
        if task.threads:
            torch.set_num_threads(task.threads)
        torch.set_grad_enabled(False)
        self.task = task
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            task.model, dtype=getattr(torch, task.precision or "bfloat16")
        ).eval()
        self.versions = {
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "experts": str(getattr(self.model.config, "_experts_implementation", "eager")),
        }
        # Its bfloat16 products may be very slow: one context is computed, and others are copies.
        tokens = torch.from_numpy(task.decoded()[:1, : task.context]).long()
        cache = self.model(tokens, use_cache=True, logits_to_keep=1).past_key_values
        self._caches = {1: cache, task.batch: copy.deepcopy(cache)}
        self._caches[task.batch].batch_repeat_interleave(task.batch // len(tokens))

    def start(self, batch: int) -> None:
        self._cache = self._caches[batch]

    def decode(self, tokens: np.ndarray, position: int) -> np.ndarray:
        self._cache.crop(position)
        given = torch.from_numpy(tokens).long()[:, None]
        output = self.model(given, past_key_values=self._cache, use_cache=True)
        return output.logits[:, -1].float().numpy()

    def prefill(self, tokens: np.ndarray) -> None:
        self.model(torch.from_numpy(tokens).long()[None], use_cache=True, logits_to_keep=1)

    def bytes_read(self, batch: int) -> None:
        return None


if __name__ == "__main__":
    serve(TorchEngine)
