"""Tokenizers from a folder: what each file means, and clear errors for what cannot work."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from headrace.errors import CheckpointError, ConfigError, InvalidRequest, StartupError
from headrace.processing.tokenizer import Tokenizer, load_tokenizer


def write_folder(folder: Path, **config: Any) -> Path:
    """A byte-level tokenizer without merges; <s> and </s> are added tokens, <x> is plain vocabulary."""
    folder.mkdir(exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: index for index, char in enumerate(alphabet)} | {"<x>": 256}
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_named_tokens_may_be_strings_or_objects(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_folder(tmp_path, bos_token={"content": "<s>", "lstrip": False}, eos_token="</s>"))
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    assert tokenizer.eos_token_ids == (258,)
    assert tokenizer.special_token_ids == {257, 258}
    assert tokenizer.vocab_size == 259


def test_eos_ids_of_the_generation_config_come_too(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, eos_token="</s>")
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 3}))
    assert load_tokenizer(folder).eos_token_ids == (258, 3)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [258, 257]}))
    assert load_tokenizer(folder).eos_token_ids == (258, 257)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": "x"}))
    with pytest.raises(CheckpointError, match="eos_token_id"):
        load_tokenizer(folder)


def test_a_named_token_of_the_vocabulary_is_special(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_folder(tmp_path, eos_token="<x>", pad_token="<not there>"))
    assert tokenizer.encode("a<x>")[-1] == 256
    assert tokenizer.decode(tokenizer.encode("a<x>")) == "a"
    assert tokenizer.vocab_size == 259  # a token without a row in the model is not made up


def test_truncation_and_padding_of_the_file_do_not_apply(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=50)
    backend.save(str(folder / "tokenizer.json"))
    assert len(load_tokenizer(folder).encode("hello world")) == 11


@pytest.mark.parametrize("has_processor", [True, False])
def test_the_post_processor_alone_decides_on_bos_as_in_transformers(tmp_path: Path, has_processor: bool) -> None:
    transformers = pytest.importorskip("transformers")
    folder = write_folder(tmp_path, bos_token="<s>", eos_token="</s>", add_bos_token=not has_processor)
    if has_processor:
        backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 257)])
        backend.save(str(folder / "tokenizer.json"))
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(str(folder))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("") == ([257] if has_processor else [])
    for text in ("", "ab </s> c"):
        assert tokenizer.encode(text) == reference(text).input_ids
        assert tokenizer.encode(text, add_special_tokens=False) == reference(text, add_special_tokens=False).input_ids


def template_text(tokenizer: Tokenizer, **options: Any) -> str:
    assert tokenizer.chat_template is not None
    return tokenizer.chat_template.render([{"role": "user", "content": "x"}], **options)


def test_where_the_chat_template_comes_from(tmp_path: Path) -> None:
    assert load_tokenizer(write_folder(tmp_path)).chat_template is None
    inline = load_tokenizer(write_folder(tmp_path, chat_template="{{ bos_token }}inline", bos_token="<s>"))
    assert template_text(inline) == "<s>inline"
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    tokenizer = load_tokenizer(write_folder(tmp_path, chat_template=named))
    assert (template_text(tokenizer), template_text(tokenizer, tools=[])) == ("D", "T")
    (tmp_path / "chat_template.jinja").write_text("file {{ messages[0].content }}")
    assert template_text(load_tokenizer(tmp_path)) == "file x"
    override = tmp_path / "mine.jinja"
    override.write_text("mine")
    assert template_text(load_tokenizer(tmp_path, chat_template=str(override))) == "mine"
    assert template_text(load_tokenizer(tmp_path, chat_template="{{ 1 + 1 }}")) == "2"


def test_bad_chat_templates_stop_the_start(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, chat_template="{% if %}")
    with pytest.raises(CheckpointError, match="line 1"):
        load_tokenizer(folder)
    with pytest.raises(ConfigError, match="--chat-template"):
        load_tokenizer(folder, chat_template="{{ x")
    with pytest.raises(ConfigError, match="no such file"):
        load_tokenizer(folder, chat_template="missing.jinja")


def test_request_templates_are_compiled_once(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_folder(tmp_path, bos_token="<s>"))
    template = tokenizer.request_template("{{ bos_token }}!")
    assert template.render([{"role": "user", "content": ""}]) == "<s>!"
    assert tokenizer.request_template("{{ bos_token }}!") is template
    for number in range(40):
        tokenizer.request_template(str(number))
    assert tokenizer.request_template("{{ bos_token }}!") is not template
    with pytest.raises(InvalidRequest) as caught:
        tokenizer.request_template("{% if %}")
    assert caught.value.param == "chat_template"


def test_a_folder_or_file_of_another_model_can_be_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "a", eos_token="</s>")
    for name in (folder, folder / "tokenizer.json"):
        assert load_tokenizer(tmp_path / "model", tokenizer=str(name)).eos_token == "</s>"
    with pytest.raises(StartupError, match="no such file"):
        load_tokenizer(folder, tokenizer=str(tmp_path / "missing"))


def test_other_vocabularies_are_named_in_the_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"only tokenizer\.model.*supported") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"version": "1.0"}', "\x00\xff"])
def test_a_broken_tokenizer_is_one_line(tmp_path: Path, content: str) -> None:
    write_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError) as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_broken_config_is_one_line(tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
        load_tokenizer(tmp_path)


def test_halves_of_surrogate_pairs(byte_level: Tokenizer) -> None:
    assert byte_level.encode("a\ud83d\ude00") == byte_level.encode("a😀")
    assert byte_level.encode("\ud83d!") == byte_level.encode("�!")


def test_ids_that_are_no_ids(byte_level: Tokenizer) -> None:
    assert byte_level.decode([97, 10**6, 98]) == "ab"
    for ids in ([-1], [2**40], ["a"]):
        with pytest.raises(InvalidRequest) as caught:
            byte_level.decode(ids)  # type: ignore[arg-type]
        assert caught.value.param == "tokens"


def test_token_text_and_bytes(byte_level: Tokenizer, byte_fallback_prefix: Tokenizer) -> None:
    hello = byte_level.backend.token_to_id("Ġhello")
    assert (byte_level.token_text(hello), byte_level.token_bytes(hello)) == (" hello", b" hello")
    assert (byte_level.token_text(0xE4), byte_level.token_bytes(0xE4)) == ("�", b"\xe4")
    assert byte_level.token_text(byte_level.eos_token_ids[0]) == "<|end|>"
    word, byte = (byte_fallback_prefix.backend.token_to_id(token) for token in ("▁hello", "<0xE4>"))
    assert byte_fallback_prefix.token_text(word) == " hello"
    assert (byte_fallback_prefix.token_text(byte), byte_fallback_prefix.token_bytes(byte)) == ("�", b"\xe4")
    assert byte_level.token_bytes(10**6) == b""


def test_special_tokens_in_a_text_are_those_tokens(byte_level: Tokenizer) -> None:
    end = byte_level.eos_token_ids[0]
    assert byte_level.encode("a<|end|>b") == [97, end, 98]
    assert byte_level.decode([97, end, 98]) == "ab"
    assert byte_level.decode([97, end, 98], skip_special_tokens=False) == "a<|end|>b"


def test_encoding_lets_other_threads_run(byte_level: Tokenizer) -> None:
    """Without that, one long prompt stops the event loop for as long as it is tokenised."""
    text = "hello world 漢字 " * 60_000
    started, done = threading.Event(), threading.Event()
    ticks = []

    def encode() -> None:
        started.set()
        byte_level.encode(text)
        done.set()

    thread = threading.Thread(target=encode)
    thread.start()
    started.wait()
    while not done.is_set():
        ticks.append(time.perf_counter())
        done.wait(0.001)
    thread.join()
    assert len(ticks) > 10
