"""``zeroplan record share`` copies a record's sizes and nothing private, and overwrites no file."""

import errno
import json
import os
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_args, get_origin, get_type_hints

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.cli.command import Run
from tests.on_gpus import gpu_check
from zeroplan.errors import SpecError
from zeroplan.measurement import Measurement
from zeroplan.records import read_record
from zeroplan.script_card import RankOnCard
from zeroplan.verify.cases.results import Result, read_results
from zeroplan.verify.cases.sharing import KEPT, KEYS, shared

#: Marks private text: no text that a copy may contain has these letters.
PRIVATE = "Zq"
HIDDEN = (
    f"/home/{PRIVATE}-ann/runs/7", f"node17.{PRIVATE}.example.com", f"GPU-{PRIVATE}8f3a-55d2-4f5e-9d1b-0123456789ab",
    f"AWS_SECRET={PRIVATE}", f"{PRIVATE}-llama-70b", f"\\\\{PRIVATE}\\share", f"aten::{PRIVATE}", f"NVIDIA {PRIVATE}",
)  # fmt: skip
LINES = (Path(__file__).parents[1] / "on_gpus/records/h100-one-80gb.jsonl").read_text().splitlines()
RESULT = next(one for one in map(json.loads, LINES) if one["record"] and one["task"]["job"]["cluster"]["gpu"])
FULL = [line for line in LINES if '"outcome":"out of memory"' in line]
RECORD = RESULT["record"]
RANK = {
    "rank": 1, "gpus": 2, "alone": False, "ended": "steps taken", "settings": "default",
    **{key: RECORD[key] for key in ("environment", "card", "initialisation", "steps")},
}  # fmt: skip
ON_CARD = {"schema_version": 1, "agrees": True, "measured": [RANK], "predicted": {"command": [f"/home/{PRIVATE}/train.py"]}}
KINDS = {"record.json": RECORD, "results.jsonl": RESULT, "on-card.json": ON_CARD}


def written(folder: Path, name: str, data: object) -> Path:
    (folder / name).write_text(json.dumps(data) + "\n", encoding="utf-8")
    return folder / name


