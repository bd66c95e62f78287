"""Load, recompute or split: the decision, in seconds.

The core is pure: frozen inputs in, a `Plan` out. No device, no sockets, no clock, and none of the heavy
libraries; importing this package loads neither numpy nor torch.
"""

from kvlane.policy.breaker import CircuitBreaker
from kvlane.policy.catalog import load_machine, load_model, machine_names, model_names
from kvlane.policy.errors import InputError
from kvlane.policy.machine import Device, Link, Machine, PrefillEfficiency, Tier
from kvlane.policy.model import KvFormat, LayerSpec, ModelSpec
from kvlane.policy.plan import Estimate, LoadSegment, Plan, Request
from kvlane.policy.planner import Calibration, Planner, decide
from kvlane.policy.prefill_cost import PassCost, PrefillCost

__all__ = [
    "Calibration",
    "CircuitBreaker",
    "Device",
    "Estimate",
    "InputError",
    "KvFormat",
    "LayerSpec",
    "Link",
    "LoadSegment",
    "Machine",
    "ModelSpec",
    "PassCost",
    "Plan",
    "Planner",
    "PrefillCost",
    "PrefillEfficiency",
    "Request",
    "Tier",
    "decide",
    "load_machine",
    "load_model",
    "machine_names",
    "model_names",
]
