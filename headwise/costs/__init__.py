"""The cost of attention before it runs: parameters, FLOPs, bytes and time."""

from headwise.costs.architecture import Architecture
from headwise.costs.calculate import cost
from headwise.costs.calculate import read as read_architecture
from headwise.costs.cost import Cost
from headwise.costs.explaining import Language
from headwise.costs.explaining import missing as missing_costs
from headwise.costs.machines.hardware import DEVICES, Device
from headwise.costs.machines.measure import about_now as about_this_machine
from headwise.costs.machines.measure import measure as measure_device
from headwise.costs.machines.this_machine import THIS
from headwise.costs.machines.this_machine import find as find_device
from headwise.costs.machines.this_machine import present as present_device
from headwise.costs.machines.this_machine import save as save_device
from headwise.costs.uses.scenario import LONGEST, Phase, Scenario
from headwise.costs.uses.sketch import Sketch
from headwise.costs.uses.utilisation import Utilisation
from headwise.costs.words import translated as translated_part
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
