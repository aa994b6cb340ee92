"""Linear layers that read packed weights: half the bytes of a step on the CPU, in decode steps and prefill alike.

A step multiplies few rows with every weight of a model, so its time is that of reading the weights, and stock kernels
lose another factor at 2 to 16 rows. FBGEMM keeps a weight once more, in half precision and in the order its kernels
read it, and multiplies and adds in float32. One pack serves every number of rows. Layers that take the same input, such
as the projections to queries, keys and values, become one product.

A weight is packed only if half precision takes less from it than adding up its rows in float32 loses anyway. That is so
for what was stored in float16, and for bfloat16, whose 8 digits fit into half precision's 11: only numbers below 2**-17
lose some. Other weights stay as they are.

Nothing is patched: a mode that is entered around a forward pass answers `torch.nn.functional.linear`. Records, eager
steps and prefill run the same products, so a graph has the bits of eager with packs as without.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch.nn.functional import linear, pad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from attention import NoNativeError, native_library
from graphspec.records.config import EngineConfig

log = logging.getLogger(__name__)

# Four roundings of float32, relative to the length of a row. A sum of its hundreds of terms makes hundreds.
MAX_LOSS = 2.0**-22
MOST_TRIED = 512  # rows; blocks are at most 120 high, and repeat
MULTIPLY = torch.ops.quantized.linear_dynamic_fp16.default
PRODUCTS = {getattr(torch.ops.aten, name).default for name in ("mm", "addmm", "bmm", "baddbmm")}
PREPACK = torch.ops.quantized.linear_prepack_fp16.default


class LinearLayer(NamedTuple):
    """What a linear layer multiplies with and adds."""

    weight: torch.Tensor  # [N, K]
    bias: torch.Tensor | None  # [N]


Siblings = tuple[LinearLayer, ...]  # layers that take the same input, all with a bias or all without


class SiblingFinder(TorchFunctionMode):
    """While entered, writes down which linear layers run, those of the same input together."""

    def __init__(self) -> None:
        super().__init__()
        self._groups: dict[tuple[int, int, bool], list[LinearLayer]] = {}
        self._inputs: list[torch.Tensor] = []  # kept alive, so that identities stay theirs

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is linear:
            x, layer = _linear_arguments(*args, **(kwargs or {}))
            self._inputs.append(x)
            self._groups.setdefault((id(x), x._version, layer.bias is None), []).append(layer)
        return func(*args, **(kwargs or {}))

    @property
    def num_runs(self) -> int:
        """Linear layers that ran, each time counted."""
        return len(self._inputs)

    def siblings(self, constants: Iterable[torch.Tensor]) -> list[Siblings]:
        """The layers whose tensors are all among `constants`, each once. One that runs twice stands alone."""
        known = {id(tensor) for tensor in constants}
        runs = Counter(id(layer.weight) for group in self._groups.values() for layer in group)
        found: dict[tuple[int, ...], Siblings] = {}
        for group in self._groups.values():
            fixed = [layer for layer in group if all(id(t) in known for t in layer if t is not None)]
            alone = any(runs[id(layer.weight)] > 1 for layer in fixed)
            for part in [(layer,) for layer in fixed] if alone else [tuple(fixed)]:
                found.setdefault(tuple(id(layer.weight) for layer in part), part)
        return [part for part in found.values() if part]


class ProductCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While entered, counts matrix products that add something up (those of rotary embeddings have one term)."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in PRODUCTS:
            self.count += args[-1].shape[-2] > 1
        return func(*args, **(kwargs or {}))


class PackedProduct:
    """Sibling layers as one product with one pack."""

    def __init__(self, layers: Siblings, multiple: int = 1) -> None:
        """`multiple`: rows are padded to one of it."""
        self.layers, self._multiple = layers, multiple
        weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers if layer.bias is not None]
        weight = torch.cat(weights) if len(weights) > 1 else weights[0]
        self._pack = PREPACK(weight.float(), torch.cat(biases).float() if biases else None)

    def __call__(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """`[..., K]` -> the output `[..., N]` of each layer, in the dtype of `x`."""
        product = self._padded(x.float()) if self._multiple > 1 else MULTIPLY(x.float(), self._pack)
        product = product.to(x.dtype)
        if len(self.layers) == 1:
            return (product,)
        return product.split_with_sizes([len(layer.weight) for layer in self.layers], dim=-1)

    def _padded(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        missing = -len(rows) % self._multiple
        product: torch.Tensor = MULTIPLY(pad(rows, (0, 0, 0, missing)), self._pack)
        return product[: len(rows)].view(*x.shape[:-1], -1)


def pack(groups: Iterable[Siblings], multiple: int) -> Iterator[PackedProduct]:
    """The product of each of `groups`. A pack is made by one thread, so several are made at once, the largest first."""
    largest_first = sorted(groups, key=lambda group: sum(layer.weight.numel() for layer in group), reverse=True)
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        yield from threads.map(partial(PackedProduct, multiple=multiple), largest_first)


class PackedLinears(TorchFunctionMode):
    """While entered, linear layers multiply with packs of their weights, where half precision can hold them.

    Weights must not change as long as this lives: a pack does not follow. For one thread at a time.
    """

    def __init__(self, layers: Iterable[Siblings], *, batch_invariant: bool = False) -> None:
        """With `batch_invariant` a row has the same bits in a product of any number of rows.

        Raises ValueError if that cannot be had here.
        """
        super().__init__()
        multiple = invariant_multiple() if batch_invariant else 1
        self._products: dict[int, tuple[LinearLayer, PackedProduct]] = {}  # by weight
        self._input: tuple[torch.Tensor, int] | None = None  # of the last product, and its version
        self._outputs: dict[int, torch.Tensor] = {}  # of the last product, by weight, that nobody has asked for yet
        self.num_refused = 0  # weights that half precision cannot hold
        groups: list[Siblings] = []
        for group in layers:
            fitting = tuple(layer for layer in group if fits_half(layer.weight))
            self.num_refused += len(group) - len(fitting)
            groups += [fitting] if fitting else []
        for product in pack(groups, multiple):
            self._products |= {id(layer.weight): (layer, product) for layer in product.layers}

    @property
    def weights(self) -> list[torch.Tensor]:
        """Those that are read from packs."""
        return [layer.weight for layer, _ in self._products.values()]

    def __exit__(self, *exception: Any) -> None:
        self._input, self._outputs = None, {}
        super().__exit__(*exception)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is linear:
            x, layer = _linear_arguments(*args, **(kwargs or {}))
            packed, product = self._products.get(id(layer.weight), (None, None))
            if packed is not None and product is not None and layer.bias is packed.bias:
                return self._multiply(x, layer.weight, product)
        return func(*args, **(kwargs or {}))

    def _multiply(self, x: torch.Tensor, weight: torch.Tensor, product: PackedProduct) -> torch.Tensor:
        """One output of a product, which is made when the first of its layers runs."""
        same = self._input is not None and self._input[0] is x and self._input[1] == x._version
        if not same or id(weight) not in self._outputs:
            self._input = x, x._version
            self._outputs = dict(zip((id(layer.weight) for layer in product.layers), product(x), strict=True))
        return self._outputs.pop(id(weight))


def invariant_multiple() -> int:
    """The number to a multiple of which rows are padded so that a row has the same bits in a product of any number of
    them: FBGEMM cuts rows into blocks, and its kernels for some heights of blocks add up in another order. Which ones
    depends on the processor alone, so it is tried on one small product.

    Raises ValueError if no number will do.
    """
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 64, generator=generator) for n in (MOST_TRIED, 32))
    product = PackedProduct((LinearLayer(weight.half().float(), None),))
    for multiple in range(1, 25):
        counts = range(multiple, MOST_TRIED + 1, multiple)
        (expected,) = product(x[: counts[-1]])
        if all(torch.equal(product(x[:count])[0], expected[:count]) for count in counts):
            return multiple
    raise ValueError("batch_invariant: the products of this processor depend on the number of their rows; leave it out")


def packed_linears(user: EngineConfig, device: torch.device, layers: Iterable[Siblings]) -> PackedLinears | None:
    """The mode under which a model with these `layers` runs; None if its weights are to stay as they are. That there
    can be packs, if they were asked for, is known before (`check_packing`, `check_batch_invariance`)."""
    if user.pack_weights is False:
        return None
    try:
        check_packing(device)
    except ValueError as reason:
        log.info("linear layers read plain weights: %s", reason)
        return None
    return PackedLinears(layers, batch_invariant=user.batch_invariant)


def check_invariant_model(packed: PackedLinears, num_other_products: int) -> None:
    """Raise ValueError, in one sentence, if a model with these packs, and so many matrix products that are none of a
    linear layer, is not batch invariant."""
    if packed.num_refused:
        raise ValueError(
            f"batch_invariant packs every linear layer in half precision, which cannot hold {packed.num_refused} of "
            "this model's weights: leave it out, or load a checkpoint in bfloat16 or float16"
        )
    if num_other_products:
        raise ValueError(
            f"batch_invariant covers linear layers and attention, and {num_other_products} matrix products of this "
            "model are neither: leave it out"
        )


def check_packing(device: torch.device) -> None:
    """Raise ValueError, in one sentence, if linear layers on `device` cannot be packed."""
    if device.type != "cpu":
        raise ValueError("pack_weights is for the CPU: leave it out with another device")
    if not has_fbgemm():
        raise ValueError("pack_weights needs a torch with FBGEMM and a processor with AVX2: leave it out here")


def check_batch_invariance(device: torch.device) -> None:
    """Raise ValueError, in one sentence, if nothing can keep the bits of a row on `device`."""
    if device.type != "cpu" or not has_fbgemm():
        raise ValueError("batch_invariant needs a CPU with AVX2 and a torch with FBGEMM: leave it out here")
    try:
        native_library()
    except NoNativeError as reason:
        raise ValueError(f"batch_invariant needs the compiled attention kernel, and {reason}") from reason


def has_fbgemm() -> bool:
    engines = torch.backends.quantized
    return "fbgemm" in engines.supported_engines and engines.engine in ("fbgemm", "x86")


def fits_half(weight: torch.Tensor) -> bool:
    """Whether rounding to half precision takes no more than `MAX_LOSS` from any row of `weight` `[N, K]`."""
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return False
    error = weight.half().float().sub_(weight).norm(dim=1)
    return bool(((error <= weight.float().norm(dim=1) * MAX_LOSS) & error.isfinite()).all())


def _linear_arguments(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, LinearLayer]:
    """The arguments of `torch.nn.functional.linear`, by its names."""
    return input, LinearLayer(weight, bias)
