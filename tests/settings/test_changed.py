"""The settings of a service that differ from their defaults."""

import json

from sluice.settings.changed import changed_settings
from sluice.settings.services import EngineSettings, RouterSettings


def test_settings_with_their_default_values_are_omitted() -> None:
    assert changed_settings(EngineSettings(model="m", id="e")) == {"model": "m", "id": "e"}
    same = EngineSettings(model="m", id="e", max_batch_size=64, logits_processors={})
    assert changed_settings(same) == {"model": "m", "id": "e"}


def test_values_of_every_type_can_be_written_as_json() -> None:
    values = {
        "model": "m",
        "id": "e",
        "keys": "/keys",
        "overlap": False,
        "max_attention_window": [64, 128],
        "logits_processors": {"upper": "mine:upper"},
        "capacity_scheduler_policy": "guaranteed_no_evict",
    }
    settings = EngineSettings(**values, kv_host_memory="8GiB")
    assert json.loads(json.dumps(changed_settings(settings))) == {**values, "kv_host_memory": 8 << 30}


def test_settings_that_only_a_launcher_passes_are_omitted() -> None:
    assert "engines_here" not in changed_settings(EngineSettings(model="m", engines_here=2))


def test_credentials_in_a_url_are_omitted() -> None:
    settings = RouterSettings(model="m", id="r", otlp_endpoint="http://me:secret@collector:4317")
    assert changed_settings(settings)["otlp_endpoint"] == "http://…@collector:4317"
    settings = RouterSettings(model="m", id="r", otlp_endpoint="https://me:se@cret@collector:4317?key=secret")
    assert changed_settings(settings)["otlp_endpoint"] == "https://…@collector:4317?…"
    settings = RouterSettings(model="m", id="r", otlp_endpoint="http://collector:4317")
    assert changed_settings(settings)["otlp_endpoint"] == "http://collector:4317"
