"""Every option of the server, one frozen dataclass per component; the root `ServeConfig` composes them.

A component's constructor takes its own dataclass, never the root. `None` stands for "decide at start"; the engine's
ready message says what was decided. Names are vLLM's where vLLM has the option.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.config.fields import option

LOG_LEVELS = ("debug", "info", "warning", "error")
BACKENDS = ("auto", "native", "reference", "reference-exact")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model, and how it computes."""

    model: str = option("smollm2", "alias, Hugging Face id, folder of safetensors, or GGUF file", metavar="MODEL")
    revision: str | None = option(None, "branch, tag or commit of a Hugging Face id", metavar="REV")
    tokenizer: str | None = option(None, "tokenizer folder or file, if not the model's own", metavar="PATH")
    chat_template: str | None = option(None, "file with a Jinja chat template, or the template itself", metavar="PATH")
    served_model_name: tuple[str, ...] = option(
        (), "names that requests may use (default: the model's)", metavar="NAME"
    )
    generation_config: str = option(
        "auto", "sampling defaults of requests: the model's own advice, or OpenAI's", choices=("auto", "none")
    )
    override_generation_config: str | None = option(
        None, 'sampling defaults that win over the model\'s, such as {"temperature": 0.2}', metavar="JSON"
    )
    max_model_len: int | None = option(None, "longest prompt plus output, in tokens (default: the model's)", minimum=1)
    backend: str = option(
        "auto",
        "kernels: native is compiled, the others are numpy; all but reference give the same bits in any batch",
        choices=BACKENDS,
    )
    threads: int | None = option(
        None, "threads of the native kernels, of all ranks together (default: the cores that may be used)", minimum=1
    )
    kv_cache_dtype: str = option(
        "auto", "KV memory of the native kernels; auto is fp16", choices=("auto", "fp16", "int8")
    )
    pooling: str = option(
        "last", "what an embedding is made of: the last token, or the mean of all tokens", choices=("last", "mean")
    )
    quantization: str | None = option(
        None, "round the weights of a float model to 8 or 4 bits at load (native kernels)", choices=("w8", "w4")
    )
    seed: int = option(
        0,
        "seed of requests that bring none is drawn from a generator that starts here; 0: random",
        minimum=0,
        maximum=2**63 - 1,
    )


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Several processes (ranks) that share one model, on this host."""

    tensor_parallel_size: int = option(
        1, "ranks that the model is spread over; any number gives the same bits (native kernels)", minimum=1, maximum=64
    )
    enable_expert_parallel: bool = option(
        False, "give each rank whole experts of a mixture-of-experts model, instead of a part of each"
    )
    redundant_experts: int = option(
        0, "second copies of busy experts, over all ranks; needs --enable-expert-parallel", minimum=0
    )
    expert_map: str | None = option(
        None,
        "where experts are at the start, redundant ones included: JSON that `headrace ctl experts stats --json` has"
        " printed (default: in order)",
        metavar="FILE",
    )


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """Balancing experts over ranks."""

    expert_balancing: str = option(
        "manual", "auto moves experts by itself when that pays; manual when asked to", choices=("off", "manual", "auto")
    )
    expert_strategy: str = option(
        "hierarchical", "how placements are planned", choices=("hierarchical", "global", "intra_node")
    )
    expert_nodes: int = option(1, "nodes that a placement thinks the ranks are spread over", minimum=1)
    expert_window_steps: int = option(1000, "steps over which loads are counted", minimum=1)
    expert_interval_steps: int = option(3000, "steps between two decisions of auto", minimum=1)
    expert_min_tokens: int = option(20_000, "tokens that a window needs for a decision of auto", minimum=0)
    expert_balance_threshold: float = option(0.9, "balance that auto leaves alone", minimum=0, maximum=1)
    expert_min_gain: float = option(0.03, "least share of the fullest ranks' load that auto moves for", minimum=0)
    expert_horizon: float = option(600.0, "seconds for which auto expects a placement to fit", minimum=0)
    expert_cool_down: float = option(60.0, "seconds between two moves of auto", minimum=0)
    expert_move_bytes: str = option("1MiB", "bytes of experts that move beside one step", metavar="SIZE")


@dataclass(frozen=True, kw_only=True)
class EplbConfig:
    """FastDeploy's routes of expert balancing, by which several servers change their maps together."""

    eplb_user: str | None = option(
        None, "user in the bodies of these routes; without, admin keys alone guard them", metavar="NAME"
    )
    eplb_password: str | None = option(
        None, "password beside it; a server sends both to those that it leads", metavar="TEXT"
    )
    eplb_timeout: float = option(
        60.0, "seconds without a word from its leader after which a server gives a rearrangement up", above=0
    )
    eplb_call_timeout: float = option(
        1.0, "seconds that another server may take to answer this one during a rearrangement", above=0
    )


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """KV memory."""

    block_size: int = option(16, "tokens per KV block", minimum=1, maximum=4096)
    kv_cache_memory: str | None = option(None, "KV memory, such as 512MiB or 2GiB", metavar="SIZE")
    kv_cache_fraction: float = option(
        0.25, "share of the free memory for KV, when --kv-cache-memory is not given", above=0, maximum=1
    )
    num_kv_blocks: int | None = option(None, "number of KV blocks; overrides both sizes (tests)", minimum=1)
    enable_prefix_caching: bool = option(True, "reuse the KV of prompt prefixes across requests")


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Batching."""

    max_num_seqs: int = option(64, "sequences that run at once", minimum=1)
    max_num_batched_tokens: int = option(
        512, "tokens that one step computes at most, prefill and decode together", minimum=1
    )
    priority_ageing_s: float = option(
        10.0, "a request one priority level lower runs as if it had come this much later", minimum=0
    )


@dataclass(frozen=True, kw_only=True)
class ControlConfig:
    """Weights that change, and sleep."""

    allow_pickled_weights: bool = option(
        False, "take tensors that a trainer has pickled; the reader knows tensors alone and runs no code of the pickle"
    )
    requests_while_asleep: str = option(
        "refuse",
        "requests that come while the engine sleeps: 503 at once, or a place in the queue",
        choices=("refuse", "wait"),
    )
    refresh_timeout: float = option(
        300.0, "seconds without a word from its sender after which an open refresh is aborted", above=0
    )


@dataclass(frozen=True, kw_only=True)
class GrammarConfig:
    """Output that must match a schema, a regular expression or a grammar."""

    max_grammar_bytes: int = option(262_144, "longest schema or grammar of a request; more: 400", minimum=1)
    grammar_timeout: float = option(10.0, "seconds that a grammar may take to compile; more: 400", above=0)
    num_grammars_kept: int = option(
        128, "compiled grammars that each process keeps for requests that bring the same again", minimum=1
    )


@dataclass(frozen=True, kw_only=True)
class AdmissionConfig:
    """What the front end accepts."""

    max_queued_requests: int = option(1024, "choices that may wait for their first token; more: 429", minimum=1)
    max_queued_tokens: int = option(
        1_000_000, "prompt tokens that may wait for their first token; more: 429", minimum=1
    )
    max_logprobs: int = option(20, "most logprobs that a request may ask for; -1: the vocabulary", minimum=-1)
    max_n: int = option(128, "most choices per prompt", minimum=1)
    max_stop_strings: int = option(16, "most stop strings of a request", minimum=0)
    max_stop_tokens: int = option(64, "longest stop string, in tokens", minimum=1)
    max_body_bytes: int = option(32 * 1024 * 1024, "largest request body; more: 413", minimum=1)
    max_refresh_bytes: int = option(
        64 * 1024**3, "largest body that brings weights; it goes to /dev/shm, else to a file; more: 413", minimum=1
    )
    default_timeout_s: float | None = option(None, "deadline of requests that bring none, waiting included", above=0)
    default_queue_timeout_s: float | None = option(
        None, "how long requests that do not say may wait until they are started", above=0
    )
    strict_fields: bool = option(False, "refuse unknown request fields instead of a warning header")
    trust_request_chat_template: bool = option(
        False, "let requests bring their own chat_template: it is sandboxed, yet may burn CPU"
    )


@dataclass(frozen=True, kw_only=True)
class ParsingConfig:
    """What chat replies are taken apart into."""

    reasoning_parser: str = option(
        "auto",
        "how the model marks its thoughts: think, deepseek_r1, qwen3, ernie_x1, gemma4, a plugin's name, none; auto: "
        "read from the chat template",
        metavar="NAME",
    )
    tool_parser: str = option(
        "auto",
        "how the model writes tool calls: hermes, llama3_json, mistral, pythonic, deepseek_v3, qwen3_coder, glm45, "
        "ernie_x1, a plugin's name, none; auto: read from the chat template",
        metavar="NAME",
    )
    plugin: tuple[str, ...] = option(
        (), "Python file whose register(registry) adds parsers; repeatable; it is run", metavar="FILE"
    )


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """HTTP and processes."""

    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "port to listen on; 0: any free one", minimum=0, maximum=65535)
    api_servers: int = option(1, "front-end processes on the port", minimum=1)
    api_key: tuple[str, ...] = option((), "user key; repeatable (or HEADRACE_API_KEY)", metavar="KEY")
    cache_salt_by_key: bool = option(
        False, "cached prefixes are shared only by requests with the same API key, so that timing tells others nothing"
    )
    admin_key: tuple[str, ...] = option((), "key of the control routes (or HEADRACE_ADMIN_KEY)", metavar="KEY")
    drain_timeout: float = option(30.0, "seconds that running requests get after SIGTERM", minimum=0)
    heartbeat_timeout: float = option(
        10.0, "seconds without a heartbeat after which the engine counts as stalled", above=0
    )
    hang_timeout: float = option(
        300.0,
        "seconds without a heartbeat after which the server ends, with the stacks of the engine in its log",
        minimum=2,
    )
    startup_timeout: float = option(600.0, "seconds that the engine may take to load", above=0)
    mock_engine: bool = option(False, "EchoModel in place of a model: for tests of the front end")
    mock_step_delay: float = option(0.0, "seconds that a step of the mock engine takes", minimum=0, maximum=60)
    response_store_bytes: int = option(
        64 * 1024 * 1024, "bytes of what /v1/responses keeps; the oldest go first, 0: none", minimum=0
    )
    cors_origin: tuple[str, ...] = option((), "origin that browsers may call from; repeatable", metavar="ORIGIN")


@dataclass(frozen=True, kw_only=True)
class ObservabilityConfig:
    """Logs, metrics and traces."""

    log_level: str = option("info", "least severe log line; POST /v1/control/log_level changes it", choices=LOG_LEVELS)
    log_format: str = option("text", "a log line as words and key=value, or as a JSON object", choices=("text", "json"))
    metrics_alias: tuple[str, ...] = option(
        (), "show metrics under another server's names too; repeatable", choices=("vllm", "fastdeploy")
    )
    otlp_traces_endpoint: str | None = option(
        None, "OpenTelemetry collector to send spans to (OTLP over HTTP); needs headrace[otel]", metavar="URL"
    )


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What an engine process needs."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    control: ControlConfig = field(default_factory=ControlConfig)
    grammar: GrammarConfig = field(default_factory=GrammarConfig)


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Everything `headrace serve` takes."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    parsing: ParsingConfig = field(default_factory=ParsingConfig)
    eplb: EplbConfig = field(default_factory=EplbConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    observability: ObservabilityConfig = field(default_factory=ObservabilityConfig)
