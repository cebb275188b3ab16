"""Malicious pickles: unpickling one creates a marker file, which tests look for."""

import io
import pickle
import zipfile
from pathlib import Path

import torch

NAMES = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pkl", "pytorch_model.bin")


class _Payload:
    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple:
        return Path.touch, (self._marker,)


class Trap:
    """Malicious files in the forms that a user could upload: `pickled`, `saved` by torch, and `zipped`."""

    def __init__(self, folder: Path) -> None:
        self._marker = folder / "executed"
        weights = {"prompt_embeddings": _Payload(self._marker)}
        self.pickled = pickle.dumps(weights)
        saved = io.BytesIO()
        torch.save(weights, saved)
        self.saved = saved.getvalue()
        archive = io.BytesIO()
        with zipfile.ZipFile(archive, "w") as file:
            for name, data in self.files.items():
                file.writestr(name, data)
        self.zipped = archive.getvalue()

    @property
    def files(self) -> dict[str, bytes]:
        """By file name, as in the folder of an adapter."""
        return dict(zip(NAMES, (self.saved, self.saved, self.pickled, self.saved), strict=True))

    @property
    def sprung(self) -> bool:
        """Whether any of the files was unpickled."""
        return self._marker.exists()

    def rearm(self) -> None:
        self._marker.unlink()

    def write(self, folder: Path) -> None:
        for name, data in self.files.items():
            (folder / name).write_bytes(data)
