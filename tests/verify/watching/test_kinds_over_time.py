"""At every moment of a recording, the bytes of all kinds add up to the bytes alive."""

from zeroplan.ledger import Kind, Phase
from zeroplan.verify.watching.recording import Block, Recording, Span
from zeroplan.verify.watching.timeline import Timeline


def block(n_bytes: int, born: int, died: int | None, kind: Kind) -> Block:
    made = Block(n_bytes, born, "aten.empty.default", "", 1)
    made.kind = kind
    if died is not None:
        made.died = died
    return made


def test_kinds_add_up_to_what_is_alive_after_every_request_and_release():
    blocks = [
        block(8, 1, None, Kind.PARAMETERS),
        block(3, 2, 4, Kind.ACTIVATIONS),
        block(5, 3, None, Kind.ACTIVATIONS),
    ]
    timeline = Timeline(Recording(blocks, [Span(-1, Phase.INIT, 0), Span(0, Phase.FORWARD, 0)], [], 4))
    blocks[2].died = 9  # freed after the recording ends
    held = {"parameters": 8}
    found = [timeline.kinds(moment) for moment in range(5)]
    assert found == [{}, held, held | {"activations": 3}, held | {"activations": 8}, held | {"activations": 5}]
    assert [sum(kinds.values()) for kinds in found] == timeline.live == [0, 8, 11, 16, 13]
