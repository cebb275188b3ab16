"""The ranks' shares of a layer together equal the layer."""

import pytest
import torch

from engine_worker.attention.backend import HeadShape
from engine_worker.layers.linear import Embedding, LMHead, SummedLinear
from engine_worker.layers.mlp import SwiGLU
from engine_worker.layers.shard import Place, Shard, Span

PLACE = Place(torch.float32, torch.device("cpu"))


class Rank(Shard):
    """One of several ranks in this process. Its collectives do nothing: the test combines the ranks' results."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size


def ranks(size: int) -> list[Rank]:
    return [Rank(rank, size) for rank in range(size)]


def fill(layer, whole: dict[str, torch.Tensor]) -> None:
    """Load the weights as the loader does."""
    cuts = layer.cuts("layer.")
    for name, target in layer.targets("layer.").items():
        tensor = whole[name]
        if name in cuts:
            dim, part = cuts[name]
            assert tensor.shape[dim] == part.total
            tensor = tensor.narrow(dim, part.end - part.filled, part.filled)
        target.copy_(tensor)
    layer.freeze()


def random_like(layer) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn_like(target) for name, target in layer.targets("layer.").items()}


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_spans_cover_all_rows(size):
    parts = [rank.span(12, "rows") for rank in ranks(size)]
    assert [row for part in parts for row in range(part.start, part.end)] == list(range(12))
    assert all(part.filled == part.size for part in parts)


@pytest.mark.parametrize(("total", "size"), [(97, 2), (97, 4), (5, 4), (3, 8), (1, 1)])
def test_padded_spans_cover_all_rows_and_have_equal_sizes(total, size):
    parts = [rank.padded_span(total) for rank in ranks(size)]
    assert len({part.size for part in parts}) == 1
    assert [row for part in parts for row in range(part.end - part.filled, part.end)] == list(range(total))


def test_a_dimension_that_the_ranks_cannot_share_is_named():
    with pytest.raises(ValueError, match="tensor_parallel = 3 does not divide intermediate_size = 80"):
        Rank(0, 3).span(80, "intermediate_size")
    with pytest.raises(ValueError, match="tensor_parallel = 3 does not divide num_attention_heads = 8"):
        Rank(0, 3).heads(HeadShape(8, 3, 64))
    with pytest.raises(ValueError, match="tensor_parallel = 4 does not divide num_key_value_heads = 6"):
        Rank(0, 4).heads(HeadShape(12, 6, 64))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"), [(8, 8, 2), (8, 2, 2), (8, 2, 4), (8, 2, 8), (8, 1, 4), (6, 3, 3), (7, 1, 7)]
)
def test_each_rank_has_the_kv_heads_that_its_query_heads_read(heads, kv_heads, size):
    shape = HeadShape(heads, kv_heads, 16)
    covered = []
    for rank in ranks(size):
        queries, keys, share = rank.query_heads(shape), rank.kv_heads(shape), rank.heads(shape)
        assert (share.num_heads, share.num_kv_heads) == (queries.size, keys.size)
        assert queries.size % keys.size == 0
        for i in range(queries.size):
            assert keys.start + i // share.group == (queries.start + i) // shape.group
        covered += range(queries.start, queries.end)
    assert covered == list(range(heads))


@pytest.mark.parametrize("size", [2, 4])
def test_an_mlp_is_the_sum_of_its_shards(size):
    """Including biases: the bias of the summed projection is added once."""
    alone = SwiGLU(8, 12, PLACE, bias=True)
    whole = random_like(alone)
    fill(alone, whole)
    x, total = torch.randn(5, 8), torch.zeros(5, 8)
    for rank in ranks(size):
        mlp = SwiGLU(8, 12, PLACE._replace(shard=rank), bias=True)
        fill(mlp, whole)
        total += mlp(x)
    torch.testing.assert_close(total, alone(x))


def test_a_row_parallel_layer_is_the_sum_of_its_shards():
    alone = SummedLinear(Span(0, 9, 9), 4, PLACE, bias=True)
    whole = random_like(alone)
    fill(alone, whole)
    x, total = torch.randn(3, 9), torch.zeros(3, 4)
    for rank in ranks(3):
        part = rank.span(9, "inputs")
        linear = SummedLinear(part, 4, PLACE._replace(shard=rank), bias=True)
        fill(linear, whole)
        total += linear(x[:, part.start : part.end])
    torch.testing.assert_close(total, alone(x))


@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_vocabulary_split_by_rows(size):
    """13 rows over 8 ranks: some ranks have a single row and some none. Padding does not appear in the logits."""
    vocabulary = 13
    alone = Embedding(vocabulary, 6, PLACE)
    whole = random_like(alone)
    fill(alone, whole)
    ids, total, scores = torch.tensor([0, 12, 5, 5, 7]), torch.zeros(5, 6), []
    head = LMHead(6, vocabulary, PLACE)
    fill(head, whole)
    for rank in ranks(size):
        embedding = Embedding(vocabulary, 6, PLACE._replace(shard=rank))
        fill(embedding, whole)
        total += embedding(ids)

        def keep(x):
            scores.append(x)
            return x

        rank.gather = keep
        part = LMHead(6, vocabulary, PLACE._replace(shard=rank))
        fill(part, whole)
        part(alone(ids))
    torch.testing.assert_close(total, alone(ids), rtol=0, atol=0)
    torch.testing.assert_close(torch.cat(scores, dim=1)[:, :vocabulary], head(alone(ids)))


def test_a_split_embedding_does_not_change_the_ids():
    ids = torch.tensor([3, 12])
    embedding = Embedding(13, 6, PLACE._replace(shard=Rank(1, 2)))
    fill(embedding, {"layer.weight": torch.ones(13, 6)})
    embedding(ids)
    assert ids.tolist() == [3, 12]
