"""Compiles grammars in threads of its own, with limits on what one may cost, and keeps those that were used last.

One per front end and one per engine process. llguidance's own budgets bound the work on a grammar, so that a thread
comes back even from one whose caller no longer waits.
"""

from __future__ import annotations

import json
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from headrace.grammar.matcher import Matcher
from headrace.grammar.vocabulary import Vocabulary, build_tokenizer
from headrace.types import GrammarSpec

NUM_THREADS: Final = 1
WHITESPACE: Final = r"[ \n\r\t]{0,32}"
"""Between the tokens of JSON. Enough to indent by; without a bound some models write it until the length limit."""
SCHEMA_OPTIONS: Final[dict[str, Any]] = {"whitespace_pattern": WHITESPACE}
FORCED_OPTIONS: Final[dict[str, Any]] = {"lenient": False}  # what a schema says and we cannot hold is an error

_DEAD_END: Final = "NoExtension"  # llguidance's word for a state that nothing leads on from


class GrammarError(Exception):
    """A grammar that cannot be followed; says why, in the words of llguidance where they are its."""


class CompiledGrammar:
    """A grammar that is ready for sequences."""

    def __init__(self, spec: GrammarSpec, prototype: LLMatcher, vocab_size: int) -> None:
        self.spec = spec  # in the form that every compiler takes
        self._prototype = prototype
        self._vocab_size = vocab_size
        self._lock = threading.Lock()

    def matcher(self, output: Sequence[int] = ()) -> Matcher:
        """For a sequence that has this output already. Copies share what they learn of the grammar."""
        with self._lock:
            matcher = Matcher(self._prototype.deep_copy(), self._vocab_size)
        matcher.accept(*output)
        return matcher


class GrammarCompiler:
    """All methods may be called from any thread; none blocks but `get`."""

    def __init__(
        self,
        load_vocabulary: Callable[[], Vocabulary],
        vocab_size: int,
        eos_token_ids: Sequence[int],
        *,
        num_kept: int = 128,
        prepare: Callable[[GrammarSpec], GrammarSpec] = lambda spec: spec,
    ) -> None:
        """`load_vocabulary` is called once, in a thread, when the first grammar comes. `prepare` turns specs of other
        kinds into one of json_schema, regex, lark and llguidance."""
        self._prepare = prepare
        self._load_vocabulary = load_vocabulary
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(i for i in eos_token_ids if 0 <= i < vocab_size)
        self._num_kept = num_kept
        self._tokenizer: LLTokenizer | None = None
        self._kept: OrderedDict[GrammarSpec, Future[CompiledGrammar]] = OrderedDict()
        self._alive: weakref.WeakValueDictionary[GrammarSpec, CompiledGrammar] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()  # of `_kept`
        self._pool: ThreadPoolExecutor | None = None

    def compile(self, spec: GrammarSpec) -> Future[CompiledGrammar]:
        """Ends with the grammar or a GrammarError. The same spec is compiled once, as long as it is kept."""
        with self._lock:
            future = self._kept.get(spec)
            if future is None:
                if self._pool is None:
                    self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="grammar")
                future = self._kept[spec] = self._pool.submit(self._compile, spec)
                while len(self._kept) > self._num_kept:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(spec)
            return future

    def get(self, spec: GrammarSpec) -> CompiledGrammar:
        """Waits for it, if nobody holds it. Raises GrammarError."""
        return self._alive.get(spec) or self.compile(spec).result()

    def close(self) -> None:
        """Stops the thread. A grammar that comes later starts another one."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------------------------------------- in the thread

    def _compile(self, spec: GrammarSpec) -> CompiledGrammar:
        if not self._eos_token_ids:
            raise GrammarError("the model has no end-of-sequence token, with which the output would end")
        if self._tokenizer is None:
            self._tokenizer = build_tokenizer(self._load_vocabulary(), self._vocab_size, self._eos_token_ids)
        spec = self._prepare(spec)
        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(self._tokenizer, source_of(spec), log_level=0, limits=limits)
        compiled = CompiledGrammar(spec, matcher, self._vocab_size)
        first = compiled.matcher()
        mask = first.mask()
        if mask is None and not (first.error or "").startswith(_DEAD_END):
            raise GrammarError(first.error or "it has failed")
        if mask is None or not (mask == 0).any():
            raise GrammarError("no text matches it")
        self._alive[spec] = compiled
        return compiled


def source_of(spec: GrammarSpec) -> str:
    """As llguidance reads it. Raises GrammarError."""
    if spec.kind == "llguidance":
        return spec.text
    if spec.kind == "lark":
        return LLMatcher.grammar_from_lark(spec.text)
    if spec.kind == "regex":
        return LLMatcher.grammar_from_regex(spec.text)
    if spec.kind != "json_schema":
        raise GrammarError(f"grammars of kind {spec.kind[:40]!r} are unknown")
    try:
        return LLMatcher.grammar_from_json_schema(
            spec.text,
            defaults=SCHEMA_OPTIONS,  # type: ignore[arg-type]  # keys that are absent keep their meaning
            overrides=FORCED_OPTIONS,  # type: ignore[arg-type]
        )
    except (ValueError, json.JSONDecodeError) as error:
        raise GrammarError(str(error)) from error
