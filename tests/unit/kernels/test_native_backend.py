"""The compiled backend's edges: memory sizes, what it refuses, steps of changing size, models one after the other."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from headrace.errors import ConfigError
from headrace.kernels import Backend, create_backend
from headrace.kernels.ops import KVSpec
from headrace.testing.op_models import OpModel, float_tensor, on_rows, random_tensor, run_rows, step_of
from headrace.weights.tensor import TensorKind

pytest.importorskip("headrace.kernels.native._native", reason="the compiled kernels are not there")
from headrace.kernels.native import _native as native
from headrace.kernels.native.backend import NativeBackend

X = np.random.default_rng(4).standard_normal((200, 40)).astype(np.float32)


def build(backend: Backend) -> Any:
    table = backend.packer().pack_table(float_tensor(X))
    head = backend.packer().pack_linear([float_tensor(X[:50])])
    return lambda ops: ops.linear(ops.logit_rows(ops.scale(ops.embed(table), 2.0)), head)


@pytest.mark.parametrize("has_int8_kv", [False, True])
@pytest.mark.parametrize("head_dim", [8, 16, 80])
def test_memory_of_a_token_is_what_is_allocated(has_int8_kv: bool, head_dim: int) -> None:
    spec = KVSpec(3, 2, head_dim)
    per_token = NativeBackend(1, has_int8_kv=has_int8_kv).kv_bytes_per_token(spec)
    memory = native.KVMemory(3, 2, head_dim, 4096, 32, has_int8_kv)
    huge_page = 2 << 20
    assert 0 <= memory.num_bytes - per_token * 4096 * 32 < huge_page


@pytest.mark.parametrize("block_size", [1, 4, 8, 24])
def test_block_size_that_does_not_fit_the_kernels(block_size: int) -> None:
    with pytest.raises(ConfigError, match=f"--block-size {block_size} .* multiple of 16"):
        NativeBackend(1).allocate_kv(KVSpec(1, 1, 16), 4, block_size)


def test_steps_of_any_size_one_after_the_other() -> None:
    """Buffers grow and are used again, with what is left in them."""
    backend = NativeBackend(2)
    expected = run_rows(build, X, backend)
    model = backend._model
    assert model is not None
    for num_rows in (1, 7, 200, 3, 64, 199, 2):
        rows = backend.run(model, step_of(num_rows)).logits_RV
        assert rows.tobytes() == expected[:num_rows].tobytes()


def test_two_models_in_turn() -> None:
    """Each run records the model that it gets."""
    backend = NativeBackend(1)
    first = run_rows(build, X, backend)
    other = OpModel(on_rows(X * 2, lambda ops, x, _: x, lambda _: None)(backend))
    np.testing.assert_array_equal(backend.run(other, step_of(5)).logits_RV, X[:5] * 2)
    model = OpModel(build(backend))
    assert backend.run(model, step_of(200)).logits_RV.tobytes() == first.tobytes()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("positions_T", lambda a: a[:-1]),
        ("kv_slots_T", lambda a: a[:-1]),
        ("query_starts", lambda a: a[:-1]),
        ("block_tables_SB", lambda a: np.repeat(a, 2, axis=0)),
    ],
)
def test_arrays_that_do_not_fit_together(name: str, change: Any) -> None:
    backend = NativeBackend(1)
    run_rows(build, X, backend)
    model, inputs = backend._model, step_of(5)
    assert model is not None
    with pytest.raises(ValueError, match="do not fit together"):
        backend.run(model, dataclasses.replace(inputs, **{name: change(getattr(inputs, name))}))


def test_arrays_of_another_layout_are_taken() -> None:
    """Slices and columns of larger arrays, as the batch makes them."""
    backend = NativeBackend(1)
    expected = run_rows(build, X, backend)
    inputs = step_of(20)
    strided = dataclasses.replace(
        inputs,
        token_ids_T=np.stack([inputs.token_ids_T, inputs.token_ids_T], axis=1)[:, 0],
        block_tables_SB=np.asfortranarray(np.tile(inputs.block_tables_SB, (1, 3)))[:, :2],
    )
    assert backend._model is not None
    assert backend.run(backend._model, strided).logits_RV.tobytes() == expected[:20].tobytes()


@pytest.mark.parametrize("kind", [kind for kind in TensorKind if kind.label in ("Q4_0", "Q4_1", "Q4_K", "Q8_0", "F16")])
def test_wrong_number_of_bytes(kind: TensorKind) -> None:
    tensor = random_tensor(kind, (3, 256), np.random.default_rng(0))
    with pytest.raises(ValueError, match="bytes"):
        native.pack_blocks(native.Arena(), kind.label, tensor.data[:-1], 3, 256)
    with pytest.raises(ValueError, match="bytes"):
        native.pack_blocks(native.Arena(), kind.label, tensor.data, 4, 256)


def test_bytes_of_a_file_need_not_be_aligned() -> None:
    """A safetensors file may put a tensor of halves at an odd offset."""
    tensor = random_tensor(TensorKind.BF16, (20, 33), np.random.default_rng(0))
    shifted = np.empty(tensor.data.size + 1, np.uint8)[1:]
    shifted[:] = tensor.data

    def product(data: np.ndarray) -> bytes:
        weight = dataclasses.replace(tensor, data=data)
        x = X[:3, :33]
        pack = on_rows(x, lambda ops, x, w: ops.linear(x, w), lambda b: b.packer().pack_linear([weight]))
        return run_rows(pack, x, NativeBackend(1)).tobytes()

    assert product(shifted) == product(tensor.data)


def test_unknown_names() -> None:
    with pytest.raises(ValueError, match="Q3_K"):
        native.pack_blocks(native.Arena(), "Q3_K", np.zeros(4, np.uint8), 1, 1)
    with pytest.raises(ValueError, match="w2"):
        native.pack_floats(native.Arena(), "w2", np.zeros((1, 1), np.float32))
    assert not native.force_instruction_set("altivec")
    assert native.force_instruction_set("")


def test_more_threads_than_cores_and_short_lives() -> None:
    """Members that were asleep or late when a step ended neither disturb the next one nor outlive their program."""
    expected = run_rows(build, X, NativeBackend(1))
    for round_ in range(30):
        backend = NativeBackend(2 + round_ % 5)
        models = [OpModel(build(backend)) for _ in range(2)]
        backend.allocate_kv(KVSpec(1, 1, 16), 13, 16)
        for step in range(20):
            num_rows = 1 + (7 * step + round_) % 23
            found = backend.run(models[step // 5 % 2], step_of(num_rows))  # each change of model drops a program
            assert found.logits_RV.tobytes() == expected[:num_rows].tobytes(), (round_, step)
            np.testing.assert_array_equal(found.best_R, found.logits_RV.argmax(axis=1))


@pytest.mark.parametrize("make_backend", [lambda: NativeBackend(2), lambda: create_backend("reference-exact")])
def test_hidden_states_of_the_rows_that_are_asked_for(make_backend: Any) -> None:
    """They come beside the same logits, of any rows in any order; a step that wants none gets none."""
    backend = make_backend()
    table, norm = backend.packer().pack_table(float_tensor(X)), backend.packer().pack_vector(float_tensor(X[0]))
    head = backend.packer().pack_linear([float_tensor(X[:50])])

    def forward(ops: Any) -> Any:
        x = ops.scale(ops.embed(table), 2.0)
        ops.hidden_rows(x, norm, 1e-5)
        return ops.linear(ops.rms_norm(ops.logit_rows(x), norm, 1e-5), head)

    model = OpModel(forward)
    backend.allocate_kv(KVSpec(1, 1, 16), 13, 16)
    plain = backend.run(model, step_of(200))
    assert plain.hidden_UD is None
    logits = plain.logits_RV.copy()
    for wanted, num_logits in (([5], 200), ([7, 3, 199, 3], 2), (list(range(200)), 0)):
        inputs = step_of(200, list(range(num_logits)))
        outputs = backend.run(model, dataclasses.replace(inputs, hidden_rows_U=np.array(wanted, np.int32)))
        rows = 2 * X[wanted].astype(np.float64)
        expected = rows / np.sqrt(np.square(rows).mean(axis=1, keepdims=True) + 1e-5) * X[0]
        assert outputs.hidden_UD is not None
        np.testing.assert_allclose(outputs.hidden_UD, expected, rtol=1e-5, atol=1e-5)
        assert outputs.logits_RV.tobytes() == logits[:num_logits].tobytes()


def test_a_model_without_hidden_states_refuses_to_give_them() -> None:
    backend = NativeBackend(1)
    run_rows(build, X, backend)
    assert backend._model is not None
    assert backend._program is not None
    backend._program = dataclasses.replace(backend._program, hidden_size=40)
    inputs = dataclasses.replace(step_of(5), hidden_rows_U=np.array([1], np.int32))
    with pytest.raises(ValueError, match="no room"):
        backend.run(backend._model, inputs)
