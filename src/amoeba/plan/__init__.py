"""Will a model fit, and how fast will it be? Memory and speed of every way to run it, before anything is loaded."""

from amoeba.plan.machine import Machine, described_machine, measured_machine
from amoeba.plan.memory import Work
from amoeba.plan.model import ModelFacts, read_facts
from amoeba.plan.plan import Candidate, Plan, make_plan, read_plan, write_plan

__all__ = [
    "Candidate",
    "Machine",
    "ModelFacts",
    "Plan",
    "Work",
    "described_machine",
    "make_plan",
    "measured_machine",
    "read_facts",
    "read_plan",
    "write_plan",
]
