"""Prompts with equal beginnings share KV blocks, each named by a hash of all tokens up to its
end."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from host_offload.memory.kv_cache import Block, KVCache
from moejax.requests.request import Request


class PrefixCache:
    """Publishes and finds KV blocks of prompts, by name.

    A block is shared only if prefill computed it and all blocks before it, since KV of generated
    tokens has decode's bits. A prompt that must be computed whole shares nothing.
    """

    def __init__(self, cache: KVCache, enabled: bool):
        self.cache, self.enabled, self.hit_tokens = cache, enabled, 0
        self.block_size = cache.arena.layout.page.block_size

    def held(self, request: Request) -> int:
        """Counts blocks that the request would find and that another request or session holds, so
        that they take no further page."""
        names, count = self._names(request), 0
        last = (len(request.prompt) - 1) // self.block_size
        for name in names[len(request.blocks) : last]:
            if not self.cache.held(name):
                break
            count += 1
        return count

    def find(self, request: Request) -> int:
        """Appends shared blocks to a running request, as long as its next block is found. Returns
        how many."""
        size, found = self.block_size, 0
        # The last token of a prompt is always computed, since the next token is sampled from it.
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
        """Publishes the prompt's blocks that tokens [start, end) complete. Prefill must have
        computed all tokens before `end`."""
        names, size = self._of_prompt(request), self.block_size
        blocks = []
        for i in range(start // size, min(end // size, len(names))):
            self.cache.publish(request.blocks[i], names[i])
            blocks.append(request.blocks[i])
        return blocks

    def _names(self, request: Request) -> list[bytes]:
        """Returns the names of the prompt's blocks; none if the request has KV that cannot be
        continued by shared blocks."""
        whole = request.computed == len(request.blocks) * self.block_size
        return self._of_prompt(request) if whole and request.pure == request.computed else []

    def _of_prompt(self, request: Request) -> list[bytes]:
        """Returns the names of the prompt's blocks; none if the prompt shares nothing."""
        if not self.enabled or request.prefill_kind != "prefill":
            return []
        if request.block_keys is None:
            request.block_keys = block_keys(request.prompt, self.block_size)
        return request.block_keys


def block_keys(tokens: Sequence[int], block_size: int) -> list[bytes]:
    """Names each whole block of a prompt by a hash of its tokens and all tokens before them. Equal
    names mean equal KV, if prefill computed it."""
    keys, key = [], b""
    data = np.asarray(tokens, np.int32)
    for end in range(block_size, len(tokens) + 1, block_size):
        # Cryptographic, so that no prompt can be made to read another's KV.
        key = hashlib.blake2b(key + data[end - block_size : end].tobytes(), digest_size=16).digest()
        keys.append(key)
    return keys
