"""The styles that are two markers and a rule for where the thoughts begin."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.processing.reasoning.base import Opening, Phase, ReasoningParser
from headrace.processing.reasoning.tags import TagSplitter, phase_after

OPENER, CLOSER = "<think>", "</think>"


@dataclass(frozen=True, slots=True, kw_only=True)
class TagStyle:
    """A style; calling it makes the parser of one choice."""

    opener: str = OPENER
    closer: str = CLOSER
    label: str = ""
    begins: Phase = Phase.START  # where the prompt says nothing
    switch: str | None = None  # the template variable that switches thoughts off

    @property
    def tags(self) -> tuple[str, str]:
        return self.opener, self.closer

    @property
    def markers(self) -> tuple[str, ...]:
        return self.tags

    def __call__(self, opening: Opening) -> ReasoningParser:
        if self.switch is not None and opening.template_kwargs.get(self.switch) is False:
            phase = Phase.ANSWER
        else:
            phase = phase_after(opening, self.opener, self.closer, self.begins)
        return TagSplitter(self.opener, self.closer, phase, label=self.label)


THINK = TagStyle()
"""Any model that shows where its thoughts begin, in the prompt or in what it says."""

DEEPSEEK_R1 = TagStyle(begins=Phase.THINKING)
"""The first R1 templates open the thoughts without a word of it. V3.1's prompts end with `</think>` to have none."""

QWEN3 = TagStyle(switch="enable_thinking")
"""With thoughts off everything is the answer, tags that a model writes all the same included."""

GEMMA4 = TagStyle(opener="<|channel>", closer="<channel|>", label="thought\n")
"""A channel of its own. Prompts that want no thoughts end with an empty one. Gemma 3 has no thoughts."""
