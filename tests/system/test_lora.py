"""LoRA adapters on a real ring: outputs equal those of peft, and streams keep the weights with which they began."""

import asyncio
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

import sluice.trtllm as trtllm
from sluice import LLM, AsyncClient, Client, SamplingParams, tiny_model
from sluice.client import AdapterNotFound, InvalidRequest, ModelChanged, Unavailable, read_lora
from sluice.executor import LoRARequest
from sluice.launch import Ring
from tests.engine_worker.lora import oracle
from tests.fakes.pickles import Trap
from tests.fakes.processes import LIMIT, wait_until
from tests.system.followed_streams import disturbed_streams
from tests.system.test_examples import run
from tests.trtllm.lora_tensors import lora_config

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).parents[2]
PROMPT = [40, 41, 42, 300, 301, 302, 17, 5]
SHORT = {"max_tokens": 12, "ignore_eos": True, "temperature": 0.0, "token_ids": True}
LONG = {**SHORT, "max_tokens": 200}
WEIGHTS = "adapter_model.safetensors"
ENGINE = {"lora": True, "dtype": "float32", "threads": 1, "kv_cache_tokens": 16384}
ADAPTERS = {
    "all": {"seed": 1, "rank": 8},
    "attention": {"seed": 2, "rank": 4, "targets": ("q_proj", "v_proj")},
    "mlp": {"seed": 3, "rank": 2, "targets": ("up_proj", "down_proj")},
    "other": {"seed": 4, "rank": 8},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {name: oracle.write_adapter(root / name, tiny_model.path(), **options) for name, options in ADAPTERS.items()}


@pytest.fixture(scope="module")
def expected(folders) -> dict[str, list[int]]:
    """Tokens of peft by adapter; "": of the model alone. All of them differ."""
    peft = oracle.Oracle(tiny_model.path())
    outputs = {name: peft.greedy(folders.get(name), PROMPT, SHORT["max_tokens"])[0] for name in ("", *folders)}
    assert len({tuple(tokens) for tokens in outputs.values()}) == len(outputs)
    return outputs


@pytest.fixture(scope="module")
def ring(folders):
    engine = ENGINE | {"lora_folders": [str(folders["all"].parent)]}
    options = {"engine_args": engine, "router_args": {"lora_in_requests": True}}
    with Ring(routers=2, engines=2, detokenizers=1, **options) as ring:
        yield ring


@pytest.fixture
def client(ring, folders):
    """A client of a ring whose services all run, and on which no adapter is loaded."""
    with Client(ring.addresses, timeout=LIMIT) as client:
        wait_for_engines(ring)
        for name in {lora.lora_id for router in client.list_loras() for lora in router.loras}:
            client.unload_lora(name)
        yield client


def wait_for_engines(ring: Ring) -> None:
    for address in ring.addresses:
        assert wait_until(lambda address=address: engines_of(address) == 2)


def engines_of(address: str) -> int:
    """Number of engines that a router knows; 0 while it does not run."""
    try:
        with Client(address, timeout=LIMIT) as client:
            return len(client.stats().engines)
    except Unavailable:
        return 0


def load(client: Client, name: str, folder: Path, how: str) -> None:
    """Load an adapter at both routers, by path or as an upload."""
    source = {"path": str(folder)} if how == "path" else {"folder": folder}
    assert [answer.error for answer in client.load_lora(name, **source)] == [None, None]


def tokens(client: Client, **options) -> list[int]:
    return list(client.generate(PROMPT, **SHORT, **options).outputs[0].token_ids)


async def disturbed(addresses: list[str], options: list[dict], disturb: Callable[[], None]) -> list[list[int]]:
    """Tokens of two streams with each of these options, which are disturbed once all have begun."""
    streams = await disturbed_streams(addresses, PROMPT, [{**LONG, **choice} for choice in 2 * options], disturb)
    return [stream.token_ids for stream in streams]


async def undisturbed(addresses: list[str], options: list[dict]) -> list[list[int]]:
    """Tokens of the same requests as in `disturbed`, one by one."""
    async with AsyncClient(addresses, timeout=2 * LIMIT) as client:
        results = [await client.generate(PROMPT, **LONG, **choice) for choice in 2 * options]
    return [list(result.outputs[0].token_ids) for result in results]


def kill(ring: Ring, service: str) -> None:
    os.kill(ring.pids[service], signal.SIGKILL)


async def test_requests_with_different_adapters_return_the_tokens_of_peft(ring, client, folders, expected) -> None:
    for name, how in (("all", "path"), ("attention", "upload"), ("mlp", "upload")):
        load(client, name, folders[name], how)
    options = [{}, *({"lora_id": name} for name in ("all", "attention", "mlp"))]
    options.append({"lora_weights": read_lora(folders["other"])})
    right = [expected[name] for name in ("", "all", "attention", "mlp", "other")]
    async with AsyncClient(ring.addresses, timeout=LIMIT) as many:
        results = await asyncio.gather(*(many.generate(PROMPT, **SHORT, **choice) for choice in 4 * options))
    assert [list(result.outputs[0].token_ids) for result in results] == 4 * right
    listed = client.list_loras()
    assert [[lora.lora_id for lora in router.loras] for router in listed] == [["all", "attention", "mlp"]] * 2
    assert listed[0].loras == listed[1].loras
    assert {lora.lora_id: (lora.rank, lora.path) for lora in listed[0].loras} == {
        "all": (8, str(folders["all"])),
        "attention": (4, ""),
        "mlp": (2, ""),
    }


@pytest.mark.parametrize("how", ["path", "upload"])
def test_an_adapter_can_be_unloaded_and_replaced(ring, client, folders, expected, how) -> None:
    load(client, "a", folders["all"], how)
    assert tokens(client, lora_id="a") == tokens(client, model="a") == expected["all"]
    client.unload_lora("a")
    for address in ring.addresses:
        with Client(address, timeout=LIMIT) as router, pytest.raises(AdapterNotFound):
            tokens(router, lora_id="a")
    assert tokens(client) == expected[""]
    load(client, "a", folders["other"], how)
    assert tokens(client, lora_id="a") == expected["other"]
    load(client, "a", folders["all"], "upload")
    assert tokens(client, lora_id="a") == expected["all"]


def test_an_adapter_loaded_at_one_router_is_known_to_the_other(ring, client, folders, expected) -> None:
    first, second = ring.addresses
    with Client(first, timeout=LIMIT) as first_client, Client(second, timeout=LIMIT) as second_client:
        first_client.load_lora("a", folder=folders["all"])
        assert wait_until(lambda: second_client.list_loras()[0].loras == first_client.list_loras()[0].loras)
        assert tokens(second_client, lora_id="a") == expected["all"]
        second_client.unload_lora("a")
        assert wait_until(lambda: not first_client.list_loras()[0].loras)


@pytest.mark.parametrize("name", ["/etc", "/adapters/none"])
def test_a_path_outside_the_configured_folders_is_refused(client, name) -> None:
    with pytest.raises(InvalidRequest):
        client.load_lora("a", path=name)
    assert not client.list_loras()[0].loras


def test_malicious_files_are_refused_and_never_executed(client, folders, tmp_path) -> None:
    trap = Trap(tmp_path)
    for name, data in {**trap.files, "adapter_model.safetensors": trap.zipped}.items():
        for how, parent in (("path", folders["all"].parent), ("upload", tmp_path)):
            folder = shutil.copytree(folders["all"], parent / "hostile")
            (folder / "adapter_model.safetensors").unlink()
            if how == "upload":
                (folder / "adapter_model.safetensors").write_bytes(data)
            (folder / name).write_bytes(data)
            with pytest.raises(InvalidRequest, match=r"adapter_model\."):
                load(client, "hostile", folder, how)
            if how == "upload":
                with pytest.raises(InvalidRequest, match=r"spec\.lora_weights.*adapter_model\."):
                    client.generate(PROMPT, lora_weights=read_lora(folder))
            shutil.rmtree(folder)
    assert [router.loras for router in client.list_loras()] == [(), ()]
    assert not trap.sprung


@pytest.mark.long
@pytest.mark.parametrize("how", ["path", "upload"])
async def test_streams_keep_the_weights_with_which_they_began(ring, client, folders, expected, how) -> None:
    """Even if their engine dies after the adapter was replaced. New requests use the new weights."""
    load(client, "a", folders["all"], how)
    right = await undisturbed(ring.addresses, [{"lora_id": "a"}])
    assert right[0][: SHORT["max_tokens"]] == expected["all"]

    def replace_and_kill() -> None:
        load(client, "a", folders["other"], how)
        assert tokens(client, lora_id="a") == expected["other"]
        kill(ring, "engine-0")

    try:
        streams = await disturbed(ring.addresses, [{"lora_id": "a"}], replace_and_kill)
    except ModelChanged:
        # Uploaded files may be lost with the engine. The stream then ends instead of continuing with other weights.
        assert how == "upload"
    else:
        assert streams == right
    assert tokens(client, lora_id="a") == expected["other"]


@pytest.mark.long
@pytest.mark.parametrize("service", ["engine-0", "router-0", "engine-1", "router-1"])
async def test_streams_with_adapters_survive_the_death_of_a_service(ring, client, folders, service) -> None:
    load(client, "by-path", folders["all"], "path")
    load(client, "uploaded", folders["attention"], "upload")
    options = [{"lora_id": "by-path"}, {"lora_id": "uploaded"}, {"lora_weights": read_lora(folders["other"])}, {}]
    right = await undisturbed(ring.addresses, options)
    streams = await disturbed(ring.addresses, options, lambda: kill(ring, service))
    assert streams == right
    # The restarted engine and router know the loaded adapters.
    wait_for_engines(ring)
    for address in ring.addresses:
        with Client(address, timeout=LIMIT) as router:
            assert wait_until(lambda router=router: len(router.list_loras()[0].loras) == 2)
            assert tokens(router, lora_id="by-path") == right[0][: SHORT["max_tokens"]]
            assert tokens(router, lora_id="uploaded") == right[1][: SHORT["max_tokens"]]


@pytest.mark.long
async def test_requests_bring_more_adapters_than_fit_in_host_memory(folders, expected) -> None:
    """Concurrent requests then wait for each other."""
    sizes = [sum(tensor.nbytes for tensor in load_file(folders[name] / WEIGHTS).values()) for name in ("all", "other")]
    engine = ENGINE | {"lora_folders": [str(folders["all"].parent)], "lora_host_cache_size": int(1.1 * max(sizes))}
    options = {"engine_args": engine, "router_args": {"lora_in_requests": True}}
    with Ring(**options) as ring:
        async with AsyncClient(ring.addresses, timeout=LIMIT) as client:
            adapters = [read_lora(folder) for folder in folders.values()]
            calls = (client.generate(PROMPT, **SHORT, lora_weights=weights) for weights in 3 * adapters)
            results = await asyncio.gather(*calls)
    assert [list(result.outputs[0].token_ids) for result in results] == 3 * [expected[name] for name in folders]


@pytest.mark.long
@pytest.mark.parametrize("page", ["lora.md", "executor.md"])
def test_the_examples_of_the_pages_work(ring, client, folders, capsys, page) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "folder" in block)
    # `exec` is safe here: the page is part of this repository.
    exec(code, {"address": ring.addresses, "folder": str(folders["all"])})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) >= 2
    if page == "lora.md":
        assert [line for line in lines if line.startswith("sql 8 ")]
        assert [line for line in lines if "no adapter is loaded under this id" in line]


