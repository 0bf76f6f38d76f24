"""Tools of a request: OpenAI's `tools` and `tool_choice`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from moejax.errors import UserError, shown
from moejax.serve.http.answer_formats import Answer, Call

MOST_TOOLS = 128
"""Most tools of a request, OpenAI's limit."""


@dataclasses.dataclass(frozen=True)
class Tools:
    """The tools that an answer may call."""

    given: tuple[Mapping[str, Any], ...] = ()
    """As in the request, for the chat template."""
    choice: str = "auto"
    """"auto", "required", or the name of the tool that must be called."""

    def types(self) -> dict[str, Mapping[str, Any]]:
        """Tool → the JSON schemas of its parameters."""
        found = {name: schema.get("properties") for name, schema in _schemas(self.given).items()}
        return {name: types if isinstance(types, dict) else {} for name, types in found.items()}

    @property
    def forced(self) -> bool:
        return self.choice != "auto"

    def grammar(self) -> dict[str, Any]:
        """Returns the JSON schema of the text where a tool must be called, as in vLLM: the
        arguments of the named tool, or a list of calls."""
        schemas = _schemas(self.given)
        if self.choice != "required":
            return dict(schemas[self.choice])
        calls, shared = [], {}
        for name, schema in schemas.items():
            # References like "#/$defs/Place" begin at the root.
            schema = dict(schema)
            for part, definition in (schema.pop("$defs", None) or {}).items():
                if shared.setdefault(part, definition) != definition:
                    raise UserError(f"tools have two different $defs of the name {shown(part)}")
            calls.append(
                {
                    "type": "object",
                    "properties": {"name": {"const": name}, "parameters": schema},
                    "required": ["name", "parameters"],
                    "additionalProperties": False,
                }
            )
        defs = {"$defs": shared} if shared else {}
        return {"type": "array", "items": {"anyOf": calls}, "minItems": 1} | defs

    def read(self, text: str) -> Answer:
        """Takes a text of that schema apart. A text that ended too early is content."""
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            return Answer("", text, ())
        if self.choice != "required":
            return Answer("", "", (Call(self.choice, text.strip()),))
        calls = [Call(call["name"], json.dumps(call["parameters"])) for call in found]
        return Answer("", "", tuple(calls))


def read_tools(given: Any, choice: Any) -> Tools:
    """Reads `tools` and `tool_choice`; None: absent. Raises UserError for what they cannot be."""
    if given is not None and (not isinstance(given, list) or len(given) > MOST_TOOLS):
        raise UserError(f"tools must be a list of at most {MOST_TOOLS} tools, got {shown(given)}")
    tools = tuple(map(_tool, given or ()))
    names = [tool["function"]["name"] for tool in tools]
    if len({*names}) < len(names):
        raise UserError("tools has two functions of the same name")
    if choice == "none" or not tools:
        if choice not in (None, "none", "auto"):
            raise UserError("tool_choice needs tools")
        return Tools()
    if isinstance(choice, dict):
        function = choice.get("function")
        choice = function.get("name") if isinstance(function, dict) else None
        if choice not in names:
            raise UserError(f"tool_choice names {shown(choice)}, which is none of tools")
        return Tools(tools, choice)
    if choice not in (None, "auto", "required"):
        raise UserError(
            'tool_choice must be "none", "auto", "required" or {"type": "function", "function": '
            f'{{"name": …}}}}, got {shown(choice)}'
        )
    return Tools(tools, choice or "auto")


def _tool(tool: Any) -> Mapping[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type", "function") != "function":
        raise UserError(
            f'each of tools must be {{"type": "function", "function": {{…}}}}, got {shown(tool)}'
        )
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not name:
        raise UserError(f"each of tools needs a name, got {shown(name)}")
    if parameters is not None and not isinstance(parameters, dict):
        raise UserError(f"the parameters of a tool are a JSON schema, got {shown(parameters)}")
    if parameters and not isinstance(parameters.get("$defs", {}), dict):
        raise UserError(f"$defs of a tool must be an object, got {shown(parameters['$defs'])}")
    return tool


def _schemas(tools: tuple[Mapping[str, Any], ...]) -> dict[str, Mapping[str, Any]]:
    functions = (tool["function"] for tool in tools)
    return {f["name"]: f.get("parameters") or {"type": "object"} for f in functions}
