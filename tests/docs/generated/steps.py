"""Tables of optimizers, of memory outside the model, and of the time of a step."""

from __future__ import annotations

from tests.docs.generated.jobs import example, title
from tests.docs.generated.markdown import Sources, code, gigabytes, once, table
from tests.engines_that_run import STAGES
from zeroplan.catalog.gpu import gpu as gpu_named
from zeroplan.engines.device import outside, workspace_line
from zeroplan.engines.device_figures import figures
from zeroplan.engines.optimizers import IMPLEMENTATIONS
from zeroplan.estimator import engine_module
from zeroplan.ledger import Kind, Phase
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.recipe import LOMO
from zeroplan.steptime import efficiency, step_time
from zeroplan.steptime.efficiency import (
    HOST_BYTES_PER_S,
    HOST_SOURCE,
    LINK_SHARE,
    LINK_SOURCE,
    PCIE_SHARE,
    PCIE_SOURCE,
    matrices_share,
)
from zeroplan.units import GIB

_LAST = "update of the last weight"
"""LOMO's step inside the backward."""


def optimizers() -> str:
    """Return the states and the step's temporaries of every optimizer and implementation, without sharding."""
    sources, rows = Sources(), []
    for name, implementations in IMPLEMENTATIONS.items():
        for implementation in implementations:
            answer = example(**_where(name), optimizer=name, optimizer_impl=implementation)
            step = next(moment for moment in answer.moments if moment.phase is Phase.STEP or moment.name == _LAST)
            mine = [
                line for line in step.lines if line.kind in (Kind.OPTIMIZER_STATE, Kind.OPTIMIZER_TEMPORARY) and line.n_bytes
            ]
            rows += [
                (code(name), implementation, str(line.kind), line.reason, code(line.formula), gigabytes(int(line.n_bytes)),
                 sources.number(line.source))
                for line in mine
            ]  # fmt: skip
            rows += [] if mine else [(code(name), implementation, "", "nothing", "", "0", "")]
    return table(("optimizer", "step", "kind", "what", "bytes", "GB:", "source:"), once(rows)) + "\n" + sources.listed()


def _where(name: str) -> dict[str, object]:
    """Return DDP, on one GPU for optimizers that zeroplan models there alone; FSDP2 for dion's Muon."""
    if name == "dion-muon":
        return {"engine": "fsdp2", "stage": 3}
    return {"engine": "ddp", "stage": 0, **({"gpus": 1} if name in LOMO else {})}


def optimizer_symbols() -> str:
    """Return the symbols of the optimizers' formulas."""
    found = {}
    for name, implementations in IMPLEMENTATIONS.items():
        for implementation in implementations:
            answer = example(**_where(name), optimizer=name, optimizer_impl=implementation)
            found |= {symbol.name: symbol.meaning for symbol in answer.symbols if symbol.name.startswith("U")}
    return table(("symbol", "what"), [(code(name), meaning) for name, meaning in found.items()])


#: Settings that each row of the table on lower precision adds to the example.
_LESS: tuple[dict[str, str], ...] = (
    {},
    {"optimizer": "torchao-adamw-8bit"},
    {"optimizer": "torchao-adamw-4bit"},
    {"optimizer": "torchao-adamw", "precision": "bf16"},
    {"float8_recipe": "rowwise"},
)
_LESS_ON_ONE: tuple[dict[str, str], ...] = (
    {},
    {"optimizer": "adamw-8bit"},
    {"optimizer": "paged-adamw-8bit"},
    {"optimizer": "lion-8bit"},
    {"optimizer": "apollo"},
)


def less_precision() -> str:
    """Return what lower precision saves, for the example under FSDP2 and for Llama 3.2 1B on one GPU, both with recomputation."""
    rows = []
    for where, options, common in (
        ("8B on 8 GPUs, FSDP2", _LESS, {"engine": "fsdp2", "stage": 3}),
        ("1B on one GPU", _LESS_ON_ONE, {"model": "llama-3.2-1b", "gpus": 1, "engine": "ddp", "stage": 0}),
    ):
        for said in options:
            answer = example(**{**common, "recompute": "full", **said})
            state = sum(int(line.n_bytes) for line in answer.states if line.kind is Kind.OPTIMIZER_STATE)
            flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in said.items()) or "(fp32 AdamW)"
            host = sum(int(line.n_bytes) for line in answer.host)
            sizes = (f"{n_bytes / GIB:.2f}" for n_bytes in (state, host, answer.peak_bytes))
            rows.append((where, code(flags), *sizes))
    return table(("job", "flags", "optimizer state, GiB:", "host memory, GiB:", "peak, GiB:"), once(rows))


