"""In the form of PyTorch's RPC tutorial on reinforcement learning: the program spawns its workers;
an agent makes observers on the others, which call it for each action.
"""

import os

import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import nn

NUM_STEPS = 4
losses: list[float] = []


class World:
    """An environment without randomness of its own."""

    def __init__(self, seed):
        self.state = torch.full((3,), float(seed))

    def reset(self):
        self.state = self.state * 0 + 1
        return self.state

    def step(self, action):
        self.state = torch.roll(self.state, 1) + action
        return self.state, float(self.state.sum()) / 10


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(6)
        self.first, self.second = nn.Linear(3, 8), nn.Linear(8, 2)

    def forward(self, x):
        return torch.log_softmax(self.second(torch.relu(self.first(x))), -1)


class Observer:
    def __init__(self):
        self.number = rpc.get_worker_info().id
        self.world = World(self.number)

    def run_episode(self, agent_rref):
        state = self.world.reset()
        for _ in range(NUM_STEPS):
            action = agent_rref.rpc_sync().select_action(self.number, state)
            state, reward = self.world.step(action)
            agent_rref.rpc_sync().report_reward(self.number, reward)


class Agent:
    def __init__(self, world_size):
        self.agent_rref = rpc.RRef(self)
        self.observers = [
            rpc.remote(f"observer{number}", Observer) for number in range(1, world_size)
        ]
        self.policy = Policy()
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=0.05)
        self.log_probs = {number: [] for number in range(1, world_size)}
        self.rewards = {number: [] for number in range(1, world_size)}

    def select_action(self, number, state):
        log_probs = self.policy(state)
        action = int(log_probs.argmax())
        self.log_probs[number].append(log_probs[action])
        return action

    def report_reward(self, number, reward):
        self.rewards[number].append(reward)

    def run_episode(self):
        for observer in self.observers:
            observer.rpc_sync(timeout=0).run_episode(self.agent_rref)

    def finish_episode(self):
        terms = [
            -log_prob * reward
            for number in self.log_probs
            for log_prob, reward in zip(self.log_probs[number], self.rewards[number], strict=True)
        ]
        loss = torch.stack(terms).sum()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        for each in (*self.log_probs.values(), *self.rewards.values()):
            each.clear()
        return loss.item()


def run_worker(rank, world_size, queue):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = os.environ["PROGRAM_PORT"]
    if rank == 0:
        rpc.init_rpc("agent", rank=rank, world_size=world_size)
        agent = Agent(world_size)
        found = []
        for _ in range(3):
            agent.run_episode()
            found.append(agent.finish_episode())
        queue.put(found)
    else:
        rpc.init_rpc(f"observer{rank}", rank=rank, world_size=world_size)
    rpc.shutdown()


# %% --ranks 0
if __name__ == "__main__":
    queue = mp.get_context("spawn").SimpleQueue()
    mp.spawn(run_worker, args=(3, queue), nprocs=3, join=True)
    losses = queue.get()
