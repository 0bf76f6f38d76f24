"""Nobody's weights are overwritten before their last read, whatever the order of events."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from host_offload.policies.placement.buffers import DEMAND_BUFFERS, PARTS, Buffers

pytestmark = pytest.mark.slow  # nothing here depends on the version of Python or jax

GROUP, EXPERTS, LAYERS = 2, 4, 6


@given(st.data())
def test_no_buffer_is_overwritten_before_its_last_read(data):
    """Loads, landings, reads and ends of layers in any order, against a memory of what each buffer
    holds: a read finds all parts of its expert from its begin to its end."""
    buffers, layer = Buffers.empty(GROUP), 0
    memory: list[dict[str, tuple[int, int]]] = [{} for _ in buffers.all]
    flying: list[tuple[tuple[int, int], str, int]] = []
    reading: dict[tuple[int, int], int] = {}
    begun: set[tuple[int, int]] = set()
    for _ in range(40):
        ready = [key for key in begun if buffers.is_there(key) and key not in reading]
        ready = [key for key in ready if key[0] == layer]
        actions = ["demand", "ahead", "layer"]
        actions += ["land"] * 3 * bool(flying) + ["read"] * bool(ready) + ["end"] * bool(reading)
        match data.draw(st.sampled_from(actions)):
            case "demand" | "ahead" as what:
                expert = data.draw(st.integers(0, EXPERTS - 1))
                key = (layer + data.draw(st.integers(1, 2)) * (what == "ahead"), expert)
                if buffers.place(key) is not None:
                    with pytest.raises(ValueError, match="is there or on its way"):
                        buffers.begun(key, ahead=what == "ahead")
                elif (new := buffers.begun(key, ahead=what == "ahead")) is not None:
                    buffers, place = new, new.place(key)
                    assert (place >= DEMAND_BUFFERS) == (what == "ahead")
                    assert place not in reading.values()
                    assert not any(where == place for _, _, where in flying)
                    # Who is there for a layer that is not over keeps its buffer.
                    kept = [k for k in memory[place].values() if k in begun and k[0] >= layer]
                    assert not kept
                    memory[place] = {}
                    begun.add(key)
                    flying += [(key, part, place) for part in sorted(PARTS)]
            case "land":
                key, part, place = flying.pop(data.draw(st.integers(0, len(flying) - 1)))
                buffers = buffers.landed(key, part)
                memory[place][part] = key
            case "read":
                key = data.draw(st.sampled_from(sorted(ready)))
                buffers, reading[key] = buffers.read_begun(key), buffers.place(key)
            case "end":
                key = data.draw(st.sampled_from(sorted(reading)))
                assert memory[reading[key]] == dict.fromkeys(PARTS, key)
                buffers = buffers.read_ended(key)
                memory[reading.pop(key)] = {}
                begun.discard(key)
            case "layer":
                if layer < LAYERS:  # also while somebody is read
                    buffers = buffers.layer_ended(layer)
                    layer += 1
        for key, place in reading.items():
            assert memory[place] == dict.fromkeys(PARTS, key)


def test_loads_on_demand_alternate_and_a_third_waits():
    buffers = Buffers.empty(GROUP)
    for expert in range(DEMAND_BUFFERS):
        new = buffers.begun((0, expert), ahead=False)
        assert new is not None
        buffers = new
        for part in PARTS:
            buffers = buffers.landed((0, expert), part)
    assert buffers.begun((0, 2), ahead=False) is None
    buffers = buffers.read_begun((0, 0))
    assert buffers.begun((0, 2), ahead=False) is None  # still read
    buffers = buffers.read_ended((0, 0))
    new = buffers.begun((0, 2), ahead=False)
    assert new is not None and new.place((0, 2)) == 0


def test_an_expert_is_there_when_its_three_parts_are():
    buffers = Buffers.empty(GROUP).begun((1, 3), ahead=True)
    assert buffers is not None
    for part in ("down", "gate"):
        buffers = buffers.landed((1, 3), part)
        assert not buffers.is_there((1, 3))
        with pytest.raises(ValueError, match=r"\(1, 3\) is not there"):
            buffers.read_begun((1, 3))
    with pytest.raises(ValueError, match=r"gate of expert \(1, 3\) is not on its way"):
        buffers.landed((1, 3), "gate")
    assert buffers.landed((1, 3), "up").is_there((1, 3))


def test_groups_rotate_with_layers():
    """What came for layer 1 stays while prefetches for layer 2 come, and makes room for those of
    layer 3 when layer 1 is over; what still flies then lands first."""
    buffers = Buffers.empty(1)
    for key in ((1, 0), (2, 0)):
        new = buffers.begun(key, ahead=True)
        assert new is not None
        buffers = new
    assert buffers.begun((3, 0), ahead=True) is None
    over = buffers.layer_ended(1)
    assert over.begun((3, 0), ahead=True) is None  # its parts still fly
    for part in PARTS:
        over = over.landed((1, 0), part)
    assert over.begun((3, 0), ahead=True) is not None
    assert over.place((2, 0)) is not None


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="give 0 or more"):
        Buffers.empty(-1)
    with pytest.raises(ValueError, match=r"nobody reads expert \(0, 0\)"):
        Buffers.empty(1).read_ended((0, 0))
    assert Buffers.empty(0).begun((1, 0), ahead=True) is None
