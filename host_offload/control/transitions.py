"""Changes versions of experts that always stay resident (DynaExq, section 3.3): it turns a wanted
queue into cells, copies and given-back cells. It is host code over numpy.

The host alone decides which cells exist (`cell_row`, `cell_version`). It adds the cell of a new
copy before the step that makes the copy, and removes the old cell after that step. The device
decides where an expert is: the step's stage list changes its table entry once the bytes are there.
So the host's books are exact once a step was read, and at no time does an entry point to a cell
that the host could give away:

- A cell is given back when the step that changed the entry was read. Steps run on the device one
  after the other, and every later step began with the new entry, so none of them reads the old
  cell. Later writes to the cell come after all of them.
- DynaExq has a pool of cells for each version. Here both versions share slots, cut into cells of
  either when needed. `ResidentSpec.capacity` is so that the most high experts, all others in low
  and the spares of both fit into whole slots of their own; compaction frees a slot whenever the
  cells of a version fit into fewer. So any transition that the two pools would admit is admitted
  (test_one_pool_admits_what_the_papers_two_pools_would).
- Moves within the arena run between two steps and change entries themselves, so the place that they
  leave is free at once. Cells of experts in flight are not moved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from host_offload.control.interface import Policy, Spec, StagedTransfer
from host_offload.control.rules import refuse_writes
from host_offload.control.transfers import Flight, TransferLedger
from host_offload.memory.placement import ResidentSpec, place
from host_offload.memory.tables import Copy, Entry, Move, Residency


def check_resident(policies: Sequence[Policy], resident: ResidentSpec) -> None:
    """Raises PolicyError for policies that cannot run if every expert is resident."""
    # What means nothing there, or would take cells away.
    refuse_writes(
        policies,
        ("cells", "stages"),
        "every expert is resident; leave the policy out, or use a precision that pages",
    )
    refuse_writes(
        policies,
        ("fill_version",),
        "every expert is resident, so no miss fills one; write transitions, or use paged=true",
    )
    if not resident.spares:
        # What takes slots from experts makes room by transitions.
        refuse_writes(
            policies,
            ("transitions", "kv_pages"),
            "the versions are fixed: there are no spare cells; leave the policy out, or add "
            "spares=1 to the precision",
        )


class Transitions(TransferLedger):
    """Transfers if every expert is resident: each copy gets a cell of the pools that all layers
    share.

    resident.step_bytes bounds the bytes of a step. A copy counts from the moment it is listed, so
    copies in flight are within the budget, and there is no separate staging area.
    """

    def __init__(self, spec: Spec, log: Callable[[StagedTransfer], None]):
        super().__init__(spec, log, ("transitions",))
        assert spec.resident is not None
        self.resident = spec.resident
        self._sizes = [max(sizes) for sizes in self._bytes]
        """Bytes of a cell, by version number; all layers share cells."""
        self.capacity = self.resident.capacity[0]
        self._aimed = self.resident.slots
        """Slots that experts should have. They may have more, which they must give away."""
        placed = place(spec.resident)
        contents = placed.contents
        self.pools = placed.pools
        self.cell_row, self.cell_version = contents["cell_row"], contents["cell_version"]
        self.column = contents["owner"][:, : spec.experts]
        """int32[L, E]: the cell that each entry points to after the last step that was read."""
        self.version = contents["version"]
        """int32[L, E]: each expert's version after the last step that was read."""
        self.evicting: list[tuple[int, int]] = []
        """(layer, cell) of old copies to give back before the next step."""
        self._holder = {int(row): place for place, row in np.ndenumerate(self.cell_row) if row >= 0}
        """Arena row → (layer, cell)."""
        self._peak = self.used_bytes
        """Most bytes since the number of slots changed."""
        self._moved_bytes = 0
        """Bytes moved within the arena before the next step."""
        self._vacated: set[int] = set()
        """Slots that those moves left."""
        self.keep_free = 0
        """Slots that are wanted for other use: compaction empties this many, if cells allow, and
        transitions leave them free."""
        self._compacted = np.zeros(2, np.int64)
        """Cells moved so far, and their bytes."""
        self._changed = False

    @property
    def used_bytes(self) -> int:
        """Bytes of all copies: complete ones, those in flight, and those to give back."""
        return sum(self.pools.count_taken(v) * size for v, size in enumerate(self._sizes))

    # ---- more and fewer slots

    @property
    def slots(self) -> int:
        """Slots that experts have."""
        return len(self.pools.slots)

    def aim(self, slots: int) -> list[int]:
        """Sets the number of slots that experts should have, at most their present number. Returns
        the slots that they give up now. Call it before each step until no more are wanted.

        The capacity falls at once, so the policy demotes surplus experts. A slot is given up when
        all high experts and the spares fit into the rest, and when the slot is empty: old copies
        were given back and cells were moved together, within the bounds of a step. Raises
        ValueError for fewer slots than all experts in the last version and the spares need.
        """
        if slots < (least := self.resident.least_slots()):
            lowest = [*self.spec.version_bytes][-1]
            raise ValueError(
                f"experts must keep {least} slots, for all of them in {lowest} and "
                f"{self.resident.spares} spare of each version; {slots} are left"
            )
        self._aimed = min(slots, self.slots)
        self.capacity = self.resident.most_high(self._aimed)
        gone = self.pools.remove(min(self._surplus(), self.pools.free_slots))
        self.keep_free = self._surplus()
        if gone:
            self._peak = self.used_bytes
        return gone

    def add(self, slots: Sequence[int]) -> None:
        """Gives experts more slots, which are empty, and ends the aim for fewer."""
        self.pools.add(slots)
        self._aimed, self.keep_free = self.slots, 0
        self.capacity = self.resident.most_high(self.slots)
        self._peak = self.used_bytes

    def _surplus(self) -> int:
        """Slots beyond the aim that experts can give up now. Experts in transition count as
        high."""
        high = {(int(layer), int(e)) for layer, e in np.argwhere(self.version == 0)}
        high |= {(t.layer, t.expert) for t in self.in_flight if t.version == 0}
        return max(self.slots - max(self._aimed, self.resident.least_slots(len(high))), 0)

    # ---- what is wanted

    def versions_of(self, layer: np.ndarray, expert: np.ndarray, tables: Residency) -> np.ndarray:
        return self.version[layer, expert]

    def entries(self, step: int, tables: Residency, *, between_layers: bool = False) -> list[Entry]:
        """See Transfers. Transitions do not run between layers. Old copies of steps that were read
        are given back first.

        A transition without a cell or budget waits, with all later ones that want the same version.
        Those that want another version overtake, since they make room.
        """
        if between_layers:
            return []
        for layer, cell in self.evicting:
            self._drop(layer, cell)
        self.evicting.clear()
        self._moved_bytes = 0
        self._vacated.clear()
        if self._aimed < self.slots:
            self.keep_free = self._surplus()
        waiting: set[int] = set()

        def find_cell(kind: str, layer: int, expert: int, version: int) -> int | None:
            if version in waiting:
                return None
            columns = np.flatnonzero(self.cell_row[layer] < 0)
            if not columns.size:
                return None
            row = self._reserve(version)
            if row is None:
                waiting.add(version)
                return None
            cell = int(columns[0])
            self.cell_row[layer, cell], self.cell_version[layer, cell] = row, version
            self._holder[row] = layer, cell
            self._changed = True
            return cell

        entries = self._issue(step, tables, find_cell, step_bytes=self.resident.step_bytes)
        while self.pools.free_slots < self.keep_free and self._compact(None):
            pass
        if self._changed:
            cells = {"cell_row": self.cell_row.copy(), "cell_version": self.cell_version.copy()}
            self.changes.contents |= cells
            self._changed = False
        return entries

    def _reserve(self, version: int) -> int | None:
        """Takes a cell of a version. Returns its arena row; None without a free cell or budget."""
        assert self.capacity is not None
        most = self.capacity, *self.resident.capacity[1:]
        if self.pools.count_taken(version) >= most[version] + self.resident.spares:
            return None
        row = self.pools.allocate(version, self.keep_free)
        while row is None and self._compact(version):
            row = self.pools.allocate(version, self.keep_free)
        self._peak = max(self._peak, self.used_bytes)
        return row

    def _compact(self, wanting: int | None) -> bool:
        """Moves cells of one version together, so that a slot becomes free. Returns False if
        nothing can be moved before this step. A step's moves may be carried out in any order
        (pallas_kernels.move), so no cell moves twice, and none to where another one was.

        - `wanting`: the version that wants a cell, whose cells stay; None: any may move.
        """
        flying = self.flying_places()
        moved = {(move.layer, move.cell) for move in self.changes.moves}

        def movable(row: int) -> bool:
            layer, cell = self._holder[row]
            if (layer, cell) in moved:
                return False
            here = np.flatnonzero(self.column[layer] == cell)
            return here.size == 1 and (layer, int(here[0])) not in flying

        for version, size in enumerate(self._sizes):
            most = (self.resident.move_bytes - self._moved_bytes) // size
            most = max(most, int(self._moved_bytes == 0))
            per_slot = self.pools.cells_per_slot[version]
            if version == wanting or most < 1 or self.pools.free_cells(version) < per_slot:
                continue
            pairs = self.pools.compact(version, movable, most, self._vacated)
            for source, target in pairs:
                self._vacated.add(source // self.resident.slot_rows)
                layer, cell = self._holder[target] = self._holder.pop(source)
                self.cell_row[layer, cell] = target
                self.changes.moves.append(Move(layer, cell, target))
            if pairs:
                self._changed = True
                self._moved_bytes += len(pairs) * size
                self._compacted += np.array([len(pairs), len(pairs) * size])
                return True
        return False

    def _drop(self, layer: int, cell: int) -> None:
        """Frees a cell and its place in the arena."""
        row = int(self.cell_row[layer, cell])
        del self._holder[row]
        self.pools.release(row)
        self.cell_row[layer, cell] = -1
        self._changed = True

    # ---- what became of it

    def is_done(self, transfer: StagedTransfer, tables: Residency | None) -> bool:
        assert tables is not None, "a lost step is known by its tables only"
        return bool(tables.owner[transfer.layer, transfer.cell] == transfer.expert)

    def _settle(self, flight: Flight, done: bool) -> None:
        transfer = flight.transfer
        place, cell = (transfer.layer, transfer.expert), transfer.cell
        if done:
            self.evicting.append((transfer.layer, int(self.column[place])))
            self.column[place], self.version[place] = cell, transfer.version
        else:
            self._drop(transfer.layer, cell)
        super()._settle(flight, done)

    def forget(self, step: int) -> None:
        """Does nothing for a step that failed during its dispatch. The device may have run a part
        of it, so the tables of the next step that is read show which transfers were carried out."""

    # ---- what there is

    def stats(self, tables: Residency | None = None) -> dict[str, Any]:
        """See TransferLedger. peak_bytes counts since the slots changed."""
        moves, moved_bytes = self._compacted.tolist()
        return {
            "precision": {
                **self.transition_counts(),
                "queued": self.queued,
                "moves": moves,
                "moved_bytes": moved_bytes,
                "hi": int(np.sum(self.version == 0)),
                "lo": int(np.sum(self.version != 0)),
                "absent": 0,
                "free_slots": self.pools.free_slots,
                "slots": self.slots,
                "hi_capacity": self.capacity,
                "peak_bytes": self._peak,
                "budget_bytes": self.slots * self.resident.slot_rows * self.spec.hidden * 2,
                "step_bytes": self.resident.step_bytes,
                "step_bytes_from": self.resident.step_bytes_from,
            }
        }


class ArrivingTransitions(Transitions):
    """Transitions by the transfer queue, beside the steps: an expert has its new version when the
    last byte of it is there, as DynaExq's handle changes when the copy's event is done (section
    3.3). No step waits for a transition, and one that fails changes nothing.

    Copies begin between two steps and are published between two later ones, by new contents of the
    tables. The device begins a copy when all dispatched steps are done, since the queue does not
    follow their order. An old cell is given back when the first step with the new entry was read.
    """

    def __init__(self, spec: Spec, log: Callable[[StagedTransfer], None]):
        super().__init__(spec, log)
        self._left: list[tuple[int, tuple[int, int]]] = []
        """(first step with the new entry, (layer, cell)) of old copies that steps may still
        read."""

    def publish(self, step: int, ended: Mapping[tuple[int, int], bool]) -> None:
        """Changes the entries of experts whose copies ended, before a step.

        - `ended`: (layer, expert) → whether all bytes are there, of copies that ended since.
        """
        flying, self.flying = self.flying, []
        read = self.evicting
        for flight in flying:
            place = flight.transfer.layer, flight.transfer.expert
            if place not in ended:
                self.flying.append(flight)
                continue
            if ended[place]:
                published = flight.transfer._replace(published=step - 1)
                flight = flight._replace(transfer=published)
                self._changed = True
            self.evicting = []
            self._settle(flight, ended[place])
            self._left += [(step, cell) for cell in self.evicting]
        self.evicting = read

    def entries(self, step: int, tables: Residency, *, between_layers: bool = False) -> list[Entry]:
        """Lists the copies to begin in `changes`; steps carry out none."""
        for layer, expert, version, cell in super().entries(
            step, tables, between_layers=between_layers
        ):
            row = int(self.cell_row[layer, cell])
            self.changes.copies.append(Copy(layer, expert, version, row))
        if self.changes.contents:
            owner = np.full_like(self.cell_row, -1)
            experts = np.arange(self.column.shape[1], dtype=np.int32)[None]
            np.put_along_axis(owner, self.column, experts, axis=1)
            address = np.take_along_axis(self.cell_row, self.column, axis=1)
            where = {"owner": owner, "address": address, "version": self.version.copy()}
            self.changes.contents |= where
        return []

    def settle(self, step: int, staged: np.ndarray | None, tables: Residency | None = None) -> None:
        self.evicting += [cell for first, cell in self._left if first <= step]
        self._left = [left for left in self._left if left[0] > step]
