"""Runs as the process of a dry run: ``python -m zeroplan.dryrun.child TASK`` fakes GPUs in torch and runs the user's script.

It writes the answer, or one line with the reason of a failure, to the task's answer file and ends with the script. The script's
output is unchanged.
"""

import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from zeroplan.allocator import expandable_segments_are_set
from zeroplan.dryrun.rank_messages import RankMessages
from zeroplan.dryrun.script import answer_or_failure, leave, run_script
from zeroplan.dryrun.task import DryRunTask, Over
from zeroplan.script_trace import SavedRun, as_data
from zeroplan.spec.base import Spec, read


def main() -> None:
    """Run the script of a task and end this process."""
    began = time.perf_counter()
    task = read(DryRunTask, json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), where="task")
    _end(task, lambda: _answer(task, began))


def _end(task: DryRunTask, make_answer: Callable[[], Spec]) -> None:
    Path(task.answer).write_text(json.dumps(answer_or_failure(make_answer), default=as_data), encoding="utf-8")
    leave(0)


def _answer(task: DryRunTask, began: float) -> Spec:
    run, target = _prepared(task, began), str(Path(task.target).absolute())
    from zeroplan.dryrun.answer import answer  # noqa: PLC0415  torch must be imported later

    if task.companion:
        run.loop.end_now = lambda: _end(task, Over)
        run(lambda: _run_script(task))
        return Over()

    def found() -> SavedRun:
        run.tracker.close()
        return answer(task, run.tracker, run.loop, run.stand_ins, began=began, target=target)

    run.loop.end_now = lambda: _end(task, lambda: _without_profile(found(), run))
    run(lambda: _run_script(task))
    return _with_profile(found(), run, task)


def _without_profile(found: SavedRun, run: "_Run") -> SavedRun:
    from zeroplan.script_profile import ScriptProfile  # noqa: PLC0415  see _answer

    if run.observer is None:
        return found
    return replace(
        found, general=ScriptProfile(unknown="the script goes on after its last counted step, which ends its process")
    )


def _with_profile(found: SavedRun, run: "_Run", task: DryRunTask) -> SavedRun:
    """The answer, with the profile of the script's model if requested. The script has ended, so profiling may change the model."""
    if run.observer is None:
        return found
    from zeroplan.dryrun.profiled.made import script_profile  # noqa: PLC0415  see _answer

    with run.fakes():
        general = script_profile(run.observer, task, init_peak_bytes=found.run.initialisation.peak_bytes)
    return replace(found, general=general)


