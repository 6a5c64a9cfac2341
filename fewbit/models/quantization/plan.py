"""Plans: which layer gets which key and why, how large the result will be, what will run it. Before anything heavy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from fewbit.algorithms.registry import algorithm
from fewbit.algorithms.round_to_nearest import RoundToNearest
from fewbit.checkpoints.dtypes import nbytes
from fewbit.checkpoints.interface import CheckpointFormat
from fewbit.checkpoints.registry import formats, writable
from fewbit.checkpoints.tensor_files import TensorFolder
from fewbit.errors import CheckpointError, OutputError, SchemeError, ShapeError, closest
from fewbit.kernels.interface import LinearRequest
from fewbit.kernels.registry import choose_kernel
from fewbit.kernels.select import Choice, Preference
from fewbit.models.destinations import Destinations
from fewbit.models.families import blocks_of
from fewbit.models.inspect import natural_order
from fewbit.models.names import build_on_meta, config_dtype, read_config
from fewbit.models.quantization.transforms.registry import of_recipe
from fewbit.models.replace import submodule
from fewbit.models.stored import StoredCheckpoint
from fewbit.numerics import float_element
from fewbit.numerics.codebooks import codebook_of
from fewbit.spec.hardware import Hardware
from fewbit.spec.key import LinearKey
from fewbit.spec.recipe import Recipe
from fewbit.spec.scheme import Scheme

EMBEDDING = "Embedding"
"""The class by which rules name a model's input embedding, whatever its class is called."""


@dataclass(frozen=True)
class PlannedLayer:
    """What happens to one module with a matrix of weights.

    Attributes:
        name: on disk, without `.weight`.
        class_name: class of the module in the model, empty where the model class does not build it.
        shape: [N, K].
        key: how it will be quantized, None where it stays plain.
        reason: why it stays plain, empty where it does not.
        block: path of the decoder block it belongs to, empty outside the blocks.
        embedding: whether tokens are looked up in it.
    """

    name: str
    class_name: str
    shape: tuple[int, ...]
    key: LinearKey | None
    reason: str = ""
    block: str = ""
    embedding: bool = False


@dataclass(frozen=True)
class Plan:
    """What quantizing a checkpoint by a recipe will do.

    Attributes:
        recipe: with everything resolved.
        layers: every module with a matrix of weights, in the checkpoint's order.
        plain: names of the layers that stay as they are, embeddings excepted; a tied head is not on disk, but readers
            build it and must be told.
        bytes_before, bytes_after: of all tensors.
        block_bytes: of the largest decoder block as it is now.
        dtype: element name of the checkpoint's weights.
        unties: whether the source ties its head to its embedding, and the head will no longer be equal to it.
        cautions: what other readers of the format are known to refuse, a sentence each.
        parameters: numbers in all tensors of the source.
        budget: how a bit budget chose the keys, for the report; None where none did.
    """

    recipe: Recipe
    layers: tuple[PlannedLayer, ...]
    plain: tuple[str, ...]
    bytes_before: int
    bytes_after: int
    block_bytes: int
    dtype: str
    unties: bool = False
    cautions: tuple[str, ...] = ()
    parameters: int = 0
    budget: Mapping[str, Any] | None = None

    @property
    def quantized(self) -> tuple[PlannedLayer, ...]:
        return tuple(layer for layer in self.layers if layer.key is not None)

    @property
    def bits_per_weight(self) -> float:
        """Mean over the quantized weights, scales and zero points counted."""
        weights = sum(prod(layer.shape) for layer in self.quantized)
        bits = sum(_stored_bits(layer) for layer in self.quantized)
        return bits / max(1, weights)

    @property
    def whole_bits_per_weight(self) -> float:
        """Mean over every number of the model, quantized or not."""
        return 8 * self.bytes_after / max(1, self.parameters)

    def peak_bytes(self, max_shard_bytes: int) -> int:
        """Memory needed beside the interpreter: the largest block, float32 working copies, and one shard."""
        largest = max((prod(layer.shape) for layer in self.layers), default=0)
        return self.block_bytes + WORKING_COPIES * 4 * largest + min(max_shard_bytes, self.bytes_after)

    def choices(self, hardware: Hardware, dtype: str, preference: Preference = Preference()) -> dict[str, Choice]:
        """Layer name -> the kernel that would run it on `hardware` with inputs of element `dtype`."""
        chosen = {}
        for layer in self.quantized:
            assert layer.key is not None
            request = LinearRequest(layer.key, layer.shape[0], layer.shape[1], dtype)
            chosen[layer.name] = choose_kernel(request, hardware, preference)
        return chosen


