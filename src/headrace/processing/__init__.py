"""Everything between the HTTP routes and the engine client: requests to token ids, token ids to text.

In: `validate.py`, `chat_template.py`, `tokenizer.py`, put together by `inputs.py`. Out: `outputs.py` over
`detokenize.py`, `search.py`, `stop.py` and `logprobs.py`, with the parsers that `parsing.py` chooses from `reasoning/`
and `tools/`. Modules are imported one by one: each process pays for what it uses.
"""
