"""`LLM`: a model in this process, for scripts, notebooks and trainers; no server, no HTTP.

    with LLM("smollm2", max_model_len=2048) as llm:
        outputs = llm.generate(["Once upon a time"], SamplingParams(max_tokens=32))

It runs the same engine and validation as the server, over `InprocClient` on an event loop in a thread of its own.
Its methods block, and may be called from any thread.
"""

from __future__ import annotations

import asyncio
import dataclasses
import queue
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator, Sequence
from types import TracebackType
from typing import Any, TypeVar, cast

import numpy as np

from headrace.client.base import EngineClient, OutputStream
from headrace.client.inproc import InprocClient
from headrace.config.generation import parse_defaults, resolve_model_config
from headrace.config.load import load_config
from headrace.config.options import AdmissionConfig, EngineConfig, ObservabilityConfig
from headrace.engine.core import EngineCore
from headrace.errors import FailedRequest, InvalidRequest, Unavailable
from headrace.executor import Grammars, create_executor
from headrace.processing.embedding import check_dimensions, finished
from headrace.processing.inputs import ChatInput, InputProcessor, PreparedRequest, Prompt, RequestOptions
from headrace.processing.outputs import OutputAssembler, TextDelta, TokenLogprob
from headrace.processing.tokenizer import Tokenizer, load_tokenizer
from headrace.processing.vocabulary import load_vocabulary
from headrace.transport.messages import EngineInfo
from headrace.types import SamplingParams, Usage
from headrace.weights.hub import ResolvedModel, resolve_model

T = TypeVar("T")
Messages = Sequence[dict[str, Any]]
Source = ChatInput | Sequence[Prompt]
Collect = Callable[[PreparedRequest, OutputStream], Coroutine[Any, Any, T]]

# Nobody else waits in this queue, so nothing is refused that the engine could do.
_ADMISSION = AdmissionConfig(
    max_queued_requests=2**31,
    max_queued_tokens=2**40,
    max_logprobs=-1,
    max_n=2**16,
    max_stop_strings=1024,
    max_stop_tokens=1024,
)
_CLOSE_TIMEOUT_S = 10.0


@dataclasses.dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One choice."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str  # stop or length
    stop_reason: int | str | None  # the stop token id or stop string that ended it
    logprobs: list[TokenLogprob] | None
    cumulative_logprob: float | None


