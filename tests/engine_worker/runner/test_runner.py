import json
import math

import pytest
import torch

from engine_worker.layers.packing import LIBRARIES, MKL, ONEDNN, Packer
from engine_worker.runner.config import RunnerConfig
from engine_worker.runner.load import load_runner
from engine_worker.step import Draw, Move, MoveKind, Slice, Step
from sluice import tiny_model
from sluice.checkpoint.errors import CheckpointError
from sluice.checkpoint.folder import open_checkpoint
from sluice.wire.errors import ErrorCode
from sluice.wire.params import SamplingParams, derive_seed
from tests.engine_worker.models.checkpoints import CONFIGS, open_written, write_checkpoint
from tests.engine_worker.runner.generate import generate
from tests.fakes.products import exact, inexact, other_in_small_batches

GREEDY = SamplingParams(temperature=0.0)
LENGTHS = (1, 5, 15, 16, 17, 31, 40)
NEW = 12


@pytest.fixture(scope="module", params=["qwen3, tied", "llama, llama3 rope", "qwen3, windowed"])
def folder_and_model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return folder, write_checkpoint(folder, CONFIGS[request.param])


@pytest.fixture(scope="module", params=["cpu", "reference"])
def runner(request, folder_and_model):
    config = RunnerConfig("cpu", attention=request.param, kv_cache_tokens=1024, threads=1)
    return load_runner(open_written(folder_and_model[0]), config, lambda *_: None)


@pytest.fixture(scope="module")
def prompts():
    random = torch.Generator().manual_seed(0)
    return [torch.randint(97, (length,), generator=random).tolist() for length in LENGTHS]


@pytest.fixture(scope="module")
def expected(folder_and_model, prompts):
    model = folder_and_model[1]
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
        outputs.append(out[0, len(prompt) :].tolist())
    return outputs


@pytest.mark.quick(3)
def test_greedy_alone_equals_transformers(runner, prompts, expected):
    assert [generate(runner, [prompt], NEW, temperature=0.0)[0] for prompt in prompts] == expected


@pytest.mark.quick(8)
@pytest.mark.parametrize("chunk", [1, 2, 7, 16, 1 << 20])
def test_greedy_together_and_chunked_equals_transformers(runner, prompts, expected, chunk):
    assert generate(runner, prompts, NEW, chunk=chunk, temperature=0.0) == expected


def test_chunked_at_every_edge(runner, prompts, expected):
    for edge in range(1, len(prompts[6])):
        tokens, blocks = prompts[6], [3, 1, 4]
        runner.run(Step((Slice(tokens[:edge], 0, blocks),)))
        drawn = runner.run(Step((Slice(tokens[edge:], edge, blocks, (Draw(GREEDY, 0, 0),)),)))
        assert drawn[0].token == expected[6][0]


@pytest.mark.quick(3)
def test_seeded_samples_do_not_depend_on_the_batch(runner, prompts):
    sampling = {"seed": 5, "temperature": 1.5}
    alone = [generate(runner, [prompt], NEW, **sampling)[0] for prompt in prompts]
    assert generate(runner, prompts, NEW, **sampling) == alone
    assert generate(runner, prompts, NEW, chunk=3, **sampling) == alone
    assert len({tuple(tokens) for tokens in alone}) == len(alone)


@pytest.mark.parametrize(
    ("libraries", "expected"),
    [
        (LIBRARIES, None),
        ([MKL], None),
        ([ONEDNN], None),
        ([exact()], True),
        ([inexact(other_in_small_batches)], False),
    ],
    ids=["this machine's", "MKL", "oneDNN", "exact", "inexact"],
)
def test_a_generation_step_has_the_same_bits_in_every_batch_if_claimed(prompts, libraries, expected, monkeypatch):
    """Which real libraries are batch invariant depends on the CPU; of the fakes one always is, and one never."""
    monkeypatch.setattr("engine_worker.runner.load.Packer", lambda: Packer(libraries))
    config = RunnerConfig("cpu", attention="cpu", kv_cache_tokens=1024, threads=1)
    runner = load_runner(open_checkpoint(str(tiny_model.path())), config, lambda *_: None)
    everything = SamplingParams(temperature=0.0, logprobs=4096)
    tables = [range(4 * i, 4 * i + 4) for i in range(len(prompts))]
    runner.run(Step(tuple(Slice(prompt, 0, table) for prompt, table in zip(prompts, tables, strict=True))))
    slices = [
        Slice([7], len(prompt), table, (Draw(everything, 0, 0),)) for prompt, table in zip(prompts, tables, strict=True)
    ]
    alone = [runner.run(Step((part,)))[0] for part in slices]
    together = runner.run(Step(tuple(slices)))
    context = Slice(prompts[-1], 0, range(60, 64))
    beside_context = runner.run(Step((context, *slices[::-1])))[::-1]
    assert [drawn.token for drawn in together] == [drawn.token for drawn in beside_context]
    assert [drawn.token for drawn in together] == [drawn.token for drawn in alone]
    claimed = runner.choices["linear"].endswith(", batch invariant")
    assert claimed == expected or expected is None
    if claimed:
        assert together == beside_context == alone
    elif expected is False:
        assert together != alone


