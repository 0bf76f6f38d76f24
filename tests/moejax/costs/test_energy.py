"""Counters of energy, in a folder like Linux's."""

from moejax.costs.energy import joules, read_energy


def zone(root, name, what, microjoules):
    path = root / name
    path.mkdir(exist_ok=True)
    (path / "name").write_text(f"{what}\n")
    (path / "energy_uj").write_text(f"{microjoules}\n")
    (path / "max_energy_range_uj").write_text("1000000\n")


def test_packages_are_added_and_what_is_within_them_is_not(tmp_path):
    zone(tmp_path, "intel-rapl:0", "package-0", 100)
    zone(tmp_path, "intel-rapl:1", "package-1", 900_000)
    zone(tmp_path, "intel-rapl:0:0", "core", 50)
    begin = read_energy(tmp_path)
    zone(tmp_path, "intel-rapl:0", "package-0", 500_100)
    zone(tmp_path, "intel-rapl:1", "package-1", 150_000)  # began again
    zone(tmp_path, "intel-rapl:0:0", "core", 400_000)
    assert joules(begin, read_energy(tmp_path)) == 0.5 + 0.25


def test_where_nothing_can_be_read_there_is_no_figure(tmp_path):
    assert joules(read_energy(tmp_path), read_energy(tmp_path)) is None
    zone(tmp_path, "intel-rapl:0", "package-0", 1)
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("none")
    assert read_energy(tmp_path) == {}
    (tmp_path / "intel-rapl:0" / "energy_uj").unlink()
    (tmp_path / "intel-rapl:0" / "energy_uj").mkdir()  # as unreadable as without permission
    assert read_energy(tmp_path) == {}
