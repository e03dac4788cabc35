"""The real Megatron-FSDP on CPUs and gloo: what it wants of CUDA and NCCL, and models fully sharded by it.

Only streams, the current device and two reductions are stood in for.  Grouping, buffers, DTensors, hooks and the step
contract are the package's own code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from support.every_kind import local_of


class Stream:
    """On a CPU things are done when a call returns."""

    device = None

    def __init__(self, device: object = None) -> None: ...

    def wait_stream(self, other_stream: Stream) -> None: ...

    def wait_event(self, event: Stream) -> None: ...

    def wait(self) -> None: ...

    def record_event(self) -> Stream:
        return self


@dataclass(frozen=True)
class PremulSum:
    """NCCL's sum of terms times a factor."""

    factor: float


def all_reduce(tensor, op=dist.ReduceOp.SUM, group=None, *, real=dist.all_reduce) -> None:
    """Gloo's, and NCCL's sum of scaled terms and its average."""
    if op == dist.ReduceOp.AVG:
        op = PremulSum(1 / dist.get_world_size(group))
    if isinstance(op, PremulSum):
        tensor *= op.factor
        op = dist.ReduceOp.SUM
    real(tensor, op=op, group=group)


def reduce_scatter(output, input, op, group) -> None:
    """By all-reduce."""
    total = input.clone()
    all_reduce(total, op, group)
    output.copy_(total.chunk(dist.get_world_size(group))[dist.get_rank(group)])


@contextmanager
def on_cpu() -> Iterator[None]:
    """Within this, Megatron-FSDP runs on CPUs."""
    replaced = [
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "Stream", Stream),
        (torch.cuda, "current_stream", Stream),
        (torch.cuda, "stream", nullcontext),
        (torch.cuda, "device", nullcontext),
        (torch.cuda.nvtx, "range_push", lambda name: None),
        (torch.cuda.nvtx, "range_pop", lambda: None),
        (torch.Tensor, "cuda", lambda tensor: tensor),
        (dist, "reduce_scatter_tensor", reduce_scatter),
        (dist, "all_reduce", all_reduce),
        (dist, "_make_nccl_premul_sum", PremulSum),
    ]
    with ExitStack() as stack:
        for box, name, value in replaced:
            stack.enter_context(patch.object(box, name, value))
        yield


@dataclass(frozen=True)
class Topology:
    """Sizes of the mesh axes, and what Megatron-FSDP does over them.

    The ranks of ``outer`` x ``shard`` x ``tensor`` hold the dense parameters.  Of ``shard``, ``expert`` ranks (0: there
    are no experts) hold different experts, and the others shard those.  Version 2 (the package's ``experimental``) has
    neither ``tensor`` nor ``expert``, and ``zero`` is 3.
    """

    outer: int = 1
    shard: int = 2
    tensor: int = 1
    expert: int = 0
    zero: int = 3
    outer_sharded: bool = False
    version: int = 1

    @property
    def world(self) -> int:
        return self.outer * self.shard * self.tensor


