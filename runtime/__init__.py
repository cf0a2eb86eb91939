"""Engine directory to tokens. Works without torch; see `Engine.load`."""

from speccompile.runtime.generation import Engine, Generation

__all__ = ["Engine", "Generation"]
