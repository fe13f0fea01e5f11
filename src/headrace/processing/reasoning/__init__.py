"""Reasoning parsers by name, and which of them a chat template speaks of."""

from __future__ import annotations

from headrace.processing.reasoning.base import Opening, Phase, ReasoningParser, ReasoningParserType, Split
from headrace.processing.reasoning.ernie_x1 import ErnieX1Parser
from headrace.processing.reasoning.styles import DEEPSEEK_R1, GEMMA4, QWEN3, THINK

__all__ = [
    "Opening",
    "Phase",
    "ReasoningParser",
    "ReasoningParserType",
    "Split",
    "detect_reasoning",
    "reasoning_parsers",
]


def reasoning_parsers() -> dict[str, ReasoningParserType]:
    return {
        "think": THINK,
        "deepseek_r1": DEEPSEEK_R1,
        "qwen3": QWEN3,
        "ernie_x1": ErnieX1Parser,
        "gemma4": GEMMA4,
    }


def detect_reasoning(template: str) -> str | None:
    """The name for a chat template; None if it knows no thoughts."""
    if "<|channel>" in template and "<channel|>" in template:
        return "gemma4"
    if "</think>" not in template and "<think>" not in template:
        return None
    if "<response>" in template:
        return "ernie_x1"
    if "<｜Assistant｜>" in template:
        return "deepseek_r1"
    return "qwen3" if "enable_thinking" in template else "think"
