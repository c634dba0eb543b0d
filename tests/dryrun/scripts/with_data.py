"""Runs another project's script with made-up data instead of downloads: ``with_data.py SCRIPT [ARGUMENT ...]``.

CIFAR-10, folders of pictures, GLUE's sentence pairs, lines of text, a tokenizer of words, and BERT and Stable Diffusion's
autoencoder as their configurations have them.
"""

import runpy
import sys
from collections.abc import Callable
from pathlib import Path

WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def main() -> None:
    for patch in (_pictures, _texts, _models, _autoencoder):
        try:
            patch()
        except ImportError:
            continue
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).absolute().parent))
    runpy.run_path(sys.argv[0], run_name="__main__")


def _pictures() -> None:
    from torchvision import datasets

    class Cifar(datasets.FakeData):
        def __init__(self, transform: object = None, **_: object) -> None:
            super().__init__(size=4096, image_size=(3, 32, 32), num_classes=10, transform=transform)

    datasets.CIFAR10 = Cifar
    datasets.ImageFolder = Pictures


class Pictures:
    """Black pictures of 1,000 classes."""

    def __init__(self, _: str, transform: Callable[[object], object]) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, at: int) -> tuple[object, int]:
        from PIL import Image

        return self.transform(Image.new("RGB", (256, 256))), at % 1000


def _autoencoder() -> None:
    from diffusers.models import AutoencoderKL

    def model(*_: object, **__: object) -> object:
        kinds = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
        return AutoencoderKL(block_out_channels=(128, 256, 512, 512), layers_per_block=2, sample_size=256, **kinds)

    AutoencoderKL.from_pretrained = model


def _texts() -> None:
    import datasets

    pairs = [
        {"sentence1": " ".join(WORDS * (i % 3 + 1)), "sentence2": " ".join(WORDS * 2), "label": i % 2, "idx": i}
        for i in range(512)
    ]
    lines = [{"text": " ".join(WORDS * 60)} for _ in range(512)]

    def load_dataset(path: str, *_: object, split: str | None = None, **__: object) -> object:
        rows = datasets.Dataset.from_list(pairs if "glue" in path else lines)
        return rows if split else datasets.DatasetDict({"train": rows, "validation": rows})

    datasets.load_dataset = load_dataset


def _models() -> None:
    import evaluate
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    def tokenizer(*_: object, **__: object) -> object:
        names = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", *WORDS]
        words = Tokenizer(models.WordLevel({name: at for at, name in enumerate(names)}, unk_token="<unk>"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        special = dict(zip(("bos_token", "pad_token", "eos_token", "unk_token", "mask_token"), names, strict=False))
        return transformers.PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=512, **special)

    def model(*_: object, **__: object) -> object:
        return transformers.AutoModelForSequenceClassification.from_config(transformers.BertConfig())

    transformers.AutoTokenizer.from_pretrained = tokenizer
    transformers.AutoModelForSequenceClassification.from_pretrained = model
    evaluate.load = lambda *_, **__: Metric()


class Metric:
    """A metric that ignores its input."""

    def add_batch(self, **_: object) -> None:
        """Ignore a batch."""

    def compute(self) -> dict[str, float]:
        """Return a perfect score."""
        return {"accuracy": 1.0, "f1": 1.0}


if __name__ == "__main__":
    main()
