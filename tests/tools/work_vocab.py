"""What ranks do in the tests of heads that are split over ranks, against a program of one process in float64.

    rank 0   rows 0 .. a - 1 of the head --+
    rank 1   rows a .. b - 1 of the head --+-- packed_log_probs(group=) -->  errors of each output and gradient
    rank 2   rows b .. V - 1 of the head --+

Each function runs in all ranks of a group (ranks.py).
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from kernels import count_syncs
from output_layers import plain, rounding_product
from samples import in_chunks
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from maskpack.errors import LayoutError
from maskpack.ops import log_probs as module
from maskpack.ops import packed_log_probs
from maskpack.replay import response_log_probs

Case = dict[str, Any]


def case(tokens: int, width: int, bounds: Sequence[int], dtype: str, **more: Any) -> Case:
    """A head whose slices begin at `bounds`, the last of which is V."""
    return {"size": (tokens, width, bounds[-1]), "bounds": tuple(bounds), "dtype": dtype, **more}


def problem(given: Case, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden, the whole head, ids, and factors [2, T] of both outputs, the same on all ranks."""
    tokens, width, vocabulary = given["size"]
    dtype = getattr(torch, given["dtype"])
    source = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, width, generator=source)
    weight = torch.randn(vocabulary, width, generator=source) * max(width, 1) ** -0.5 * given.get("sharpness", 1)
    ids = torch.randint(vocabulary, (tokens,), generator=source)
    factors = torch.randn(2, tokens, generator=source, dtype=torch.float64)
    sure = given.get("sure")
    if sure is not None:  # every third token has a logit of this size
        own = weight[ids]
        hidden += ((sure - (hidden * own).sum(1)) / own.square().sum(1) * (torch.arange(tokens) % 3 == 0))[
            :, None
        ] * own
    device = given.get("device", "cpu")
    return hidden.to(device, dtype), weight.to(device, dtype), ids.to(device), factors.to(device)


def exact(
    hidden: Tensor, weight: Tensor, ids: Tensor, factors: Tensor, temperature: float, use: str
) -> tuple[list[Tensor], list[Tensor]]:
    """Both outputs and both gradients, by the plain program in float64."""
    hidden, weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    outputs = plain(hidden, weight, ids, temperature)
    loss = sum((x * factor).sum() for x, factor, name in zip(outputs, factors, "LE", strict=True) if name in use)
    return [x.detach() for x in outputs], [*torch.autograd.grad(loss, (hidden, weight))]


def ours(
    hidden: Tensor, weight: Tensor, ids: Tensor, factors: Tensor, use: str, **options: Any
) -> tuple[list[Tensor], list[Tensor]]:
    hidden, weight = hidden.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()
    outputs = packed_log_probs(hidden, weight, ids, entropy=True, **options)
    loss = sum((x * factor).sum() for x, factor, name in zip(outputs, factors, "LE", strict=True) if name in use)
    loss.backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return [x.detach() for x in outputs], [hidden.grad, weight.grad]


def largest(seen: Tensor, truth: Tensor) -> float:
    assert seen.shape == truth.shape
    return float((seen.double() - truth).abs().max()) if truth.numel() else 0.0


def relative(seen: Tensor, truth: Tensor) -> float:
    """The norm of the difference, as a part of that of the truth, or of 1 where that is smaller."""
    assert seen.shape == truth.shape
    return float((seen.double() - truth).norm() / truth.norm().clamp(min=1))


def same_on_all(tensors: Sequence[Tensor]) -> bool:
    """Whether all ranks have the same bits."""
    raw = [x.contiguous().view(torch.uint8).tolist() if x.numel() else [] for x in tensors]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, raw)
    return all(other == raw for other in everyone)


def errors(given: Case, seed: int = 0, *, alone: bool = False) -> dict[str, Any]:
    """Of this rank: the largest error of log-probs and of entropies, the relative one of each gradient; with `alone`,
    also those of one process with the whole head, under the same names in `alone`."""
    hidden, weight, ids, factors = problem(given, seed)
    temperature, use = given.get("temperature", 1.0), given.get("use", "LE")
    outputs, gradients = exact(hidden, weight, ids, factors, temperature, use)
    options = {name: given[name] for name in ("keep", "backend") if name in given}
    if "keeps" in given:
        options["keep"] = given["keeps"][dist.get_rank()]
    rank = dist.get_rank()
    begin, end = (0, *given["bounds"])[rank : rank + 2]
    call = factors, use
    with in_chunks(given.get("chunk")):
        seen, parts = ours(
            hidden, weight[begin:end], ids, *call, temperature=temperature, group=dist.group.WORLD, **options
        )
    assert all(x.dtype == torch.promote_types(hidden.dtype, torch.float32) for x in seen)
    assert all(x.dtype == hidden.dtype for x in parts)

    def compared(seen: list[Tensor], parts: list[Tensor], rows: slice) -> dict[str, Any]:
        return {
            "log_probs": largest(seen[0], outputs[0]),
            "entropy": largest(seen[1], outputs[1]),
            "hidden": relative(parts[0], gradients[0]),
            "weight": relative(parts[1], gradients[1][rows]),
        }

    out = compared(seen, parts, slice(begin, end))
    out["same"] = same_on_all([*seen, parts[0]])
    if alone:
        whole, (grad_hidden, grad_weight) = ours(hidden, weight, ids, *call, temperature=temperature, **options)
        out["alone"] = compared(whole, [grad_hidden, grad_weight[begin:end]], slice(begin, end))
    return out


