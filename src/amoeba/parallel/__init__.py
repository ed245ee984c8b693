"""Expert parallelism: each process of a group owns some of a layer's experts, and tokens are sent to the owners."""

from amoeba.parallel.expert_owners import Owners
from amoeba.parallel.ranks import RankLost, Ranks
from amoeba.parallel.sharded import ShardedExperts, own_parameter, shard_experts, shard_lora
from amoeba.parallel.sharded_backend import RANKS
from amoeba.parallel.shards import add_up_gradients, clip_gradients

__all__ = [
    "RANKS",
    "Owners",
    "RankLost",
    "Ranks",
    "ShardedExperts",
    "add_up_gradients",
    "clip_gradients",
    "own_parameter",
    "shard_experts",
    "shard_lora",
]
