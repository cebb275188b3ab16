import gc
import signal
import weakref

import openvino as ov
import pytest

from engine_worker.models.decoder import CausalLM
from engine_worker.openvino import load as loading
from engine_worker.openvino import trial
from engine_worker.openvino.adapters import GraphAdapters
from engine_worker.openvino.forward import OpenVinoForward
from engine_worker.openvino.trial import verify
from engine_worker.pool_files.folder import PoolFolder
from engine_worker.runner.extensions import Extensions
from sluice.wire.calls import MethodCall, parse_json
from tests.engine_worker.models.checkpoints import CONFIGS, write_checkpoint
from tests.engine_worker.openvino.loaded import load
from tests.engine_worker.runner.generate import generate


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_checkpoint(folder, CONFIGS["qwen3, tied"])
    return folder


def test_the_choices_name_the_backend_and_the_reason(folder):
    runner = load(folder, quantize="int8", kv_precision="u8")
    assert runner.choices["backend"] == runner.choices["attention"] == "openvino"
    assert (
        runner.choices["backend_reason"] == "selected by the setting backend = openvino; it agrees with torch in a test"
    )
    assert (runner.choices["quantize"], runner.choices["kv_precision"]) == ("int8", "u8")
    assert runner.dtype == "int8, KV cache u8"
    assert load(folder).dtype == "float32"


@pytest.mark.parametrize(("quantize", "events"), [("int8", []), ("int4", ["weights_rounded_coarsely"])])
def test_coarse_rounding_is_reported(folder, quantize, events):
    warnings = []
    runner = load(folder, warn=lambda *warning: warnings.append(warning), quantize=quantize)
    assert [event for event, _ in warnings] == events
    assert all(f"quantize = {quantize} changes the weights of {folder.name} by" in reason for _, reason in warnings)
    assert runner.choices["quantize"].startswith(quantize)


def test_a_setting_that_only_openvino_has_selects_it(folder):
    reason = load(folder, backend="auto", quantize="int8").choices["backend_reason"]
    assert reason.startswith("selected by the setting quantize = int8; ")


def test_a_wrong_plugin_is_refused(folder, monkeypatch):
    right = trial.compile_decoder

    def wrong(model, *args, **options):
        model.model.norm.weight *= 1.01
        return right(model, *args, **options)

    monkeypatch.setattr(trial, "compile_decoder", wrong)
    with pytest.raises(ValueError, match=r"off by .* of the largest logit in a test step"):
        load(folder)


@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_a_plugin_that_ignores_adapters_is_refused(folder, monkeypatch, quantize):
    monkeypatch.setattr(GraphAdapters, "use", lambda *_: None)
    with pytest.raises(ValueError, match=r"off by .* of the largest logit in a test step"):
        load(folder, quantize=quantize, lora=True)


def test_a_restart_remembers_what_passed(folder, shared_memory, monkeypatch):
    memory = PoolFolder(shared_memory, "engine", print)
    first = load(folder, Extensions(pool_folder=memory)).choices["backend_reason"]
    tests = []
    monkeypatch.setattr(loading, "verify", lambda *arguments, **_: tests.append(arguments) or verify(*arguments))
    assert load(folder, Extensions(pool_folder=memory)).choices["backend_reason"] == first
    assert not tests
    # With other settings it is tested again.
    load(folder, Extensions(pool_folder=memory), quantize="int8")
    assert len(tests) == 1


def test_a_plugin_that_fails_is_refused(folder, monkeypatch):
    def fail(*_, **options):
        raise RuntimeError("Exception from src/plugin.cpp\nwrong number of inputs")

    monkeypatch.setattr(trial, "compile_decoder", fail)
    with pytest.raises(ValueError, match=r"failed in a test: .*wrong number of inputs"):
        load(folder)


def test_another_version_is_refused(folder, monkeypatch):
    monkeypatch.setattr(ov, "__version__", "2027.0.0")
    with pytest.raises(ValueError, match=r"openvino 2027\.0\.0 is installed, but 2026\.4\.x is required"):
        load(folder)


def test_a_layer_that_the_model_does_not_have_is_refused(folder):
    with pytest.raises(ValueError, match=r"output_layers: the model has no layer 9; its last layer is \d+$"):
        load(folder, output_layers=(0, 9))


@pytest.mark.parametrize(("config", "why"), [("qwen3 moe", "mixture of experts")])
def test_models_that_cannot_be_built_are_refused(tmp_path, config, why):
    write_checkpoint(tmp_path, CONFIGS[config])
    with pytest.raises(ValueError, match=f"OpenVINO cannot serve this model here: .*{why}"):
        load(tmp_path)


def test_weights_are_packed_before_the_first_request(folder, monkeypatch):
    models_run = []
    logits = OpenVinoForward.logits

    def spy(forward, *args):
        models_run.append(forward.rank.model)
        return logits(forward, *args)

    monkeypatch.setattr(OpenVinoForward, "logits", spy)
    assert load(folder)._forward.rank.model in models_run


@pytest.mark.parametrize("options", [{}, {"weights": "random"}, {"lora": True}], ids=["files", "random", "adapters"])
def test_the_model_is_gone_before_the_plugin_packs(folder, monkeypatch, options):
    """Its weights would be in memory beside the plugin's own."""
    models, alive = [], []

    def spy_model(*args):
        model = CausalLM(*args)
        models.append(weakref.ref(model))
        return model

    def spy_pack(*args):
        alive.append(sum(model() is not None for model in models))
        return pack(*args)

    pack = loading._pack
    monkeypatch.setattr(loading, "CausalLM", spy_model)
    monkeypatch.setattr(loading, "_pack", spy_pack)
    load(folder, **options)
    assert (len(models), alive) == (1, [0])


def test_overlap_does_not_change_the_tokens(folder):
    prompts = [[1, 2, 3], list(range(40))]
    expected = generate(load(folder), prompts, 8, temperature=0.0)
    assert generate(load(folder, overlap=True), prompts, 8, temperature=0.0) == expected


def test_methods_by_name(folder):
    runner = load(folder, kv_cache_tokens=320)
    (answer,) = runner.call(MethodCall("memory", "[]", "{}", ())).poll()
    memory = parse_json(answer.value)
    assert (memory["kv_blocks"], memory["tokens_per_kv_block"]) == (10, 32)
    assert memory["kv_bytes"] == 10 * 2 * 2 * 32 * 2 * 16 * 4


def test_a_signal_after_runners_were_freed_does_not_crash(folder):
    runners = [load(folder) for _ in range(2)]
    while runners:
        del runners[0]
        gc.collect()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
