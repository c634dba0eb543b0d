"""Scripts that save, move, copy and delete checkpoints: a dry run writes no weights, and files from before the run stay."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dryrun.running import Run, dry_run

pytestmark = pytest.mark.torch
pytest.importorskip("torch")

SCRIPT = """
import os, pathlib, shutil, torch
network = torch.nn.Linear(64, 64, device="cuda")
optimizer = torch.optim.AdamW(network.parameters())

def save(name):
    torch.save({"model": network.state_dict()}, name)
    return name

for step in range(3):
    network(torch.ones(4, 64, device="cuda")).sum().backward()
    optimizer.step()
    os.replace(save("last.tmp"), "last.pt")
    os.replace("last.pt", "renamed.pt")
    os.rename(save(f"folder/{step}.tmp"), f"folder/{step}.pt")
    shutil.move(save(f"moved{step}.tmp"), "folder")
    pathlib.Path(save(pathlib.Path("path.tmp"))).replace("path.pt").rename("path2.pt").unlink()
    shutil.copyfile(save("checkpoint.pth"), "best.pth")
    shutil.copy2("best.pth", "folder")
    os.remove("best.pth")
    os.remove("old.pt")  # of a run before
    os.rename(save("old.tmp"), "old.pt")
    os.unlink("latest")
    os.symlink("old.pt", "latest")
    os.rename("previous.pt", "previous.bak")
    shutil.rmtree("before")
    os.makedirs("new", exist_ok=True)
    save("new/weights.pt")
    os.rename("new", "before")
    assert torch.load("before/weights.pt")["model"]["bias"].shape == (64,)
    os.replace(save("before/weights.tmp"), "before/weights.pt")
    open("own.txt", "w").write("own")
    os.replace("own.txt", "final.txt")
    os.makedirs(f"whole{step}.tmp")
    save(f"whole{step}.tmp/weights.pt")
    os.rename(f"whole{step}.tmp", f"whole{step}")
    os.remove(f"whole{step}/weights.pt")
    assert os.path.getsize(save("size.pt")) > 4 * (64 * 64 + 64) and pathlib.Path("size.pt").is_file()
    os.replace("size.pt", "size2.pt")
    assert os.path.exists("size2.pt") and not os.path.exists("size.pt")
    with open("opened.pt", "wb") as file:
        torch.save(network.state_dict(), file)
    open("notes.txt", "w").write("new")
    assert open("notes.txt").read() == "new"
    pathlib.Path("notes.txt").write_text(f"step {step}")
    with open("log.txt", "a") as file:
        file.write(f" {step}")
    assert open("log.txt").read() == "log.txt of a real run" + "".join(f" {one}" for one in range(step + 1))
    print("saved all", pathlib.Path("notes.txt").read_text())
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with checkpoints of an earlier run."""
    made = tmp_path_factory.mktemp("unwritten")
    for name in ("last.pt", "old.pt", "previous.pt", "path.pt", "last.tmp", "best.pth", "before/weights.pt", "folder/0.pt",
                 "opened.pt", "notes.txt", "log.txt"):  # fmt: skip
        (made / name).parent.mkdir(exist_ok=True)
        (made / name).write_text(f"{name} of a real run")
    (made / "latest").symlink_to("old.pt")
    (made / "script.py").write_text(SCRIPT)
    return made


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    return dry_run("--", "script.py", folder=folder, flags=("--json",))


def test_a_script_can_move_copy_and_delete_unwritten_checkpoints(run: Run):
    assert run.answer["ended"] == "steps taken"
    assert run.errors.count("saved all") == run.errors.count("saved all step") == 2
    replaced = {one["what"] for one in run.answer["stood_in"]}
    assert {
        "torch.save",
        "moving of saved files",
        "copying of saved files",
        "deleting of older checkpoints",
        "writing over files from before this run",
    } <= replaced


def test_files_from_before_the_run_stay_and_no_weights_are_written(run: Run, folder: Path):
    assert run.code == 0
    files = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}
    links = {"latest": "old.pt of a real run"}
    real = ("last.pt", "old.pt", "previous.pt", "path.pt", "last.tmp", "best.pth", "before/weights.pt", "folder/0.pt",
            "opened.pt", "notes.txt", "log.txt")  # fmt: skip
    assert files == {name: f"{name} of a real run" for name in real} | links | {"script.py": SCRIPT, "final.txt": "own"}
    assert (folder / "latest").is_symlink()
