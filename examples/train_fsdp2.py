"""A small GPT in float16 with FSDP2: clipping, a checkpoint, and the same command with more steps resumes it.

torchrun --nproc-per-node 2 examples/train_fsdp2.py 200 checkpoints
"""

import pathlib
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lucid.amp import GradScaler


class GPT(nn.Module):
    """Bytes in, the logits of the next bytes out: ``(rows, LENGTH)`` to ``(rows, LENGTH, 256)``."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True, norm_first=True)
        self.token, self.place = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(WIDTH, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Each position sees itself and what came before."""
        future = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=x.device).triu(1)
        return self.head(self.blocks(self.token(x) + self.place.weight, mask=future)).float()


LENGTH, WIDTH, steps, folder = 32, 64, int(sys.argv[1]), pathlib.Path(sys.argv[2])
device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
dist.init_process_group()
text = torch.tensor(list(pathlib.Path(__file__).read_bytes()))  # this file is what it learns, byte by byte
model, half = GPT().to(device), MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
for part in (*model.blocks.layers, model):
    fully_shard(part, mp_policy=half)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scaler = GradScaler(growth_interval=50)  # the sharded parameters tell which ranks decide together
state = {"scaler": scaler} | dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
if start := max((int(path.parent.name) for path in folder.glob("*/.metadata")), default=0):
    dcp.load(state, checkpoint_id=folder / str(start))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
for step in range(start, steps):
    torch.manual_seed(step * dist.get_world_size() + dist.get_rank())
    rows = torch.stack([text[i : i + LENGTH + 1] for i in torch.randint(len(text) - LENGTH, (32,))]).to(device)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
    scaler.scale(loss).backward()
    norm = scaler.clip_grad_norm_(optimizer, 1.0)  # unscales, and clips by the norm over all ranks
    scaler.step(optimizer)
    scaler.update()
    if dist.get_rank() == 0 and (step % 10 == 0 or step == steps - 1):
        print(f"step {step:3}  loss {loss.item():.3f}  norm {norm.item():.3f}  scale {scaler.get_scale():g}")
state["model"], state["optimizer"] = get_state_dict(model, optimizer)
dcp.save(state, checkpoint_id=folder / str(steps))
dist.destroy_process_group()
