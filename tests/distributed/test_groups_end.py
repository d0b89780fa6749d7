"""A process group ends where it is destroyed, whatever of ours and of PyTorch's was used with it."""

import subprocess
import sys

import pytest

pytest.importorskip("torch")

TRAINED_WITH_A_GROUP = """
import gc, weakref
import torch
import torch.distributed as dist
from flashwright import distributed

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
group = weakref.ref(dist.group.WORLD)
q, k = torch.randn(1, 2, 40, 32, requires_grad=True), torch.randn(1, 1, 40, 32)
distributed.unshard(distributed.attention(q, k, k, causal=True), dim=2).sum().backward()
torch.optim.AdamW([q]).step()  # imports PyTorch's compiler
dist.destroy_process_group()
gc.collect()
print("kept" if group() is not None else "ended")
"""


def test_a_destroyed_group_is_kept_by_nothing():
    """Its threads would abort the process when it ends, now and then."""
    done = subprocess.run([sys.executable, "-c", TRAINED_WITH_A_GROUP], capture_output=True, text=True, timeout=120)
    assert (done.stdout.strip(), done.returncode) == ("ended", 0), done.stderr
