"""packed: GRPOTrainer and RLOOTrainer of TRL with log-probs from packed rows; AsyncGRPOTrainer goes to tree_row.py.

TRL      input_ids [B, P+C], attention_mask  -> model(padded rows)  -> log-probs [B, C], 0 at masked tokens
packed   the same -> PackedInputs            -> model(packed_rows=) -> the same

`_get_per_token_logps_and_entropies` is the one method in which TRL runs the model for log-probs; it is replaced. The
passes go through the module that TRL passes (DDP, the root of FSDP2, PEFT), whose forward synchronises gradients and
gathers weights; the causal language model within learns a keyword for them. What packed rows cannot do goes to TRL's
own method, with one warning for each reason. This is decided by the configuration, which all ranks share. Tokens of
tools are not scored: the mask of TRL is noted when it generates, and again when it computes the loss.

attention   TRL's own   packed, forward   packed, backward   TRL's own
            generate    old, ref                             generate, callbacks, checkpoints
"""

from __future__ import annotations

import functools
import inspect
import types
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from maskpack.adapters.transformers import gradients, passes
from maskpack.adapters.transformers.model import (
    FIRST,
    LATER,
    SHARED,
    TOLERANCE,
    Replayable,
    check_dropout,
    most_of,
    precision,
    too_far,
)
from maskpack.adapters.transformers.output import Layer, other_forward, wide_forward
from maskpack.adapters.transformers.refusals import PADDED, Refusal
from maskpack.adapters.trl.tree_row import is_async, with_tree_rows
from maskpack.core.arguments import IntArray, flag, said, whole
from maskpack.errors import MaskpackWarning, ReplayError
from maskpack.layout.prefix_tree import MIN_SHARED
from maskpack.ops import packed_log_probs
from maskpack.ops.prefix_attention import gather_rows
from maskpack.planning.agreement import agree_on_count
from maskpack.planning.plan import plan_micro_batches
from maskpack.replay.inputs import PackedInputs, prefix_tree
from maskpack.replay.log_probs import in_dtype, packing_is_on
from maskpack.replay.mismatch import MismatchLimit, compare
from maskpack.replay.options import ReplayOptions

if TYPE_CHECKING:
    from transformers import Trainer

_Trainer = TypeVar("_Trainer", bound="Trainer")
_CALL = "packed"
_METHOD = "_get_per_token_logps_and_entropies"
_TAKEN = ("model", "input_ids", "attention_mask", "logits_to_keep", "batch_size", "compute_entropy", "compute_aux_loss")
_LEFT = (
    *("pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles"),
    *("image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids"),
)
"""The parameters of TRL's method: those that packed rows have, and those of images and token types."""
_SCORED = "tool_mask"
_OF_GRPO = 8
"""What GRPOTrainer._generate returns; the third is a mask of each completion, 0 at tokens of tools, or None."""
_FRACTION = "maskpack/computed_fraction"
_MISMATCH = "maskpack/rollout_mismatch/"
_RANKS = ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP")
"""The kinds of accelerate's processes that were tested."""