def compare(cases: Sequence[Case], alone: bool = False) -> list[dict[str, Any]]:
    return [errors(given, alone=alone) for given in cases]


def narrow() -> None:
    """Numbers so small that every loop takes several turns, as the fixture of this name."""
    module._PIECE_ROWS, module._PIECE_COLUMNS, module.SLICE, module._RANGE_BYTES = 64, 512, 256, 1
    module._BLOCK_TOKENS = 128


def compare_narrow(cases: Sequence[Case]) -> list[dict[str, Any]]:
    narrow()
    return compare(cases, alone=True)


def compare_rounded(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """With products as a GPU has them, of gradients in half precision."""
    module._has_wide_products = lambda x: True
    module._product = rounding_product
    return compare_narrow(cases)


def random_rounds(rounds: int) -> list[dict[str, Any]]:
    """Any sizes, bounds and options; fewer tokens, or fewer rows, than ranks."""
    source = random.Random(0)
    ranks = dist.get_world_size()
    out = []
    for seed in range(rounds):
        vocabulary = source.choice([1, 2, 3, 7, 20, 300])
        bounds = [*sorted(source.randint(0, vocabulary) for _ in range(ranks - 1)), vocabulary]
        given = case(
            source.randint(0, 7), source.randint(1, 9), bounds, source.choice(["float64", "float32"]),
            temperature=source.choice([0.5, 1.0, 3]), use=source.choice(["L", "E", "LE"]),
            sharpness=source.choice([0.0, 1.0, 20.0]), chunk=source.choice([None, 1, 2, 50]),
        )  # fmt: skip
        out.append({**given, **errors(given, seed)})
    return out


# -------------------------------------------------------------------- extremes


def huge_logits() -> dict[str, list[float]]:
    """Log-probs, entropies and the gradient of the logits (hidden is the identity, so the gradient of hidden times the
    head is not needed): logits by rank, the id in each of them."""
    weight = torch.tensor([[1000.0, -1000.0], [990.0, -30000.0], [992.0, -1001.0], [-9000.0, -1002.5]])
    rank = dist.get_rank()
    hidden = torch.eye(2)[[0, 0, 0, 1, 1]]
    ids = torch.tensor([0, 1, 3, 2, 1])
    log_probs, entropy = packed_log_probs(
        hidden, weight[2 * rank : 2 * rank + 2], ids, entropy=True, group=dist.group.WORLD
    )
    truth = (hidden.double() @ weight.double().T).log_softmax(-1)
    want = truth[range(5), ids]
    return {
        "log_probs": [float(x) for x in (log_probs - want).abs() / (1 + want.abs())],
        "entropy": [float(x) for x in (entropy + (truth.exp() * truth).sum(-1)).abs()],
    }


def unknown_ids() -> tuple[list[bool], list[bool], list[float]]:
    """As on a GPU, where ids are not checked: which log-probs and entropies are NaN, and the gradients of hidden."""
    module._check_ids = lambda *_: None
    hidden, weight, ids, _ = problem(case(6, 3, [4, 4 * dist.get_world_size()], "float32"))
    vocabulary = weight.shape[0]
    ids[1:5] = torch.tensor([vocabulary, -1, 2**62, -(2**63)])
    hidden.requires_grad_()
    part = weight.chunk(dist.get_world_size())[dist.get_rank()]
    log_probs, entropy = packed_log_probs(hidden, part, ids, entropy=True, group=dist.group.WORLD)
    log_probs.where(~log_probs.isnan(), 0).sum().backward()
    assert hidden.grad is not None
    return log_probs.isnan().tolist(), entropy.isnan().tolist(), hidden.grad.abs().sum(1).tolist()


class Storages(TorchDispatchMode):
    """The bytes of the largest storage that any operation returned."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else [result]:
            if isinstance(x, Tensor):
                self.largest = max(self.largest, x.untyped_storage().nbytes())
        return result


def bytes_of(vocabulary: int, tokens: int, keep: int | None) -> dict[str, int]:
    """Of the weight, of the largest storage of the forward pass, and of what it kept."""
    ranks = dist.get_world_size()
    given = case(tokens, 4, [vocabulary], "bfloat16" if keep else "float32")
    hidden, weight, ids, _ = problem(given)
    weight = weight.chunk(ranks)[dist.get_rank()].clone()
    if keep:
        hidden.requires_grad_()
    with Storages() as seen:
        out = packed_log_probs(hidden, weight, ids, keep=keep and keep // ranks, group=dist.group.WORLD)
    node: Any = out.grad_fn
    kept = node.saved_tensors[-1] if keep else None
    return {"weight": weight.nbytes, "largest": seen.largest, "kept": 0 if kept is None else kept.nbytes}


# -------------------------------------------------------------------- DTensor


def of_dtensors(vocabularies: Sequence[int]) -> list[dict[str, Any]]:
    """A head of each size, sharded as DTensor does: errors of both gradients, and how that of the head is laid out."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    out = []
    for vocabulary in vocabularies:
        hidden, weight, ids, factors = problem(case(6, 3, [vocabulary], "float32"))
        outputs, gradients = exact(hidden, weight, ids, factors, 1.0, "LE")
        sharded = torch.nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)]))
        hidden.requires_grad_()
        seen = packed_log_probs(hidden, sharded, ids, entropy=True, group=mesh.get_group())
        sum((x * factor).sum() for x, factor in zip(seen, factors, strict=True)).backward()
        grad = sharded.grad
        assert isinstance(grad, DTensor)
        assert hidden.grad is not None
        out.append(
            {
                "outputs": max(largest(x.detach(), y) for x, y in zip(seen, outputs, strict=True)),
                "hidden": relative(hidden.grad, gradients[0]),
                "weight": relative(grad.full_tensor(), gradients[1]),
                "layout": (grad.placements == (Shard(0),), grad.device_mesh == mesh, tuple(grad.shape)),
                "rows": sharded.to_local().shape[0],
            }
        )
    return out


