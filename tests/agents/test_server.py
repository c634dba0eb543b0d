"""A client of the official MCP SDK lists the tools, calls them, and gets a one-line error for an invalid call."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

pytest.importorskip("mcp")
anyio = pytest.importorskip("anyio")
from mcp import Client, StdioServerParameters  # noqa: E402  after the check

from zeroplan.agents.server import server  # noqa: E402
from zeroplan.agents.skill import skill  # noqa: E402
from zeroplan.agents.tools import TOOLS, called  # noqa: E402

JOB = {"model": "gpt2", "gpu": "l4-24gb", "gpus": 2, "seq_len": 512}


def connected(to: Any, talk: Callable[[Client], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        async with Client(to) as client:
            return await talk(client)

    return anyio.run(run)


def test_it_lists_read_only_tools():
    listed = connected(server(), lambda client: client.list_tools()).tools
    assert [tool.name for tool in listed] == [tool.name for tool in TOOLS]
    assert all(tool.annotations.read_only_hint and not tool.annotations.open_world_hint for tool in listed)


def test_a_call_returns_what_the_tool_returns():
    found = connected(server(), lambda client: client.call_tool("estimate", {"job": JOB}))
    assert not found.is_error
    assert (
        found.structured_content
        == json.loads(found.content[0].text)
        == json.loads(json.dumps(called("estimate", {"job": JOB})))
    )


def test_an_invalid_call_gets_one_line_and_the_next_call_works():
    async def talk(client: Client) -> Any:
        return await client.call_tool("check", {"job": {"model": "nobody"}}), await client.call_tool("check", {"job": JOB})

    wrong, right = connected(server(), talk)
    assert wrong.is_error
    assert wrong.content[0].text.startswith("unknown model 'nobody'")
    assert (right.is_error, right.structured_content["fits"]) == (False, True)


def test_the_command_serves_on_standard_input_and_output():
    program = StdioServerParameters(command=sys.executable, args=["-m", "zeroplan", "mcp"])
    found = connected(program, lambda client: client.call_tool("check", {"job": JOB}))
    assert found.structured_content["fits"] is True


def test_the_skill_file_names_every_tool():
    out = subprocess.run(
        [sys.executable, "-m", "zeroplan", "mcp", "--skill"], capture_output=True, text=True, check=True
    ).stdout
    assert out == skill()
    assert out.startswith("---\nname: zeroplan\n")
    assert all(f"`{tool.name}`" in out for tool in TOOLS)
