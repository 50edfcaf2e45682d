"""A small GAN: two networks, two optimizers, one scaler."""

import sys

import torch
from torch import nn

torch.manual_seed(3)
generator = nn.Sequential(nn.Linear(4, 16), nn.LeakyReLU(0.2), nn.Linear(16, 2))
critic = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
of_generator = torch.optim.Adam(generator.parameters(), lr=1e-3)
of_critic = torch.optim.RMSprop(critic.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22, growth_interval=5)
loss_fn = nn.BCEWithLogitsLoss()
real, fake = torch.ones(32, 1), torch.zeros(32, 1)

for _ in range(15):
    data, noise = torch.randn(32, 2) + 3, torch.randn(32, 4)
    of_critic.zero_grad()
    with torch.autocast("cpu", torch.float16):
        made = generator(noise)
        loss = loss_fn(critic(data).float(), real) + loss_fn(critic(made.detach()).float(), fake)
    scaler.scale(loss).backward()
    scaler.step(of_critic)
    of_generator.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = loss_fn(critic(made).float(), real)
    scaler.scale(loss).backward()
    scaler.step(of_generator)
    scaler.update()

state = {"model": {**generator.state_dict(), **{f"c{k}": v for k, v in critic.state_dict().items()}}}
torch.save({**state, "scale": scaler.get_scale()}, sys.argv[1])
