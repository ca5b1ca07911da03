"""The policy of notebook 18, its reward, and a step of GRPO."""

from __future__ import annotations

import torch
from torch import Tensor, nn

NUM_TOKENS, LENGTH, NUM_ANSWERS = 12, 8, 16  # an answer's length; answers to each prompt


class Policy(nn.Module):
    """Answers one token with eight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_TOKENS, 32)
        self.gru = nn.GRU(32, 64, batch_first=True)
        self.out = nn.Linear(64, NUM_TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the log-probabilities of the token after each one."""
        return self.out(self.gru(self.embedding(tokens))[0]).log_softmax(2)

    @torch.no_grad()
    def sample(self, prompts: Tensor) -> tuple[Tensor, Tensor]:
        """Return 16 answers to each prompt, which they begin with, and their log-probabilities."""
        tokens = prompts.repeat_interleave(NUM_ANSWERS)[:, None]
        for _ in range(LENGTH):
            tokens = torch.cat([tokens, self(tokens)[:, -1].exp().multinomial(1)], 1)
        return tokens, log_probabilities(self, tokens)


def log_probabilities(policy: nn.Module, tokens: Tensor) -> Tensor:
    """Return the log-probability of each token of the answers."""
    return policy(tokens[:, :-1]).gather(2, tokens[:, 1:, None])[..., 0]


def reward_of(tokens: Tensor) -> Tensor:
    """Return the share of an answer's tokens that are the prompt's successor."""
    return (tokens[:, 1:] == (tokens[:, :1] + 1) % NUM_TOKENS).float().mean(1)


def grpo_step(
    policy: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor, old: Tensor, reward: Tensor
) -> None:
    """Make answers likelier that have more reward than the others to the same prompt.

    Args:
        policy: the policy, also in DDP.
        optimizer: of its parameters.
        tokens, old: answers and their log-probabilities, from `Policy.sample`.
        reward: of each answer.
    """
    groups = reward.view(-1, NUM_ANSWERS)
    advantage = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
    advantage = advantage.view(-1, 1)
    ratio = (log_probabilities(policy, tokens) - old).exp()
    loss = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
