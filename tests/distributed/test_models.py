"""Models whose ranks share a sequence: batches, transformers, compilation, checkpoints, DDP and FSDP2."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5", reason="transformers 5 is not installed")

from rank_processes import on_ranks
from sharded_models import ROWS, check_shards, check_training, gradients_by_one, llama, tokens

from flashwright import distributed

WAYS = ("plain", "compile", "checkpoint", "ddp", "fsdp")


def test_a_model_inside_the_context_computes_what_it_does_outside():
    model = llama()
    outside, gradients = gradients_by_one(model)
    with distributed.context_parallel():
        inside, same = gradients_by_one(model)
    torch.testing.assert_close(inside, outside)
    torch.testing.assert_close(same, gradients)


@pytest.mark.slow
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("strategy", ["ring", "all-gather", "all-to-all"])
def test_shared_models_have_the_gradients_of_one_process(how, strategy):
    on_ranks(2, check_training, how, strategy)


def test_what_is_sharded_can_be_put_together():
    on_ranks(3, check_shards, "zigzag")


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["contiguous", "documents", "assigned"])
def test_any_layout_can_be_put_together(layout):
    layouts = {
        "documents": distributed.Documents((0, 3, 20, 23)),
        "assigned": [[(20, 23), (0, 2)], [], [(2, 20)]],
    }
    on_ranks(3, check_shards, layouts.get(layout, layout))


def test_a_sharded_batch_has_positions_and_labels_of_the_next_token():
    inputs = tokens()
    batch = distributed.shard_batch({"input_ids": inputs, "labels": inputs, "cu_seq_lens_q": torch.tensor([0, ROWS])})
    assert torch.equal(batch["labels"], inputs)
    assert torch.equal(batch["shift_labels"][:, :-1], inputs[:, 1:])
    assert (batch["shift_labels"][:, -1] == -100).all()
    assert torch.equal(batch["position_ids"][0], torch.arange(ROWS))
    assert batch["cu_seq_lens_q"].tolist() == [0, ROWS]


def test_padding_and_caches_are_refused_inside_the_context():
    model = llama()
    inputs = tokens()
    padded = torch.ones_like(inputs)
    padded[0, :3] = 0
    with distributed.context_parallel(), torch.no_grad():
        with pytest.raises(ValueError, match="context_parallel: a mask was given"):
            model(inputs, attention_mask=padded)
        cached = model(inputs, use_cache=True)
        with pytest.raises(ValueError, match="calls without a KV cache"):
            model(inputs[:, :1], past_key_values=cached.past_key_values)