def test_forks_share_the_context_and_copy_the_last_block(runner, prompts):
    """n = 3 after one context; then each sequence continues alone."""
    prompt, sampling = prompts[4], SamplingParams(seed=9)
    draws = tuple(Draw(sampling, i, 0) for i in range(3))
    outputs = [[drawn.token] for drawn in runner.run(Step((Slice(prompt, 0, [0, 1], draws),)))]
    moves = (Move(MoveKind.COPY, 1, 2), Move(MoveKind.COPY, 2, 3))
    for position in range(1, 5):
        slices = tuple(
            Slice(
                [output[-1]],
                len(prompt) + position - 1,
                [0, 1 + i],
                (Draw(sampling, i, position),),
            )
            for i, output in enumerate(outputs)
        )
        for output, drawn in zip(outputs, runner.run(Step(slices, moves)), strict=True):
            output.append(drawn.token)
        moves = ()
    single = [generate(runner, [prompt], 5, seed=derive_seed(9, i))[0] for i in range(3)]
    assert outputs == single


def test_the_window_is_the_widest_of_any_layer(tmp_path):
    def window(name: str, *limits: int) -> int | None:
        write_checkpoint(tmp_path / name, CONFIGS[name])
        config = RunnerConfig("cpu", kv_cache_tokens=64, threads=1, max_attention_window=limits)
        return load_runner(open_written(tmp_path / name), config, lambda *_: None).window

    assert window("mistral") == 40
    assert window("mistral", 30) == 30
    assert window("qwen2, half windowed") is None
    assert window("qwen2, half windowed", 50) == 50
    assert window("qwen2", 50, 512) is None


def test_no_draw_no_result(runner):
    assert runner.run(Step((Slice([1, 2], 0, [0]),))) == []
    assert runner.run(Step((), (Move(MoveKind.COPY, 0, 1),))) == []


@torch.inference_mode()
def test_a_broken_sequence_does_not_affect_another(runner, prompts):
    """NaN in one sequence's cache: its draw faults, the other sequence is unaffected."""
    prompt = prompts[3]
    draw = Draw(GREEDY, 0, 0)
    runner.run(Step((Slice(prompt, 0, [0, 1]), Slice(prompt, 0, [2, 3]))))
    clean = runner.run(Step((Slice([1], 16, [0, 1], (draw,)), Slice([1], 16, [2, 3], (draw,)))))
    broken = runner._forward.cache.layers[0].values
    broken[2] = math.nan
    drawn = runner.run(Step((Slice([1], 16, [0, 1], (draw,)), Slice([1], 16, [2, 3], (draw,)))))
    runner._forward.cache._blocks.zero_()
    assert drawn[0] == clean[0]
    assert drawn[1].fault.error_code is ErrorCode.INVALID_LOGITS


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_cpu_serves_checkpoints_of_any_type_in_float32(tmp_path, prompts, dtype):
    stored = write_checkpoint(tmp_path, CONFIGS["qwen3, tied"]).to(getattr(torch, dtype))
    stored.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == dtype
    config = RunnerConfig("cpu", kv_cache_tokens=64, threads=1)
    runner = load_runner(open_written(tmp_path), config, lambda *_: None)
    assert runner.choices["dtype"] == "float32"
    ids = torch.tensor([prompts[1]])
    out = stored.float().generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
    assert generate(runner, [prompts[1]], NEW, temperature=0.0)[0] == out[0, len(prompts[1]) :].tolist()


def test_unsupported_options(folder_and_model):
    checkpoint = open_written(folder_and_model[0])
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="no CUDA device"):
            load_runner(checkpoint, RunnerConfig("cuda"), lambda *_: None)
    checkpoint.config["architectures"] = ["Other"]
    with pytest.raises(CheckpointError, match="no native implementation of architecture Other"):
        load_runner(checkpoint, RunnerConfig("cpu"), lambda *_: None)