def packed(
    trainer_class: type[_Trainer],
    *,
    share_prefixes: bool = True,
    min_shared: int = MIN_SHARED,
    self_check: bool | None = None,
    fused: bool = False,
    mismatch_limit: MismatchLimit | None = None,
) -> type[_Trainer]:
    """Makes a subclass of GRPOTrainer or RLOOTrainer that computes log-probs and entropies from packed rows; or of
    AsyncGRPOTrainer, which packs rows itself, one that packs them by PrefixTree: the same tensors in less time.

    Args:
        trainer_class: one of the three, or a subclass that leaves their method `_get_per_token_logps_and_entropies`.
            For AsyncGRPOTrainer, leave the other arguments out.
        share_prefixes: whether tokens that begin several rows, such as the prompts of a group, are computed once.
        min_shared: the fewest tokens of a shared prefix, as for `PrefixTree.from_ids`.
        self_check: whether to compare a row with TRL's own pass over that row, padded. True: in every pass; False:
            never; None: the first time for each model, and the first time that rows share a prefix.
        fused: whether norms, MLPs and rotary embeddings run by kernels of maskpack in packed passes, as with
            `replayable(fused=True)`. Several times fewer kernels are launched, and small models wait mostly for
            launches.
        mismatch_limit: how far old log-probs may be from those of the sampler, on the rows of all ranks.

    Returns:
        A class with the same name and arguments. Log-probs are those of TRL within rounding, float32 [B, C] and 0 at
        masked tokens and at tokens of tools; losses, metrics and checkpoints are TRL's. Passes without gradients run in
        as few micro-batches as hold the tokens of TRL's. What packed rows do not support runs TRL's own method, with a
        MaskpackWarning that says why; so does everything with MASKPACK_PACKED_REPLAY=0 in the environment. If TRL has
        log-probs of the sampler, as those of vLLM, and old ones, `maskpack/rollout_mismatch/` are metrics of `compare`.

    Raises:
        ReplayError: not such a class, or of a TRL whose method has other parameters; an invalid option. While it
            trains: rows that are padded elsewhere than TRL pads them; a failed self-check; an input that replay
            refuses; the limit was exceeded.
        LayoutError: min_shared is no integer from 1.
    """
    if is_async(trainer_class):
        options = share_prefixes, min_shared, self_check, fused, mismatch_limit
        if options != (True, MIN_SHARED, None, False, None):
            raise ReplayError(
                f"{_CALL}: {trainer_class.__name__} with options of packed; expected none, because this trainer has "
                "packed rows and attention of its own, of which packed makes the rows. Leave the options out."
            )
        return with_tree_rows(trainer_class, _CALL)
    method = getattr(trainer_class, _METHOD, None)
    if not isinstance(trainer_class, type) or not callable(method):
        seen = getattr(trainer_class, "__name__", None) or said(trainer_class)
        raise ReplayError(
            f"{_CALL}: got {seen}; expected a class with the method {_METHOD}. Pass GRPOTrainer, RLOOTrainer or "
            "AsyncGRPOTrainer of TRL 1.16, and make the trainer of the class that packed returns; SFTTrainer takes a "
            "PackedCollator."
        )
    if issubclass(trainer_class, _PackedTrainer):
        raise ReplayError(
            f"{_CALL}: {trainer_class.__name__} is packed already; expected a trainer of TRL. Call packed once."
        )
    own = inspect.unwrap(method)
    if not own.__module__.startswith("trl."):
        raise ReplayError(
            f"{_CALL}: {trainer_class.__name__} has a {_METHOD} of its own, of {own.__module__}; expected TRL's, which "
            "is replaced. Leave the method out, or keep the trainer padded."
        )
    names = tuple(inspect.signature(own).parameters)
    if names != ("self", *_TAKEN, *_LEFT):
        differ = ", ".join(sorted({*names} ^ {"self", *_TAKEN, *_LEFT})) or "in another order"
        raise ReplayError(
            f"{_CALL}: {trainer_class.__name__}.{_METHOD} has other parameters than in TRL 1.16 ({differ}); "
            "expected the same. Use TRL 1.16, or a maskpack that knows this version."
        )
    if mismatch_limit is not None and not isinstance(cast("Any", mismatch_limit), MismatchLimit):
        raise ReplayError(
            f"{_CALL}: mismatch_limit is {said(mismatch_limit)}; expected a MismatchLimit. Pass MismatchLimit(k3=0.01)."
        )
    body = {
        "__doc__": trainer_class.__doc__,
        "__module__": __package__,
        "__qualname__": f"{_CALL}({trainer_class.__name__})",
        "_packing": ReplayOptions(
            share_prefixes=flag(share_prefixes, "share_prefixes", _CALL, ReplayError),
            min_shared=whole(min_shared, "min_shared", 1, _CALL),
        ),
        "_self_check": None if self_check is None else flag(self_check, "self_check", _CALL, ReplayError),
        "_fused": flag(fused, "fused", _CALL, ReplayError),
        "_limit": mismatch_limit,
    }
    name = trainer_class.__name__  # it is in TRL's metrics
    return cast("Any", type)(name, (_PackedTrainer, trainer_class), body)


