"""Reads torchtitan's Llama 3: the answer is for torchtitan's own modules if these are modelled."""

from __future__ import annotations

from pathlib import Path

import pytest

from zeroplan import job
from zeroplan.errors import SpecError
from zeroplan.resolve import Request, resolve

CONFIGURATION = """
[model]
name = "{name}"
flavor = "8B"
[training]
local_batch_size = 1
seq_len = 8192
[parallelism]
data_parallel_shard_degree = 8
{degree}
[activation_checkpoint]
mode = "full"
"""


def _file(folder: Path, name: str = "llama3", degree: str = "") -> str:
    written = folder / "titan.toml"
    written.write_text(CONFIGURATION.format(name=name, degree=degree), encoding="utf-8")
    return str(written)


def test_they_are_counted(tmp_path: Path):
    answer = resolve(Request(from_file=_file(tmp_path)))
    assert answer.job.recipe.fsdp2.modules == "torchtitan"
    assert any("own modules are counted, since its file was read" in note for note in answer.notes)
    assert not any("counted as transformers' are" in note for note in answer.notes)


@pytest.mark.parametrize(
    ("file", "said", "why"),
    [
        ({"degree": "tensor_parallel_degree = 2"}, {}, "not modelled with tp=2"),
        ({}, {"lora_rank": 8}, "not modelled with adapters or frozen parts"),
        ({}, {"keep_logits": True}, "not modelled with keep_logits"),
        ({"name": "qwen3"}, {}, "counted as transformers' are"),
    ],
    ids=["a degree", "adapters", "logits", "another model"],
)
def test_where_they_are_not_modelled_a_note_says_why(tmp_path: Path, file: dict[str, str], said: dict[str, object], why: str):
    answer = resolve(Request(from_file=_file(tmp_path, **file), **said))
    assert answer.job.recipe.fsdp2.modules == "transformers"
    assert any(why in note for note in answer.notes), answer.notes
    assert any("counted as transformers' are" in note for note in answer.notes), answer.notes


def test_what_is_asked_for_beside_the_file_counts(tmp_path: Path):
    file = _file(tmp_path)
    for answer in (
        resolve(Request(from_file=file, modules="transformers")),
        resolve(Request(from_file=file), chosen=("fsdp2.modules",)),
    ):
        assert answer.job.recipe.fsdp2.modules == "transformers"
        assert any("counted as transformers' are" in note for note in answer.notes)


def test_the_flag_is_the_option():
    assert job(model="llama-3.1-8b", gpus=8, modules="torchtitan").recipe.fsdp2.modules == "torchtitan"
    with pytest.raises(SpecError, match="a qwen3 model are not modelled; use a Llama, or --modules transformers"):
        job(model="qwen3-8b", gpus=8, modules="torchtitan")


@pytest.mark.parametrize(
    ("compiled", "parts"),
    [
        ("enable = true", ("compiled-blocks", "compiled-loss")),
        ('enable = true\ncomponents = ["loss"]', ("compiled-loss",)),
        ("enable = false", ()),
    ],
    ids=["all", "the loss", "nothing"],
)
def test_what_it_compiles_is_counted_as_compiled(tmp_path: Path, compiled: str, parts: tuple[str, ...]):
    file = _file(tmp_path, degree=f"[compile]\n{compiled}")
    answer = resolve(Request(from_file=file))
    assert answer.job.recipe.fused_parts == parts
    assert any("as torch.compile runs it" in note for note in answer.notes) is bool(parts)
    assert resolve(Request(from_file=file, fused_kernels="rms-norm")).job.recipe.fused_parts == ("rms-norm",)


def test_a_note_names_the_compiler_where_other_modules_are_counted(tmp_path: Path):
    answer = resolve(Request(from_file=_file(tmp_path, degree="tensor_parallel_degree = 2\n[compile]\nenable = true")))
    assert (answer.job.recipe.fsdp2.modules, answer.job.recipe.fused_parts) == ("transformers", ())
    assert any("counted without torch.compile" in note for note in answer.notes), answer.notes
    chosen = resolve(Request(from_file=_file(tmp_path, degree="[compile]\nenable = true"), modules="torchtitan"))
    assert chosen.job.recipe.fused_parts == ("compiled-blocks", "compiled-loss")


def test_selective_recomputation_is_counted_as_compiled_too(tmp_path: Path):
    file = Path(_file(tmp_path, degree="[compile]\nenable = true"))
    file.write_text(
        file.read_text(encoding="utf-8").replace('"full"', '"selective"\nselective_ac_option = "op"'), encoding="utf-8"
    )
    recipe = resolve(Request(from_file=str(file))).job.recipe
    assert (recipe.recompute, recipe.fused_parts) == ("selective", ("compiled-blocks", "compiled-loss"))


def test_where_that_is_not_modelled_a_note_says_why(tmp_path: Path):
    file = _file(tmp_path, degree="[compile]\nenable = true")
    answer = resolve(Request(from_file=file, float8_recipe="mxfp8", gpu="b200"))
    assert answer.job.recipe.fused_parts == ()
    assert any("compiled blocks with float8_recipe 'mxfp8'" in note for note in answer.notes), answer.notes


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_compiled_float8_is_read(tmp_path: Path, recompute: str):
    file = Path(_file(tmp_path, degree="[compile]\nenable = true"))
    text = file.read_text(encoding="utf-8").replace("[training]", 'converters = ["quantize.linear.float8"]\n[training]')
    file.write_text(text.replace('"full"', f'"{recompute}"\nselective_ac_option = "op"'), encoding="utf-8")
    recipe = resolve(Request(from_file=str(file))).job.recipe
    assert (recipe.recompute, recipe.float8_recipe, recipe.fsdp2.modules) == (recompute, "tensorwise", "torchtitan")
    assert recipe.fused_parts == ("compiled-blocks", "compiled-loss")
