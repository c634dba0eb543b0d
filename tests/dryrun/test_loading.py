"""Tensors that ``torch.load`` puts on the GPU are counted, for every form of ``map_location``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.dryrun.running import Run, dry_run

pytestmark = pytest.mark.torch
pytest.importorskip("torch")

OLD = """
import torch
weights = {"weight": torch.zeros(512, 1024), "bias": torch.zeros(512)}
torch.save({"model": weights, "half": weights["weight"][:256], "epoch": 3}, "old.pt")
"""
LOADS = """
import gc, torch
network = torch.nn.Linear(1024, 512, device="cuda")
held = torch.cuda.memory_allocated
begin = held()
places = {
    "gpu": "cuda:0", "device": torch.device("cuda", 0), "dict": {"cpu": "cuda:0"}, "function": lambda stored, _: stored.cuda(0),
    "by torch": lambda stored, _: torch.serialization.default_restore_location(stored, "cuda:0"),
    "host": "cpu", "function, host": lambda stored, place: stored, "left to torch": lambda stored, place: None, "nowhere": None,
}
gc.disable()
for name, place in places.items():
    saved = torch.load("old.pt", map_location=place)
    network.load_state_dict(saved["model"])
    where = {str(one.device) for one in saved["model"].values()} | {str(saved["half"].device)}
    print("loaded", name, held() - begin, *where)
    del saved
    assert held() == begin
own = torch.empty(0, device="cuda")
own.set_(torch.empty(1024, device="cuda").untyped_storage(), 0, (1024,), (1,))
assert held() == begin + 4096
del own
assert held() == begin
optimizer = torch.optim.SGD(network.parameters())
for _ in range(3):
    network(torch.ones(4, 1024, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("loading")
    subprocess.run([sys.executable, "-c", OLD], cwd=folder, check=True, capture_output=True)
    (folder / "script.py").write_text(LOADS)
    return dry_run("--", "script.py", folder=folder, flags=("--json",))


def test_tensors_loaded_onto_the_gpu_count_until_they_are_freed(run: Run):
    assert run.answer["ended"] == "steps taken"
    said = [line.removeprefix("loaded ") for line in run.errors.splitlines() if line.startswith("loaded ")]
    whole = 4 * (512 * 1024 + 512)  # the half is a view of the weight
    on_gpu = [f"{name} {whole} cuda:0" for name in ("gpu", "device", "dict", "function", "by torch")]
    on_host = [f"{name} 0 cpu" for name in ("host", "function, host", "left to torch", "nowhere")]
    assert said == on_gpu + on_host


def test_a_checkpoint_on_the_gpu_is_part_of_the_peak_of_loading(run: Run):
    loading = run.answer["initialisation"]["peak_bytes"]
    assert loading == pytest.approx(2 * 4 * (512 * 1024 + 512), abs=4096 + 8)


EMPTY = """
import torch
from accelerate import init_empty_weights
from accelerate.utils import set_module_tensor_to_device
with init_empty_weights():
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
model[0].requires_grad_(False)
assert [(one.device.type, one.requires_grad) for one in model.parameters()] == [("meta", False)] * 2 + [("meta", True)] * 2
for name, parameter in list(model.named_parameters()):
    set_module_tensor_to_device(model, name, "cuda", torch.zeros(parameter.shape))
assert [(one.device.type, one.requires_grad) for one in model.parameters()] == [("cuda", False)] * 2 + [("cuda", True)] * 2
assert all(isinstance(one, torch.nn.Parameter) for one in model.parameters())
optimizer = torch.optim.SGD(model.parameters())
for _ in range(3):
    model(torch.ones(8, 64, device="cuda")).sum().backward()
    optimizer.step()
"""


def test_accelerate_builds_models_without_weights_and_fills_them(tmp_path: Path):
    """Accelerate makes each new parameter by calling the parameter's class."""
    pytest.importorskip("accelerate")
    (tmp_path / "script.py").write_text(EMPTY)
    assert dry_run("--", "script.py", folder=tmp_path).answer["ended"] == "steps taken"