@pytest.mark.long
def test_the_python_example_works(ring, folders) -> None:
    printed = run("lora.py", ring.addresses[0], str(folders["all"])).stdout
    assert re.fullmatch(r"127\.0\.0\.1:\d+: Lora\(lora_id='mine'.*\)\nmine: '.*'\nmodel: '.*'\n", printed)


@pytest.mark.long
def test_llm_takes_lora_requests(folders, expected) -> None:
    params = SamplingParams(max_tokens=SHORT["max_tokens"], temperature=0.0, ignore_eos=True)
    names = ["", "all", "attention", "mlp", "all"]
    with LLM(enable_lora=True, engine_args=ENGINE) as llm:
        adapters = [LoRARequest(name, i, str(folders[name])) if name else None for i, name in enumerate(names)]
        adapters[-1] = adapters[1]
        results = llm.generate([PROMPT] * len(names), params, lora_request=adapters, use_tqdm=False)
    assert [result.outputs[0].token_ids for result in results] == [expected[name] for name in names]


@pytest.mark.long
def test_the_executor_of_tensorrt_llm_takes_lora_configs(folders, expected, tmp_path) -> None:
    tensors = load_file(folders["all"] / "adapter_model.safetensors")
    peft = trtllm.PeftCacheConfig(max_adapter_size=16)
    config = trtllm.ExecutorConfig(peft_cache_config=peft, kv_cache_config=trtllm.KvCacheConfig(max_tokens=8192))
    with trtllm.Executor(tiny_model.path(), trtllm.ModelType.DECODER_ONLY, config) as executor:

        def run(lora: trtllm.LoraConfig | None) -> trtllm.Response:
            request = trtllm.Request(PROMPT, SHORT["max_tokens"], lora_config=lora)
            request.output_config.exclude_input_from_output = True
            (response,) = executor.await_responses(executor.enqueue_request(request), LIMIT)
            return response

        unknown = run(trtllm.LoraConfig(7))
        assert unknown.error_msg == "LoRA task 7 not found in cache. Please send LoRA weights with request"
        with_weights = run(lora_config(7, tensors, scale=2.0))
        by_id, plain = run(trtllm.LoraConfig(7)), run(None)
    assert not with_weights.has_error(), with_weights.error_msg
    assert with_weights.result.output_token_ids == by_id.result.output_token_ids
    assert by_id.result.output_token_ids != plain.result.output_token_ids
