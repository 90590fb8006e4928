"""A step of OpenRLHF's PPO on a CPU, without Ray: openrlhf_rollouts.py OUT.pt MODEL ROLE,ROLE… WORD….

Its worker classes are what Ray would run, one of each in every process, called as its experience maker and its trainer
call them; rollouts come from a list. Each rank writes what every role gave to OUT.pt.RANK. WORD: of its command line.
"""
# ruff: noqa: E402 - functions of GPUs are replaced before the rest is imported

from __future__ import annotations

import os
import random
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

sys.path.insert(0, str(Path(__file__).resolve().parent))

from openrlhf_on_cpu import stay_on_cpu

stay_on_cpu()
# Nothing is generated here, and names of the generator are all that an import needs.
sys.modules |= {name: MagicMock(__path__=[]) for name in ("vllm", "vllm.inputs", "vllm.utils")}
import openrlhf.cli.train_ppo_ray as ppo
import ray
import torch
import torch.distributed as dist
from openrlhf.trainer.ppo_utils.experience import Experience, balance_experiences
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker
from openrlhf.utils import get_strategy

import deepspeed_cad

LENGTHS = [40, 36, 800, 25, 44, 90, 38, 31, 60, 42, 20, 47, 39, 55, 28, 41]
"""Tokens of rollouts: the longest is 20 times the median."""
PROMPT = 8


class _Parsed(Exception):
    """The command line was read."""


def arguments(model: str, *words: str) -> Any:
    """What `python -m openrlhf.cli.train_ppo_ray WORDS` makes of its command line."""
    found = []

    def stop() -> None:
        found.append(sys._getframe(1).f_locals["args"])
        raise _Parsed

    ray.is_initialized, before, sys.argv = stop, ray.is_initialized, ["train_ppo_ray", *words]
    for role in ("actor", "critic", "ref", "reward"):
        sys.argv += [f"--{role}.num_gpus_per_node", "2"]
        sys.argv += [] if role == "ref" else [f"--{role}.model_name_or_path", model]
    try:
        runpy.run_module(ppo.__name__, run_name="__main__")
    except _Parsed:
        ray.is_initialized = before
    return found[0]


def rollouts() -> list[Any]:
    """As the generator of samples gives them, one each."""
    pick = random.Random(0)
    made = []
    for length in LENGTHS:
        ids = torch.tensor([[pick.randrange(61) for _ in range(length)]])
        actions = torch.zeros(1, length - 1, dtype=torch.bool)
        actions[:, PROMPT - 1 :] = True
        made.append(
            Experience(
                sequences=ids,
                attention_mask=torch.ones_like(ids),
                action_mask=actions,
                total_length=torch.tensor([length]),
                response_length=torch.tensor([length - PROMPT]),
                rewards=torch.tensor([pick.random()]),
                truncated=torch.tensor([False]),
                index=[0],
            )  # fmt: skip
        )
    return made


def mine(args: Any) -> list[Any]:
    """This rank's micro-batches of rollouts, dealt out as OpenRLHF does."""
    maker = SimpleNamespace(args=args, tokenizer=SimpleNamespace(pad_token_id=61))
    batches = RemoteExperienceMaker.split_rollout_samples(maker, rollouts())
    size = -(-len(batches) // dist.get_world_size())
    return batches[dist.get_rank() * size :][:size]


def train(args: Any, workers: dict[str, Any], batches: list[Any], found: dict[str, Any]) -> None:
    """Actor and critic, on rollouts that are dealt out anew, with made-up advantages."""
    for i, one in enumerate(batches):
        one.action_log_probs, one.values = found["actor"][i], found["critic"][i]
        one.advantages = torch.sin(one.sequences[:, 1:].float()) * one.action_mask
        one.returns = one.values + one.advantages
    everything: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everything, batches)
    for role in ("actor", "critic"):
        workers[role].append(balance_experiences(sum(everything, []), args)[dist.get_rank()])
        found[f"{role} status"] = workers[role].fit()
        trained = getattr(workers[role], role)
        found[f"{role} parameters"] = [one.detach().clone() for one in trained.parameters()]


def main(out: str, model: str, roles: list[str], words: list[str]) -> None:
    """Forwards of all roles for all rollouts, then what trains, trains."""
    args = arguments(
        model, "--ds.packing_samples", *words, "--train.max_tokens_per_gpu", "240",
        "--rollout.batch_size", "16", "--train.batch_size", "4", "--vllm.num_engines", "1", "--ds.zero_stage", "2",
        "--rollout.n_samples_per_prompt", "1", "--vllm.sync_backend", "gloo", "--actor.adam.lr", "1e-3",
        "--critic.adam.lr", "1e-3", "--actor.gradient_checkpointing_enable",
    )  # fmt: skip
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    classes = {
        "actor": ppo.PolicyModelActor, "critic": ppo.CriticModelActor, "ref": ppo.ReferenceModelActor,
        "reward": ppo.RewardModelActor,
    }  # fmt: skip
    workers: dict[str, Any] = {}
    for role in roles:
        workers[role] = classes[role].__ray_metadata__.modified_class(
            world, rank, os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
        )
        trains = {"max_steps": 4} if role in ("actor", "critic") else {}
        workers[role].init_model_from_pretrained(get_strategy(args), model, **trains)
    batches = mine(args)
    found: dict[str, Any] = {"micro_batches": len(batches)}
    given = {
        "sequences": [one.sequences for one in batches], "attention_mask": [one.attention_mask for one in batches],
        "action_mask": [one.action_mask for one in batches],
    }  # fmt: skip
    for role, worker in workers.items():
        data = {name: value for name, value in given.items() if role != "reward" or name != "action_mask"}
        found[role] = worker.execute_batch("forward", data, 0, len(batches))
    session = deepspeed_cad.current_session()
    if session is not None:
        looks = session.forward_only
        found["looks"], found["balance"] = looks.micro_batches, [looks.imbalance_before, looks.imbalance]
    if {"actor", "critic"} <= workers.keys():
        train(args, workers, batches, found)
    torch.save(found, f"{out}.{rank}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3].split(","), sys.argv[4:])
