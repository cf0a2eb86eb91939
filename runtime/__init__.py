"""Engine directory to tokens. Works without torch; see `Engine.load`."""

from speccompile.runtime.async_engine import AsyncEngine
from speccompile.runtime.generation import Engine, Generation
from speccompile.runtime.params import SamplingParams
from speccompile.runtime.scheduler import Request, Scheduler

__all__ = ["AsyncEngine", "Engine", "Generation", "Request", "SamplingParams", "Scheduler"]
