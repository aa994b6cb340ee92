"""Packed linear layers: a rewrite of the CPU's records that halves the bytes a decode step reads.

A step multiplies few rows with every weight of a model, so its time is that of reading the weights, and stock kernels
lose another factor at 2 to 16 rows. FBGEMM keeps a weight once more, in half precision and in the order its kernels
read it, and multiplies and adds in float32. One pack serves every number of rows. Layers that take the same input, such
as the projections to queries, keys and values, become one product.

A weight is packed only if half precision takes less from it than adding up its rows in float32 loses anyway. That is so
for what was stored in float16, and for bfloat16, whose 8 digits fit into half precision's 11: only numbers below 2**-17
lose some. Other weights stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_map

from graphs.recorded import Node, Ref, storage_of, written_by

# Four roundings of float32, relative to the length of a row. A sum of its hundreds of terms makes hundreds.
MAX_LOSS = 2.0**-22
LINEAR = torch.ops.quantized.linear_dynamic_fp16.default
PREPACK = torch.ops.quantized.linear_prepack_fp16.default


def check_packing(device: torch.device, dtype: torch.dtype | None) -> None:
    """Raise ValueError, in one sentence, if linear layers on `device` with weights of `dtype` cannot be packed."""
    if device.type != "cpu" or dtype is not torch.float32:
        raise ValueError("pack_weights is for float32 on the CPU: leave it out with another device or dtype")
    if not has_fbgemm():
        raise ValueError("pack_weights needs a torch with FBGEMM and a processor with AVX2: leave it out here")


def has_fbgemm() -> bool:
    engines = torch.backends.quantized
    return "fbgemm" in engines.supported_engines and engines.engine in ("fbgemm", "x86")


@dataclass(frozen=True, eq=False)
class Layer:
    """A product of a record that can be packed, and what it takes."""

    node: Node
    input: Ref
    x: torch.Tensor  # the input in the recording run
    sources: tuple[torch.Tensor, ...]  # weight [K, N], as a product takes it, and perhaps bias [N]


@dataclass(frozen=True, eq=False)
class Siblings:
    """Layers of one input as one product. Gives the contiguous outputs that they gave one by one."""

    pack: Any
    sizes: tuple[int, ...]

    def __call__(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [part.contiguous() for part in LINEAR(x, self.pack).split_with_sizes(self.sizes, dim=1)]


class LinearPacker:
    """A rewrite for `graphs.record`: products with a weight among `constants` become products with its pack.

    `constants` are tensors whose content never changes as long as a record lives; a pack does not follow if it does.
    A weight is packed once, however many records use it, and freed with the packer and its records.
    """

    def __init__(self, constants: Iterable[torch.Tensor]) -> None:
        self._constants = {storage_of(tensor): tensor for tensor in constants}  # kept, so that addresses stay theirs
        self._fits: dict[Hashable, bool] = {}  # by weight
        self._packs: dict[Hashable, Any] = {}  # by weights and biases

    @property
    def num_packed(self) -> int:
        return sum(self._fits.values())

    @property
    def num_refused(self) -> int:
        """Weights that stay as they are, because half precision cannot hold them."""
        return len(self._fits) - self.num_packed

    def __call__(
        self, nodes: Sequence[Node], results: Sequence[Ref], tensor: Callable[[Ref], torch.Tensor]
    ) -> list[Node]:
        steps = dict(enumerate(nodes))
        for group in self._groups(nodes, tensor):
            steps[min(group)] = self._product(list(group.values()))
            for i in sorted(group)[1:]:
                del steps[i]
        return list(steps.values())

    def _groups(self, nodes: Sequence[Node], tensor: Callable[[Ref], torch.Tensor]) -> list[dict[int, Layer]]:
        """The layers to pack, by their place in the record, those of the same input together."""
        written = [set(_written_storages(node, tensor)) for node in nodes]
        fixed = self._constants.keys() - set().union(*written)
        groups: list[dict[int, Layer]] = []
        current: dict[tuple[int, Hashable], dict[int, Layer]] = {}  # by storage and place of the input
        for i, node in enumerate(nodes):
            # What was computed from an input before it is written is no sibling of what is computed after.
            current = {key: group for key, group in current.items() if key[0] not in written[i]}
            layer = self._layer(node, fixed, tensor)
            if layer is not None:
                key = storage_of(layer.x), (address(layer.x), len(layer.sources))
                if key not in current:
                    groups.append(current.setdefault(key, {}))
                current[key][i] = layer
        return groups

    def _layer(self, node: Node, fixed: set[int], tensor: Callable[[Ref], torch.Tensor]) -> Layer | None:
        product = as_product(node)
        if product is None:
            return None
        x, *sources = (tensor(ref) for ref in product)
        weight = sources[0].t()
        if not all(storage_of(source) in fixed for source in sources) or any(b.dim() != 1 for b in sources[1:]):
            return None
        if address(weight) not in self._fits:
            self._fits[address(weight)] = fits_half(weight)
        return Layer(node, product[0], x, tuple(sources)) if self._fits[address(weight)] else None

    def _product(self, layers: Sequence[Layer]) -> Node:
        """One node that computes what `layers` do, in the place of the first."""
        key = tuple(address(source) for layer in layers for source in layer.sources)
        if key not in self._packs:
            weights, *biases = zip(*(layer.sources for layer in layers), strict=True)
            bias = torch.cat(biases[0]) if biases else None
            self._packs[key] = PREPACK(torch.cat([weight.t() for weight in weights]), bias)
        pack, first, x = self._packs[key], layers[0].node, layers[0].input
        if len(layers) == 1:
            return replace(first, op=LINEAR, args=(x, pack))
        op = Siblings(pack, tuple(layer.sources[0].shape[1] for layer in layers))
        return replace(first, op=op, args=(x,), outputs=tuple(layer.node.outputs[0] for layer in layers), single=False)


def as_product(node: Node) -> tuple[Ref, ...] | None:
    """(input, weight) or (input, weight, bias) of a node that is a linear layer of outside tensors; else None."""
    if node.op is torch.ops.aten.mm.default:
        x, *rest = node.args
    elif node.op is torch.ops.aten.addmm.default and not node.kwargs:
        bias, x, weight = node.args
        rest = [weight, bias]
    else:
        return None
    return (x, *rest) if all(ref.outside for ref in rest) else None


def fits_half(weight: torch.Tensor) -> bool:
    """Whether rounding to half precision takes no more than `MAX_LOSS` from any row of `weight` `[N, K]`."""
    if weight.dtype is not torch.float32:
        return False
    error = weight.half().float().sub_(weight).norm(dim=1)
    return bool(((error <= weight.norm(dim=1) * MAX_LOSS) & error.isfinite()).all())


def address(tensor: torch.Tensor) -> Hashable:
    """Equal for tensors that are the same numbers in memory, in the same order."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _written_storages(node: Node, tensor: Callable[[Ref], torch.Tensor]) -> Iterator[int]:
    assert isinstance(node.op, OpOverload)
    args, kwargs = tree_map(lambda x: tensor(x) if isinstance(x, Ref) else x, (node.args, node.kwargs))
    return (storage_of(written) for written in written_by(node.op, args, kwargs))
