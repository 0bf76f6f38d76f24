"""Prompts with equal beginnings share KV, named by what they begin with."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from host_offload.memory.kv_cache import Block, KVCache
from moejax.requests.request import Request


class PrefixCache:
    """Blocks that requests publish and find by their names.

    Only what came through the prefill path from the start of the sequence on is shared: KV of
    generated tokens has decode's bits. A prompt that must be computed whole shares nothing.
    """

    def __init__(self, cache: KVCache, enabled: bool):
        self.cache, self.enabled, self.hit_tokens = cache, enabled, 0
        self.block_size = cache.arena.layout.page.block_size

    def held(self, request: Request) -> int:
        """Blocks that the request would find and that take no page, since others hold them."""
        names, count = self._names(request), 0
        last = (len(request.prompt) - 1) // self.block_size
        for name in names[len(request.blocks) : last]:
            if not self.cache.held(name):
                break
            count += 1
        return count

    def find(self, request: Request) -> int:
        """Gives a running request the blocks that go on where it is; returns how many."""
        size, found = self.block_size, 0
        # The last token of a prompt is always computed: what follows it is sampled from it.
        while request.computed + size < len(request.prompt):
            names = self._names(request)
            block = self.cache.lookup(names[len(request.blocks)]) if names else None
            if block is None:
                break
            self.cache.pin([block])
            request.blocks.append(block)
            request.computed += size
            request.pure += size
            found += 1
        request.cached_tokens += found * size
        self.hit_tokens += found * size
        return found

    def publish(self, request: Request, start: int, end: int) -> list[Block]:
        """Publishes the prompt's blocks that tokens [start, end) complete; all before `end` came
        through the prefill path."""
        names, size = self._of_prompt(request), self.block_size
        blocks = []
        for i in range(start // size, min(end // size, len(names))):
            self.cache.publish(request.blocks[i], names[i])
            blocks.append(request.blocks[i])
        return blocks

    def _names(self, request: Request) -> list[bytes]:
        """Names of the prompt's blocks, none where the request cannot go on from shared ones."""
        whole = request.computed == len(request.blocks) * self.block_size
        return self._of_prompt(request) if whole and request.pure == request.computed else []

    def _of_prompt(self, request: Request) -> list[bytes]:
        """Names of the prompt's blocks, none where it shares nothing."""
        if not self.enabled or request.prefill_kind != "prefill":
            return []
        if request.block_keys is None:
            request.block_keys = block_keys(request.prompt, self.block_size)
        return request.block_keys


def block_keys(tokens: Sequence[int], block_size: int) -> list[bytes]:
    """A name for each whole block of a prompt, from its tokens and all before it: equal names mean
    equal KV, as long as all of it came through the prefill path."""
    keys, key = [], b""
    data = np.asarray(tokens, np.int32)
    for end in range(block_size, len(tokens) + 1, block_size):
        # Cryptographic, so that no prompt can be made to read another's KV.
        key = hashlib.blake2b(key + data[end - block_size : end].tobytes(), digest_size=16).digest()
        keys.append(key)
    return keys
