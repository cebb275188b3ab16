"""The functions of llama.cpp's C library that a server of token ids needs, as declared in the pinned release.

The library's CPU backends, one for each generation of CPUs, are in the same folder; it loads the best for this machine.
"""

import ctypes
from ctypes import POINTER, c_bool, c_byte, c_char_p, c_float, c_int8, c_int32, c_uint32, c_void_p
from pathlib import Path
from typing import Any

from bench.peers.catalog import LLAMA

LIBRARIES = Path("bins", "linux-x64")
F32, F16 = 0, 1
"""Types of the KV cache."""


class ModelParams(ctypes.Structure):
    """Opaque: only the defaults are used. At least as large as the library's structure."""

    _fields_ = [("opaque", c_byte * 256)]


class ContextParams(ctypes.Structure):
    _fields_ = [
        ("n_ctx", c_uint32),
        ("n_batch", c_uint32),
        ("n_ubatch", c_uint32),
        ("n_seq_max", c_uint32),
        ("n_rs_seq", c_uint32),
        ("n_outputs_max", c_uint32),
        ("n_outputs_max_per_seq", c_uint32),
        ("n_threads", c_int32),
        ("n_threads_batch", c_int32),
        ("kinds", c_int32 * 5),
        ("scaling", c_float * 6),
        ("yarn_orig_ctx", c_uint32),
        ("defrag_thold", c_float),
        ("cb_eval", c_void_p),
        ("cb_eval_user_data", c_void_p),
        ("type_k", c_int32),
        ("type_v", c_int32),
        ("abort_callback", c_void_p),
        ("abort_callback_data", c_void_p),
        ("embeddings", c_bool),
        ("offload_kqv", c_bool),
        ("no_perf", c_bool),
        ("op_offload", c_bool),
        ("swa_full", c_bool),
        ("kv_unified", c_bool),
        ("samplers", c_void_p),
        ("n_samplers", ctypes.c_size_t),
        ("ctx_other", c_void_p),
    ]


class Batch(ctypes.Structure):
    _fields_ = [
        ("n_tokens", c_int32),
        ("token", POINTER(c_int32)),
        ("embd", c_void_p),
        ("pos", POINTER(c_int32)),
        ("n_seq_id", POINTER(c_int32)),
        ("seq_id", POINTER(POINTER(c_int32))),
        ("logits", POINTER(c_int8)),
    ]


SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "llama_backend_init": (None, []),
    "llama_model_default_params": (ModelParams, []),
    "llama_model_load_from_file": (c_void_p, [c_char_p, ModelParams]),
    "llama_context_default_params": (ContextParams, []),
    "llama_init_from_model": (c_void_p, [c_void_p, ContextParams]),
    "llama_get_memory": (c_void_p, [c_void_p]),
    "llama_memory_seq_rm": (c_bool, [c_void_p, c_int32, c_int32, c_int32]),
    "llama_decode": (c_int32, [c_void_p, Batch]),
    "llama_get_logits": (POINTER(c_float), [c_void_p]),
}


def load_library() -> Any:
    """Raises RuntimeError if the library's structures differ from those declared here."""
    folder = LLAMA.npm_folder / LIBRARIES
    found = {name: next(folder.glob(f"lib{name}*.so")) for name in ("ggml-base", "ggml.", "llama.")}
    loaded = {name: ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL) for name, file in found.items()}
    loaded["ggml."].ggml_backend_load_all_from_path(str(folder).encode())
    library = loaded["llama."]
    for name, (result, arguments) in SIGNATURES.items():
        call = getattr(library, name)
        call.restype, call.argtypes = result, arguments
    library.llama_backend_init()
    known = library.llama_context_default_params()
    if (known.n_batch, known.n_seq_max, known.defrag_thold, known.type_k, known.swa_full) != (2048, 1, -1.0, F16, True):
        raise RuntimeError(f"the structures of {found['llama.']} differ from those declared here")
    return library