def refused_dtensors() -> list[str]:
    """The errors of those that are not sharded over the group, by rows; on 4 ranks."""
    hidden, weight, ids, _ = problem(case(6, 4, [8], "float32"))
    line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    halves = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    half = halves[dist.get_rank() // 2]
    backwards = DeviceMesh("cpu", [3, 2, 1, 0])
    tries: list[tuple[Any, Any]] = [
        (distribute_tensor(weight, line, [Shard(0)]), None),
        (distribute_tensor(weight, line, [Replicate()]), dist.group.WORLD),
        (distribute_tensor(weight, line, [Shard(1)]), dist.group.WORLD),
        (DTensor.from_local(weight, line, [Partial()]), dist.group.WORLD),
        (distribute_tensor(weight, square, [Shard(0), Shard(0)]), dist.group.WORLD),
        (distribute_tensor(weight, line, [Shard(0)]), half),
        (distribute_tensor(weight, backwards, [Shard(0)]), dist.group.WORLD),
    ]
    errors = [_error_of(hidden, part, ids, group=group) for part, group in tries]
    states = distribute_tensor(hidden, line, [Replicate()])
    return [*errors, _error_of(states, weight, ids), _error_of(states, weight[:2], ids, group=dist.group.WORLD)]


# -------------------------------------------------------------------- replay


class Embeddings:
    """A model for replay whose hidden states are those of the tokens themselves."""

    device = torch.device("cpu")

    def __init__(self, embedding: Tensor, head: Tensor, head_group: Any = None) -> None:
        self.embedding, self.head, self.head_group = embedding, head, head_group

    def hidden(self, inputs: Any) -> Tensor:
        return self.embedding[inputs.input_ids[0]]

    def dense_hidden(self, *_: Any) -> Tensor:
        raise NotImplementedError

    def self_check(self, *_: Any) -> None:
        pass


def replayed() -> float:
    """The largest error of log-probs of a model that has a slice of its head, against those of a loop."""
    source = torch.Generator().manual_seed(0)
    embedding, head = torch.randn(11, 4, generator=source), torch.randn(11, 4, generator=source)
    rank = dist.get_rank()
    model = Embeddings(embedding, head[:7] if rank == 0 else head[7:], dist.group.WORLD)
    ids = torch.randint(1, 11, (3, 5), generator=source)
    batch = TensorDict({"input_ids": ids, "attention_mask": torch.ones_like(ids), "responses": ids[:, 2:]}, [3])
    seen = response_log_probs(model, batch).values().tolist()
    want = []
    for row in ids.tolist():
        for place in range(2, 5):
            scores = [float(embedding[row[place - 1]].double() @ one.double()) for one in head]
            want.append(scores[row[place]] - math.log(math.fsum(math.exp(score) for score in scores)))
    return max(abs(x - y) for x, y in zip(seen, want, strict=True))


# -------------------------------------------------------------------- what goes wrong


def _error_of(*args: Any, **options: Any) -> str:
    try:
        packed_log_probs(*args, **options)
    except LayoutError as error:
        return str(error)
    return ""


FAILURES: dict[str, dict[str, Any]] = {
    "temperature of 0": {"temperature": 0},
    "no hidden states": {"hidden": None},
    "a jagged weight": {"lm_head_weight": "weight"},
    "another dtype of the weight": {"lm_head_weight": torch.zeros(3, 4, dtype=torch.float64)},
    "entropy of another type": {"entropy": "yes"},
    "unknown backend": {"backend": "cuda"},
    "tensors elsewhere": {name: torch.zeros(5, device="meta") for name in ("hidden", "lm_head_weight", "token_ids")},
    "fewer tokens": {"hidden": torch.zeros(4, 4), "token_ids": torch.zeros(4, dtype=torch.int64)},
    "other width": {"hidden": torch.zeros(5, 3), "lm_head_weight": torch.zeros(3, 3)},
    "other dtype": {"hidden": torch.zeros(5, 4).double(), "lm_head_weight": torch.zeros(3, 4).double()},
    "other temperature": {"temperature": 0.7},
    "other entropy": {"entropy": True},
    "gradient": {"hidden": torch.zeros(5, 4, requires_grad=True)},
    "other ids": {"token_ids": torch.tensor([0, 1, 2, 3, 5])},
    "other order of ids": {"token_ids": torch.tensor([4, 3, 2, 1, 0])},
}
"""What the last rank passes in place of the right arguments."""
EVERYWHERE: dict[str, dict[str, Any]] = {
    "no rows": {"lm_head_weight": torch.zeros(0, 4)},
    "ids of no row": {"token_ids": torch.tensor([0, 1, 2, 3, 99])},
    "negative ids": {"token_ids": torch.tensor([0, 1, 2, 3, -100])},
}
"""What all ranks pass."""


def failures(device: str = "cpu") -> dict[str, tuple[str, float]]:
    """The error of each case on this rank; and the result of a right call after it, which shows whether ranks still
    are at the same place."""
    last = dist.get_rank() == dist.get_world_size() - 1

    def there(given: dict[str, Any]) -> dict[str, Any]:
        moves = {name: x for name, x in given.items() if isinstance(x, Tensor) and x.device.type != "meta"}
        return {**given, **{name: x.detach().to(device).requires_grad_(x.requires_grad) for name, x in moves.items()}}

    right = {"hidden": torch.zeros(5, 4), "lm_head_weight": torch.zeros(3, 4), "token_ids": torch.arange(5)}
    out = {}
    for name, changes in {**FAILURES, **EVERYWHERE}.items():
        call = there({**right, **(changes if last or name in EVERYWHERE else {})})
        error = _error_of(**call, group=dist.group.WORLD)
        out[name] = error, float(packed_log_probs(**there(right), group=dist.group.WORLD)[0].exp())
    return out


def waits() -> int:
    """How often the host waits for the GPU in a call with its backward pass."""
    hidden, weight, ids, factors = problem(case(300, 64, [5003], "bfloat16", device="cuda"))
    part = weight.chunk(dist.get_world_size())[dist.get_rank()]
    ours(hidden, part, ids, factors, "LE", group=dist.group.WORLD)  # compiles, and makes the communicator
    with count_syncs() as seen:
        ours(hidden, part, ids, factors, "LE", group=dist.group.WORLD)
    return len(seen)


def pairs_of_ranks() -> tuple[float, str]:
    """Two groups of two ranks with tokens of their own: the error of the group's log-probs; and what a call says whose
    group has both, as data-parallel ranks would pass by mistake."""
    rank = dist.get_rank()
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    hidden, weight, ids, _ = problem(case(6, 4, [9], "float32"), seed=rank // 2)
    part = weight[:5] if rank % 2 == 0 else weight[5:]
    seen = packed_log_probs(hidden, part, ids, group=groups[rank // 2])
    truth = (hidden.double() @ weight.double().T).log_softmax(-1)[range(6), ids]
    assert _error_of(hidden, part, ids, group=groups[1 - rank // 2]).startswith("packed_log_probs: group is ")
    return largest(seen, truth), _error_of(hidden, part, ids, group=dist.group.WORLD)
