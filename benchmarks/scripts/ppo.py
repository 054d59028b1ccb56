"""PPO in one file: rollout storage on the device, generalized advantages, clipped updates."""

import argparse

import numpy as np
import torch
from torch import nn, optim
from torch.distributions.categorical import Categorical

NUM_STEPS, NUM_ENVS, OBS, ACTIONS = 6, 3, 4, 2


class Envs:
    """A few copies of a toy task that answer with arrays."""

    def __init__(self):
        self.rng = np.random.default_rng(1)

    def reset(self):
        return self.rng.normal(size=(NUM_ENVS, OBS))

    def step(self, action):
        return self.reset(), 1.0 - action.astype(np.float64), self.rng.random(NUM_ENVS) < 0.2


def layer_init(layer, std=np.sqrt(2)):
    nn.init.orthogonal_(layer.weight, std)
    nn.init.constant_(layer.bias, 0.0)
    return layer


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(layer_init(nn.Linear(OBS, 16)), nn.Tanh(), layer_init(nn.Linear(16, 1), std=1.0))
        self.actor = nn.Sequential(
            layer_init(nn.Linear(OBS, 16)), nn.Tanh(), layer_init(nn.Linear(16, ACTIONS), std=0.01)
        )

    def get_action_and_value(self, x, action=None):
        probs = Categorical(logits=self.actor(x))
        action = probs.sample() if action is None else action
        return action, probs.log_prob(action), probs.entropy(), self.critic(x)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume")
    parser.add_argument("--save")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(1)
    device = torch.device(args.device)
    envs = Envs()
    agent = Agent().to(device)
    optimizer = optim.Adam(agent.parameters(), lr=2.5e-4, eps=1e-5)
    if args.resume:
        checkpoint = torch.load(args.resume, map_location=device)
        agent.load_state_dict(checkpoint["agent"])
        optimizer.load_state_dict(checkpoint["optimizer"])

    obs = torch.zeros((NUM_STEPS, NUM_ENVS, OBS), device=device)
    actions, logprobs, rewards, dones, values = (torch.zeros((NUM_STEPS, NUM_ENVS), device=device) for _ in range(5))
    next_obs = torch.Tensor(envs.reset()).to(device)
    next_done = torch.zeros(NUM_ENVS, device=device)
    for step in range(NUM_STEPS):
        obs[step], dones[step] = next_obs, next_done
        with torch.no_grad():
            action, logprob, _, value = agent.get_action_and_value(next_obs)
        values[step], actions[step], logprobs[step] = value.flatten(), action, logprob
        next_array, reward, done = envs.step(action.cpu().numpy())
        rewards[step] = torch.tensor(reward).to(device).view(-1)
        next_obs, next_done = torch.Tensor(next_array).to(device), torch.Tensor(done).to(device)
    with torch.no_grad():
        next_value = agent.critic(next_obs).reshape(-1)
        advantages, lastgaelam = torch.zeros_like(rewards), 0
        for t in reversed(range(NUM_STEPS)):
            nonterminal = 1.0 - (next_done if t == NUM_STEPS - 1 else dones[t + 1])
            nextvalues = next_value if t == NUM_STEPS - 1 else values[t + 1]
            delta = rewards[t] + 0.99 * nextvalues * nonterminal - values[t]
            advantages[t] = lastgaelam = delta + 0.99 * 0.95 * nonterminal * lastgaelam
        returns = advantages + values
    b_inds = np.arange(NUM_STEPS * NUM_ENVS)
    np.random.default_rng(2).shuffle(b_inds)
    for start in range(0, len(b_inds), 9):
        mb = b_inds[start : start + 9]
        _, newlogprob, entropy, newvalue = agent.get_action_and_value(obs.reshape(-1, OBS)[mb], actions.reshape(-1)[mb])
        ratio = (newlogprob - logprobs.reshape(-1)[mb]).exp()
        adv = advantages.reshape(-1)[mb]
        pg_loss = torch.max(-adv * ratio, -adv * torch.clamp(ratio, 0.8, 1.2)).mean()
        loss = pg_loss - 0.01 * entropy.mean() + 0.25 * (newvalue.view(-1) - returns.reshape(-1)[mb]).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
        optimizer.step()
        print(f"loss {loss.item():.4f}")
    if args.save:
        torch.save({"agent": agent.state_dict(), "optimizer": optimizer.state_dict()}, args.save)


if __name__ == "__main__":
    main()