@dataclass(frozen=True, eq=False)
class _Ask:
    """What a model is asked in one forward pass."""

    inputs: PackedInputs
    temperature: float
    entropy: bool


class _Inside(Replayable):
    """A Replayable that runs inside the forward pass of its model, in which the weights of the root are gathered.

    Attributes:
        computed_in: the dtype of the last hidden states; weights may have others.
    """

    computed_in: torch.dtype

    def _find_ranks(self) -> None:
        """Nothing: it would reshard the weights. The trainer compares rows on all ranks."""

    def _states(self, **given: Any) -> Tensor:
        return self._base(**given, use_cache=False).last_hidden_state

    def check_head(self) -> None:
        """Raises ReplayError for an output layer that replay does not know. One that is sharded has hooks of FSDP, and
        its weight is whole only while it runs."""
        layer: Any = self._output
        sharded = isinstance(layer, FSDPModule) or isinstance(getattr(layer, "weight", None), DTensor)
        if sharded and isinstance(layer, nn.Linear):
            self._wide = wide_forward(type(self.model).__name__, layer, self._wide, hooks=True)
        else:
            _ = self.head

    def check_dropout(self) -> None:
        check_dropout(self.model, self._base, self._config)

    def answer(self, ask: _Ask) -> tuple[Tensor, ...]:
        """(log-probs [N],) or (log-probs [N], entropies [N]) of the scored tokens."""
        self.check_head()
        inputs, layer = ask.inputs, self._output
        hidden = self.hidden(inputs)
        self.computed_in = hidden.dtype
        rows = hidden.index_select(0, inputs.predict) if inputs.tree is None else gather_rows(hidden, inputs.predict)
        with other_forward(layer, functools.partial(self._scores, ask)):
            return layer(rows)  # by its hooks: FSDP gathers its weight, which may be sharded with the last norm

    def _scores(self, ask: _Ask, rows: Tensor) -> tuple[Tensor, ...]:
        """The forward of the output layer while it answers."""
        layer, device = Layer.of(self._output), rows.device.type
        if layer.is_sharded(weight=True):
            raise Refusal.SHARDED_HEAD(_CALL, model=type(self.model).__name__)
        weight = self._factor(layer.weight)
        if torch.is_autocast_enabled(device) and rows.dtype != torch.float64:  # its product would cast both, too
            dtype = torch.get_autocast_dtype(device)
            rows, weight = rows.to(dtype), weight.to(dtype)
        logits = layer.logits(self._scale, self._softcap)
        with torch.autocast(device, enabled=False):
            out: Any = packed_log_probs(
                in_dtype(rows, weight),
                weight,
                ask.inputs.targets,
                temperature=ask.temperature,
                entropy=ask.entropy,
                logits=logits,
            )
        return out if ask.entropy else (out,)

    def teach(self) -> None:
        """Gives the model a forward that answers `packed_rows`, and otherwise is the one that it had."""
        model: Any = self.model
        before, kind = model.forward, cast("Any", type(model))

        @functools.wraps(kind.forward)  # generate checks its arguments against the signature
        def forward(_: nn.Module, *args: Any, packed_rows: _Ask | None = None, **kwargs: Any) -> Any:
            return before(*args, **kwargs) if packed_rows is None else self.answer(packed_rows)

        model.forward = types.MethodType(cast("Any", forward), model)


