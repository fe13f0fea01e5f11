"""Output that must match a grammar: compiles specs and gives masks of allowed tokens, through llguidance.

Front ends compile a request's grammar to refuse a bad one, the engine to follow it (runner/constraints.py). What fields
a request may have for it is `processing/structured.py`'s.
"""

from __future__ import annotations

from headrace.grammar.compiler import (
    FORCED_OPTIONS,
    SCHEMA_OPTIONS,
    CompiledGrammar,
    GrammarCompiler,
    GrammarError,
    source_of,
)
from headrace.grammar.matcher import Matcher
from headrace.grammar.vocabulary import Vocabulary

__all__ = [
    "FORCED_OPTIONS",
    "SCHEMA_OPTIONS",
    "CompiledGrammar",
    "GrammarCompiler",
    "GrammarError",
    "Matcher",
    "Vocabulary",
    "source_of",
]
