"""`moejax check-gpu --kernels`: what it keeps, leaves for later, and says; with checks of ours."""

import jax
import pytest

from moejax.errors import UserError
from moejax.evaluate.gpu_check import check_kernels, shape_checks
from pallas_kernels.verification import load_table
from pallas_kernels.verification.table import file_name
from tests.pallas_kernels.faulty_checks import toy_job

DEVICE = jax.devices()[0]


def kept(folder):
    found = load_table(folder / file_name(DEVICE.device_kind))
    return {key.removesuffix(" uint16") for key, entry in found.items() if not entry.why}


@pytest.mark.slow
def test_what_was_checked_is_not_checked_again(tmp_path, capsys):
    assert check_kernels(DEVICE, toy_job(2), tmp_path) == 0
    assert kept(tmp_path) == {"fill toy 0", "fill toy 1"}
    capsys.readouterr()
    assert check_kernels(DEVICE, toy_job(4), tmp_path, threads=1) == 0
    first, *lines, last = capsys.readouterr().out.splitlines()
    assert first.startswith("4 checks, 2 of them in ")
    assert [line.split(":")[0] for line in lines] == [f"ok    fill toy {i} uint16" for i in (2, 3)]
    assert last.startswith("2 checked in") and len(kept(tmp_path)) == 4


@pytest.mark.slow
def test_minutes_leave_the_rest(tmp_path, capsys):
    assert check_kernels(DEVICE, toy_job(3), tmp_path, until=0.0) == 0
    assert capsys.readouterr().out.endswith("3 are left: run it again\n")
    assert check_kernels(DEVICE, toy_job(3), tmp_path) == 0
    assert len(kept(tmp_path)) == 3


@pytest.mark.slow
def test_a_wrong_one_is_named_and_left_out(tmp_path, capsys):
    assert check_kernels(DEVICE, toy_job(1), tmp_path) == 0
    path = tmp_path / file_name(DEVICE.device_kind)
    # Of another source: it is checked again, and what was right then is no more.
    path.write_text(path.read_text().replace('"source": "', '"source": "old'))
    job = toy_job(3, wrong=0, **{"lacks memory": 2})
    assert check_kernels(DEVICE, job, tmp_path) == 1
    said = capsys.readouterr().out
    assert "WRONG fill toy 0 uint16: the kernel for" in said
    assert "LEFT  fill toy 2 uint16: " in said and said.endswith("1 are left: run it again\n")
    assert kept(tmp_path) == {"fill toy 1"}


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot be written .*; --tables names another folder"):
        check_kernels(DEVICE, toy_job(1), tmp_path / "file")


@pytest.mark.slow
def test_the_likeliest_checks_come_first():
    keys = [check.key for check in shape_checks(["olmoe", "demo"], ["bfloat16", "float16"])]
    assert len(set(keys)) == len(keys)

    def first(text):
        return next(i for i, key in enumerate(keys) if text in key)

    assert first("offsets 64") < first("int8") < first("int2")  # dense, then other versions
    assert first("384x128 uint16") < first("int8")  # of every shape
    assert max(i for i, key in enumerate(keys) if "bfloat16" in key) < first(" float16")
    assert not any("lossless12" in key and " float16" in key for key in keys)
