"""Tool parsers by name, and which of them a chat template speaks of."""

from __future__ import annotations

from headrace.processing.tools.base import ToolCallDelta, ToolOutput, ToolParser, ToolParserType
from headrace.processing.tools.deepseek_v3 import DeepSeekV3Parser
from headrace.processing.tools.glm45 import Glm45Parser
from headrace.processing.tools.hermes import HermesParser
from headrace.processing.tools.llama3 import Llama3Parser
from headrace.processing.tools.mistral import MistralParser
from headrace.processing.tools.pythonic import PythonicParser
from headrace.processing.tools.qwen3_coder import Qwen3CoderParser

__all__ = ["ToolCallDelta", "ToolOutput", "ToolParser", "ToolParserType", "detect_tools", "tool_parsers"]


def tool_parsers() -> dict[str, ToolParserType]:
    return {
        "hermes": HermesParser,
        "llama3_json": Llama3Parser,
        "mistral": MistralParser,
        "pythonic": PythonicParser,
        "deepseek_v3": DeepSeekV3Parser,
        "qwen3_coder": Qwen3CoderParser,
        "glm45": Glm45Parser,
        "ernie_x1": HermesParser,  # the same format, inside what its reasoning parser leaves
    }


def detect_tools(template: str) -> str | None:
    """The name for a chat template; None if it has no format that is known here."""
    if "<｜tool▁calls▁begin｜>" in template:
        return "deepseek_v3"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<|python_start|>" in template:
        return "pythonic"
    if "<tool_call>" in template:
        if "<function=" in template:
            return "qwen3_coder"
        if "<arg_key>" in template:
            return "glm45"
        return "ernie_x1" if "<response>" in template else "hermes"
    if "<|python_tag|>" in template or ("<|start_header_id|>" in template and '"parameters": ' in template):
        return "llama3_json"
    return None
