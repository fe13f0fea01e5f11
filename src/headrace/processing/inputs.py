"""From what a user sent to what the engine gets: renders the chat template, tokenises, validates, builds `Submit`.

Routes and `LLM` call it on their event loop. Long texts are handled in a small thread pool of its own, so that probes
keep answering; short ones inline, because a thread would cost more than the work. It submits nothing.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from msgspec.structs import replace

from headrace.config.options import AdmissionConfig, GrammarConfig
from headrace.errors import InvalidRequest, QueueFull
from headrace.processing.chat_template import ChatTemplate
from headrace.processing.checks import check_int, check_token_ids, refusal
from headrace.processing.messages import check_messages
from headrace.processing.structured import GrammarChecker
from headrace.processing.tokenizer import Tokenizer
from headrace.processing.validate import (
    check_length,
    check_num_choices,
    context_limit,
    resolve_words,
    validate_params,
    validate_request,
)
from headrace.transport.messages import EngineInfo, Submit
from headrace.types import GrammarSpec, RequestId, SamplingParams

INLINE_CHARS = 2_000  # a text up to this long is tokenised on the loop: well under a millisecond
NUM_THREADS = 2
NICENESS = 5  # of these threads: where cores are short, the event loop goes first
DENSE_CHARS = 16  # characters per token that no text but spaces reaches: below, its length alone says too little
SEED_BITS = 62  # drawn seeds leave room for seed + choice
RESERVED_TEMPLATE_KWARGS = frozenset(
    {"messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize"}
)
NO_TEMPLATE = (
    "The served model has no chat template. Use /v1/completions, or start the server with --chat-template FILE "
    "(a Jinja template)."
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatInput:
    """A conversation and how it is rendered. `tools` reach the template; calls in the answer are `parsing.py`'s."""

    messages: Sequence[dict[str, Any]]
    tools: Sequence[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None  # None: unless the final message is continued
    continue_final_message: bool = False
    chat_template: str | None = None
    template_kwargs: Mapping[str, Any] | None = None


Prompt = str | Sequence[int] | ChatInput


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """What travels with a request beside its prompt and its sampling parameters; already checked by the caller."""

    prefix: str = "cmpl"
    name: str | None = None  # the caller's request_id or X-Request-Id
    public_id: str | None = None  # in place of one made of prefix and name
    more_names: tuple[str, ...] = ()  # by which an abort finds the request too
    add_special_tokens: bool | None = None  # None: for plain prompts, as a chat template writes its own
    default_max_tokens: int | None = None
    truncate_to: int | None = None  # of a longer prompt only that many last tokens are kept; -1: what the context holds
    priority: int = 0
    timeout_s: float | None = None
    queue_timeout_s: float | None = None
    cache_salt: str | None = None
    trace_parent: str | None = None
    names: Mapping[str, str] = field(default_factory=dict)  # SamplingParams field -> the request's name for it


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A `Submit` and the texts its prompts came from (None where the caller gave token ids)."""

    submit: Submit
    texts: tuple[str | None, ...]


@dataclass(frozen=True, slots=True)
class _Room:
    """What a prompt must fit into."""

    info: EngineInfo
    has_output: bool
    num_kept: int | None  # a longer prompt loses its first tokens; None: it is refused

    @classmethod
    def of(cls, info: EngineInfo, options: RequestOptions, *, has_output: bool) -> _Room:
        asked, most = options.truncate_to, context_limit(info) - has_output
        if asked is None:
            return cls(info, has_output, None)
        param = options.names.get("truncate_to", "truncate_prompt_tokens")
        if asked != -1:
            check_int(asked, param, 1, most, f"-1 or an integer from 1 to {most}, what the context holds")
        return cls(info, has_output, most if asked == -1 else asked)

    def check(self, num_tokens: int, param: str, *, at_least: bool = False) -> None:
        if self.num_kept is None:
            check_length(num_tokens, 0, self.info, param, at_least=at_least, has_output=self.has_output)


class InputProcessor:
    """One per front end. All methods but `close` belong to one event loop."""

    def __init__(
        self, tokenizer: Tokenizer, admission: AdmissionConfig, *, seed: int = 0, grammar: GrammarConfig | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._admission = admission
        self._seeds = random.Random(seed or None)
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tokenise", initializer=_stand_back)
        self._num_pending = 0
        self._grammars = GrammarChecker(tokenizer, grammar or GrammarConfig())

    async def prepare(
        self,
        source: ChatInput | Sequence[Prompt],
        params: SamplingParams,
        info: EngineInfo,
        request_id: RequestId,
        options: RequestOptions | None = None,
        *,
        answer_form: Callable[[PreparedRequest, GrammarSpec], GrammarSpec] | None = None,
    ) -> PreparedRequest:
        """Validates and tokenises. Raises InvalidRequest, or QueueFull when too many long texts wait already.
        `answer_form` gives the grammar of all that the model says, from that of the answer."""
        options = options or RequestOptions()
        params = validate_params(params, self._admission, info, names=options.names)
        num_prompts = 1 if isinstance(source, ChatInput) else len(source)
        check_num_choices(num_prompts * params.n, self._admission, options.names.get("n", "n"))
        if params.seed is None:
            params = replace(params, seed=self._seeds.getrandbits(SEED_BITS))
        size = _num_chars(source) + sum(map(len, params.stop)) + sum(map(len, params.bad_words))

        def work() -> PreparedRequest:
            return self._build(source, params, info, request_id, options)

        prepared = await self._run(size, work)
        if params.grammar is None:
            return prepared
        spec = params.grammar if answer_form is None else answer_form(prepared, params.grammar)
        spec = await self._grammars.check(spec, options.names.get("grammar", "grammar"), info.vocab_size)
        submit = replace(prepared.submit, params=replace(prepared.submit.params, grammar=spec))
        return PreparedRequest(submit, prepared.texts)

    async def tokenize(self, source: ChatInput | str, *, add_special_tokens: bool | None = None) -> list[int]:
        """Token ids of a text or of a rendered conversation."""
        sources: ChatInput | Sequence[Prompt] = source if isinstance(source, ChatInput) else (source,)
        options = RequestOptions(add_special_tokens=add_special_tokens)
        return await self._run(_num_chars(sources), lambda: list(self._token_ids(sources, None, options)[0][0]))

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return await self._run(
            len(token_ids) * 4,
            lambda: self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens),
        )

    async def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """The text of each token by itself."""
        return await self._run(len(token_ids) * 4, lambda: list(map(self._tokenizer.token_text, token_ids)))

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._grammars.close()

    async def _run(self, num_chars: int, work: Callable[[], T]) -> T:
        if num_chars <= INLINE_CHARS:
            return work()
        if self._num_pending >= self._admission.max_queued_requests:
            raise QueueFull(
                f"{self._num_pending} prompts wait to be tokenised; at most {self._admission.max_queued_requests} may.",
                retry_after_s=1,
            )
        self._num_pending += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        finally:
            self._num_pending -= 1

    # ------------------------------------------------------------------ pure work, on the loop or in a thread

    def _build(
        self,
        source: ChatInput | Sequence[Prompt],
        params: SamplingParams,
        info: EngineInfo,
        request_id: RequestId,
        options: RequestOptions,
    ) -> PreparedRequest:
        params = resolve_words(params, self._encode_word, self._admission)
        room = _Room.of(info, options, has_output=params.pooling is None)
        prompts, texts = self._token_ids(source, room, options)
        params = validate_request(
            prompts,
            params,
            self._admission,
            info,
            default_max_tokens=options.default_max_tokens,
            names={"prompt": "messages" if isinstance(source, ChatInput) else "prompt", **options.names},
        )
        public_id, aliases = request_names(options.prefix, options.name)
        timeout_s, queue_timeout_s = options.timeout_s, options.queue_timeout_s
        submit = Submit(
            request_id=request_id,
            public_id=options.public_id or public_id,
            aliases=(*options.more_names, *aliases),
            prompts=prompts,
            params=params,
            priority=options.priority,
            timeout_s=self._admission.default_timeout_s if timeout_s is None else timeout_s,
            queue_timeout_s=self._admission.default_queue_timeout_s if queue_timeout_s is None else queue_timeout_s,
            cache_salt=options.cache_salt,
            trace_parent=options.trace_parent,
        )
        return PreparedRequest(submit, texts)

    def _token_ids(
        self, source: ChatInput | Sequence[Prompt], room: _Room | None, options: RequestOptions
    ) -> tuple[tuple[tuple[int, ...], ...], tuple[str | None, ...]]:
        """Ids and texts of prompts. Without `room` they are only counted or shown."""
        if isinstance(source, ChatInput):
            source = (source,)
        if not source:
            raise refusal("prompt", [], "at least one prompt")
        ids: list[tuple[int, ...]] = []
        texts: list[str | None] = []
        for index, prompt in enumerate(source):
            name = options.names.get("prompt", "messages" if isinstance(prompt, ChatInput) else "prompt")
            param = name + (f"[{index}]" if len(source) > 1 else "")
            text = None
            if isinstance(prompt, str):
                text, adds_special = prompt, options.add_special_tokens is not False
                ids.append(self._encode(text, adds_special, room, param))
            elif isinstance(prompt, ChatInput):
                text, adds_special = self._render(prompt), bool(options.add_special_tokens)
                ids.append(self._encode(text, adds_special, room, param))
            elif isinstance(prompt, list | tuple):
                assert room is not None, "ids are a prompt"
                room.check(len(prompt), param)  # before looking at each of a million ids
                kept = prompt if room.num_kept is None else prompt[-room.num_kept :]
                ids.append(check_token_ids(kept, param, room.info.vocab_size))
            else:
                raise refusal(param, prompt, "a string or a list of token ids")
            texts.append(text)
        return tuple(ids), tuple(texts)

    def _encode(self, text: str, adds_special: bool, room: _Room | None, param: str) -> tuple[int, ...]:
        """A text that is much too long is refused by its length: to tokenise 10 MB takes seconds."""
        if room is not None and room.num_kept is None and len(text) > DENSE_CHARS * context_limit(room.info):
            room.check(self._tokenizer.least_tokens(text), param, at_least=True)
        ids = self._tokenizer.encode(text, add_special_tokens=adds_special)
        return tuple(ids if room is None or room.num_kept is None else ids[-room.num_kept :])

    def _render(self, chat: ChatInput) -> str:
        template = self._template(chat.chat_template)
        kwargs = dict(chat.template_kwargs or {})
        for name in RESERVED_TEMPLATE_KWARGS & kwargs.keys():
            raise InvalidRequest(f"chat_template_kwargs must not set {name}.", param=f"chat_template_kwargs.{name}")
        add_generation_prompt = chat.add_generation_prompt
        if add_generation_prompt is None:
            add_generation_prompt = not chat.continue_final_message
        elif add_generation_prompt and chat.continue_final_message:
            raise InvalidRequest(
                "add_generation_prompt and continue_final_message must not both be true.", param="add_generation_prompt"
            )
        return template.render(
            check_messages(chat.messages),
            tools=list(chat.tools) if chat.tools else None,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=chat.continue_final_message,
            kwargs=kwargs,
        )

    def _template(self, source: str | None) -> ChatTemplate:
        if source is None:
            if self._tokenizer.chat_template is None:
                raise InvalidRequest(NO_TEMPLATE, param="messages", code="no_chat_template")
            return self._tokenizer.chat_template
        if not self._admission.trust_request_chat_template:
            raise InvalidRequest(
                "chat_template in a request is allowed only when the server runs with --trust-request-chat-template.",
                param="chat_template",
                code="unsupported_field",
            )
        return self._tokenizer.request_template(source)

    def _encode_word(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def _stand_back() -> None:
    """On Linux a thread has a niceness of its own, which the tokenizer library's threads inherit."""
    if sys.platform == "linux":
        os.nice(NICENESS)


def request_names(prefix: str, name: str | None) -> tuple[str, tuple[str, ...]]:
    """The public id, and the other names by which an abort finds the request; the last one is always unique."""
    unique = uuid.uuid4().hex
    if name is None:
        return f"{prefix}-{unique}", (unique,)
    return f"{prefix}-{name}", (name, unique)


def _num_chars(source: ChatInput | Sequence[Prompt]) -> int:
    """How much text there is, roughly: decides between inline and thread."""
    if not isinstance(source, ChatInput):
        chats = sum(_num_chars(prompt) for prompt in source if isinstance(prompt, ChatInput))
        return chats + sum(len(prompt) for prompt in source if isinstance(prompt, str))
    total = 500 * len(source.tools or ()) + len(source.chat_template or "")
    for message in source.messages:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, str):
            total += len(content)
        elif isinstance(content, list):
            total += sum(len(str(part.get("text", ""))) for part in content if isinstance(part, dict))
    return total
