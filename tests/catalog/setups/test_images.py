"""The size of an image that a trainer's file allows, and vision-language models that it names."""

from __future__ import annotations

from pathlib import Path

import pytest

from zeroplan.catalog.model import model
from zeroplan.resolve import Request, Resolved, resolve

SWIFT = "{limit} NPROC_PER_NODE=2 swift sft --model {model} --dataset a --tuner_type full --deepspeed zero2 --max_length 4096\n"
FACTORY = """
model_name_or_path: {model}
stage: sft
do_train: true
finetuning_type: full
bf16: true
cutoff_len: 4096
dataset: a
template: qwen2_vl
output_dir: out
"""


def resolved(tmp_path: Path, name: str, text: str, **flags: object) -> Resolved:
    file = tmp_path / name
    file.write_text(text)
    return resolve(Request(from_file=str(file), gpu="h100-sxm-80gb", gpus=2, **flags))  # type: ignore[arg-type]


@pytest.mark.parametrize(("limit", "name", "tokens"), [
    ("MAX_PIXELS=1003520", "Qwen/Qwen2.5-VL-7B-Instruct", 1280),
    ("MAX_PIXELS=602112", "Qwen/Qwen2.5-VL-3B-Instruct", 768),
    ("IMAGE_MAX_TOKEN_NUM=1024", "Qwen/Qwen3-VL-4B-Instruct", 1024),
    ("", "Qwen/Qwen2.5-VL-7B-Instruct", 729),
    ("MAX_PIXELS=1003520", "OpenGVLab/InternVL3-8B", 1280),  # tiles: the default image has four, and one of the whole
])  # fmt: skip
def test_an_image_is_as_large_as_a_script_of_ms_swift_allows(tmp_path: Path, limit: str, name: str, tokens: int) -> None:
    vision = resolved(tmp_path, "train.sh", SWIFT.format(limit=limit, model=name)).job.model.vision
    assert vision is not None
    assert (vision.images, vision.tokens_per_image) == (1, tokens)


def test_an_image_is_as_large_as_llama_factory_makes_it(tmp_path: Path) -> None:
    text = FACTORY.format(model="Qwen/Qwen3-VL-4B-Instruct") + "image_max_pixels: 262144\n"
    found = resolved(tmp_path, "sft.yaml", text)
    vision = found.job.model.vision
    assert vision is not None
    assert (vision.image_width, vision.image_height, vision.freeze_tower) == (512, 512, True)
    assert any("image_max_pixels: images are counted as large as it allows" in note for note in found.notes)
    other = resolved(tmp_path, "sft.yaml", text, image_size="320x320").job.model.vision
    assert other is not None
    assert other.tokens_per_image == 100


def test_a_text_model_takes_no_notice_of_a_limit_for_images(tmp_path: Path) -> None:
    found = resolved(tmp_path, "train.sh", SWIFT.format(limit="MAX_PIXELS=1003520", model="Qwen/Qwen2.5-7B-Instruct"))
    assert found.job.model == model("qwen2.5-7b")


def test_the_largest_image_nearly_fills_its_limit() -> None:
    tower = model("qwen2.5-vl-7b").vision
    assert tower is not None
    for tokens in range(1, 3000):
        width, height = tower.largest_image(tokens)
        count = (width // 28) * (height // 28)
        assert tokens * (0.94 if tokens > 64 else 0.9) <= count <= tokens
        assert width <= 3 * height or tokens < 16


def test_a_model_taken_by_the_last_part_of_its_name_is_noted() -> None:
    found = resolve(Request(model="someone/Llama-2-7b", gpus=1))
    assert found.job.model == model("llama-2-7b")
    assert any("'someone/Llama-2-7b' is taken for llama-2-7b" in note for note in found.notes)
    assert not any("is taken for" in note for note in resolve(Request(model="meta-llama/Llama-2-7b-hf", gpus=1)).notes)
