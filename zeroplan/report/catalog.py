"""Renders the catalogue: tables of models and accelerators, and single entries with every figure and source."""

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass

from zeroplan.catalog.model import ModelEntry
from zeroplan.report.words import plural
from zeroplan.spec.hardware import Figure, GpuSpec
from zeroplan.transformer.parameters import Parameter
from zeroplan.transformer.params import active_parameter_count, layout, parameter_count
from zeroplan.units import GB, GIB, format_size


def gpu_table(chosen: Sequence[GpuSpec]) -> str:
    """Return one line per accelerator: memory as torch reports it, dense bf16 (or fp16) peak, bandwidth, link in the node."""
    head = f"{'name':<28}{'GiB':>8}{'GB':>8}{'TFLOP/s':>9}{'TB/s':>7}{'link GB/s':>11}  link in the node"
    rows = [
        f"{one.name:<28}{one.memory_bytes.value / GIB:>8.1f}{one.memory_bytes.value / GB:>8.1f}"
        f"{_half_precision(one) / 1e12:>9.0f}{one.memory_bandwidth_bytes_per_s.value / 1e12:>7.2f}"
        f"{one.node_link_bytes_per_s.value / GB:>11.1f}  {one.node_link}"
        for one in chosen
    ]
    foot = "memory as torch reports it; TFLOP/s dense, bf16 (fp16 where there is no bf16); links per GPU and direction"
    return "\n".join([head, *rows, f"{plural(len(chosen), 'accelerator')}; {foot}"])


def _half_precision(one: GpuSpec) -> float:
    peaks = one.dense_flops_per_s
    return next(peaks[dtype].value for dtype in ("bf16", "fp16", *peaks) if dtype in peaks)


def gpu_text(one: GpuSpec) -> str:
    """Return every figure of one accelerator with its source, its note, and its derivation."""
    head = [
        f"{one.full_name} ({one.name})",
        f"{one.vendor}, {one.architecture}, compute capability {one.compute_capability}, {one.released}",
        f"{one.gpus_per_node} to a node over {one.node_link}"
        + (f", {one.network_link} between nodes" if one.network_link else ""),
        f"memory: {format_size(int(one.memory_bytes.value))}",
    ]
    return "\n".join([*head, "", *(line for name, figure in _figures(one) for line in _figure(name, figure))])


def _figures(one: GpuSpec) -> Iterator[tuple[str, Figure]]:
    for field in fields(one):
        value = getattr(one, field.name)
        if isinstance(value, Figure):
            yield field.name, value
        elif isinstance(value, dict):
            yield from ((f"{field.name}.{dtype}", figure) for dtype, figure in value.items())


def _number(value: float) -> str:
    return f"{int(value):,}" if value == int(value) else f"{value:,.10g}"


def _figure(name: str, figure: Figure) -> Iterator[str]:
    yield f"{name} = {_number(figure.value)}"
    yield f"    source: {figure.source}" + (f" ({figure.as_of})" if figure.as_of else "")
    if figure.note:
        yield f"    note: {figure.note}"
    if figure.check:
        yield "    = " + " x ".join(f"{value:,.10g} {factor}" for factor, value in figure.check.items())


def model_table(chosen: Sequence[ModelEntry]) -> str:
    """Return one line per model, by size."""
    head = f"{'name':<26}{'parameters':>20}{'active':>20}{'layers':>8}{'hidden':>8}{'vocab':>9}  family"
    rows = [
        f"{one.name:<26}{parameter_count(one.spec):>20,}{_active(one):>20}{one.spec.num_hidden_layers:>8}"
        f"{one.spec.hidden_size:>8,}{one.spec.vocab_size:>9,}  {one.spec.family}"
        for one in chosen
    ]
    return "\n".join([head, *rows, plural(len(chosen), "model")])


def _active(one: ModelEntry) -> str:
    active = active_parameter_count(one.spec)
    return "" if active == parameter_count(one.spec) else f"{active:,}"


def model_text(one: ModelEntry) -> str:
    """Return shape, parameters tensor by tensor, published count, source."""
    return "\n".join([*_model_head(one), "", *_shape(one), "", *_tensors(one)])


def _model_head(one: ModelEntry) -> Iterator[str]:
    count, active = parameter_count(one.spec), _active(one)
    yield f"{one.name}: {count:,} parameters" + (f", {active} of them used per token" if active else "")
    if one.published_parameters is not None:
        published = one.published_parameters
        yield f"published: {_number(published.value)} ({published.note or 'as printed'}; {published.source})"
    yield f"released {one.released}; source: {one.source}"
    if one.aliases:
        yield f"also: {', '.join(one.aliases)}"
    yield "activations: exact, tensor by tensor"


def _shape(one: ModelEntry) -> Iterator[str]:
    for field, value in _stated(one.spec):
        if is_dataclass(value):
            yield from (_entry(f"{field}.{part}", size) for part, size in _stated(value))
        elif field != "name":
            yield _entry(field, value)
    if one.spec.family == "gpt_neox" and one.spec.parallel_residual:  # the default, which only this family's models choose
        yield _entry("parallel_residual", value=True)


def _stated(of: object) -> list[tuple[str, object]]:
    """Return the fields that have no default, and those whose value is another."""
    values = [(field, getattr(of, field.name)) for field in fields(of)]  # type: ignore[arg-type]  # a frozen dataclass
    return [(field.name, value) for field, value in values if value != field.default]


def _entry(name: str, value: object) -> str:
    number = isinstance(value, int) and not isinstance(value, bool)
    return f"  {name:<30}{f'{value:,}' if number else value}"


def _tensors(one: ModelEntry) -> Iterator[str]:
    tree = layout(one.spec)
    yield from _group("outside the blocks", 1, (*tree.embeddings, *tree.tail))
    for run in tree.runs:
        yield from _group(f"each of {run.layers} {run.kind} blocks", run.layers, run.parameters)


def _group(title: str, times: int, parameters: Sequence[Parameter]) -> Iterator[str]:
    together = sum(parameter.numel for parameter in parameters)
    yield f"{title}: {together:,} parameters" + (f", {times * together:,} in all" if times > 1 else "")
    for parameter in parameters:
        shape = " x ".join(f"{size:,}" for size in parameter.shape)
        yield f"  {parameter.name:<44}{shape:>24}{parameter.numel:>16,}"
