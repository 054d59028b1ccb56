"""Deep Q-learning with replay memory and a target network."""

import argparse
import random
from collections import deque, namedtuple

import torch
from torch import nn, optim

Transition = namedtuple("Transition", ("state", "action", "next_state", "reward"))
BATCH_SIZE, GAMMA, TAU = 8, 0.99, 0.005


class ReplayMemory:
    def __init__(self, capacity):
        self.memory = deque(maxlen=capacity)

    def push(self, *args):
        self.memory.append(Transition(*args))

    def sample(self, batch_size):
        return random.sample(self.memory, batch_size)


class DQN(nn.Module):
    def __init__(self, n_observations, n_actions):
        super().__init__()
        self.layer1 = nn.Linear(n_observations, 16)
        self.layer2 = nn.Linear(16, n_actions)

    def forward(self, x):
        return self.layer2(torch.relu(self.layer1(x)))


def optimize_model(policy_net, target_net, memory, optimizer, device):
    batch = Transition(*zip(*memory.sample(BATCH_SIZE)))
    non_final_mask = torch.tensor([s is not None for s in batch.next_state], device=device, dtype=torch.bool)
    non_final_next_states = torch.cat([s for s in batch.next_state if s is not None])
    state_batch = torch.cat(batch.state)
    action_batch = torch.cat(batch.action)
    reward_batch = torch.cat(batch.reward)
    state_action_values = policy_net(state_batch).gather(1, action_batch)
    next_state_values = torch.zeros(BATCH_SIZE, device=device)
    with torch.no_grad():
        next_state_values[non_final_mask] = target_net(non_final_next_states).max(1).values
    expected = (next_state_values * GAMMA) + reward_batch
    loss = nn.SmoothL1Loss()(state_action_values, expected.unsqueeze(1))
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_value_(policy_net.parameters(), 100)
    optimizer.step()
    return loss.item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume", default=None)
    parser.add_argument("--save", default=None)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    random.seed(0)
    torch.manual_seed(0)
    device = torch.device(args.device)
    policy_net = DQN(4, 2).to(device)
    target_net = DQN(4, 2).to(device)
    target_net.load_state_dict(policy_net.state_dict())
    optimizer = optim.AdamW(policy_net.parameters(), lr=1e-4, amsgrad=True)
    if args.resume is not None:
        checkpoint = torch.load(args.resume, map_location=device)
        policy_net.load_state_dict(checkpoint["policy"])
        target_net.load_state_dict(checkpoint["target"])
        optimizer.load_state_dict(checkpoint["optimizer"])

    memory = ReplayMemory(100)
    state = torch.tensor([0.1, 0.2, 0.3, 0.4], device=device).unsqueeze(0)
    for t in range(BATCH_SIZE + 2):
        with torch.no_grad():
            action = policy_net(state).max(1).indices.view(1, 1)
        next_state = None if t % 5 == 4 else torch.tensor([[0.1 * t, 0.2, 0.3, 0.1]], device=device)
        reward = torch.tensor([1.0 - 0.1 * t], device=device)
        memory.push(state, action, next_state, reward)
        state = next_state if next_state is not None else torch.ones(1, 4, device=device)
        if len(memory.memory) >= BATCH_SIZE:
            print(f"loss {optimize_model(policy_net, target_net, memory, optimizer, device):.4f}")
            for target, online in zip(target_net.parameters(), policy_net.parameters()):
                target.data.mul_(1 - TAU).add_(online.data, alpha=TAU)
    if args.save is not None:
        nets = {"policy": policy_net, "target": target_net, "optimizer": optimizer}
        torch.save({k: v.state_dict() for k, v in nets.items()}, args.save)


if __name__ == "__main__":
    main()
