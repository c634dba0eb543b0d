"""A training step as a program writes it down: what is allocated, what is freed, and the moments at which most is alive.

An engine's program puts and drops lines in the order of the engine's code. Nobody lists who is alive: it follows. Memory can
only peak right before something is dropped, so every drop after a rise becomes a moment.
"""

from collections.abc import Hashable

from zeroplan.ledger import Line, Moment, Phase


class Trace:
    """What is alive while a program runs, and the moments so far.

    >>> from zeroplan.ledger import Kind
    >>> trace, one, two = Trace(), Line(Kind.PARAMETERS, 4, "weights"), Line(Kind.ACTIVATIONS, 2, "an input")
    >>> trace.at("forward", Phase.FORWARD)
    >>> trace.put("weights", one)
    >>> trace.put("input", two)
    >>> trace.drop("input")
    >>> [(moment.name, moment.total_bytes) for moment in trace.finished()]
    [('forward', 6)]
    """

    def __init__(self) -> None:
        """Begin with nothing alive."""
        self._alive: dict[Hashable, tuple[Line, ...]] = {}
        self._together: tuple[Line, ...] | None = ()
        self._moments: list[Moment] = []
        self._name, self._phase, self._of_forward = "", Phase.FORWARD, False
        self._risen = False
        self.recording = True
        """Whether moments are kept. A program turns this off for layers that cannot hold the maximum."""

    def at(self, name: str, phase: Phase, *, of_forward: bool = False) -> None:
        """Name what follows. Moments do not reach across phases."""
        if self._risen and (phase is not self._phase or of_forward is not self._of_forward):
            self._close()
        self._name, self._phase, self._of_forward = name, phase, of_forward

    def put(self, key: Hashable, *lines: Line) -> None:
        """Allocate these lines under a key. What the key has held so far becomes part of them."""
        self.hold(key, *lines)
        if lines:
            self._risen = True

    def hold(self, key: Hashable, *lines: Line) -> None:
        """Hold lines that were alive before, under another key or as a part of something: nothing is allocated."""
        if lines:
            self._alive[key] = lines
            self._together = None
        elif self._alive.pop(key, None) is not None:
            self._together = None

    def drop(self, *keys: Hashable) -> None:
        """Free what these keys hold, if anything."""
        for key in keys:
            if key in self._alive:
                if self._risen:
                    self._close()
                del self._alive[key]
                self._together = None

    def shrink(self, key: Hashable, *lines: Line) -> None:
        """Free a part of what a key holds: these lines stay."""
        if self._risen and key in self._alive:
            self._close()
        self.hold(key, *lines)

    def pass_by(self, *lines: Line) -> None:
        """Allocate lines and free them again."""
        if lines and self.recording:
            self._write_down(lines)
        self._risen = self._risen and not lines

    def rename(self, key: Hashable, new: Hashable) -> None:
        """Hold what a key holds under another one."""
        if key in self._alive:
            self._alive[new] = self._alive.pop(key)
            self._together = None

    def has(self, key: Hashable) -> bool:
        """Whether a key holds anything."""
        return key in self._alive

    def finished(self) -> tuple[Moment, ...]:
        """Every moment, the last one included."""
        if self._risen:
            self._close()
        return tuple(self._moments)

    def _close(self) -> None:
        """Write a moment down, of all that is alive after a rise."""
        if self.recording:
            self._write_down(())
        self._risen = False

    def _write_down(self, more: tuple[Line, ...]) -> None:
        if self._together is None:
            self._together = tuple([line for lines in self._alive.values() for line in lines])
        self._moments.append(Moment(self._name, self._phase, self._together + more, self._of_forward))
