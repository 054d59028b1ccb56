"""Soft actor-critic: two critics and their targets, a tuned temperature with an optimizer of its own."""

import argparse

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn, optim

OBS, ACT = 5, 2


class ReplayBuffer:
    def __init__(self, size, device):
        self.device, rng = device, np.random.default_rng(0)
        self.obs, self.next_obs = (rng.normal(size=(size, OBS)).astype(np.float32) for _ in range(2))
        self.actions = rng.uniform(-1, 1, size=(size, ACT)).astype(np.float32)
        self.rewards = rng.normal(size=size).astype(np.float32)

    def sample(self, batch_size):
        rows = np.random.randint(0, len(self.rewards), batch_size)
        arrays = self.obs[rows], self.next_obs[rows], self.actions[rows], self.rewards[rows]
        return [torch.as_tensor(array).to(self.device) for array in arrays]


class SoftQNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(OBS + ACT, 16), nn.Linear(16, 1)

    def forward(self, x, a):
        return self.fc2(F.relu(self.fc1(torch.cat([x, a], 1))))


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc_mean, self.fc_logstd = nn.Linear(OBS, 16), nn.Linear(16, ACT), nn.Linear(16, ACT)
        self.register_buffer("action_scale", torch.tensor([1.0, 0.5]))

    def get_action(self, x):
        x = F.relu(self.fc1(x))
        mean, log_std = self.fc_mean(x), torch.tanh(self.fc_logstd(x))
        normal = torch.distributions.Normal(mean, log_std.exp())
        x_t = normal.rsample()
        y_t = torch.tanh(x_t)
        log_prob = normal.log_prob(x_t) - torch.log(self.action_scale * (1 - y_t.pow(2)) + 1e-6)
        return y_t * self.action_scale, log_prob.sum(1, keepdim=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume")
    parser.add_argument("--save")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(1)
    np.random.seed(1)
    device = torch.device(args.device)
    actor = Actor().to(device)
    qf1, qf2 = SoftQNetwork().to(device), SoftQNetwork().to(device)
    qf1_target = SoftQNetwork().to(device)
    qf2_target = SoftQNetwork().to(device)
    qf1_target.load_state_dict(qf1.state_dict())
    qf2_target.load_state_dict(qf2.state_dict())
    q_optimizer = optim.Adam(list(qf1.parameters()) + list(qf2.parameters()), lr=1e-3)
    actor_optimizer = optim.Adam(list(actor.parameters()), lr=3e-4)
    log_alpha = torch.zeros(1, requires_grad=True, device=device)
    a_optimizer = optim.Adam([log_alpha], lr=1e-3)
    parts = {"actor": actor, "qf1": qf1, "qf2": qf2, "qf1_target": qf1_target, "qf2_target": qf2_target}
    parts |= {"q_optimizer": q_optimizer, "actor_optimizer": actor_optimizer, "a_optimizer": a_optimizer}
    if args.resume:
        checkpoint = torch.load(args.resume, map_location=device)
        for name, part in parts.items():
            part.load_state_dict(checkpoint[name])
        log_alpha.data.copy_(checkpoint["log_alpha"])
    rb = ReplayBuffer(64, device)
    for global_step in range(2):
        observations, next_observations, actions, rewards = rb.sample(8)
        with torch.no_grad():
            next_actions, next_log_pi = actor.get_action(next_observations)
            q1, q2 = qf1_target(next_observations, next_actions), qf2_target(next_observations, next_actions)
            next_q = rewards + 0.99 * (torch.min(q1, q2) - log_alpha.exp() * next_log_pi).view(-1)
        values = (qf(observations, actions).view(-1) for qf in (qf1, qf2))
        qf_loss = sum(F.mse_loss(value, next_q) for value in values)
        q_optimizer.zero_grad()
        qf_loss.backward()
        q_optimizer.step()
        pi, log_pi = actor.get_action(observations)
        actor_loss = (
            log_alpha.exp().detach() * log_pi - torch.min(qf1(observations, pi), qf2(observations, pi))
        ).mean()
        actor_optimizer.zero_grad()
        actor_loss.backward()
        actor_optimizer.step()
        alpha_loss = (-log_alpha.exp() * (log_pi.detach() - ACT)).mean()
        a_optimizer.zero_grad()
        alpha_loss.backward()
        a_optimizer.step()
        print(f"{global_step}: critics {qf_loss.item():.4f}, actor {actor_loss.item():.4f}")
    if args.save:
        torch.save(
            {name: part.state_dict() for name, part in parts.items()} | {"log_alpha": log_alpha.detach()}, args.save
        )


if __name__ == "__main__":
    main()
