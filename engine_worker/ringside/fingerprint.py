"""Identity of the model that an engine computes: a stream may go on at another engine with the same one."""

from hashlib import blake2b

import msgspec

from sluice.ring.checkpoint import Checkpoint


def fingerprint(checkpoint: Checkpoint, weights: str, dtype: str, max_attention_window: tuple[int, ...]) -> str:
    """Hex; of the checkpoint's files and the settings that make another function of them.

    Device, attention backend, number of ranks and sizes of batches are left out: they change no more than rounding, so
    a stream may go on from a GPU to a CPU. Two of these with one dtype are the same model.
    """
    parts = (checkpoint.fingerprint, weights, dtype, max_attention_window)
    return blake2b(msgspec.msgpack.encode(parts), digest_size=8, person=b"sluice-model").hexdigest()