class _PackedTrainer:
    """What `packed` puts before a trainer of TRL."""

    _packing: ClassVar[ReplayOptions]
    _self_check: ClassVar[bool | None]
    _fused: ClassVar[bool]
    _limit: ClassVar[MismatchLimit | None]
    accelerator: Any
    args: Any
    model: Any
    temperature: float
    _metrics: dict[str, Any]

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        if _METHOD in vars(cls):  # passes would run padded, and nobody would be told
            raise ReplayError(
                f"{_CALL}: {cls.__name__}, a subclass of a packed trainer, has a {_METHOD} of its own; expected the "
                "packed one. Leave the method out, or keep the trainer padded."
            )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        cast("Any", super()).__init__(*args, **kwargs)
        self._tools: Any = None
        self._told: set[str] = set()
        self._proved: dict[tuple[int, bool], int] = {}
        self._replays: list[_Inside] = []
        self._refused = _refused(self)
        made: list[_Inside] = []
        try:
            for model in (self.model, getattr(self, "ref_model", None)):
                if model is not None and self._refused is None:
                    made.append(_Inside(_causal_lm(self, model), fused=self._fused))
                    made[-1].check_head()
        except ReplayError as error:
            self._refused = str(error)
        for replay in made:
            replay.release()
            if self._refused is None:
                replay.teach()
                self._replays.append(replay)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return cast("Any", super()).training_step(*args, **kwargs)
        finally:
            self._release()  # not before: the backward pass may run layers again

    def _release(self) -> None:
        for replay in self._replays:
            replay.release()

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        out: Any = cast("Any", super())._generate(*args, **kwargs)
        self._tools = out[2] if len(out) == _OF_GRPO else None  # RLOOTrainer has no tools
        return out

    def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
        try:
            out: Any = cast("Any", super())._generate_and_score_completions(*args, **kwargs)
            scored, told = self._scored(out["completion_ids"]), out.get("tool_mask")
        finally:
            self._tools = None
        on = out["completion_mask"] != 0
        if (scored is None) != (told is None) or (told is not None and bool(((told != 0) != scored)[on].any())):
            raise ReplayError(
                f"{_CALL}: {type(self).__name__} generated another mask of tool tokens than it returned; expected the "
                "same, as by TRL 1.16. Use TRL 1.16, or a trainer that does not change tool_mask."
            )
        sampler, old = out.get("sampling_per_token_logps"), out.get("old_per_token_logps")
        if sampler is not None and old is not None:
            rows = torch.stack([sampler.to(old.dtype), old, (on if scored is None else on & scored).to(old.dtype)], 1)
            if self.accelerator.num_processes > 1:
                rows = self.accelerator.gather(self.accelerator.pad_across_processes(rows, dim=2))
            mode = "train" if self.model.training else "eval"
            for name, value in compare(*rows.unbind(1), limit=self._limit).metrics(_MISMATCH).items():
                self._metrics[mode][name].append(value)
        return out

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        self._tools = inputs.get("tool_mask")
        try:
            return cast("Any", super())._compute_loss(model, inputs)
        finally:
            self._tools = None

    def _scored(self, completions: Tensor) -> Tensor | None:
        """Bool [B, C]: where no tool wrote; None if there are no tools."""
        tools = self._tools
        if tools is None or isinstance(tools, Tensor):
            return None if tools is None else tools != 0
        rows = [torch.tensor(row, dtype=torch.bool, device="cpu") for row in tools]
        scored = torch.ones(completions.shape, dtype=torch.bool, device="cpu")
        for line, row in zip(scored, rows, strict=True):
            line[: row.numel()] = row
        return scored.to(completions.device)

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **left: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        trl: Any = super()
        found = self._taken(model, compute_aux_loss, left)
        scored = self._scored(input_ids[:, input_ids.shape[1] - logits_to_keep :])
        if isinstance(found, str):
            if found not in self._told and self.accelerator.is_local_main_process:
                told = f"{type(self).__qualname__}: TRL's own padded pass runs: {found}"
                warnings.warn(told, MaskpackWarning, stacklevel=3)
            self._told.add(found)
            self._release()
            log_probs, *others = trl._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, batch_size, compute_entropy, compute_aux_loss, **left
            )
            if self._refused is None:  # another model of the trainer, or another pass, may be packed
                log_probs = log_probs if scored is None else log_probs.masked_fill(~scored, 0)
                self._metrics["train" if self.model.training else "eval"][_FRACTION].append(1.0)
            return log_probs, *others

        def own(rows: Tensor) -> tuple[Tensor, Tensor | None, None]:
            return trl._get_per_token_logps_and_entropies(
                model, input_ids[rows], attention_mask[rows], logits_to_keep, compute_entropy=compute_entropy
            )

        profiled: Any = import_module("trl.extras.profiling").profiling_context
        with profiled(self, _METHOD):
            try:
                run = _Run(self, model, found, logits_to_keep, compute_entropy, own, scored)
                log_probs, entropies = run.of(input_ids, attention_mask, batch_size)
            finally:
                if not torch.is_grad_enabled():
                    self._release()
        return log_probs, entropies, None

    def _taken(self, model: Any, compute_aux_loss: bool, left: dict[str, Any]) -> _Inside | str:
        """The Replayable of a model, or why TRL's own method runs."""
        if self._refused is not None:
            return self._refused
        if not packing_is_on(_CALL):
            return "MASKPACK_PACKED_REPLAY is 0. Unset it for packed rows."
        if given := [name for name in left if left[name] is not None]:
            return f"the batch has {', '.join(given)}, which packed rows do not have. Drop images where there are none."
        if compute_aux_loss:
            return "compute_aux_loss was asked for, which needs the router of padded rows. Set router_aux_loss_coef=0."
        causal = _causal_lm(self, model)
        for replay in self._replays:
            if replay.model is causal:
                try:
                    replay.check_dropout()
                except ReplayError as error:
                    return f"{error} In the trainer: disable_dropout=True, lora_dropout=0, attention_dropout=0."
                return replay
        return f"{type(causal).__name__} is neither model nor ref_model of the trainer. Keep these two."


