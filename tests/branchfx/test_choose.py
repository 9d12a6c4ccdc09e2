"""The break-even: predicted work, measured rates, and the cache that keeps them."""

from __future__ import annotations

import json
import pathlib

import platformdirs
import pytest
import torch

from branchfx.runtime import choose
from branchfx.runtime.machine import MachineRates, machine_rates
from branchfx.runtime.work import Work
from branchfx.token_tree import build_token_tree
from tests.batches import group

RATES = MachineRates(1e11, 1e10, 1e-3, 1e-7)
SMALL, LARGE = Work(1e6, 0.0, 1e5), Work(1e11, 1e10, 1e8)


@pytest.fixture
def _known_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "machine_rates", lambda device: RATES)


@pytest.mark.usefixtures("_known_rates")
@pytest.mark.parametrize(
    ("before", "part", "shared_length", "pays"),
    [
        pytest.param(LARGE, 0.25, 40, True, id="much is saved"),
        pytest.param(SMALL, 0.25, 40, False, id="less is saved than the tree costs"),
        pytest.param(LARGE, 1.0, 40, False, id="nothing is saved"),
        pytest.param(LARGE, 0.25, 0, False, id="no token is shared"),
    ],
)
def test_sharing_pays_when_more_is_saved_than_the_tree_costs(
    before: Work, part: float, shared_length: int, pays: bool
) -> None:
    batch = group(4, shared_length, 8)
    tree = build_token_tree([batch.ids], None)
    assert choose.worth_sharing(before, before.times(part), tree, [batch.ids]) is pays


@pytest.mark.usefixtures("_known_rates")
def test_a_backward_counts() -> None:
    batch = group(4, 40, 8)
    tree = build_token_tree([batch.ids], None)
    before = Work(2e8, 0.0, 0.0)
    assert choose.worth_sharing(before, Work(), tree, [batch.ids])
    with torch.no_grad():
        assert choose.worth_sharing(before.times(0.4), Work(), tree, [batch.ids]) is False


@pytest.mark.parametrize("broken", [None, "not json", "[1]", '{"x": {"flops_per_second": 1}}'])
def test_rates_are_measured_once_a_machine(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, broken: str | None
) -> None:
    monkeypatch.setattr(platformdirs, "user_cache_dir", lambda name: str(tmp_path / name))
    path = tmp_path / "branchfx" / "machine-1.json"
    if broken is not None:
        path.parent.mkdir()
        path.write_text(broken)
    machine_rates.cache_clear()
    first = machine_rates("cpu")
    assert all(x > 0 for x in (first.flops_per_second, first.bytes_per_second))
    assert len(json.loads(path.read_text())) == 1
    machine_rates.cache_clear()
    assert machine_rates("cpu") == first
    machine_rates.cache_clear()


def test_rates_need_no_writable_cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(platformdirs, "user_cache_dir", lambda name: str(tmp_path / "file" / name))
    machine_rates.cache_clear()
    assert machine_rates("cpu").flops_per_second > 0
    machine_rates.cache_clear()