def places(data: object, way: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
    """Return the path to every text in the data."""
    if isinstance(data, str):
        return [way]
    pairs = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [found for key, one in pairs for found in places(one, (*way, key))]


def keys(data: object, way: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
    """Return the path to every table with names as keys: sizes by kind, versions by package."""
    pairs = list(data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ())
    named = [(*way, key) for key, _ in pairs if key in ("kinds", "held_kinds", "packages")]
    return [*named, *(found for key, one in pairs for found in keys(one, (*way, key)))]


def at(data: object, way: tuple[object, ...]) -> object:
    for key in way:
        data = data[key]
    return data


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_text_outside_the_allowed_lists_is_copied(name: str, tmp_path: Path, data: st.DataObject):
    changed = json.loads(json.dumps(KINDS[name]))
    text = data.draw(st.sampled_from(HIDDEN) | st.tuples(st.text(), st.text()).map(PRIVATE.join))
    way = data.draw(st.sampled_from([*places(changed), *keys(changed)]))
    if isinstance(at(changed, way), str):
        at(changed, way[:-1])[way[-1]] = text
    else:
        at(changed, way)[text] = text if way[-1] == "packages" else 1
    path = written(tmp_path, name, changed)
    before = path.read_bytes()
    try:
        copy = shared(path)
    except SpecError:
        copy = None  # a field with a fixed list of values refuses the file
    assert copy is None or PRIVATE not in copy.content
    assert path.read_bytes() == before


def test_every_rule_is_for_an_existing_field():
    seen, found, pending = set(), set(), [Measurement, RankOnCard, Result]
    while pending:
        one = pending.pop()
        pending += [arm for arm in get_args(one) if arm is not Ellipsis]
        if get_origin(one) is None and is_dataclass(one) and one not in seen:
            seen.add(one)
            found |= {f"{one.__name__}.{field.name}" for field in fields(one)}
            pending += get_type_hints(one, include_extras=True).values()
    assert {*KEPT, *KEYS} <= found


def test_a_copy_has_the_same_sizes_and_names_of_the_catalogue(tmp_path: Path, run: Run):
    path, out = written(tmp_path, "mine.json", RECORD), tmp_path / "out"
    code, said, _ = run("record", "share", path, "--out", out)
    (copy,) = out.iterdir()
    assert code == 0
    assert str(copy) in said
    before, after = read_record(path), read_record(copy)
    assert (after.job, after.card, after.collectives) == (before.job, before.card, before.collectives)
    assert [one.peak.peak_bytes for one in after.steps] == [one.peak.peak_bytes for one in before.steps]
    assert [one.held_kinds for one in after.steps] == [one.held_kinds for one in before.steps]
    assert after.environment.device == before.environment.device
    assert "left out: remarks: " in said
    compared = [json.loads(run("compare", file, "--json")[1])["comparisons"][0] for file in (path, copy)]
    assert [one.pop("name") for one in compared] == ["mine", copy.stem]
    assert all(one.pop("measurement") for one in compared)
    assert compared[0] == compared[1]


def test_private_names_of_models_and_gpus_are_left_out_and_sizes_kept(tmp_path: Path):
    changed = json.loads(json.dumps(RECORD))
    changed["job"]["model"]["name"] = "zeus-70b-internal"
    changed["job"]["cluster"]["gpu"] |= {"name": "lab-card", "full_name": "Lab card", "aliases": ["lab"]}
    changed["card"]["name"] = "NVIDIA A100-SXM4-40GB MIG 3g.20gb"
    changed["environment"]["platform"] = "Linux-5.15.0-1043-zeus-x86_64-with-glibc2.35"
    changed["environment"]["packages"]["torch"] = "2.13.0+zeus.7"
    copy = shared(written(tmp_path, "mine.json", changed))
    record = read_record(written(tmp_path, copy.name, json.loads(copy.content)))
    assert not {"zeus", "lab-card", "Lab card"} & {word for word in ("zeus", "lab-card", "Lab card") if word in copy.content}
    assert record.job.model.hidden_size == RECORD["job"]["model"]["hidden_size"]
    assert record.job.cluster.gpu.memory_bytes.value == RECORD["job"]["cluster"]["gpu"]["memory_bytes"]["value"]
    assert record.card.name == "NVIDIA A100-SXM4-40GB MIG 3g.20gb"
    assert record.environment.platform == "Linux-5.15.0-x86_64-glibc2.35"
    assert record.job.cluster.gpu.name == "left out"
    assert ("job.model.name", "zeus-70b-internal", "") in copy.left_out


DRIVERS = (
    "NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA B200", "NVIDIA GH200 480GB", "NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe",
    "NVIDIA L40S", "NVIDIA GeForce RTX 4090", "NVIDIA RTX 6000 Ada Generation", "NVIDIA RTX PRO 6000 Blackwell Server Edition",
    "Tesla T4", "Tesla V100-SXM2-32GB", "AMD Instinct MI300X", "NVIDIA GeForce RTX 4070 Ti SUPER", "NVIDIA H100 NVL",
)  # fmt: skip


def test_only_names_that_drivers_give_to_gpus_are_kept():
    for kept in (KEPT["CardMeasured.name"], KEPT["Result.card"]):
        assert [kept(name) for name in DRIVERS] == list(DRIVERS)
        assert {kept(name) for name in ("NVIDIA", "zeus-a100", "NVIDIA H100 of zeus", "NVIDIA H100\nroot", "node17")} == {""}


def test_a_full_disk_leaves_no_copy(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch):
    def no_room(*_: object, **__: object):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("zeroplan.whole.put", no_room)
    code, out, err = run("record", "share", written(tmp_path, "mine.json", RECORD), "--out", tmp_path / "out")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "No space left on device" in err
    assert not list((tmp_path / "out").iterdir())


def test_shared_results_have_numbers_for_the_names_of_cases(tmp_path: Path, run: Run):
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(LINES[:3] + FULL[:1]) + "\n")
    assert run("record", "share", path, path, "--out", tmp_path / "out")[0] == 0
    copies = [read_results(tmp_path / "out" / name) for name in ("results.jsonl", "2-results.jsonl")]
    assert copies[0] == copies[1]
    assert [one.name for one in copies[0]] == [f"case {number}" for number in range(1, 5)]
    assert gpu_check.problems(tmp_path / "out" / "results.jsonl") == []
    assert "out of memory" in [one.outcome for one in copies[0]]
    assert [one.outcome for one in copies[0]] == [one.outcome for one in read_results(path)]


BROKEN = {
    "cut off": json.dumps(RECORD)[:-40],
    "twice": '{"schema_version": 1, "schema_version": 1}',
    "deep": "[" * 200_000,
    "a list": "[]",
    "no ranks": '{"measured": [7]}',
    "another key": json.dumps({**RECORD, "hostname": "node17"}),
    "a workload": json.dumps({**RECORD, "workload": "mine:train"}),
    "a huge number": json.dumps(RECORD).replace('"rank": 0', '"rank": 1' + "0" * 5000, 1),
    "not UTF-8": "\udcff",
}


@pytest.mark.parametrize("what", BROKEN)
@pytest.mark.parametrize("ending", ["json", "jsonl"])
def test_a_broken_or_hostile_file_is_refused_in_one_line(what: str, ending: str, tmp_path: Path, run: Run):
    (tmp_path / f"bad.{ending}").write_bytes(BROKEN[what].encode("utf-8", "surrogateescape") + b"\n")
    good = written(tmp_path, "good.json", RECORD)
    code, out, err = run("record", "share", good, tmp_path / f"bad.{ending}", "--out", tmp_path / "out")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "Traceback" not in err
    assert not (tmp_path / "out").exists()  # one bad file: none of the files is copied


def test_no_file_is_overwritten(tmp_path: Path, run: Run):
    path = written(tmp_path, "mine.json", RECORD)
    run("record", "share", path, "--out", tmp_path / "out")
    (copy,) = (tmp_path / "out").iterdir()
    copy.write_text("kept")
    code, _, err = run("record", "share", path, "--out", tmp_path / "out")
    assert (code, copy.read_text()) == (2, "kept")
    assert "no file is replaced" in err
    code, _, err = run("record", "share", path, "--out", path)
    assert (code, json.loads(path.read_text())) == (2, RECORD)
    assert "cannot be written to" in err


def test_a_symlink_with_the_name_of_the_copy_is_not_followed(tmp_path: Path, run: Run):
    path, target = written(tmp_path, "mine.json", RECORD), tmp_path / "target"
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / shared(path).name).symlink_to(target)
    assert run("record", "share", path, "--out", tmp_path / "out")[0] == 2
    assert not target.exists()
