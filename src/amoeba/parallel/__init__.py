"""Experts over ranks: each process of a group owns some of a layer's experts, and tokens travel to their owners."""

from amoeba.parallel.owners import Owners
from amoeba.parallel.ranks import RankLost, Ranks
from amoeba.parallel.sharded import ShardedExperts, shard_experts, shard_lora

__all__ = ["Owners", "RankLost", "Ranks", "ShardedExperts", "shard_experts", "shard_lora"]
