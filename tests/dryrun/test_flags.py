"""`zeroplan dryrun` refuses flags that would have no effect, in one line with the way out."""

from __future__ import annotations

from pathlib import Path

import pytest

from zeroplan.cli.app import main
from zeroplan.cli.dryrun_flags import Flags


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("--tolerance 0.02", "--tolerance 0.02 is for the comparison with a GPU; add --backend cuda, or leave it out"),
        ("--force", "--force overwrites a file, but no flag writes one; add --save FILE, or leave --force out"),
        ("--until-end --steps 3", "--steps has no effect beside --until-end, which does not stop the script after its steps"),
        ("--show a.gz --gpus 8", "--gpus has no effect beside --show, which runs nothing; leave one of them out"),
        ("--show a.gz --imbalance 1.5", "--imbalance has no effect beside --show"),
        ("--against a.gz -v", "--verbose has no effect beside --against, which prints the changes instead of the answer"),
        ("--backend cuda -v", "--verbose has no effect beside --backend cuda, which compares a dry run with a GPU"),
        ("--backend cuda --against a.gz --steps 3", "--steps has no effect beside --against"),
        ("--imbalance 0.5", "--imbalance '0.5' is not a factor from 1 on; write 1.5"),
        ("--timeout soon", "--timeout 'soon' is not a number of seconds from 1 on; write 600"),
        ("--profile own", "--profile own goes into the file of a saved run; add --save FILE"),
    ],
)
def test_a_flag_without_effect_is_refused(tmp_path: Path, monkeypatch, capsys, typed: str, says: str):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("raise SystemExit('it ran')")
    with pytest.raises(SystemExit) as ended:
        main(["dryrun", *typed.split(), "--", "train.py"])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"zeroplan: {says}")


def test_the_rules_name_flags_that_exist():
    for rule in Flags(backend="cuda", against="a", show="b", until_end=True)._rules():
        assert {flag.removeprefix("--").replace("-", "_") for flag in rule.without_effect} <= set(Flags._fields)
