"""Adapters, prompt tables and tensors of layers in one step: each request gets what peft computes for it."""

import numpy as np
import pytest
import torch

from sluice.wire.tables import PromptTables
from sluice.wire.tensors import TensorParams
from tests.engine_worker.lora.engines import OPENVINO, finish, load_first, lora_runner, submit
from tests.engine_worker.lora.oracle import adapter_of, write_adapter
from tests.engine_worker.lora.test_peft import prompt
from tests.fakes.engine import VOCAB, EngineBench
from tests.fakes.tables import floats, table_of

LAYER = "layers.0"
ROWS, TOKENS = 5, 4


@pytest.fixture(scope="module")
def folders(model):
    return [write_adapter(model.parent / f"beside{seed}", model, seed, rank=6) for seed in range(2)]


def expected(oracle, folder, tokens, rows) -> tuple[list[int], torch.Tensor]:
    """The output, and the output of layer 0 for each position but the last."""
    with oracle.using(folder) as model, torch.inference_mode():
        embeddings = model.get_input_embeddings()
        output: list[int] = []
        while True:
            embeds = torch.cat([rows, embeddings(torch.tensor([*tokens, *output]))])[None]
            if len(output) == TOKENS:
                states = model(inputs_embeds=embeds, output_hidden_states=True).hidden_states[1][0]
                return output, states[:-1]
            output.append(int(model(inputs_embeds=embeds).logits[0, -1].argmax()))


def rows_of(bench, number: int, *, context: bool) -> torch.Tensor:
    parts = bench.receiver.tensors[number, 0, 0, LAYER, context]
    return torch.cat([torch.from_numpy(np.frombuffer(part.data, np.float32).reshape(part.shape)) for part in parts])


@pytest.mark.parametrize(
    ("overlap", "backend"),
    [(False, "torch"), (True, "torch"), pytest.param(True, *OPENVINO.values, marks=OPENVINO.marks)],
)
def test_all_features_in_one_step(model, oracle, folders, overlap, backend):
    runner = lora_runner(model, output_layers=(0,), backend=backend)
    bench = EngineBench(
        runner=runner, max_sequence_tokens=400, max_tokens_per_step=40, max_batch_size=16, tensor_buffer=1 << 20,
        overlap=overlap,
    )  # fmt: skip
    load_first(bench, folders)
    launched, launch = [], runner.launch
    runner.launch = lambda step: launched.append(step) or launch(step)
    no_rows = torch.zeros(0, runner.hidden_size)
    submitted = {}
    for i in range(12):
        folder = [folders[0], None, folders[1]][i % 3]
        rows = floats(ROWS, runner.hidden_size, i, 0.5) if i % 2 else no_rows
        tokens, with_tensors = prompt(i, 6 + i), i % 4 < 2
        ids = [*range(VOCAB, VOCAB + len(rows)), *tokens]
        number = submit(
            bench,
            ids,
            folder and adapter_of(folder),
            TOKENS,
            tables=PromptTables((table_of(rows),) if len(rows) else ()),
            tensors=TensorParams((LAYER,), (LAYER,)) if with_tensors else TensorParams(),
        )
        submitted[number] = folder, tokens, rows, with_tensors
    finish(bench)
    for number, (folder, tokens, rows, with_tensors) in submitted.items():
        output, states = expected(oracle, folder, tokens, rows)
        assert bench.output(number) == output
        if with_tensors:
            size = len(rows) + len(tokens)
            torch.testing.assert_close(rows_of(bench, number, context=True), states[:size], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(rows_of(bench, number, context=False), states[size - 1 :], atol=1e-4, rtol=1e-4)
    assert any(mixed(step) for step in launched)


def mixed(step) -> bool:
    """Whether the step has all three features."""
    kinds = [any(check(part) for part in step.slices) for check in (adapted, virtual, keeping)]
    return all(kinds)


def adapted(part) -> bool:
    return bool(part.adapter_slot)


def virtual(part) -> bool:
    return part.virtual is not None


def keeping(part) -> bool:
    return any(LAYER in rows.names for rows in part.kept)
