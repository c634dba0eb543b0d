"""Serves the tools over the Model Context Protocol, on standard input and output. Needs the official SDK, ``mcp``."""

import json

import anyio
from mcp import types
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server

from zeroplan import __version__
from zeroplan.agents.skill import INSTRUCTIONS
from zeroplan.agents.tools import TOOLS, called
from zeroplan.errors import ZeroplanError


def server() -> Server[dict[str, object]]:
    """Return the server with its tools."""
    return Server(
        "zeroplan", version=__version__, instructions=INSTRUCTIONS, on_list_tools=_list_tools, on_call_tool=_call_tool
    )


def serve() -> None:
    """Serve on standard input and output until the client disconnects."""
    anyio.run(_serve)


async def _serve() -> None:
    offered = server()
    async with stdio_server() as (requests, answers):
        await offered.run(requests, answers, offered.create_initialization_options())


_READ_ONLY = types.ToolAnnotations(read_only_hint=True, destructive_hint=False, idempotent_hint=True, open_world_hint=False)


async def _list_tools(
    context: ServerRequestContext[dict[str, object]],  # noqa: ARG001  the protocol's
    params: types.PaginatedRequestParams | None,  # noqa: ARG001  likewise
) -> types.ListToolsResult:
    tools = [
        types.Tool(name=one.name, description=one.description, input_schema=one.schema, annotations=_READ_ONLY) for one in TOOLS
    ]
    return types.ListToolsResult(tools=tools)


async def _call_tool(
    context: ServerRequestContext[dict[str, object]],  # noqa: ARG001  the protocol's
    params: types.CallToolRequestParams,
) -> types.CallToolResult:
    """Run the tool in a thread, so that the server notices a client that disconnects during a plan."""
    try:
        answer = await anyio.to_thread.run_sync(called, params.name, params.arguments or {}, abandon_on_cancel=True)
    except ZeroplanError as error:
        return types.CallToolResult(content=[_text(str(error))], is_error=True)
    return types.CallToolResult(content=[_text(json.dumps(answer, ensure_ascii=False))], structured_content=answer)


def _text(text: str) -> types.TextContent:
    return types.TextContent(type="text", text=text)
