"""Prompts with equal beginnings share KV blocks, each named by a hash of all tokens up to its
end."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from host_offload.memory.kv_cache import Block, KVCache
from host_offload.memory.layout import PREFILL_STEP
from moejax.requests.request import Request

STATE_TOKENS = 1024
"""A copy of the state is kept after so many tokens of a prompt, and near its end."""


class PrefixCache:
    """Publishes and finds KV blocks of prompts, by name.

    A block is shared only if prefill computed it and all blocks before it, since KV of generated
    tokens has decode's bits. A prompt that must be computed whole shares nothing. In models with
    state, prompts share blocks up to the last copy of a state.
    """

    def __init__(self, cache: KVCache, enabled: bool):
        self.cache, self.enabled, self.hit_tokens = cache, enabled, 0
        self.page = cache.arena.layout.page
        self.block_size = self.page.block_size

    def held(self, request: Request) -> int:
        """Counts blocks that the request would find and that another request or session holds, so
        that they take no further page."""
        names, first = self._names(request), len(request.blocks)
        rows = self._match(request, names, first)
        return sum(self.cache.held(name) for row in rows for name in row if name is not None)

    def find(self, request: Request) -> int:
        """Appends shared blocks to a running request, as far as they are found. Returns for how
        many times `block_size` tokens."""
        names = self._match(request, self._names(request), len(request.blocks))
        rows = [
            [None if name is None else self.cache.lookup(name) for name in row] for row in names
        ]
        self.cache.pin(block for row in rows for block in row if block is not None)
        if rows and self.page.state_pages:
            self._resume(request, self._of_prompt(request)[len(request.blocks) + len(rows) - 1])
        tokens = len(rows) * self.block_size
        gone = request.blocks.append_seen(rows, request.computed + tokens)
        self.cache.unpin(gone)
        self.cache.release(gone)
        request.computed += tokens
        request.pure += tokens
        request.cached_tokens += tokens
        self.hit_tokens += tokens
        return len(rows)

    def _match(self, request: Request, names: list[bytes], first: int) -> list[list[bytes | None]]:
        """Returns the names of the published blocks of each group that continue a request's KV from
        block `first` on; None for blocks of a group that tokens after all these do not see."""
        # The last token of a prompt is always computed, since the next token is sampled from it.
        last = min((len(request.prompt) - 1) // self.block_size, len(names))
        groups, has = range(self.page.groups), self.cache.has
        whole = [group for group in groups if self.page.windows[group] is None]
        end = first
        while end < last and all(has(_of_group(names[end], group)) for group in whole):
            end += 1
        for stop in range(end, first, -1):
            if not all(map(has, self._of_state(names[stop - 1]))):
                continue
            starts = [self.page.first_block(group, stop * self.block_size) for group in groups]
            seen = (
                _of_group(names[i], group)
                for group in groups
                if group not in whole
                for i in range(max(starts[group], first), stop)
            )
            if all(map(has, seen)):
                return [
                    [_of_group(names[i], g) if i >= starts[g] else None for g in groups]
                    for i in range(first, stop)
                ]
        return []

    def _of_state(self, name: bytes) -> list[bytes]:
        """Names the blocks of the state after a block."""
        return [name + b"state" + i.to_bytes(2) for i in range(self.page.state_pages)]

    def _resume(self, request: Request, name: bytes) -> None:
        """Makes a request go on from the published state after a block."""
        self.cache.unpin(request.blocks.resumed)
        self.cache.release(request.blocks.resumed)
        found = map(self.cache.lookup, self._of_state(name))
        request.blocks.resumed = [block for block in found if block is not None]
        self.cache.pin(request.blocks.resumed)

    def publish_state(self, request: Request, end: int) -> list[Block]:
        """Publishes new blocks for the state after `end` tokens, if it is worth it and there is
        room. The caller holds them until a step has written them."""
        names, size = self._of_prompt(request), self.block_size
        last = (len(request.prompt) - 1) // PREFILL_STEP * PREFILL_STEP
        if not names or not self.page.state_pages or request.pure != end:
            return []
        if end % PREFILL_STEP or (end != last and end % STATE_TOKENS):
            return []
        keys = self._of_state(names[end // size - 1])
        # Room is left for sequences that grow.
        room = self.cache.available - self.cache.arena.pages // 8
        if room < len(keys) or any(map(self.cache.has, keys)):
            return []
        blocks = self.cache.allocate(len(keys))
        for block, key in zip(blocks, keys, strict=True):
            self.cache.publish(block, key)
        return blocks

    def publish(self, request: Request, start: int, end: int) -> list[Block]:
        """Publishes the prompt's blocks that tokens [start, end) complete. Prefill must have
        computed all tokens before `end`."""
        names, size = self._of_prompt(request), self.block_size
        blocks = []
        for i in range(start // size, min(end // size, len(names))):
            for group, block in enumerate(request.blocks.at(i)):
                if block is not None:
                    self.cache.publish(block, _of_group(names[i], group))
                    blocks.append(block)
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


def _of_group(name: bytes, group: int) -> bytes:
    """Names the block of one group of pages."""
    return name if group == 0 else name + bytes([group])


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