@dataclass(frozen=True)
class _Run:
    """The packed passes of one call, over rows [B, P + C] of which the last `width` columns are scored.

    Attributes:
        model: what TRL runs, around the model of `replay`.
        own: TRL's own method for some of the rows.
        scored: bool [B, C], the tokens to score; None for all.
    """

    trainer: Any
    model: Any
    replay: _Inside
    width: int
    entropy: bool
    own: Any
    scored: Tensor | None

    @functools.cached_property
    def options(self) -> ReplayOptions:
        packing: ReplayOptions = self.trainer._packing
        return packing if self.scored is None else replace(packing, scored=(_SCORED,))

    def of(self, input_ids: Tensor, attention_mask: Tensor, batch_size: int | None) -> tuple[Tensor, Tensor | None]:
        """float32 [B, C]: log-probs and entropies, 0 at masked tokens."""
        ids, mask = input_ids.cpu(), attention_mask.cpu()
        _check_padding(mask, self.width)
        columns = torch.arange(ids.shape[1], device="cpu")  # the position ids of models that are given none
        batch = TensorDict(
            {
                "input_ids": ids,
                "attention_mask": mask.long(),
                "responses": ids[:, -self.width :],
                "position_ids": columns.expand(ids.shape),
            },
            batch_size=[ids.shape[0]],
        )
        if self.scored is not None:
            batch[_SCORED] = self.scored.cpu()
        parts = [list(range(ids.shape[0]))] if batch_size is None else self._planned(batch, batch_size)
        outs: list[list[Tensor]] = []
        tokens = 0
        for number, rows in enumerate(parts):
            part = batch[torch.tensor(rows, device="cpu")]
            inputs = PackedInputs.of(part, device=self.replay.device, options=self.options)
            tokens += inputs.num_tokens
            outs.append(self._checked(inputs, part, rows) if number == 0 else self._scores(inputs, part))
        mode = "train" if self.trainer.model.training else "eval"
        self.trainer._metrics[mode][_FRACTION].append(tokens / ids.numel())
        _, first = np.unique(np.concatenate(parts), return_index=True)  # dummies, which come last, repeat rows
        order = torch.from_numpy(first).to(outs[0][0].device)
        joined = [torch.cat(one).index_select(0, order) for one in zip(*outs, strict=True)]
        return joined[0], joined[1] if self.entropy else None

    def _planned(self, batch: TensorDict, batch_size: int) -> list[list[int]]:
        """Rows of each pass, each with at most the tokens that TRL's padded one of `batch_size` rows has."""
        tree = prefix_tree(batch, options=self.options) if self.options.share_prefixes else None
        lengths = batch["attention_mask"].ne(0).sum(-1).numpy()
        plan = plan_micro_batches(lengths, batch_size * batch["input_ids"].shape[1], tree=tree)
        together = isinstance(self.model, DistributedDataParallel | FSDPModule)
        return (agree_on_count(plan) if together else plan).micro_batches

    def _scores(self, inputs: PackedInputs, part: TensorDict) -> list[Tensor]:
        """[b, C] each: log-probs, and entropies if asked for."""
        with self.trainer.accelerator.autocast():
            out = self.model(packed_rows=_Ask(inputs, self.trainer.temperature, self.entropy))
        real = self._real(part)[:, -self.width :].to(out[0].device, non_blocking=True)
        every = out if inputs.copies is None else [one.index_select(0, inputs.copies) for one in out]
        return [one.new_zeros(real.shape).masked_scatter(real, one) for one in every]

    def _real(self, part: TensorDict) -> Tensor:
        """Bool [b, P + C]: the tokens, without those of the completions that are not scored."""
        real = part["attention_mask"].ne(0)
        if self.scored is not None:
            real[:, -self.width :] &= part[_SCORED]
        return real

    # ---------------------------------------------------------------- self-check

    def _checked(self, inputs: PackedInputs, part: TensorDict, rows: Sequence[int]) -> list[Tensor]:
        """`_scores`, of which a row is compared with TRL's own. All ranks compare in the same call, or none."""
        asked, accelerator = self.trainer._self_check, self.trainer.accelerator
        path = id(self.replay), torch.is_grad_enabled()
        before = self.trainer._proved.get(path, 0)
        most = SHARED if self.trainer._packing.share_prefixes else LATER
        if asked is False or (before == most and not asked):
            return self._scores(inputs, part)
        real = self._real(part)
        row, proof, tokens = _row_to_compare(inputs, part["attention_mask"].ne(0).numpy(), real.numpy(), self.width)
        groups = (None,) if accelerator.num_processes > 1 else ()
        proof = int(most_of(groups, proof, accelerator.device))
        if not asked and proof <= before:
            return self._scores(inputs, part)
        self.replay.release()
        with torch.no_grad():
            truth = self.own(torch.tensor([rows[row]], device=accelerator.device))
        with passes.noting() as calls:
            out = self._scores(inputs, part)
        self.replay.need_same_cap()
        pairs = zip(out, truth, strict=False)
        away = ~real[row, -self.width :].to(out[0].device)
        gaps = [ours.detach()[row] - own[0].masked_fill(away, 0) for ours, own in pairs]
        off = max(float(gap.abs().nan_to_num(torch.inf).max()) for gap in gaps)
        with accelerator.autocast():
            dtype = precision(out[0].new_zeros(0, dtype=self.replay.computed_in))
        model, most = type(self.replay.model).__name__, TOLERANCE[dtype] / min(self.trainer.temperature, 1.0)
        far = too_far(off, most, groups, accelerator.device)
        if far is not None:
            what, remedy = "log-probs or entropies from packed rows", f"Train it {PADDED}"
            raise Refusal.OFF(_CALL, what=what, model=model, off=far, most=f"{most:.3g}", remedy=remedy)
        if out[0].requires_grad:
            off, most = gradients.error(calls.values(), inputs, tokens), gradients.TOLERANCE[dtype]
            far = too_far(off, most, groups, accelerator.device)
            if far is not None:
                raise Refusal.GRADIENTS_OFF(_CALL, model=model, off=far, most=most)
        self.trainer._proved[path] = max(before, proof)
        return out


