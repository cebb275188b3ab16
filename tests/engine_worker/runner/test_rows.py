"""Logits of a prompt's positions take the memory of one block of rows, for any size of the chunk; so do logits
that are sent to a client."""

import subprocess
import sys
from copy import deepcopy
from pathlib import Path

import pytest

from engine_worker.runner.forward import rows_per_block
from tests.engine_worker.models.checkpoints import CONFIGS, write_checkpoint

VOCAB, PROMPT = 150_000, 2_000
BLOCK = rows_per_block(VOCAB) * VOCAB * 4
"""Bytes of logits."""
CHILD = """
import resource, sys
from pathlib import Path
from sluice.wire.params import SamplingParams, StopParams
from sluice.wire.tensors import CONTEXT_LOGITS, NO_TENSORS, TensorParams
from tests.fakes.lane import Receiver
from tests.parity.harness import EngineHarness

rows = []

def peak():
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

def submit(harness, top, tensors=NO_TENSORS):
    number = harness.send([(7 * i) % 999 for i in range({prompt})], SamplingParams(temperature=0),
                          StopParams(max_tokens=1), prompt_logprobs=top, tensors=tensors)
    harness.run()
    return number

harness = EngineHarness(Path(sys.argv[1]), backend=sys.argv[2], max_tokens_per_step={prompt}, max_batch_size=4,
                        kv_cache_tokens=4096, block_reuse=False)
submit(harness, None)
before = peak()
number = submit(harness, 5)
assert len(harness.prompt_logprobs(number)) == {prompt} - 1
scored = peak()
Receiver._receive_tensor = lambda self, part: rows.append(part.rows)
number = submit(harness, None, TensorParams((CONTEXT_LOGITS,)))
assert sum(rows) == {prompt}
print(scored - before, peak() - scored)
"""


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("backend", ["torch", "openvino"])
def test_a_large_vocabulary(tmp_path, backend):
    config = deepcopy(CONFIGS["qwen3, tied"])
    config.vocab_size, config.max_position_embeddings = VOCAB, 4096
    write_checkpoint(tmp_path, config)
    code = CHILD.replace("{prompt}", str(PROMPT))
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), backend],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    grown, grown_for_client = map(int, done.stdout.split()[-2:])
    # A block of logits, what is computed from it, and the head that OpenVINO compiles once more; not 1.2 GB.
    assert grown < 6 * BLOCK < PROMPT * VOCAB * 4 / 5
    # The rows on their way to the client: its lane's buffer and a block.
    assert grown_for_client < 3 * BLOCK
