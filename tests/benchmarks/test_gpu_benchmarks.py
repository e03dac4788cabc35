"""The benchmarks of `make gpu` run where there is no GPU, and say there what they did not measure."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import gpu
import newton_schulz
import peer_kernels
import products
import step_gpu
from support.interpreted import DEVICE

from muonckpt.optimizer.ground.tensors import Places
from muonckpt.optimizer.newton_schulz.costs import CostTable


def test_a_step_is_measured_and_what_is_not_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    found = step_gpu.measure(step_gpu.SMALL, DEVICE, limit=0)
    step_gpu.show(step_gpu.SMALL, found)
    rows = capsys.readouterr().out
    measured = [name for name, value in found.items() if value is not None]
    assert measured[:4] == ["step", "Newton-Schulz alone", "torch.optim.Muon", "torch.optim.AdamW"]
    assert all(f"| {name} | not measured |" in rows for name, value in found.items() if value is None)
    assert set(step_gpu.ON_GPU) <= found.keys()
    assert (len(measured) == 4) == (DEVICE.type == "cpu")


def test_methods_are_checked_before_they_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    row = newton_schulz.row(Places(((2, 16, 40), (1, 8, 8))), DEVICE, 1, until=0)
    assert set(row["error"]) >= {"torch.optim.Muon", "ours"} and row["median"].keys() == row["faster"].keys()
    newton_schulz.show(row)
    far = {"torch.optim.Muon": newton_schulz.by_torch, "ours": lambda memory, places: torch.zeros_like(memory)}
    monkeypatch.setattr(newton_schulz, "methods", lambda device, compile_too: far)
    with pytest.raises(SystemExit, match="too far"):
        newton_schulz.row(Places(((1, 8, 8),)), DEVICE, 1, until=0)


CHECKOUTS = {
    "flash_muon": "from torch.optim._muon import _zeropower_via_newtonschulz as ns\n"
    "fast_newtonschulz = lambda matrix: ns(matrix, (3.4445, -4.7750, 2.0315), 5, 1e-7)\n",
    "gram_newton_schulz": "import a_package_of_theirs\n",
}


def test_checkouts_of_peers_are_found_and_one_that_does_not_run_says_why(tmp_path, monkeypatch, capsys):
    for module, code in CHECKOUTS.items():
        (tmp_path / f"of {module}").mkdir()
        (tmp_path / f"of {module}" / f"{module}.py").write_text(code)
    monkeypatch.setenv("PEERS", str(tmp_path))
    monkeypatch.setattr(sys, "path", [*sys.path])
    theirs = {name: newton_schulz.by_peer(peer) for name, peer in peer_kernels.found().items()}
    assert theirs.keys() >= {"flash-muon", "gram-newton-schulz"}
    each = {name: theirs[name] for name in ("flash-muon", "gram-newton-schulz")}
    chosen = {"torch.optim.Muon": newton_schulz.by_torch, **each}
    monkeypatch.setattr(newton_schulz, "methods", lambda device, compile_too: chosen)
    row = newton_schulz.row(Places(((2, 8, 24), (1, 8, 8))), DEVICE, 1, until=0)
    assert row["median"].keys() == {"torch.optim.Muon", "flash-muon"}
    newton_schulz.show(row)
    assert "gram-newton-schulz   does not run: ModuleNotFoundError: No module named 'a_pack" in capsys.readouterr().out


def test_gates_are_measured_and_stored(capsys: pytest.CaptureFixture[str]) -> None:
    table = newton_schulz.gates(DEVICE, (8,))
    assert list(table.nanoseconds) == [(8, 8), (8, 32)]
    assert CostTable.from_json(json.dumps(json.loads(table.as_json()))) == table
    assert "8 x 32: torch" in capsys.readouterr().out or DEVICE.type == "cuda"


def test_parts_run_one_after_the_other_and_what_failed_is_said(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    path = [gpu.linked(gpu.ROOT, tmp_path / "linked")]

    def of(script: str, limit: float = 60.0) -> str | None:
        return gpu.run(gpu.Part("part", ("-c", script, "{out}"), limit), tmp_path, path)

    home = "from importlib.util import find_spec as f; import sys; print(f('muonckpt.optimizer').origin, sys.argv[1])"
    assert of(home) is None
    told = capsys.readouterr().out
    assert str(tmp_path / "linked/muonckpt/optimizer") in told and told.count(str(tmp_path)) >= 2
    assert of("raise SystemExit(3)") == "exit code 3"
    assert of("import time; time.sleep(600)", limit=0.5) == "longer than 0.5 s"
    assert {part.name for part in gpu.PARTS} >= {"tests", "products", "step", "newton_schulz", "attest"}
    assert sum(part.limit for part in gpu.PARTS) < 500


@pytest.mark.skipif(DEVICE.type == "cuda", reason="they are measured here")
def test_products_are_not_measured_without_a_gpu(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["products.py"])
    products.main()
    assert capsys.readouterr().out == "no NVIDIA GPU: not measured\n"
    assert products.flops(2, 3, 5) == {"gram": 90, "square": 54, "added": 180}
