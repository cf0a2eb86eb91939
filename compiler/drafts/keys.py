"""A checkpoint's config.json as a reader sees it: every key asked for is accounted for, the rest is refused by name."""

from pathlib import Path
from typing import Any

from transformers import LlamaConfig, PretrainedConfig, Qwen3Config

from speccompile.export.errors import UserError

# What Transformers itself writes into any config.json; none of it reaches a draft's arithmetic.
_GENERIC = (
    set(Qwen3Config().to_dict())
    | set(LlamaConfig().to_dict())
    | set(PretrainedConfig().to_dict())
    | {"auto_map", "torch_dtype", "rope_theta", "rope_scaling", "_name_or_path", "transformers_version", "attn_implementation",
       "_attn_implementation", "tie_word_embeddings", "use_cache", "pad_token_id", "bos_token_id", "eos_token_id", "rope_parameters"}
)  # fmt: skip


class Keys:
    """Values of one config.json and of the objects nested in it, under the rule that nothing is guessed.

    A key may stand in a nested object or at the top level; both only if they agree.
    """

    def __init__(self, raw: dict[str, Any], source: Path, nested: tuple[str, ...] = ()):
        self.source = source
        self.places: list[tuple[str, dict[str, Any]]] = []
        for name in nested:
            value = raw.get(name)
            if value is not None and not isinstance(value, dict):
                raise UserError(f"{source}: {name} is a {type(value).__name__}; an object was expected.")
            self.places.append((f"{name}.", value or {}))
        self.places.append(("", {k: v for k, v in raw.items() if k not in nested}))
        self.asked: set[str] = set()

    def get(
        self, key: str, default: Any = None, *, required: bool = False, aliases: tuple[str, ...] = ()
    ) -> Any:
        """The value of `key` or of an alias. Raises UserError if it is required and absent, or given twice differently."""
        found: list[tuple[str, Any]] = []
        for name in (key, *aliases):
            self.asked.add(name)
            found += [
                (f"{place}{name}", values[name])
                for place, values in self.places
                if values.get(name) is not None
            ]
        for place, value in found[1:]:
            if value != found[0][1]:
                raise UserError(
                    f"{self.source}: {found[0][0]} is {found[0][1]!r} but {place} is {value!r}; keep the one the draft was trained with."
                )
        if not found and required:
            raise UserError(
                f"{self.source} lacks {self.places[0][0]}{key}; nothing is guessed, so add the value the draft was trained with."
            )
        return found[0][1] if found else default

    def ignore(self, *keys: str) -> None:
        """Keys that say nothing about the draft's arithmetic (training settings, provenance)."""
        self.asked |= set(keys)

    def finish(self) -> None:
        """Raises UserError for a key that nobody asked for and that is not plainly off."""
        for place, values in self.places:
            known = self.asked | (_GENERIC if place == "" else set())
            for key in sorted(set(values) - known):
                if values[key] not in (None, False, [], {}, ""):
                    raise UserError(
                        f"{self.source}: {place}{key} = {values[key]!r} is not a key this dialect is known to have; it may change the draft's numbers, "
                        "so it is not ignored. Remove it if it does not."
                    )


def layer_config(kind: type[PretrainedConfig], values: dict[str, Any], source: Path) -> PretrainedConfig:
    """The draft's layers as a Transformers configuration, old RoPE spellings and defaults resolved."""
    try:
        return kind.from_dict({k: v for k, v in values.items() if k != "quantization_config"})
    except Exception as error:
        name = kind.__name__.removesuffix("Config")
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{source} does not describe layers of a {name} draft: {reason}") from None


MOST_LAYERS = 256
SIZES = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "vocab_size", "max_position_embeddings",
)  # fmt: skip


def whole_numbers(values: dict[str, Any], names: tuple[str, ...], source: Path) -> None:
    """Raises UserError for a size that is missing or no whole number above 0, before arithmetic is done with it."""
    for name in names:
        value = values.get(name)
        if value is None:
            raise UserError(
                f"{source} lacks {name}; nothing is guessed, so add the value the draft was trained with."
            )
        if not isinstance(value, int) or isinstance(value, bool):
            raise UserError(f"{source}: {name} is {value!r}; a whole number was expected.")
        if value < 1:
            raise UserError(f"{source}: {name} is {value}; at least 1 was expected.")
    if values.get("num_hidden_layers", 0) > MOST_LAYERS:
        raise UserError(
            f"{source}: num_hidden_layers is {values['num_hidden_layers']}; at most {MOST_LAYERS} was expected of a draft."
        )


def layer_windows(kinds: Any, layers: int, window: Any, source: Path) -> list[int | None]:
    """`layer_types` and `sliding_window` as one window, or None, per layer."""
    kinds = kinds or ["full_attention"] * layers
    if (
        not isinstance(kinds, list)
        or len(kinds) != layers
        or set(kinds) - {"full_attention", "sliding_attention"}
    ):
        raise UserError(
            f"{source}: layer_types is {kinds}; {layers} entries of full_attention or sliding_attention were expected."
        )
    if "sliding_attention" in kinds and not window:
        raise UserError(
            f"{source} has sliding_attention layers but no sliding_window; add the window the draft was trained with."
        )
    return [window if kind == "sliding_attention" else None for kind in kinds]


def layer_ids(ids: Any, offset: int, source: Path, name: str, lowest: int = 0) -> tuple[int, ...]:
    """A dialect's layer ids as indices into `hidden_states`, in the order given."""
    if (
        not isinstance(ids, list | tuple)
        or not ids
        or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids)
    ):
        raise UserError(f"{source}: {name} is {ids!r}; a list of whole numbers was expected.")
    for i in ids:
        if i < lowest:
            raise UserError(f"{source}: {name} has {i}; ids from {lowest} on were expected.")
    return tuple(i + offset for i in ids)