WORKING_COPIES = 4
"""float32 copies of the layer at hand that quantizing needs: the numbers, their blocks, the quotients, the codes."""


def make_plan(source: str | Path, recipe: Recipe, short_last_group: bool = False) -> Plan:
    """The plan of quantizing the checkpoint in `source` by `recipe`.

    Args:
        source: folder of an unquantized checkpoint.
        recipe: what to do; its scheme's 16-bit scales take on the checkpoint's dtype.
        short_last_group: whether a group size that does not divide K may leave a shorter last group.

    Raises:
        SchemeError: a pattern matches nothing, or nothing would be quantized.
        ShapeError: a layer's shape does not fit its key or the format.
        OutputError: the format cannot describe these layers side by side, or their KV cache.
        CheckpointError: the checkpoint cannot be read or is quantized already.
        ModelError: transformers has no model for it.
    """
    source = Path(source)
    stored = StoredCheckpoint.open(source)
    if stored.format is not None:
        raise CheckpointError(
            f"{source} is quantized already ({stored.format.name}, says {stored.decided_by}).",
            "Give the unquantized model.",
        )
    if not isinstance(stored.folder, TensorFolder):
        raise CheckpointError(
            f"{source} is no folder of safetensors, and quantize reads no other source.", "Convert it to one first."
        )
    checkpoint = written_format(recipe.format)
    config = read_config(source)
    dtype = float_element(config_dtype(config))
    scheme = recipe.scheme.with_scale_element(checkpoint.scale_element or dtype).with_keys(checkpoint.own_key)
    _check_algorithm(recipe, scheme)
    recipe = Recipe(**{**vars(recipe), "scheme": scheme, "source": recipe.source or source.resolve().name})
    model = build_on_meta(config, config_dtype(config))
    layers = _layers(stored, model, recipe)
    _check_patterns(recipe, layers)
    _check_shapes(layers, checkpoint, short_last_group)
    plain = _plain(layers, model)
    stated_config(checkpoint, layers, plain, recipe)  # refuses what it cannot describe
    _check_kv_cache(recipe, checkpoint)
    before = sum(_header_bytes(stored, name) for name in stored.folder.headers)
    saved = sum(_header_bytes(stored, f"{layer.name}.weight") for layer in layers if layer.key)
    after = before - saved + sum(_stored_bits(layer) // 8 for layer in layers if layer.key)
    found = (checkpoint.caution(layer.key, (layer.shape[0], layer.shape[1])) for layer in layers if layer.key)
    cautions = tuple(dict.fromkeys(caution for caution in found if caution))
    tied = bool(getattr(config.get_text_config(), "tie_word_embeddings", False))
    apart = any(one.unties for one in of_recipe(recipe.transforms))
    unties = tied and (apart or _head(model) in {layer.name for layer in layers if layer.key})
    if apart and tied and f"{_head(model)}.weight" not in stored.folder.headers:
        own = _embedding_bytes(stored, layers)
        after += own
        cautions += (f"The rotated head is no longer tied to the embedding: a weight of its own, {own:,} bytes more.",)
    parameters = sum(prod(header.shape) for header in stored.folder.headers.values())
    largest = _largest_block(stored, layers)
    return Plan(recipe, layers, plain, before, after, largest, dtype.name, unties, cautions, parameters)


def _check_algorithm(recipe: Recipe, scheme: Scheme) -> None:
    tables = [key for key in scheme.keys if codebook_of(key.weight)]
    if tables and (recipe.algorithm != RoundToNearest.name or recipe.transforms):
        raise SchemeError(
            f"{recipe.algorithm} chooses numbers, and codes of {tables[0]} are indices into a table.",
            "Ask for --effort fast, which rounds to nearest.",
        )


def stated_config(
    checkpoint: CheckpointFormat, layers: Iterable[PlannedLayer], plain: Sequence[str], recipe: Recipe
) -> dict[str, Any]:
    """The `quantization_config` of planned layers, without a KV cache's key.

    Raises:
        OutputError: the format cannot describe them, or not what the recipe's algorithm makes of them.
    """
    quantized = [layer for layer in layers if layer.key is not None]
    keys = {layer.name: layer.key for layer in quantized if layer.key}
    if algorithm(recipe.algorithm, recipe.settings).orders_groups:
        if not checkpoint.writes_order:
            raise OutputError(
                f"{checkpoint.name} cannot say which group each input feature belongs to, as desc_act needs.",
                "Write gptq (--format gptq), or leave desc_act out: act_order needs nothing of the format.",
            )
        config = checkpoint.config_of_roles(keys, plain, frozenset({"order"}))
    else:
        config = checkpoint.config(keys, plain)
    embeddings = [layer.name for layer in quantized if layer.embedding]
    if not embeddings:
        return config
    if not checkpoint.describes_embeddings:
        raise OutputError(
            f"{checkpoint.name} cannot say that {embeddings[0]} is quantized.",
            "Leave the embedding as it is, or write compressed-tensors.",
        )
    return checkpoint.with_embeddings(config, embeddings)


def _embedding_bytes(stored: StoredCheckpoint, layers: tuple[PlannedLayer, ...]) -> int:
    return sum(_header_bytes(stored, f"{layer.name}.weight") for layer in layers if layer.embedding)


def written_format(name: str) -> CheckpointFormat:
    """The checkpoint format of that name, which a folder of safetensors can have.

    Raises:
        SchemeError: there is none.
    """
    found = formats().get(name)
    if found is None:
        raise SchemeError(f"Unknown checkpoint format {name!r}.", closest(name, formats()))
    if not found.in_safetensors:
        raise SchemeError(
            f"{name} is no format for a folder of safetensors, which is what quantize writes.",
            f"Quantize to another format, then fewbit convert --to {name}."
            if name in writable()
            else closest("", [known for known, other in formats().items() if other.in_safetensors]),
        )
    return found


def _layers(stored: StoredCheckpoint, model: PreTrainedModel, recipe: Recipe) -> tuple[PlannedLayer, ...]:
    """Every module of the checkpoint with a matrix of weights, and what the scheme says of it."""
    destinations, blocks = Destinations(model, stored.modules), tuple(f"{path}." for path in blocks_of(model))
    embedding = model.get_input_embeddings()
    layers = []
    for module, headers in stored.modules.items():
        header = headers.get("weight")
        if header is None or len(header.shape) != 2:
            continue
        built = submodule(model, destinations.module(module))
        class_name = type(built).__name__ if built is not None else ""
        block = next((path[:-1] for path in blocks if destinations.module(module).startswith(path)), "")
        key, reason = None, ""
        if built is embedding and (key := recipe.scheme.key_for(module, EMBEDDING)):
            _check_embedding(module, key)
        elif class_name != "Linear":
            reason = "embedding" if built is embedding else class_name or "not built by the model class"
        else:
            head = built is model.get_output_embeddings() and "lm_head" in recipe.scheme.ignore  # by whatever name
            key = None if head else recipe.scheme.key_for(module, class_name)
            reason = "" if key else "ignored by the scheme"
        layers.append(PlannedLayer(module, class_name, header.shape, key, reason, block, built is embedding))
    return tuple(sorted(layers, key=lambda layer: natural_order(layer.name)))


def _check_embedding(name: str, key: LinearKey) -> None:
    if key.activation is not None or key.weight.granularity.rows > 1:
        raise SchemeError(
            f"{name} is looked up row by row, and {key} has activations or scales of several rows.",
            "Choose a weight-only preset with groups or channels.",
        )


def _check_kv_cache(recipe: Recipe, checkpoint: CheckpointFormat) -> None:
    key = recipe.scheme.kv_cache
    if key is None:
        return
    if not key.symmetric:
        raise SchemeError(f"KV caches of {key} are not calibrated: they have zero points.", "Use a symmetric key.")
    checkpoint.with_kv_cache({}, key)
    checkpoint.cache_scale("", "k")


def _plain(layers: tuple[PlannedLayer, ...], model: PreTrainedModel) -> tuple[str, ...]:
    """See `Plan.plain`."""
    named = [layer.name for layer in layers if layer.key is None and layer.reason != "embedding"]
    head = _head(model)
    return tuple(named if not head or head in {layer.name for layer in layers} else [*named, head])


def _head(model: PreTrainedModel) -> str:
    """Name of the output head; empty where the model has none."""
    output = model.get_output_embeddings()
    return next((name for name, module in model.named_modules() if module is output), "")


def _check_patterns(recipe: Recipe, layers: tuple[PlannedLayer, ...]) -> None:
    modules = [(layer.name, EMBEDDING if layer.embedding else layer.class_name) for layer in layers]
    # A model with tied embeddings has no lm_head on disk; the default exclusion then has nothing to exclude.
    lost = [pattern for pattern in recipe.scheme.unmatched(modules) if pattern != "lm_head"]
    if lost:
        names = [layer.name for layer in layers]
        raise SchemeError(f"The pattern {lost[0]!r} matches no layer.", closest(lost[0], names[:400]))
    if not any(layer.key for layer in layers):
        raise SchemeError(f"{recipe.scheme.name} would quantize nothing here.", "Loosen the ignore list.")


def _check_shapes(layers: tuple[PlannedLayer, ...], checkpoint: CheckpointFormat, short_last_group: bool) -> None:
    uneven = [layer for layer in layers if layer.key and leaves_short_group(layer)]
    if uneven and not short_last_group:
        raise _uneven_groups(uneven, held=all(_refusal(checkpoint, layer) is None for layer in uneven))
    for layer in layers:
        reason = _refusal(checkpoint, layer)
        if reason:
            hint = "Choose a group size that divides it." if layer in uneven else "Choose another scheme, or ignore it."
            raise ShapeError(f"{checkpoint.name} cannot hold {layer.name} as {layer.key}: {reason}.", hint)


def _refusal(checkpoint: CheckpointFormat, layer: PlannedLayer) -> str | None:
    return None if layer.key is None else checkpoint.refuse(layer.key, (layer.shape[0], layer.shape[1]))


def leaves_short_group(layer: PlannedLayer) -> bool:
    """Whether the last group of the layer's rows is shorter than the others."""
    assert layer.key is not None
    granularity = layer.key.weight.granularity
    own = layer.key.weight.scale.element.bits == 8  # MX and NVFP4 groups are the format's own; the format judges them
    return granularity.kind == "group" and not own and layer.shape[1] % granularity.columns != 0


def _uneven_groups(uneven: list[PlannedLayer], held: bool) -> ShapeError:
    """What to say of groups that do not divide K; `held` is whether the format holds a shorter last one."""
    assert uneven[0].key is not None
    size = uneven[0].key.weight.granularity.columns
    by_columns: dict[int, list[str]] = {}
    for layer in uneven:
        by_columns.setdefault(layer.shape[1], []).append(layer.name)
    found = "; ".join(
        f"{columns} is {columns / size:.4g} times {size} ({names[0]}"
        + (f" and {len(names) - 1} more)" if len(names) > 1 else ")")
        for columns, names in by_columns.items()
    )
    fitting = [smaller for smaller in (128, 64, 32, 16) if all(columns % smaller == 0 for columns in by_columns)]
    offers = [f"--group-size {smaller}" for smaller in fitting if smaller < size]
    offers.append("--group-size -1 (one scale per channel)")
    if held:
        offers.append("--short-last-group (fewbit reads it, other readers may not)")
    return ShapeError(
        f"Group size {size} does not divide the input features of {len(uneven)} layers: {found}.",
        f"Use {' or '.join(filter(None, [', '.join(offers[:-1]), offers[-1]]))}.",
    )


def _stored_bits(layer: PlannedLayer) -> int:
    assert layer.key is not None
    return int(layer.key.weight.bits_per_weight(layer.shape) * prod(layer.shape))


def _header_bytes(stored: StoredCheckpoint, name: str) -> int:
    return nbytes(stored.folder.headers[name])


def _largest_block(stored: StoredCheckpoint, layers: tuple[PlannedLayer, ...]) -> int:
    sizes: dict[str, int] = {}
    for layer in layers:
        sizes[layer.block] = sizes.get(layer.block, 0) + _header_bytes(stored, f"{layer.name}.weight")
    return max((size for block, size in sizes.items() if block), default=0)
