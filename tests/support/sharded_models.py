"""Small models trained on shards by several ranks, and by one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from flashwright import distributed

VOCABULARY, ROWS = 61, 29


def llama(seed: int = 0, **more: Any) -> Any:
    import transformers

    from flashwright.integrations.transformers import register

    register()
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, **more,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).double()
    model.set_attn_implementation("flashwright")
    return model


def tokens(batch: int = 2) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (batch, ROWS), generator=torch.Generator().manual_seed(1))


def loss_of(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """This rank's part of the mean over all tokens that have a next one."""
    logits = model(**{name: x for name, x in batch.items() if "labels" not in name}, use_cache=False).logits
    labels = batch["shift_labels"]
    total = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return total / (labels.shape[0] * (ROWS - 1))


def gradients_by_one(model: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    inputs = tokens()
    labels = torch.cat((inputs[:, 1:], torch.full_like(inputs[:, :1], -100)), 1)
    model.zero_grad()
    loss = loss_of(model, {"input_ids": inputs, "shift_labels": labels})
    loss.backward()
    return loss.detach(), [parameter.grad.clone() for parameter in model.parameters()]


def check_training(how: str, strategy: str = "ring") -> None:
    """The loss and the gradients of a model that ranks share are those of one process."""
    model = llama()
    expected_loss, expected = gradients_by_one(model)
    model.zero_grad()
    ranks = dist.get_world_size()
    trained, scale = model, 1.0
    if how == "compile":
        trained = torch.compile(model, backend="eager")
    elif how == "checkpoint":
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    elif how == "ddp":
        trained, scale = torch.nn.parallel.DistributedDataParallel(model), float(ranks)  # which averages
    elif how == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (ranks,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        trained, scale = fully_shard(model, mesh=mesh), float(ranks)
    inputs = tokens()
    batch = distributed.shard_batch({"input_ids": inputs, "labels": inputs})
    with distributed.context_parallel(strategy=strategy):
        loss = loss_of(trained, batch)
        (loss * scale).backward()
    dist.all_reduce(total := loss.detach().clone())
    torch.testing.assert_close(total, expected_loss, rtol=1e-9, atol=1e-12)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        found = parameter.grad
        if how == "fsdp":
            found = found.full_tensor()
        elif how != "ddp":
            dist.all_reduce(found)
        torch.testing.assert_close(found, gradient, rtol=1e-7, atol=1e-9)


def check_shards(layout: Any) -> None:
    """What ranks shard, they can put together again, with gradients."""
    x = torch.randn(2, 23, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    labels = distributed.shard_batch({"input_ids": x[..., 0], "labels": x[..., 1]}, None, layout)["shift_labels"]
    labels.view(-1)  # as the losses of transformers do, whatever chunks a rank has
    mine = distributed.shard(x, 1, None, layout).clone().requires_grad_()
    whole = distributed.unshard(mine, 1, None, layout)
    assert torch.equal(whole, x)
    weights = torch.arange(1.0, 24.0, dtype=torch.float64)[None, :, None] * (1 + dist.get_rank())
    (whole * weights).sum().backward()
    of_all = distributed.shard(sum(weights / (1 + dist.get_rank()) * (1 + r) for r in range(dist.get_world_size()))
                               .expand_as(x), 1, None, layout)  # fmt: skip
    torch.testing.assert_close(mine.grad, of_all)
    assert torch.equal(distributed.positions(23, None, layout), distributed.shard(torch.arange(23), 0, None, layout))
