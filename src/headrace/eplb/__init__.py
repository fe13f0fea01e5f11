"""The expert balancer's arithmetic: what was measured, where experts should live, whether and what to move."""

from headrace.eplb.layout import ExpertMap, MapData, check_redundant, initial_map
from headrace.eplb.moves import Move, moves
from headrace.eplb.placement import Cluster, Strategy, plan
from headrace.eplb.policy import Action, Costs, Decision, Mode, Policy, Proposal, Reason, Settings
from headrace.eplb.relabel import replan
from headrace.eplb.stats import Balance, LoadWindow, WindowLoad, balance, rank_loads, summarise

__all__ = [
    "Action",
    "Balance",
    "Cluster",
    "Costs",
    "Decision",
    "ExpertMap",
    "LoadWindow",
    "MapData",
    "Mode",
    "Move",
    "Policy",
    "Proposal",
    "Reason",
    "Settings",
    "Strategy",
    "WindowLoad",
    "balance",
    "check_redundant",
    "initial_map",
    "moves",
    "plan",
    "rank_loads",
    "replan",
    "summarise",
]
