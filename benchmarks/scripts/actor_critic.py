"""Actor-critic on a toy balance task: states come from NumPy, actions go back to it."""

import argparse

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.distributions import Categorical


class Balance:
    """A point that drifts; the agent pushes it back."""

    def __init__(self, seed):
        self.random = np.random.default_rng(seed)

    def reset(self):
        self.state = self.random.normal(size=4).astype(np.float32)
        return self.state

    def step(self, action):
        self.state = self.state + self.random.normal(scale=0.1, size=4).astype(np.float32) + (0.1 if action else -0.1)
        return self.state, float(np.exp(-np.abs(self.state).mean()))


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine1 = nn.Linear(4, 16)
        self.action_head = nn.Linear(16, 2)
        self.value_head = nn.Linear(16, 1)

    def forward(self, x):
        x = F.relu(self.affine1(x))
        return F.softmax(self.action_head(x), dim=-1), self.value_head(x)


def finish_episode(optimizer, saved, rewards, device, eps=1e-8):
    R, returns = 0.0, []
    for r in rewards[::-1]:
        R = r + 0.99 * R
        returns.insert(0, R)
    returns = torch.tensor(returns, device=device)
    returns = (returns - returns.mean()) / (returns.std() + eps)
    policy_losses, value_losses = [], []
    for (log_prob, value), R in zip(saved, returns):
        policy_losses.append(-log_prob * (R - value.item()))
        value_losses.append(F.smooth_l1_loss(value, R.unsqueeze(0)))
    optimizer.zero_grad()
    loss = torch.stack(policy_losses).sum() + torch.stack(value_losses).sum()
    loss.backward()
    optimizer.step()
    return loss.item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume")
    parser.add_argument("--save")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(543)
    device = torch.device(args.device)
    env = Balance(543)
    model = Policy().to(device)
    optimizer = optim.Adam(model.parameters(), lr=3e-2)
    if args.resume:
        checkpoint = torch.load(args.resume, map_location=device)
        model.load_state_dict(checkpoint["policy"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    for episode in range(2):
        state, saved, rewards = env.reset(), [], []
        for _ in range(6):
            state = torch.from_numpy(state).float().to(device)
            probs, state_value = model(state)
            m = Categorical(probs)
            action = m.sample()
            saved.append((m.log_prob(action), state_value))
            state, reward = env.step(action.cpu().numpy())
            rewards.append(reward)
        loss = finish_episode(optimizer, saved, rewards, device)
        print(f"episode {episode}: loss {loss:.3f}, reward {sum(rewards):.3f}")
    if args.save:
        torch.save({"policy": model.state_dict(), "optimizer": optimizer.state_dict()}, args.save)


if __name__ == "__main__":
    main()
