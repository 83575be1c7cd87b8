"""Tools in a request: functions, and which of them an answer may or must call, as several APIs say it."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from offload_decode.server.http.answers import Body
from offload_decode.server.requests import WrongField

MOST_TOOLS = 1024
FunctionName = Annotated[str, StringConstraints(pattern="^[a-zA-Z0-9_-]{1,128}$")]


class Function(Body):
    """What a tool is called, what it does and, as a JSON schema, what it takes."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Body):
    """A function that the model may call."""

    type: Literal["function"]
    function: Function


class ByName(Body):
    """One of the functions."""

    name: FunctionName


class NamedTool(Body):
    """A function by its name, which stands beside the type or, as chats have it, one level below."""

    type: Literal["function"]
    name: FunctionName | None = None
    function: ByName | None = None

    @property
    def named(self) -> str:
        """The name. Raises `WrongField` where there is none."""
        name = self.function.name if self.function else self.name
        if name is None:
            raise WrongField("tool_choice names no tool: give its name", "tool_choice")
        return name


class Allowed(Body):
    """The only tools that may be called, and whether one of them must be."""

    mode: Literal["auto", "required"] = "auto"
    tools: list[NamedTool] = Field([], max_length=MOST_TOOLS, fail_fast=True)


class AllowedTools(Allowed):
    """The same, beside its type or, as chats have it, one level below."""

    type: Literal["allowed_tools"]
    allowed_tools: Allowed | None = None


ToolChoice = Literal["none", "auto", "required", "any"] | NamedTool | AllowedTools


def tools_asked(functions: Sequence[Function], choice: ToolChoice | None) -> dict[str, Any]:
    """The fields `tools` and `tool_choice` of a `ChatRequest`. Tools that are not allowed are left out.

    Raises `WrongField` for a choice of tools that are not there.
    """
    chosen: Any = "required" if choice == "any" else choice
    if isinstance(choice, NamedTool):
        chosen = {"type": "function", "function": {"name": choice.named}}
    elif isinstance(choice, AllowedTools):
        allowed = choice.allowed_tools or choice
        names, chosen = {tool.named for tool in allowed.tools}, allowed.mode
        if unknown := names - {function.name for function in functions}:
            raise WrongField(
                f"tool_choice allows '{min(unknown)}', which is none of the tools", "tool_choice"
            )
        functions = [function for function in functions if function.name in names]
    described = [function.model_dump(exclude={"type"}, exclude_none=True) for function in functions]
    return {
        "tools": [{"type": "function", "function": function} for function in described] or None,
        "tool_choice": chosen,
    }