def workspaces() -> str:
    """Return the workspaces that libraries keep on a GPU, for four GPUs."""
    sources, rows = Sources(), []
    for gpu in ("a100-sxm-80gb", "h100-sxm-80gb", "mi250x-gcd-64gb", "mi300x-192gb"):
        line = workspace_line(gpu_named(gpu))
        rows.append((code(gpu), line.reason, code(line.formula), gigabytes(int(line.n_bytes)), sources.number(line.source)))
    return table(("GPU", "what", "bytes", "GB:", "source:"), rows) + "\n" + sources.listed()


def outside_the_allocator() -> str:
    """Return the ranges of GPU memory that is used outside torch's allocator."""
    rows = [
        (one.what, *(gigabytes(int(size)) for size in one.band), one.source)
        for one in (*outside(MeshSpec(dp_shard=8)), *outside(MeshSpec(dp_shard=8, dp_replicate=2))[1:])
    ]
    return table(("what", "least, GB:", "expected, GB:", "most, GB:", "source"), rows)


def device_figures() -> str:
    """Return the figures that were measured on GPUs, with their sources."""
    rows = [
        (one.what, ", ".join(map(code, one.gpus)), _size(one.what, one.value), one.where, one.source) for one in figures()
    ]  # fmt: skip
    return table(("what", "GPU", "GB:", "versions and date", "source"), rows)


def _size(what: str, value: int) -> str:
    return f"{value / 1000:.2f} of what is expected" if what == "reserved" else gigabytes(value)


def bands() -> str:
    """Return the memory that the allocator reserves for the example, by engine."""
    rows = []
    for engine, stage in STAGES:
        answer = example(engine=engine, stage=stage)
        rows.append((title(engine, stage), gigabytes(answer.peak_bytes), *(gigabytes(int(size)) for size in answer.reserved)))
    return table(("engine", "peak allocated, GB:", "least reserved, GB:", "expected, GB:", "most, GB:"), rows)


def parts_of_a_step(engine: str, stage: str) -> str:
    """Return the parts of the example's step time, and how each is computed."""
    job = example(engine=engine, stage=int(stage)).job
    account = engine_module(job.recipe.engine).account(job.model, job.recipe, job.mesh, job.batch)
    sources = Sources()
    step = step_time(account, job.model, job.recipe, job.mesh, job.batch, job.cluster)
    rows = [
        (part.name, f"{part.seconds:.3f}", f"{part.hidden_s:.3f}", part.reason, sources.number(part.source))
        for part in step.parts
    ]
    whole = ("together", f"{step.seconds:.3f}", "", f"{step.tokens_per_s:,.0f} tokens/s per GPU, MFU {step.mfu:.1%}", "")
    return table(("part", "seconds:", "hidden:", "how", "source:"), [*rows, whole]) + "\n" + sources.listed()


def shares() -> str:
    """Return the shares of data-sheet rates that zeroplan assumes a step reaches."""
    rows = [
        (f"{name}: {what}", f"{share:.0%}", of, efficiency(name).source)
        for name in ("Ampere", "Hopper", "Blackwell")
        for what, share, of in (
            ("matrix multiplications", efficiency(name).matrices, "products of their shape alone"),
            ("attention", efficiency(name).attention, "a kernel of its shape alone"),
            ("operators bound by memory", efficiency(name).bandwidth, "memory bandwidth"),
        )
    ]
    usual, fitted = efficiency("Blackwell"), efficiency("Hopper").source
    for name, watts in (("b200", "1,000"), ("gb200", "1,200")):
        share = efficiency("Blackwell", name).matrices
        what = f"{name.upper()}, which may draw {watts} W: matrix multiplications"
        rows.append((what, f"{share:.0%}", "products of their shape alone", fitted))
    for dtype in ("fp8", "fp4"):
        share = matrices_share(usual, "Blackwell", dtype)
        rows.append((f"Blackwell: matrix multiplications in {dtype}", f"{share:.0%}", "products of their shape alone", fitted))
    rows.append(("links between nodes", f"{LINK_SHARE:.0%}", "link rate", LINK_SOURCE))
    rows.append(("between host and GPU", f"{PCIE_SHARE:.0%}", "PCIe x16, one direction", PCIE_SOURCE))
    rows.append(("host memory of a node", f"{HOST_BYTES_PER_S / 1e9:.0f} GB/s", "shared by its ranks", HOST_SOURCE))
    return table(("what", "share", "of", "source"), rows)