def _row_to_compare(inputs: PackedInputs, mask: Any, real: Any, width: int) -> tuple[int, int, IntArray]:
    """The row that proves the most, what it proves, and its tokens among the inputs. `mask` [b, P + C] has the tokens,
    `real` those that are not left unscored; a row proves 0 without a scored token. Of several, one with pads before it,
    whose positions do not begin at 0, and of these the longest."""
    scored, lengths = real[:, -width:].sum(1), mask.sum(1)
    kinds = np.where(scored > 0, LATER, 0)
    if inputs.tree is not None:
        sharing = inputs.tree.order[inputs.tree.shared > 0]
        kinds[sharing] = np.where(scored[sharing] > 0, SHARED, 0)
    first = np.flatnonzero(lengths)[:1]
    kinds[first] = np.minimum(kinds[first], FIRST)
    row = int(np.lexsort((lengths, ~mask[:, 0], kinds))[-1])
    tokens: IntArray = np.arange(int(lengths[row]), dtype=np.int64) + int(lengths[:row].sum())
    return row, int(kinds[row]), tokens if inputs.tree is None else inputs.tree.of_row_token[tokens]


def _check_padding(mask: Tensor, width: int) -> None:
    """Checks that rows have a prompt, and no pads between their tokens."""
    real = mask.ne(0)
    prompt = real.shape[1] - width
    begins = real.clone()
    begins[:, 1:] &= ~real[:, :-1]
    alone = real[:, prompt:].any(1) & ~(real[:, prompt - 1] if prompt else real[:, 0] & False)
    odd = cast("list[int]", torch.nonzero((begins.sum(1) > 1) | alone)[:8, 0].tolist())
    if odd:
        raise ReplayError(
            f"{_CALL}: rows {odd} have no prompt token right before the completion, or pads between their tokens; "
            "expected prompts padded on the left and completions on the right, as TRL pads them. There the padded pass "
            "scores by the output at a pad: drop prompts without tokens, or train padded, MASKPACK_PACKED_REPLAY=0."
        )