class Enter(torch.autograd.Function):
    """Into tensor parallelism: the gradients that its ranks have of their common input are added."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return Leave.forward(ctx, gradient, ctx.group), None


class Leave(torch.autograd.Function):
    """Out of tensor parallelism: the terms that its ranks have of the output are added."""

    @staticmethod
    def forward(ctx, x, group):
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Layer(nn.Module):
    """Fused and plain matrices, vectors of all sizes, a stack of matrices, and experts if there are to be any."""

    tensor_parallel: dist.ProcessGroup | None = None

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.qkv = nn.Linear(16, 24, bias=False)
        self.proj = nn.Linear(8, 16, bias=False)
        self.fc1 = nn.Linear(16, 48)
        self.fc2 = nn.Linear(48, 16)
        self.stack = nn.Parameter(torch.randn(3, 6, 16) * 0.1)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(experts))

    def forward(self, x: torch.Tensor, tokens_for: tuple[int, ...]) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).split(8, -1)
        x = x + self.proj(q * k.sigmoid() + v)
        if self.tensor_parallel is None:
            x = x + self.fc2(self.fc1(x).relu())
        else:
            hidden = self.fc1(Enter.apply(x, self.tensor_parallel)).relu()
            x = x + Leave.apply(hidden @ self.fc2.weight.T, self.tensor_parallel) + self.fc2.bias
        x = x + torch.einsum("td,snd,sne->te", x, self.stack, self.stack)
        return x + sum(self.experts[number](x) for number in tokens_for)


class Net(nn.Module):
    """Two layers (FSDP units) and what lies outside of them."""

    def __init__(self, experts: int = 0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(37, 16)
        self.layers = nn.ModuleList(Layer(experts) for _ in range(2))
        self.router = nn.Linear(16, 3)

    def forward(self, tokens: torch.Tensor, tokens_for: tuple[int, ...] = ()) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, tokens_for)
        return (x.sum() + self.router(x).square().sum()) / 8

    def cut(self, mesh: DeviceMesh) -> None:
        """Tensor parallelism as Megatron has it: plain parameters, with attributes that say which dim is cut."""
        for layer in self.layers:
            layer.tensor_parallel = mesh.get_group()
            for module, name, dim in ((layer.fc1, "weight", 0), (layer.fc1, "bias", 0), (layer.fc2, "weight", 1)):
                part = nn.Parameter(
                    getattr(module, name).detach().chunk(mesh.size(), dim)[mesh.get_local_rank()].clone()
                )
                part.tensor_model_parallel, part.partition_dim = True, dim
                setattr(module, name, part)


def fully_sharded(net: Net, topology: Topology, cut: bool = True, **options):
    """``megatron_fsdp.fully_shard_model`` over this topology; the net is cut for tensor parallelism before, or is."""
    import megatron_fsdp

    if topology.version == 2:
        return packed(net, topology, **options)
    mesh = init_device_mesh(
        "cpu", (topology.outer, topology.shard, topology.tensor), mesh_dim_names=("outer", "shard", "tensor")
    )
    if topology.tensor > 1 and cut:
        net.cut(mesh["tensor"])
    if topology.expert:
        shape = (topology.outer, topology.expert, topology.shard // topology.expert, topology.tensor)
        experts = init_device_mesh("cpu", shape, mesh_dim_names=("outer", "expert", "shard", "tensor"))
        options["expt_device_mesh"] = experts
        if topology.outer > 1:
            options["hybrid_fsdp_expt_group"] = experts["outer", "shard"]._flatten().get_group()
    if topology.outer > 1:
        options["dp_outer_dim"] = "outer"
        options["hybrid_fsdp_group"] = mesh["outer", "shard"]._flatten().get_group()
        options["outer_dp_sharding_strategy"] = int(topology.outer_sharded)
    return megatron_fsdp.fully_shard_model(
        net,
        device_mesh=mesh,
        dp_shard_dim="shard",
        tp_dim="tensor",
        fsdp_unit_modules=[Layer],
        zero_dp_strategy=topology.zero,
        device=torch.device("cpu"),
        **{"sync_model_each_microbatch": False, **options},
    )


def packed(net: Net, topology: Topology, **options):
    """The net, to which ``megatron_fsdp.experimental.fully_shard`` was applied over this topology, layers first."""
    from megatron_fsdp import experimental as fsdp

    sizes = {"outer": topology.outer, "shard": topology.shard}
    names = tuple(name for name in sizes if name == "shard" or sizes[name] > 1)
    mesh = init_device_mesh("cpu", tuple(sizes[name] for name in names), mesh_dim_names=names)
    flat, hybrid = [fsdp.Flat()], len(names) > 1
    placements = fsdp.Placements(
        dp_axes=list(names),
        parameter=[fsdp.Replicate()] * hybrid + flat,
        gradient=[fsdp.Partial(dist.ReduceOp.AVG)] * hybrid + flat,
        optimizer=[fsdp.Flat() if topology.outer_sharded else fsdp.Replicate()] * hybrid + flat,
    )
    policy = megatron_policy(**options)
    for module in (*net.layers, net):
        fsdp.fully_shard(module, mesh, placements, policy)
    return net


def megatron_policy(**options):
    """Megatron-FSDP's dtypes: those of main weights and main gradients, if they are not its defaults."""
    from megatron_fsdp import MixedPrecisionPolicy

    return MixedPrecisionPolicy(**options) if options else None


@contextmanager
def last_microbatch(model: nn.Module, is_last: bool) -> Iterator[None]:
    """Within this, backward passes are those of the last micro-batch, or are not; of either version."""
    if hasattr(model, "microbatch_count"):
        model.is_last_microbatch = is_last
        yield
        return
    from megatron_fsdp.experimental import microbatch

    with microbatch(model, is_last=is_last):
        yield


def zero_gradients(model: nn.Module) -> None:
    """Drop the gradients, as each version wants it."""
    if hasattr(model, "zero_grad_buffer"):
        model.zero_grad_buffer()
    else:
        model.zero_grad()


def offsets(params: Mapping[str, DTensor]) -> dict[str, Sequence[int]]:
    """Where each local tensor begins in its global one, as Megatron-FSDP finds it by asking all ranks."""
    from megatron_fsdp.uneven_dtensor import gather_and_compute_chunk_metadata

    return {name: gather_and_compute_chunk_metadata(param.detach()).offsets for name, param in params.items()}


def whole(tensors: Mapping[str, DTensor], box: Mapping[str, Sequence[int]]) -> dict[str, torch.Tensor]:
    """All of some DTensors, whose local tensors begin at these offsets, on every rank of their meshes.

    Collective over all ranks.
    """
    everyone: list = [None] * dist.get_world_size()
    parts = {name: local_of(tensor).detach() for name, tensor in tensors.items()}
    flat = torch.cat([part.flatten() for part in parts.values()])  # one tensor to pickle, not dozens
    dist.all_gather_object(everyone, ({name: (box[name], part.shape) for name, part in parts.items()}, flat))
    parts_of_ranks = [dict(zip(places, _split(places, flat), strict=True)) for places, flat in everyone]
    whole_tensors = {}
    for name, tensor in tensors.items():
        full = whole_tensors[name] = torch.full(tuple(tensor.shape), torch.nan, dtype=tensor.dtype)
        for rank in tensor.device_mesh.mesh.flatten().tolist():
            start, shape = everyone[rank][0][name]
            full[tuple(slice(at, at + size) for at, size in zip(start, shape, strict=True))] = parts_of_ranks[rank][
                name
            ]
        assert not full.isnan().any(), f"some element of {name} is on no rank"
    return whole_tensors


def _split(places: Mapping[str, tuple[Sequence[int], torch.Size]], flat: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of these shapes, which lie end to end."""
    shapes = [shape for _, shape in places.values()]
    return [part.view(shape) for part, shape in zip(flat.split([s.numel() for s in shapes]), shapes, strict=True)]