class _Run:
    """A prepared process; call it to run the script."""

    def __init__(self, task: DryRunTask, began: float) -> None:
        from zeroplan.catalog.gpu import gpu as gpu_named  # noqa: PLC0415
        from zeroplan.dryrun.loop import Loop  # noqa: PLC0415
        from zeroplan.dryrun.profiled.observer import Observer  # noqa: PLC0415
        from zeroplan.dryrun.watcher import ScriptTracker  # noqa: PLC0415
        from zeroplan.engines.device import configured_workspace  # noqa: PLC0415
        from zeroplan.verify.fake_cuda.half_fake import HalfFakes  # noqa: PLC0415
        from zeroplan.verify.fake_cuda.installed import install  # noqa: PLC0415
        from zeroplan.verify.fake_cuda.memory import Memory  # noqa: PLC0415
        from zeroplan.verify.fake_cuda.stand_ins import StandIns  # noqa: PLC0415

        self.gpu = gpu_named(task.gpu)
        memory = Memory(int(self.gpu.memory_bytes.value))
        self.stand_ins = StandIns()
        self._messages = RankMessages(Path(task.messages), task.rank)
        install(self.gpu, memory, ranks=task.local_world_size, local_rank=task.local_rank)
        self.tracker = ScriptTracker(
            memory,
            expandable_segments=expandable_segments_are_set(),
            workspace_bytes=configured_workspace(os.environ, self.gpu),
        )
        self.observer = Observer() if task.profiled else None
        self.loop = Loop(self.tracker, task.steps, self.observer, ends_at=began + task.until_end if task.until_end else None)
        self._fakes = HalfFakes(self.stand_ins, imbalance=task.imbalance, messages=self._messages)
        self._patch(task)

    def _patch(self, task: DryRunTask) -> None:
        from zeroplan.dryrun import checkpoints, launchers, process_group, routing, saving, torch_patches  # noqa: PLC0415
        from zeroplan.dryrun.libraries import (  # noqa: PLC0415
            bitsandbytes,
            deepspeed,
            megatron,
            pipelining,
            torch_engines,
            transformers,
            triton,
        )
        from zeroplan.dryrun.patches import AfterImport  # noqa: PLC0415

        process_group.make_groups_fake(self._messages)
        launchers.run_ranks_here(task)
        routing.assume(task.imbalance, self.stand_ins)
        torch_patches.change_torch(self.stand_ins)
        checkpoints.watch_loading(self.tracker.see_loaded)
        self._compile(task)
        AfterImport(
            checkpoints.PATCHES | bitsandbytes.PATCHES | megatron.patches(self.loop)
            | pipelining.patches(self._messages, self.loop)
            | transformers.PATCHES | triton.PATCHES | torch_engines.patches(self.tracker)
            | deepspeed.patches(self.tracker, self.loop),
            saving.watch(self.loop, Path(task.answer).with_name("aside")),
        ).install()  # fmt: skip
        self.loop.watch()

    def _compile(self, task: DryRunTask) -> None:
        from zeroplan.dryrun import torch_patches  # noqa: PLC0415
        from zeroplan.dryrun.compiling import tracing  # noqa: PLC0415

        why_not = task.without_compiler or tracing.why_not()
        self._compiles = not why_not
        if why_not:
            torch_patches.skip_compilation(why_not)
        else:
            tracing.enable_compiler(self.tracker)

    def __call__(self, script: Callable[[], None]) -> None:
        """Run the script until its steps are done or it ends; errors after its steps are ignored."""
        from zeroplan.dryrun.compiling import tracing  # noqa: PLC0415
        from zeroplan.dryrun.threads import watch_threads  # noqa: PLC0415

        with self.fakes(), self.tracker:
            if self._compiles:
                tracing.call_hooks_outside_of_graphs()
            watch_threads((self._fakes, self.tracker), self.loop.end_now)
            try:
                script()
            except BaseException as error:
                if not self.loop.stopped and not (isinstance(error, SystemExit) and not error.code):
                    raise
            finally:
                self.loop.finish()
                self.tracker.close()
        self.loop.deaf = True

    @contextmanager
    def fakes(self) -> Iterator[None]:
        """Make all tensors inside the block fake or half fake, with the replacements that libraries need."""
        from zeroplan.verify.fake_cuda.attention import decisions  # noqa: PLC0415
        from zeroplan.verify.fake_cuda.fake_tensors import fake_tensor_patches  # noqa: PLC0415

        with ExitStack() as stack:
            for answer in (*fake_tensor_patches(self.tracker), decisions()):
                stack.enter_context(answer)
            stack.enter_context(self._fakes)
            yield


def _prepared(task: DryRunTask, began: float) -> _Run:
    warnings.simplefilter("ignore")
    import torch  # noqa: PLC0415
    import torch._dynamo  # noqa: PLC0415, F401  must precede the fake CUDA, since it checks the build

    if not task.without_compiler:
        from zeroplan.dryrun.compiling.tracing import preload_dynamo_rules  # noqa: PLC0415

        preload_dynamo_rules()
    return _Run(task, began)


def _run_script(task: DryRunTask) -> None:
    from zeroplan.dryrun.on_request import OnRequest  # noqa: PLC0415  see _answer

    sys.path.append(str(Path(__file__).parent / "doubles"))
    sys.meta_path.append(OnRequest())
    run_script(task, task.arguments)


if __name__ == "__main__":
    main()