# -------------------------------------------------------------------- what goes to TRL's own path


def _refused(trainer: Any) -> str | None:
    """Why nothing of a trainer can be packed, by its configuration; None if all can."""
    accelerator, args = trainer.accelerator, trainer.args
    ranks = str(accelerator.distributed_type.value)
    if ranks == "FSDP" and not accelerator.is_fsdp2:
        ranks = "FSDP version 1"
    parallel = getattr(accelerator, "parallelism_config", None)
    split = [kind for kind in ("tp", "cp", "sp") if getattr(parallel, f"{kind}_enabled", False)]
    compiles = args.torch_compile or str(accelerator.state.dynamo_plugin.backend.value) != "NO"
    devices: dict[str, Any] = getattr(trainer.model, "hf_device_map", None) or {}
    adapters: dict[str, Any] = getattr(trainer.model, "peft_config", {})
    virtual = [name for name, config in adapters.items() if getattr(config, "is_prompt_learning", False)]
    reasons = {
        f"the processes are of kind {ranks}. Use one process, DDP, or FSDP2 (version 2 in fsdp_config).": (
            ranks not in _RANKS
        ),
        f"parallelism_config has {', '.join(split)}, which splits models or rows. Use data parallelism alone.": split,
        "torch_compile is on, which compiles anew for each number of tokens. Leave it off; packed has fused=True.": (
            compiles
        ),
        'mixed_precision is "fp8". Use bf16.': accelerator.mixed_precision == "fp8",
        "the router's auxiliary loss counts padded rows. Set router_aux_loss_coef=0 to train without it.": (
            getattr(trainer, "aux_loss_enabled", False)
        ),
        "the processing class is of a model with images. For text alone, pass its tokenizer as processing_class.": (
            getattr(trainer, "_is_vlm", False)
        ),
        "device_map spreads the model over devices. Use data parallelism.": len(set(devices.values())) > 1,
        f"the adapter {', '.join(virtual)} of PEFT learns virtual tokens. Use LoRA.": virtual,
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def _causal_lm(trainer: Any, model: Any) -> Any:
    """The causal language model in what TRL runs: DDP, PEFT, or the model itself."""
    inner = trainer.accelerator.unwrap_model(model)
    return inner.get_base_model() if hasattr(inner, "peft_config") and hasattr(inner, "get_base_model") else inner
