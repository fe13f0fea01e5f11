"""/generate in SGLang's and TRL's form, /chat/, and /inference/v1/generate: bodies, replies, refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from headrace.client.base import Delta
from headrace.testing.front_end import VOCAB_SIZE, FakeClient, FrontEnd, events, rows, says
from headrace.transport.messages import Submit
from headrace.types import FinishReason

Make = Callable[..., FrontEnd]
SPAN = [{"version": "step-7", "start": 0, "end": 5}]


async def generate(front_end: FrontEnd, **fields: Any) -> Any:
    response = await front_end.post("/generate", fields)
    assert response.status_code == 200, response.text
    return response.json()


async def refused(front_end: FrontEnd, path: str = "/generate", **fields: Any) -> str:
    """The field that a 400 names."""
    response = await front_end.post(path, fields)
    assert response.status_code == 400, response.text
    return str(response.json()["error"]["param"])


@pytest.mark.parametrize("method", ["POST", "PUT"])
@pytest.mark.parametrize("path", ["/generate", "/generate/"])
async def test_one_prompt_gives_an_object(front_end: FrontEnd, method: str, path: str) -> None:
    response = await front_end.http.request(method, path, json={"text": "Hi", "rid": "mine"})
    assert response.json() == {
        "text": "Hello",
        "output_ids": list(b"Hello"),
        "meta_info": {
            "id": "mine",
            "finish_reason": {"type": "stop", "matched": ord("o")},
            "prompt_tokens": 2,
            "completion_tokens": 5,
            "cached_tokens": 0,
            "weight_version": "step-7",
            "weight_versions": SPAN,
        },
    }
    assert (front_end.submit.public_id, front_end.submit.aliases[0]) == ("mine", "mine")


async def test_sampling_has_sglang_s_names_and_no_defaults_of_the_model(front_end: FrontEnd) -> None:
    sampling = {
        "max_new_tokens": 7, "min_new_tokens": 2, "sampling_seed": 5, "no_stop_trim": True, "stop": ["x"], "top_k": -1,
        "stop_token_ids": [4], "temperature": 0.5, "ignore_eos": True, "skip_special_tokens": False, "min_p": 0.1,
    }  # fmt: skip
    await generate(front_end, input_ids=[1, 2], sampling_params=sampling)
    params = front_end.submit.params
    assert (params.max_tokens, params.min_tokens, params.seed, params.stop_token_ids) == (7, 2, 5, (4,))
    assert (params.include_stop_str_in_output, params.ignore_eos, params.skip_special_tokens) == (True, True, False)
    assert (params.top_k, params.top_p, params.temperature) == (0, 1.0, 0.5)
    await generate(front_end, input_ids=[1, 2])
    assert front_end.submit.params.max_tokens == 128


async def test_several_prompts_and_choices_give_a_list(front_end: FrontEnd) -> None:
    outputs = await generate(front_end, input_ids=[[1, 2], [3]], sampling_params={"n": 2}, rid="r")
    assert [output["meta_info"]["id"] for output in outputs] == ["r_0", "r_0", "r_1", "r_1"]
    assert [output["meta_info"]["prompt_tokens"] for output in outputs] == [2, 2, 1, 1]
    assert {"r_0", "r_1"} <= {front_end.submit.public_id, *front_end.submit.aliases}
    (only,) = await generate(front_end, text=["Hi"], rid=["a"])
    assert only["meta_info"]["id"] == "a"


async def test_logprobs_of_output_and_prompt(front_end: FrontEnd) -> None:
    fields = {"return_logprob": True, "logprob_start_len": 1, "top_logprobs_num": 1, "return_text_in_logprobs": True}
    meta = (await generate(front_end, text="Hi!", **fields))["meta_info"]
    assert meta["output_token_logprobs"][0] == [-0.5, ord("H"), "H"]
    assert meta["output_top_logprobs"][0] == [[-1.5, ord("I"), "I"]]
    assert meta["input_token_logprobs"] == [[None, ord("i"), "i"], [-0.5, ord("!"), "!"]]
    assert meta["input_top_logprobs"] == [None, [[-1.5, ord('"'), '"']]]
    meta = (await generate(front_end, text="Hi!", return_logprob=True))["meta_info"]
    assert meta["output_token_logprobs"][0] == [-0.5, ord("H"), None]
    assert meta["input_token_logprobs"] == []
    assert front_end.submit.params.prompt_logprobs is None
    fields = {"return_logprob": [True, False], "logprob_start_len": [0, -1]}
    first, second = await generate(front_end, text=["ab", "cd"], **fields)
    assert len(first["meta_info"]["input_token_logprobs"]) == 2
    assert "output_token_logprobs" not in second["meta_info"]


async def test_nothing_new_scores_the_prompt(front_end: FrontEnd) -> None:
    fields = {"sampling_params": {"max_new_tokens": 0}, "return_logprob": True, "logprob_start_len": 0}
    output = await generate(front_end, input_ids=[1, 2, 3], **fields)
    assert (output["text"], output["output_ids"]) == ("", [])
    assert output["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    assert [row[1] for row in output["meta_info"]["input_token_logprobs"]] == [1, 2, 3]
    assert output["meta_info"]["output_token_logprobs"] == []


async def test_logprobs_of_chosen_tokens_need_the_vocabulary(make: Make) -> None:
    assert await refused(make(), text="Hi", return_logprob=True, token_ids_logprob=[5]) == "token_ids_logprob"

    def script(submit: Submit) -> Iterable[list[Delta]]:
        assert submit.params.logprobs == -1
        yield [Delta(0, [9], logprobs=rows([9], VOCAB_SIZE), finish_reason=FinishReason.LENGTH)]

    front_end = make(client=FakeClient(script=script), admission={"max_logprobs": -1})
    meta = (await generate(front_end, text="Hi", return_logprob=True, token_ids_logprob=[11, 10]))["meta_info"]
    assert meta["output_token_ids_logprobs"] == [[[-2.5, 11, None], [-1.5, 10, None]]]


async def test_a_stream_holds_all_so_far(front_end: FrontEnd) -> None:
    response = await front_end.post("/generate", {"text": "Hi", "stream": True, "return_logprob": True})
    frames = events(response)
    assert [frame["text"] for frame in frames] == ["H", "He", "Hel", "Hell", "Hello", "Hello"]
    assert [len(frame["meta_info"]["output_token_logprobs"]) for frame in frames] == [1, 2, 3, 4, 5, 5]
    assert [frame["meta_info"]["finish_reason"] for frame in frames[:-1]] == [None] * 5
    assert frames[-1] == await generate(front_end, text="Hi", return_logprob=True, rid=frames[-1]["meta_info"]["id"])


def aborted(text: str) -> Callable[[Submit], Iterable[list[Delta]]]:
    return says(text, reason=FinishReason.ABORT)


@pytest.mark.parametrize(("text", "message"), [("", "Abort before prefill"), ("so", "Aborted by a control operation")])
async def test_what_was_aborted_comes_as_far_as_it_is(make: Make, text: str, message: str) -> None:
    front_end = make(client=FakeClient(script=aborted(text)))
    output = await generate(front_end, text="Hi", return_logprob=True)
    assert output["meta_info"]["finish_reason"] == {"type": "abort", "message": message}
    assert (output["text"], len(output["meta_info"]["output_token_logprobs"])) == (text, len(text))
    assert output["meta_info"]["weight_version"] is not None
    trl = (await front_end.post("/generate/", {"prompts": ["Hi"]})).json()
    assert trl["completion_ids"] == [list(text.encode())]
    vllm = (await front_end.post("/inference/v1/generate", {"token_ids": [1]})).json()
    assert (vllm["choices"][0]["finish_reason"], vllm["choices"][0]["token_ids"]) == ("abort", list(text.encode()))


async def test_fields_that_are_not_served_are_named(front_end: FrontEnd) -> None:
    for field, value in (("image_data", ["x"]), ("lora_path", "a"), ("return_routed_experts", True)):
        assert await refused(front_end, text="Hi", **{field: value}) == field
        await generate(front_end, text="Hi", **{field: None})
    await generate(front_end, text="Hi", return_routed_experts=False, image_data=[])


async def test_the_form_of_the_output_is_the_engine_s_to_keep(front_end: FrontEnd) -> None:
    schema = {"type": "object"}
    for field, value in (("json_schema", '{"type": "object"}'), ("json_schema", schema), ("regex", "a+")):
        await generate(front_end, text="Hi", sampling_params={field: value})
        assert front_end.submit.params.grammar is not None
        assert await refused(front_end, text="Hi", sampling_params={field: value, "guided_regex": "b"})
    assert await refused(front_end, text="Hi", sampling_params={"regex": "("}) == "sampling_params.regex"
    await front_end.post("/generate/", {"prompts": ["a"], "structured_outputs_regex": "a+"})
    assert front_end.submit.params.grammar is not None
    sampling = {"structured_outputs": {"regex": "a+"}}
    await front_end.post("/inference/v1/generate", {"token_ids": [1], "sampling_params": sampling})
    assert front_end.submit.params.grammar is not None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"text": []}, "text"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [[1], "a"]}, "input_ids[1]"),
        ({"input_ids": [999]}, "input_ids[0]"),
        ({"text": "a", "sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"text": "a", "sampling_params": {"max_new_tokens": -1}}, "sampling_params.max_new_tokens"),
        ({"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}]}, "sampling_params"),
        ({"text": ["a", "b"], "rid": ["x"]}, "rid"),
        ({"text": "a", "return_logprob": 1}, "return_logprob"),
        ({"text": "a", "return_logprob": True, "top_logprobs_num": 999}, "top_logprobs_num"),
        ({"text": "a", "logprob_start_len": -2}, "logprob_start_len"),
    ],
)
async def test_refusals(front_end: FrontEnd, fields: dict[str, Any], param: str) -> None:
    assert await refused(front_end, **fields) == param


async def test_trl_generates_for_many_prompts(front_end: FrontEnd) -> None:
    body = {"prompts": ["a", [98]], "n": 2, "max_tokens": 9, "logprobs": 1, "generation_kwargs": {"seed": 3}}
    reply = (await front_end.post("/generate/", body)).json()
    assert reply["prompt_ids"] == [[97], [98]]
    assert reply["completion_ids"] == [list(b"Hello")] * 4
    assert reply["logprob_token_ids"][0][0] == [ord("I"), ord("H")]
    assert reply["logprobs"][0][0] == [-1.5, -0.5]
    assert front_end.submit.params.seed == 3
    reply = (await front_end.post("/generate/", {"prompts": ["a"], "images": [None]})).json()
    assert reply["logprobs"][0] == [[-0.5]] * 5
    assert (await front_end.post("/generate/", {"prompts": ["a"], "logprobs": None})).json()["logprobs"] is None
    assert await refused(front_end, "/generate/", prompts=["a"], images=[["x"]]) == "images"
    assert await refused(front_end, "/generate/", prompts=None) == "prompts"


@pytest.mark.parametrize("path", ["/chat", "/chat/"])
async def test_trl_chats(front_end: FrontEnd, path: str) -> None:
    chats = [[{"role": "user", "content": "a"}], [{"role": "user", "content": "bb"}]]
    reply = (await front_end.post(path, {"messages": chats})).json()
    assert len(reply["prompt_ids"]) == len(reply["completion_ids"]) == 2
    assert len(reply["prompt_ids"][1]) == len(reply["prompt_ids"][0]) + 1
    assert await refused(front_end, path, messages=[{"role": "user"}]) == "messages[0]"
    assert await refused(front_end, path, messages=[]) == "messages"


async def test_vllm_s_tokens_in_tokens_out(front_end: FrontEnd) -> None:
    sampling = {"logprobs": 1, "prompt_logprobs": 0, "max_tokens": 9}
    body: dict[str, Any] = {"token_ids": [1, 2], "sampling_params": sampling, "request_id": "mine"}
    reply = (await front_end.post("/inference/v1/generate", body)).json()
    (choice,) = reply["choices"]
    assert reply["request_id"] == "mine"
    assert (choice["token_ids"], choice["finish_reason"], choice["weight_versions"]) == (list(b"Hello"), "stop", SPAN)
    assert choice["logprobs"]["content"][0]["token"] == f"token_id:{ord('H')}"
    assert [row and list(row) for row in reply["prompt_logprobs"]] == [None, ["2"]]
    assert reply["usage"]["completion_tokens"] == 5
    *frames, usage = events(
        await front_end.post(
            "/inference/v1/generate", {**body, "stream": True, "stream_options": {"include_usage": True}}
        )
    )
    choices = [frame["choices"][0] for frame in frames]
    assert [token_id for choice in choices for token_id in choice["token_ids"]] == list(b"Hello")
    assert choices[-1]["weight_versions"] == SPAN
    assert frames[0]["prompt_logprobs"] == reply["prompt_logprobs"]
    assert usage["usage"] == reply["usage"]
    path = "/inference/v1/generate"
    assert await refused(front_end, path, token_ids=[1], features={"a": 1}) == "features"
    assert await refused(front_end, path, token_ids=[1], sampling_params={"top_p": 2}) == "sampling_params.top_p"


async def test_the_routes_need_a_user_key(make: Make) -> None:
    front_end = make(server={"api_key": ("secret",)})
    for path in ("/generate", "/generate/", "/chat/", "/inference/v1/generate", "/v1/messages", "/v1/responses"):
        assert (await front_end.post(path, {"text": "Hi"})).status_code == 401
    headers = {"x-api-key": "secret"}
    assert (await front_end.post("/generate", {"text": "Hi"}, headers=headers)).status_code == 200
