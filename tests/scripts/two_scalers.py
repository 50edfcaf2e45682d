"""Sparse embeddings and a dense net, each with an optimizer and a scaler of its own."""

import sys

import torch
from torch import nn

torch.manual_seed(9)
table = nn.EmbeddingBag(50, 8, sparse=True)
head = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
parts = [
    (torch.optim.SGD(table.parameters(), lr=0.5), torch.amp.GradScaler("cpu", 2.0**20, growth_interval=3)),
    (torch.optim.Adam(head.parameters(), lr=1e-2), torch.amp.GradScaler("cpu", 2.0**25, growth_interval=7)),
]
for step in range(20):
    bags, y = torch.randint(50, (16, 5)), torch.randint(2, (16,))
    optimizer, scaler = parts[step % 2]
    table.zero_grad()
    head.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = nn.functional.cross_entropy(head(table(bags)), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
scale = [scaler.get_scale() for _, scaler in parts]
torch.save({"model": {**table.state_dict(), **head.state_dict()}, "scale": scale}, sys.argv[1])
