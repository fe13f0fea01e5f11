"""Tokenizers built from GGUF metadata: both kinds, each way to split, the cache, and files that cannot work."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest

from headrace.errors import CheckpointError
from headrace.processing import tokenizer_gguf
from headrace.processing.pieces import byte_alphabet
from headrace.processing.tokenizer import Tokenizer, load_tokenizer
from headrace.processing.tokenizer_gguf import convert, merges_of
from headrace.processing.tokenizer_splits import PRE_TOKENIZERS

ALPHABET = list(byte_alphabet())


def byte_level_metadata(**extra: Any) -> dict[str, Any]:
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*ALPHABET, "ab", "<end>"],
        "tokenizer.ggml.token_type": [1] * 257 + [3],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 257,
        **{f"tokenizer.ggml.{key}": value for key, value in extra.items()},
    }


def write_gguf(path: Path, metadata: dict[str, Any]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_string(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("HEADRACE_CACHE", str(folder))
    return folder


@pytest.mark.parametrize("split", sorted(PRE_TOKENIZERS))
def test_every_split_loads_and_loses_nothing(cache: Path, tmp_path: Path, split: str) -> None:
    path = write_gguf(tmp_path / "a.gguf", byte_level_metadata(pre=split))
    tokenizer = load_tokenizer(path)
    text = "It's 12345 words,\n\n  with\ttabs — 漢字 café! Öl  \r\n end   "
    assert tokenizer.decode(tokenizer.encode(text)) == text


def words(split: str, text: str) -> list[str]:
    import json

    import tokenizers

    shell = {
        "version": "1.0",
        "model": {"type": "BPE", "vocab": {}, "merges": []},
        "pre_tokenizer": PRE_TOKENIZERS[split],
    }
    spans = tokenizers.Tokenizer.from_str(json.dumps(shell)).pre_tokenizer.pre_tokenize_str(text)
    return [text[start:end] for _, (start, end) in spans]


def test_splits_of_numbers_and_spaces() -> None:
    text = "a  1234 it's"
    assert words("gpt-2", text) == ["a", " ", " 1234", " it", "'s"]
    assert words("smollm", text) == ["a", "  ", "1", "2", "3", "4", " it", "'s"]
    assert words("llama-bpe", text) == ["a", " ", " ", "123", "4", " it", "'s"]
    assert words("qwen2", text) == ["a", " ", " ", "1", "2", "3", "4", " it", "'s"]
    assert words("gpt-4o", "HTTPServer don't") == ["HTTPServer", " don't"]
    assert words("deepseek-v3", "漢字12345 ab") == ["漢字", "123", "45", " ab"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pre": "brand-new"}, "brand-new"),
        ({"model": "bert"}, "'bert' is not supported"),
        ({"merges": ["abc"]}, "merge 'abc'"),
        ({"merges": ["a b c"]}, "merge 'a b c'"),
        ({"merges": ["a missing"]}, "cannot be read"),
        ({"token_type": [1]}, "258 tokens but 1 token types"),
        ({"eos_token_id": 5000}, "eos_token_id is 5000"),
        ({"tokens": []}, "no tokenizer"),
    ],
)
def test_files_that_cannot_work_are_one_line(cache: Path, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    metadata = byte_level_metadata(**change)
    metadata = {key: value for key, value in metadata.items() if value != []}
    path = write_gguf(tmp_path / "a.gguf", metadata)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_tokenizer(path)
    assert "\n" not in str(caught.value)
    assert "a.gguf" in str(caught.value)


def test_sentencepiece_needs_scores(cache: Path) -> None:
    metadata = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["<unk>", "a"]}
    with pytest.raises(CheckpointError, match="score"):
        convert(metadata, "a.gguf")


def test_the_conversion_is_kept_and_found_again(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = byte_level_metadata() | {"tokenizer.chat_template": "{{ eos_token }}"}
    path = write_gguf(tmp_path / "a.gguf", metadata)
    first = load_tokenizer(path)
    copy = Path(shutil.copy2(path, tmp_path / "b.gguf"))
    conversions = []
    monkeypatch.setattr(tokenizer_gguf, "convert", lambda *args: conversions.append(args) or convert(*args))
    for again in (path, copy):
        second = load_tokenizer(again)
        assert second.encode("ab<end>") == first.encode("ab<end>") == [256, 257]
        assert second.eos_token_ids == first.eos_token_ids == (257,)
        assert second.chat_template is not None
    assert conversions == []
    write_gguf(path, byte_level_metadata(eos_token_id=256))  # another file under the same name
    assert load_tokenizer(path).eos_token_ids == (256,)
    assert len(conversions) == 1
    assert not list((cache / "tokenizers").glob(".new-*"))


@pytest.mark.parametrize("damage", ["", "{}", "{"])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_damaged_cache_is_made_again(cache: Path, tmp_path: Path, name: str, damage: str) -> None:
    path = write_gguf(tmp_path / "a.gguf", byte_level_metadata())
    load_tokenizer(path)
    (kept,) = (cache / "tokenizers").glob(f"*/{name}")
    kept.write_text(damage)
    assert load_tokenizer(path).encode("ab") == [256]
    assert kept.read_text() != damage


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "file"))
    assert load_tokenizer(write_gguf(tmp_path / "a.gguf", byte_level_metadata())).encode("ab") == [256]


def test_merges_follow_from_the_scores() -> None:
    vocab = {"a": 0, "b": 1, "ab": 2, "aba": 3, "ba": 4}
    scores = [0.0, 0.0, -2.0, -3.0, -1.0]
    assert merges_of(vocab, scores) == [("b", "a"), ("a", "b"), ("ab", "a"), ("a", "ba")]


def test_merges_are_those_of_transformers() -> None:
    generate_merges = pytest.importorskip("transformers.tokenization_utils_base").generate_merges
    tokens = ["a", "b", "c", "ab", "bc", "abc", "abca", "ca", "cab", "bca", "aa", "aab"]
    scores = [0.0, 0.0, 0.0, -1.0, -1.0, -2.0, -5.0, -1.0, -2.0, -2.0, -2.0, -4.0]
    vocab = {token: index for index, token in enumerate(tokens)}
    assert merges_of(vocab, scores) == generate_merges(vocab, dict(zip(tokens, scores, strict=True)))


def test_types_of_tokens(byte_level: Tokenizer, byte_fallback: Tokenizer) -> None:
    for tokenizer in (byte_level, byte_fallback):
        think = tokenizer.backend.token_to_id("<think>")
        assert think in tokenizer.encode("a<think>b")  # matched whole
        assert think not in tokenizer.special_token_ids  # but it is text
        assert tokenizer.decode(tokenizer.encode("a<think>b")).endswith("a<think>b")
    assert byte_fallback.special_token_ids == {0, 1, 2}


def test_unknown_characters_become_bytes(byte_fallback: Tokenizer) -> None:
    ids = byte_fallback.encode("字", add_special_tokens=False)
    assert [byte_fallback.token_bytes(token_id) for token_id in ids] == [b"\xe5", b"\xad", b"\x97"]


def test_space_prefix(byte_fallback: Tokenizer, byte_fallback_prefix: Tokenizer) -> None:
    def tokens(tokenizer: Tokenizer, text: str) -> list[str]:
        return [tokenizer.backend.id_to_token(token_id) for token_id in tokenizer.encode(text)]

    assert tokens(byte_fallback, "hello hello") == ["<s>", "he", "llo", "▁hello"]
    assert tokens(byte_fallback_prefix, "hello hello") == ["<s>", "▁hello", "▁hello"]
    assert tokens(byte_fallback_prefix, " hello") == ["<s>", "▁", "▁hello"]  # as SentencePiece: one more, not instead
    assert byte_fallback_prefix.decode(byte_fallback_prefix.encode(" hello")) == " hello"


def test_bos_where_the_file_does_not_say(cache: Path) -> None:
    def adds_bos(**extra: Any) -> bool:
        metadata = byte_level_metadata(bos_token_id=257, **extra)
        return b'"TemplateProcessing"' in convert(metadata, "a.gguf").tokenizer_json

    assert not adds_bos()
    assert adds_bos(add_bos_token=True)
    assert adds_bos(pre="llama-bpe")
    assert not adds_bos(pre="llama-bpe", add_bos_token=False)


def test_control_tokens_outside_the_byte_alphabet_are_found() -> None:
    metadata = byte_level_metadata()
    metadata["tokenizer.ggml.tokens"] = [*ALPHABET, "ab", "<｜end▁of▁sentence｜>"]
    files = convert(metadata, "a.gguf")
    import tokenizers

    tokenizer = Tokenizer(tokenizers.Tokenizer.from_buffer(files.tokenizer_json))
    assert tokenizer.encode("a<｜end▁of▁sentence｜>")[-1] == 257
