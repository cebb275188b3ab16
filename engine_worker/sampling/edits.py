"""What changes logits before temperature: bias, bans, penalties, in this order."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_worker.step import Draw


def edits(draw: Draw) -> bool:
    """Whether `edit` would change anything."""
    sampling = draw.sampling
    return bool(
        draw.banned or sampling.logit_bias or sampling.bad_token_ids or sampling.allowed_token_ids or sampling.penalized
    )


def edit(scores: Tensor, draws: Sequence[Draw]) -> None:
    """Scores [N, vocab] float32, changed in place, one row per draw. Ids outside the vocabulary cannot come: they
    change nothing."""
    _bias(scores, draws)
    _ban(scores, draws)
    _penalize_repetition(scores, draws)
    _penalize_frequency(scores, draws)


def _bias(scores: Tensor, draws: Sequence[Draw]) -> None:
    biased = [(row, token, bias) for row, draw in enumerate(draws) for token, bias in draw.sampling.logit_bias]
    biased = [entry for entry in biased if entry[1] < scores.shape[1]]
    if biased:
        rows, tokens, values = zip(*biased, strict=True)
        cells = _cells(scores, rows, tokens)
        _put(scores, cells, _at(scores, cells) + torch.tensor(values, device=scores.device))


def _ban(scores: Tensor, draws: Sequence[Draw]) -> None:
    size = scores.shape[1]
    for row, draw in enumerate(draws):
        if draw.sampling.allowed_token_ids:
            allowed = [token for token in draw.sampling.allowed_token_ids if token < size]
            forbidden = torch.ones(size, dtype=torch.bool)
            forbidden[allowed] = False
            scores[row].masked_fill_(forbidden.to(scores.device), -torch.inf)
    banned = [
        (row, token)
        for row, draw in enumerate(draws)
        for token in (*draw.banned, *draw.sampling.bad_token_ids)
        if token < size
    ]
    if banned:
        cells = _cells(scores, *zip(*banned, strict=True))
        _put(scores, cells, torch.full(cells.shape, -torch.inf, device=scores.device))


def _penalize_repetition(scores: Tensor, draws: Sequence[Draw]) -> None:
    """Divide positive and multiply negative logits of the tokens of prompt and output (CTRL, arXiv:1909.05858)."""
    rows = [row for row, draw in enumerate(draws) if draw.sampling.repetition_penalty != 1.0]
    if not rows:
        return
    seen = [np.unique(np.concatenate([_ids(draws[row].prompt), _ids(draws[row].output)])) for row in rows]
    sizes = [len(tokens) for tokens in seen]
    cells = _cells(scores, np.repeat(rows, sizes), np.concatenate(seen))
    penalty = _column(np.repeat([draws[row].sampling.repetition_penalty for row in rows], sizes), scores.device)
    found = _at(scores, cells)
    _put(scores, cells, torch.where(found < 0, found * penalty, found / penalty))


def _penalize_frequency(scores: Tensor, draws: Sequence[Draw]) -> None:
    """Subtract presence + count * frequency of the tokens of the output (as in OpenAI's API)."""
    rows = [
        row
        for row, draw in enumerate(draws)
        if (draw.sampling.presence_penalty or draw.sampling.frequency_penalty) and len(draw.output)
    ]
    if not rows:
        return
    counted = [np.unique(_ids(draws[row].output), return_counts=True) for row in rows]
    sizes = [len(tokens) for tokens, _ in counted]
    cells = _cells(scores, np.repeat(rows, sizes), np.concatenate([tokens for tokens, _ in counted]))
    presence = np.repeat([draws[row].sampling.presence_penalty for row in rows], sizes)
    frequency = np.repeat([draws[row].sampling.frequency_penalty for row in rows], sizes)
    amount = presence + frequency * np.concatenate([counts for _, counts in counted])
    _put(scores, cells, _at(scores, cells) - _column(amount, scores.device))


def _ids(tokens: Sequence[int]) -> NDArray[np.int64]:
    return np.fromiter(tokens, np.int64, len(tokens))


def _cells(
    scores: Tensor, rows: Iterable[int] | NDArray[np.int64], tokens: Iterable[int] | NDArray[np.int64]
) -> Tensor:
    """Flat indices into scores."""
    flat = np.asarray(rows, np.int64) * scores.shape[1] + np.asarray(tokens, np.int64)
    return torch.from_numpy(flat).to(scores.device)


def _at(scores: Tensor, cells: Tensor) -> Tensor:
    return scores.view(-1).index_select(0, cells)


def _put(scores: Tensor, cells: Tensor, values: Tensor) -> None:
    scores.view(-1).index_copy_(0, cells, values)


def _column(values: NDArray[np.float64], device: torch.device) -> Tensor:
    return torch.from_numpy(values.astype(np.float32)).to(device)
