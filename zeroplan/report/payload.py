"""Converts an estimate to data for JSON: every size in bytes, every key stable within a schema version."""

from collections.abc import Sequence
from dataclasses import asdict

from zeroplan.engines.account import PipelineRank
from zeroplan.estimator import Estimate
from zeroplan.ledger import Band, Collective, Kind, Line, Moment
from zeroplan.remedies import Longest, Remedy
from zeroplan.spec.hardware import SETTINGS
from zeroplan.traffic import Traffic

SCHEMA_VERSION = 1


def estimate_payload(
    answer: Estimate,
    notes: Sequence[str] = (),
    changes: Sequence[Remedy] = (),
    lengths: dict[str, object] | None = None,
    longest: Longest | None = None,
) -> dict[str, object]:
    """Return the answer of ``zeroplan estimate --json``, for ``json.dumps``."""
    return {
        "schema_version": SCHEMA_VERSION,
        "job": asdict(answer.job),
        "parameters": answer.parameters,
        "active_parameters": answer.active_parameters,
        "trained_parameters": answer.trained_parameters,
        "states": _states(answer),
        "peak": {**_moment(answer.peak), "lines": [_line(line) for line in answer.peak.lines if line.n_bytes]},
        "moments": [_moment(moment) for moment in answer.moments],
        "reserved": _band(answer.reserved),
        "reserved_with_expandable_segments": _band(answer.reserved_with("expandable_segments")),
        "under_pressure": _band(answer.under_pressure()),
        "replay": _replay(answer),
        "allocator_room_bytes": answer.allocator_room_bytes,
        **_elsewhere(answer),
        "pipeline_ranks": [_pipeline_rank(one) for one in answer.pipeline],
        "fits": answer.fits,
        "verdict": answer.verdict,
        "capacity_bytes": answer.capacity_bytes,
        "room_bytes": answer.room_bytes,
        "changes": [change._asdict() for change in changes],
        "communication": _communication(answer.traffic),
        "lengths": lengths,
        "longest_sequence": None if longest is None else longest._asdict(),
        "approximate": answer.approximate,
        "notes": list(notes),
    }


def _elsewhere(answer: Estimate) -> dict[str, object]:
    """Return the memory outside torch's allocator: on the GPU, in host memory and on NVMe."""
    return {
        "outside_allocator": {
            **_band(answer.outside_band),
            "parts": [{"what": part.what, **_band(part.band), "source": part.source} for part in answer.outside],
        },
        "host_bytes": answer.host_bytes,
        "host_bytes_per_node": answer.host_bytes_per_node,
        "host_lines": [_line(line) for line in answer.host],
        "nvme_bytes": answer.nvme_bytes,
        "nvme_bytes_per_node": answer.nvme_bytes_per_node,
        "nvme_lines": [_line(line) for line in answer.nvme],
    }


def _replay(answer: Estimate) -> dict[str, object] | None:
    """Return the replay's results for each allocator setting; None without a replay."""
    step, room = answer.replay, answer.allocator_room_bytes
    if step is None:
        return None
    return {
        settings: {
            **step.replayed(settings)._asdict(),
            "on_card": None if room is None else step.on_card(room, settings)._asdict(),
        }
        for settings in SETTINGS
    }


def _states(answer: Estimate) -> dict[str, object]:
    states = answer.states_by_kind
    return {
        "parameters_bytes": states[Kind.PARAMETERS],
        "gradients_bytes": states[Kind.GRADIENTS],
        "optimizer_bytes": states[Kind.OPTIMIZER_STATE],
        "total_bytes": sum(states.values()),
        "lines": [_line(line) for line in answer.states],
    }


def _pipeline_rank(one: PipelineRank) -> dict[str, object]:
    return {
        "rank": one.rank,
        "stages": one.stages,
        "parameters": one.parameters,
        "moment": one.moment,
        "allocated_bytes": int(one.peak_bytes),
    }


def _communication(traffic: Traffic) -> dict[str, object]:
    return {
        "total_bytes": int(traffic.total_bytes),
        "relative_to_ddp": traffic.relative_to_ddp,
        "relative_bytes_to_ddp": traffic.relative_bytes_to_ddp,
        "collectives": [_collective(call) for call in traffic.collectives if call.sent_bytes],
    }


def _line(line: Line) -> dict[str, object]:
    return {"kind": line.kind.value, "bytes": int(line.n_bytes), "reason": line.reason, "formula": line.formula,
            "source": line.source}  # fmt: skip


def _moment(moment: Moment) -> dict[str, object]:
    return {"moment": moment.name, "phase": moment.phase.value, "allocated_bytes": int(moment.total_bytes)}


def _band(band: Band) -> dict[str, object]:
    return {"low_bytes": int(band.low_bytes), "expected_bytes": int(band.expected_bytes), "high_bytes": int(band.high_bytes)}


def _collective(call: Collective) -> dict[str, object]:
    return {
        "operation": call.operation,
        "what": call.what,
        "when": call.when,
        "group": int(call.group),
        "calls": int(call.calls),
        "bytes_per_call": int(call.n_bytes),
        "sent_bytes": int(call.sent_bytes),
        "source": call.source,
    }