@dataclasses.dataclass(frozen=True, slots=True)
class GenerationOutput:
    """What came of one prompt; `prompt` is None where token ids were given."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    usage: Usage
    prompt_logprobs: list[TokenLogprob | None] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """The vector of one prompt."""

    prompt: str | None
    prompt_token_ids: list[int]
    embedding: np.ndarray  # float32 [D]


class LLM:
    """One model and its engine. Options are those of the engine in docs/options.md, with underscores."""

    def __init__(self, model: str = "smollm2", **options: Any) -> None:
        """Fetches what is missing and loads the model. Raises StartupError (an option or a file that cannot work)."""
        self._open(load_config(EngineConfig, {"model": model, **options}, environment={}))

    @classmethod
    def from_config(cls, config: EngineConfig) -> LLM:
        """The same from a whole config, as the command line makes it."""
        llm = cls.__new__(cls)
        llm._open(config)
        return llm

    def _open(self, config: EngineConfig) -> None:
        resolved = resolve_model(config.model.model, config.model.revision)
        model = resolve_model_config(config.model, resolved.name, resolved.recommended_sampling)
        config = dataclasses.replace(config, model=model)
        self._tokenizer = load_tokenizer(resolved.path, config.model.tokenizer, config.model.chat_template)
        self._inputs = InputProcessor(self._tokenizer, _ADMISSION, seed=config.model.seed, grammar=config.grammar)
        self._loop = asyncio.new_event_loop()
        thread = threading.Thread(target=self._loop.run_forever, name="headrace-llm", daemon=True)
        thread.start()
        self.name = resolved.name
        self._pooling = model.pooling
        self.default_params = SamplingParams(**parse_defaults(model.override_generation_config))
        try:
            self._client: EngineClient = self._run(_open_client(config, resolved))
        except BaseException:
            self._inputs.close()
            _stop_loop(self._loop, thread)
            raise
        self._close = weakref.finalize(self, _shut_down, self._loop, thread, self._client, self._inputs)

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    @property
    def info(self) -> EngineInfo:
        """What the engine resolved: context length, KV blocks, backend."""
        return self._client.info

    def generate(
        self, prompts: str | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[GenerationOutput]:
        """Completes the prompts (texts, or lists of token ids), all in one batch; outputs are in the prompts' order.

        Raises InvalidRequest before anything has run, FailedRequest when the engine could not finish one.
        """
        if isinstance(prompts, str):
            prompts = [prompts]
        return self._generate([(prompt,) for prompt in prompts], params)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **template_kwargs: Any,
    ) -> list[GenerationOutput]:
        """Answers a conversation, or each of a list of them; keyword arguments go to the chat template."""
        is_one = bool(messages) and isinstance(messages[0], dict)
        conversations = cast("Sequence[Messages]", [messages] if is_one else messages)
        return self._generate([_chat_input(each, template_kwargs) for each in conversations], params)

    def embed(
        self,
        prompts: str | Sequence[Prompt],
        *,
        pooling: str | None = None,
        normalize: bool = True,
        dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[EmbeddingOutput]:
        """Embeddings as /v1/embeddings makes them, all in one batch. `pooling`: last or mean; None: as the option says.

        Raises InvalidRequest before anything has run, FailedRequest when the engine could not finish one.
        """
        self._require_open()
        check_dimensions(dimensions, self.info)
        sources = [(prompt,) for prompt in ([prompts] if isinstance(prompts, str) else prompts)]
        params = [SamplingParams(pooling=pooling or self._pooling)] * len(sources)
        options = RequestOptions(truncate_to=truncate_prompt_tokens)

        async def collect(prepared: PreparedRequest, stream: OutputStream) -> EmbeddingOutput:
            choices, _ = await self._deltas(prepared, stream)
            pooled = choices[0][-1].embedding
            if pooled is None:
                raise Unavailable("the request was aborted before its embedding was computed", code="aborted")
            vector = finished(pooled, dimensions, is_normalised=normalize)
            return EmbeddingOutput(prepared.texts[0], list(prepared.submit.prompts[0]), vector)

        return self._run(self._batch(sources, params, collect, options))

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[TextDelta]:
        """Yields pieces of the completion as they come. Leaving the iteration early aborts the request."""
        return self._stream((prompt,), params or self.default_params)

    def stream_chat(
        self, messages: Messages, params: SamplingParams | None = None, **template_kwargs: Any
    ) -> Iterator[TextDelta]:
        """Yields pieces of the answer as they come. Leaving the iteration early aborts the request."""
        return self._stream(_chat_input(messages, template_kwargs), params or self.default_params)

    def control(self, operation: str, **arguments: Any) -> dict[str, Any]:
        """Runs a control operation to its effect: pause, sleep, refresh_weights, ... (docs/rl.md lists them)."""
        self._require_open()
        return self._run(self._client.control(operation, **arguments))

    def close(self) -> None:
        """Ends what still runs and lets go of the model. Idempotent."""
        self._close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _require_open(self) -> None:
        if not self._close.alive:
            raise Unavailable("this LLM is closed", code="shutdown")

    # ------------------------------------------------------------------ between threads

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:  # Ctrl-C too: the work must not go on without its caller
            future.cancel()
            raise

    def _generate(
        self, sources: Sequence[Source], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[GenerationOutput]:
        if params is None or isinstance(params, SamplingParams):
            each = [params or self.default_params] * len(sources)
        else:
            each = list(params)
        if len(each) != len(sources):
            raise InvalidRequest(f"{len(sources)} prompts need as many params, not {len(each)}.", param="params")
        self._require_open()
        return self._run(self._batch(sources, each, self._collect))

    def _stream(self, source: Source, params: SamplingParams) -> Iterator[TextDelta]:
        self._require_open()
        pieces: queue.SimpleQueue[TextDelta | None] = queue.SimpleQueue()
        future = asyncio.run_coroutine_threadsafe(self._pump(source, params, pieces), self._loop)
        try:
            while (piece := pieces.get()) is not None:
                yield piece
            future.result()
        finally:
            future.cancel()

    # ------------------------------------------------------------------ on the loop

    async def _pump(self, source: Source, params: SamplingParams, pieces: queue.SimpleQueue[TextDelta | None]) -> None:
        try:
            prepared = await self._prepare(source, params)
            stream = self._client.submit(prepared.submit)
            try:
                async for deltas in OutputAssembler(self._tokenizer, prepared.submit, stream):
                    for delta in deltas:
                        _raise_failure(delta)
                        pieces.put(delta)
            finally:
                stream.close()
        finally:
            pieces.put(None)

    async def _prepare(
        self, source: Source, params: SamplingParams, options: RequestOptions | None = None
    ) -> PreparedRequest:
        return await self._inputs.prepare(source, params, self._client.info, self._client.next_request_id(), options)

    async def _batch(
        self,
        sources: Sequence[Source],
        params: Sequence[SamplingParams],
        collect: Collect[T],
        options: RequestOptions | None = None,
    ) -> list[T]:
        # All are valid before the first one runs.
        prepared = [await self._prepare(*pair, options) for pair in zip(sources, params, strict=True)]
        streams: list[OutputStream] = []
        try:
            streams += [self._client.submit(request.submit) for request in prepared]
            collecting = [collect(*pair) for pair in zip(prepared, streams, strict=True)]
            return await asyncio.gather(*collecting)
        finally:
            for stream in streams:
                stream.close("aborted")

    async def _deltas(self, prepared: PreparedRequest, stream: OutputStream) -> tuple[list[list[TextDelta]], Usage]:
        """All of a request, by choice."""
        assembler = OutputAssembler(self._tokenizer, prepared.submit, stream)
        choices: list[list[TextDelta]] = [[] for _ in range(prepared.submit.params.n)]
        async for deltas in assembler:
            for delta in deltas:
                _raise_failure(delta)
                choices[delta.choice].append(delta)
        return choices, assembler.usage

    async def _collect(self, prepared: PreparedRequest, stream: OutputStream) -> GenerationOutput:
        choices, usage = await self._deltas(prepared, stream)
        prompt_logprobs = [row for delta in choices[0] for row in delta.prompt_logprobs or ()]
        return GenerationOutput(
            prompt=prepared.texts[0],
            prompt_token_ids=list(prepared.submit.prompts[0]),
            outputs=[_completion(index, deltas) for index, deltas in enumerate(choices)],
            usage=usage,
            prompt_logprobs=[None, *prompt_logprobs] if prompt_logprobs else None,
        )


def _chat_input(messages: Messages, template_kwargs: dict[str, Any]) -> ChatInput:
    kwargs = dict(template_kwargs)
    return ChatInput(
        messages=messages,
        tools=kwargs.pop("tools", None),
        add_generation_prompt=kwargs.pop("add_generation_prompt", None),
        continue_final_message=kwargs.pop("continue_final_message", False),
        template_kwargs=kwargs,
    )


def _completion(index: int, deltas: list[TextDelta]) -> CompletionOutput:
    logprobs = [row for delta in deltas for row in delta.logprobs or ()]
    last = deltas[-1]
    assert last.finish_reason is not None, "a choice's last delta says why it ended"
    return CompletionOutput(
        index=index,
        text="".join(delta.text for delta in deltas),
        token_ids=[token_id for delta in deltas for token_id in delta.token_ids],
        finish_reason=last.finish_reason.label,
        stop_reason=last.stop_reason,
        logprobs=logprobs or None,
        cumulative_logprob=sum(row.logprob for row in logprobs) if logprobs else None,
    )


def _raise_failure(delta: TextDelta) -> None:
    if delta.error is not None:
        raise FailedRequest(delta.error)


async def _open_client(config: EngineConfig, resolved: ResolvedModel) -> EngineClient:
    def create_core() -> EngineCore:
        executor = create_executor(
            config.model,
            resolved.path,
            Grammars(lambda: load_vocabulary(resolved.path, config.model.tokenizer), config.grammar.num_grammars_kept),
            parallel=config.parallel,
            observability=ObservabilityConfig(log_level="warning"),
        )
        try:
            return EngineCore(executor, config.cache, config.scheduler, config.model.max_model_len)
        except BaseException:
            executor.close()
            raise

    client = InprocClient(create_core, _ADMISSION, config.control, resolved.path, config.experts)
    try:
        await client.wait_ready()
    except BaseException:
        await client.close()
        raise
    return client


def _shut_down(
    loop: asyncio.AbstractEventLoop, thread: threading.Thread, client: EngineClient, inputs: InputProcessor
) -> None:
    asyncio.run_coroutine_threadsafe(client.close(), loop).result(_CLOSE_TIMEOUT_S)
    inputs.close()
    _stop_loop(loop, thread)


def _stop_loop(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    asyncio.run_coroutine_threadsafe(loop.shutdown_default_executor(), loop).result(_CLOSE_TIMEOUT_S)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(_CLOSE_TIMEOUT_S)
    loop.close()
