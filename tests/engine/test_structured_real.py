"""Structured output on SmolLM2 with the compiled kernels: what it says parses and matches, or was cut by max_tokens."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import jsonschema
import pytest

from headrace import LLM
from headrace.testing.schemas import SCHEMAS
from headrace.types import GrammarSpec, SamplingParams

pytestmark = pytest.mark.real_model
NUM_SEEDS = 10


@pytest.mark.timeout(120)
def test_twenty_schemas_times_ten_seeds(smollm2: Path) -> None:
    names = [name for name in SCHEMAS for _ in range(NUM_SEEDS)]
    params = [
        SamplingParams(
            max_tokens=80,
            temperature=(1.0, 0.0)[index % NUM_SEEDS == 0],
            seed=index,
            grammar=GrammarSpec("json_schema", json.dumps(SCHEMAS[name])),
        )
        for index, name in enumerate(names)
    ]
    with LLM(str(smollm2), kv_cache_memory="512MiB", max_num_seqs=64) as llm:
        outputs = llm.chat([[{"role": "user", "content": f"Give me a {name} as JSON."}] for name in names], params)
    reasons: Counter[str] = Counter()
    for name, output in zip(names, outputs, strict=True):
        choice = output.outputs[0]
        reasons[choice.finish_reason] += 1
        if choice.finish_reason == "stop":
            jsonschema.validate(json.loads(choice.text), SCHEMAS[name])
    assert reasons.keys() <= {"stop", "length"}
    assert reasons["stop"] > len(names) * 3 / 4
