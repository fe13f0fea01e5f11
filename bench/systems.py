"""The systems that `figures.py` measures: how each is started, asked whether it is ready, and stopped.

Headrace runs from this environment. llama.cpp (xllamacpp) and OpenVINO GenAI live in an environment of their own, whose
Python is given with --peers; nothing of theirs is imported here.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from headrace.testing.server import RunningServer

LLAMA_CPP = """
import signal, sys, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.n_parallel, params.n_ctx, params.port = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), 0
params.cont_batching, params.n_gpu_layers = True, 0
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(sys.argv[4])
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
signal.pause()
"""

OPENVINO = """
import json, sys, time, openvino_genai as ov
model, streams, out, prompts = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), json.load(sys.stdin)
scheduler = ov.SchedulerConfig()
scheduler.cache_size, scheduler.max_num_seqs, scheduler.enable_prefix_caching = 2, 64, False
pipe = ov.LLMPipeline(model, "CPU", scheduler_config=scheduler)
config = ov.GenerationConfig()
config.max_new_tokens, config.ignore_eos, config.apply_chat_template = out, True, False
pipe.generate(prompts[:1], config)
begin = time.perf_counter()
for at in range(0, len(prompts), streams):
    pipe.generate(prompts[at:at + streams], config)
print(json.dumps(time.perf_counter() - begin))
"""


@dataclass(frozen=True, slots=True)
class Running:
    url: str
    ready_s: float
    pid: int

    def resident_bytes(self) -> int:
        """Of all its processes, shared pages counted once."""
        family = [psutil.Process(self.pid), *psutil.Process(self.pid).children(recursive=True)]
        return sum(process.memory_full_info().pss for process in family)


@contextmanager
def headrace(model: str, *options: str) -> Iterator[Running]:
    begin = time.perf_counter()
    with RunningServer([model, "--no-enable-prefix-caching", *options]) as server:
        while httpx.get(server.url + "/readyz").status_code != 200:
            time.sleep(0.01)
        yield Running(server.url, time.perf_counter() - begin, server.process.pid)


@contextmanager
def llama_cpp(python: Path, model_file: Path, slots: int, context: int) -> Iterator[Running]:
    """A server with `slots` slots of context / slots tokens each."""
    begin = time.perf_counter()
    threads = str(psutil.cpu_count() or 1)
    command = [str(python), "-c", LLAMA_CPP, str(model_file), str(slots), str(context), threads]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        if not url:
            raise SystemExit(f"llama.cpp did not start: {python} -c ... {model_file}")
        url = url if url.startswith("http") else f"http://{url}"
        while httpx.get(url + "/health").status_code != 200:
            time.sleep(0.01)
        yield Running(url, time.perf_counter() - begin, process.pid)
    finally:
        process.kill()
        process.communicate()


def openvino_seconds(python: Path, model_file: Path, prompts: list[str], streams: int, output_tokens: int) -> float:
    """Seconds that OpenVINO's offline pipeline takes for all prompts, `streams` at once, after a warm-up."""
    command = [str(python), "-c", OPENVINO, str(model_file), str(streams), str(output_tokens)]
    result = subprocess.run(command, input=json.dumps(prompts), capture_output=True, text=True, check=False)
    if result.returncode:
        print(result.stderr[-500:], file=sys.stderr)
        return float("nan")
    return float(result.stdout.strip().splitlines()[-1])
