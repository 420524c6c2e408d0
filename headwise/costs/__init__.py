"""The cost of attention before it runs: parameters, FLOPs, bytes and time."""

from headwise.costs.calculate import cost, read_architecture
from headwise.costs.cost import Cost
from headwise.costs.explaining import Language, missing_costs
from headwise.costs.machines.hardware import DEVICES, Device
from headwise.costs.machines.measure import about_this_machine, measure_device
from headwise.costs.machines.this_machine import THIS, find_device, present_device, save_device
from headwise.costs.tracing.traced_model import TracedModel as Architecture
from headwise.costs.uses.scenario import LONGEST, Phase, Scenario
from headwise.costs.uses.sketch import Sketch
from headwise.costs.uses.utilisation import Utilisation
from headwise.costs.words import translated_part
from headwise.costs.workload import CacheLayout

__all__ = [
    "DEVICES",
    "LONGEST",
    "THIS",
    "Architecture",
    "CacheLayout",
    "Cost",
    "Device",
    "Language",
    "Phase",
    "Scenario",
    "Sketch",
    "Utilisation",
    "about_this_machine",
    "cost",
    "find_device",
    "measure_device",
    "missing_costs",
    "present_device",
    "read_architecture",
    "save_device",
    "translated_part",
]
