"""Optimizers of other packages: their states against the packages' own code, if installed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.engines.columns import Columns, assert_is_its_points
from tests.formulas import assert_explained
from zeroplan import SpecError, estimate, job
from zeroplan.engines.deepspeed import account
from zeroplan.engines.optimizers import LocalTensor, managed_lines, state_lines, step_temporary_lines
from zeroplan.engines.published_optimizers import PUBLISHED
from zeroplan.ledger import total_bytes
from zeroplan.spec.batch import BatchSpec
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.recipe import LOMO, DeepSpeedOptions

if TYPE_CHECKING:
    from zeroplan.spec.recipe import Optimizer

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

#: Shapes below and above 4,096 elements, with and without whole blocks, and around the least size for managed memory.
SHAPES = ((63, 65), (64, 64), (40, 128), (129, 33), (4096,), (100,), (271, 369), (400, 250))
TENSORS = tuple(LocalTensor(shape) for shape in SHAPES)


def held(states: object) -> int:
    """Return the bytes of all storages in an optimizer's states, each once, without step counters."""
    found: dict[int, int] = {}

    def look(value: object, name: str = "") -> None:
        if isinstance(value, dict):
            for key, one in value.items():
                look(one, str(key))
        elif isinstance(value, torch.Tensor) and hasattr(value, "__tensor_flatten__"):
            for attribute in value.__tensor_flatten__()[0]:
                look(getattr(value, attribute))
        elif isinstance(value, torch.Tensor) and name != "step":
            found[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif hasattr(value, "ortho_matrix"):
            look(vars(value))

    look(states)
    return sum(found.values())


def parameters(dtype: torch.dtype) -> list[torch.nn.Parameter]:
    made = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
    for one in made:
        one.grad = torch.ones_like(one)
    return made


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("optimizer", "name"),
    [
        ("torchao-adamw-8bit", "AdamW8bit"),
        ("torchao-adamw-4bit", "AdamW4bit"),
        ("torchao-adamw-fp8", "AdamWFp8"),
        ("torchao-adamw", "_AdamW"),
    ],
)
def test_states_of_torchao(optimizer: Optimizer, name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torchao = pytest.importorskip("torchao.optim")
    monkeypatch.setattr(torch, "compile", lambda *_, **__: lambda *_, **__: None)
    stepper = getattr(torchao, name)(parameters(getattr(torch, dtype)))
    stepper.step()
    assert held(dict(stepper.state)) == total_bytes(state_lines(optimizer, "forloop", TENSORS, getattr(torch, dtype).itemsize))


_BITSANDBYTES: dict[Optimizer, tuple[str, dict[str, Any]]] = {
    "adamw-8bit": ("AdamW", {"optim_bits": 8}),
    "paged-adamw-8bit": ("AdamW", {"optim_bits": 8, "is_paged": True}),
    "paged-adamw-32bit": ("AdamW", {"optim_bits": 32, "is_paged": True}),
    "lion-32bit": ("Lion", {"optim_bits": 32}),
    "lion-8bit": ("Lion", {"optim_bits": 8}),
    "paged-lion-32bit": ("Lion", {"optim_bits": 32, "is_paged": True}),
    "paged-lion-8bit": ("Lion", {"optim_bits": 8, "is_paged": True}),
    "ademamix-32bit": ("AdEMAMix", {"optim_bits": 32}),
    "ademamix-8bit": ("AdEMAMix", {"optim_bits": 8}),
    "paged-ademamix-32bit": ("AdEMAMix", {"optim_bits": 32, "is_paged": True}),
    "paged-ademamix-8bit": ("AdEMAMix", {"optim_bits": 8, "is_paged": True}),
    "rmsprop-32bit": ("RMSprop", {"optim_bits": 32}),
    "rmsprop-8bit": ("RMSprop", {"optim_bits": 8}),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("optimizer", list(_BITSANDBYTES))
def test_states_of_bitsandbytes(optimizer: Optimizer, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    paged: list[torch.Tensor] = []

    def get_paged(*shape: int, dtype: torch.dtype, device: object) -> torch.Tensor:
        del device
        paged.append(torch.zeros(shape, dtype=dtype))
        return torch.empty(0)

    def buffer(self: Any, p: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        on_gpu = type("OnGpu", (), {"device": torch.device("cuda"), "numel": p.numel, "shape": p.shape})()
        return original(self, on_gpu, dtype=dtype)

    original = bitsandbytes.optim.optimizer.Optimizer8bit.get_state_buffer
    monkeypatch.setattr(bitsandbytes.optim.optimizer.Optimizer8bit, "get_state_buffer", buffer)
    monkeypatch.setattr(torch, "zeros_like", lambda p, dtype, device: torch.zeros(p.shape, dtype=dtype))  # noqa: ARG005
    monkeypatch.setattr(bitsandbytes.functional, "get_paged", get_paged)
    monkeypatch.setattr(bitsandbytes.functional, "fill", lambda *_: None)
    name, arguments = _BITSANDBYTES[optimizer]
    stepper = getattr(bitsandbytes.optim, name)(parameters(getattr(torch, dtype)), **arguments)
    for index, one in enumerate(stepper.param_groups[0]["params"]):
        stepper.init_state(stepper.param_groups[0], one, 0, index)
    itemsize = getattr(torch, dtype).itemsize
    assert held(dict(stepper.state)) == total_bytes(state_lines(optimizer, "fused", TENSORS, itemsize))
    assert sum(one.nbytes for one in paged) == total_bytes(managed_lines(optimizer, TENSORS))
    assert bool(paged) == ("paged" in optimizer)


_BLOCK = (LocalTensor((256, 192)), LocalTensor((192, 256)))
_AROUND = (LocalTensor((300, 64), in_block=False), LocalTensor((64,), in_block=False), LocalTensor((300, 64), in_block=False))
_IN_ORDER = (_AROUND[0], *_BLOCK, *_AROUND[1:])


@pytest.mark.parametrize(
    ("optimizer", "ran", "beyond"),
    [  # bytes held and allocated in a step in fp32, measured once with each package on a CPU; Adam-mini has one mean per norm
        ("schedule-free-adamw", (1_094_144, 547_072), (0, 0)),
        ("schedule-free-sgd", (547_072, 0), (0, 0)),
        ("adam-mini", (551_268, 397_056), (4 * 63, 256)),
        ("apollo", (1_028_608, 787_472 - 4 * 256 - 16), (0, 0)),
        ("galore", (1_126_912, 883_524 - 15_172), (0, 0)),  # less LAPACK's workspace
        ("soap", (4_238_080, 2_691_076 - 102_404), (0, 0)),  # less LAPACK's workspace, estimates of eigenvalues, and their order
    ],
)  # fmt: skip
def test_states_and_scratch_of_packages_that_ran_once(
    optimizer: Optimizer, ran: tuple[int, int], beyond: tuple[int, int]
) -> None:
    impl = "foreach" if optimizer.startswith("schedule-free") else "forloop"
    lines = state_lines(optimizer, impl, _IN_ORDER, 4), step_temporary_lines(optimizer, impl, _IN_ORDER, 4)
    for found, measured, most in zip(map(total_bytes, lines), ran, beyond, strict=True):
        assert measured <= found <= measured + most


@pytest.mark.parametrize(
    ("optimizer", "width", "ran"),
    [  # bytes of all states for the shapes above, measured once: flashoptim 0.1.4 on fake tensors, torch-optimi 0.3.3 on a CPU
        ("flash-adamw", 2, 693_017),
        ("flash-adamw-32bit", 2, 914_780),
        ("flash-adamw", 4, 471_254),
        ("stable-adamw", 4, 2 * 4 * 221_763),
        ("stable-adamw", 2, 3 * 2 * 221_763),
    ],
)
def test_states_of_fused_steps_that_ran_once(optimizer: Optimizer, width: int, ran: int) -> None:
    assert total_bytes(state_lines(optimizer, "fused", TENSORS, width)) == ran


def test_torchao_quantises_whole_sub_groups_under_deepspeed() -> None:
    # DeepSpeed's flat tensors of 12,964 and 16,384 elements ran with torchao 0.18 at stages 1 to 3; 256 divides the second
    found = [total_bytes(state_lines("torchao-adamw-8bit", "forloop", (LocalTensor((n,)),), 4)) for n in (12_964, 16_384)]
    assert found == [103_712, 35_328]
    asked = {"model": "smollm2-135m", "gpus": 2, "seq_len": 64, "engine": "deepspeed", "optimizer": "torchao-adamw-8bit"}
    sizes = (DeepSpeedOptions(sub_group_size=size) for size in (2**22, 2**40))
    points = [(MeshSpec(dp_shard=ranks), BatchSpec(seq_len=64)) for ranks in (2, 3, 4)]
    whole, one = Columns(points), job(**asked, stage=3, deepspeed=DeepSpeedOptions(sub_group_size=2**22))  # type: ignore[arg-type]
    column = account(one.model, one.recipe, whole, whole)  # type: ignore[arg-type]
    assert_is_its_points(column, [account(one.model, one.recipe, *point) for point in points])
    small, large = (estimate(job(**asked, stage=3, deepspeed=one)).states for one in sizes)  # type: ignore[arg-type]
    assert total_bytes(small) < total_bytes(large)  # 256 divides some of the small sub-groups


def test_the_compiled_step_of_torchao_by_hand() -> None:
    # Buffers in Inductor's code for a tensor of 4096 x 1024: old and new codes, moments in fp32, indices in int64.
    tensor = (LocalTensor((4096, 1024)),)
    n = 4096 * 1024
    found = {
        name: total_bytes(step_temporary_lines(name, "forloop", tensor, 2))
        for name in ("torchao-adamw-8bit", "torchao-adamw-4bit", "torchao-adamw-fp8", "torchao-adamw")
    }
    assert found == {
        "torchao-adamw-8bit": 2 * n + 2 * 4 * 16384,
        "torchao-adamw-4bit": 2 * n + 2 * 4 * n + 2 * 8 * n + 2 * 4 * 32768,
        "torchao-adamw-fp8": 2 * 4 * 16384,
        "torchao-adamw": 0,
    }


@pytest.mark.parametrize("optimizer", sorted(set(PUBLISHED) - {"adamw-8bit"}))
def test_every_engine_answers_or_refuses_in_one_line(optimizer: Optimizer) -> None:
    from zeroplan.engines.optimizers import RAISES_ON_DTENSORS

    for engine in ("ddp", "fsdp1", "fsdp2", "deepspeed", "megatron"):
        fails = engine == "fsdp2" and (optimizer, "fused") in RAISES_ON_DTENSORS
        asked = {
            "model": "smollm2-135m",
            "gpus": 1 if optimizer in LOMO and engine == "ddp" else 2,
            "stage": {"ddp": 0, "megatron": 1}.get(engine, 3),
            "seq_len": 64,
        }
        if engine in PUBLISHED[optimizer].engines and not fails:
            assert_explained(estimate(job(**asked, engine=engine, optimizer=optimizer)))
            continue
        with pytest.raises(SpecError, match=f"{optimizer}.*; use ") as refused:
            estimate(job(**asked, engine=engine, optimizer=optimizer))
        assert "\n" not in str(refused.value)


def test_paged_states_are_in_host_memory_and_the_answer_says_so() -> None:
    answer = estimate(job(model="smollm2-135m", gpus=1, optimizer="paged-adamw-8bit", seq_len=64))
    other = estimate(job(model="smollm2-135m", gpus=1, optimizer="adamw-8bit", seq_len=64))
    assert sum(line.n_bytes for line in answer.host) == other.peak_bytes - answer.peak_bytes
    assert any("managed memory" in note for note in answer.notes)
