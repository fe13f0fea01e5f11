"""What `headrace serve` prints when it is ready: where it listens, and a curl that works when it is pasted."""

from __future__ import annotations

import json


def ready_lines(url: str, model: str, *, has_chat_template: bool, needs_key: bool, seconds: float) -> list[str]:
    path: str
    body: dict[str, object]
    if has_chat_template:
        question = {"role": "user", "content": "What is the capital of France?"}
        path, body = "chat/completions", {"messages": [question], "temperature": 0}
    else:
        path, body = "completions", {"prompt": "The three primary colours are", "max_tokens": 32, "temperature": 0}
    text = json.dumps({"model": model, **body}).replace("'", "'\\''")
    key = ' -H "Authorization: Bearer $HEADRACE_API_KEY"' if needs_key else ""
    return [
        f"Headrace is ready at {url} (model {model}, {seconds:.1f} s)",
        f"Try: curl {url}/v1/{path} -H 'Content-Type: application/json'{key} -d '{text}'",
    ]
