"""The remedy of an error is a program: each of these is run, and gives the right bits.

given    names, beside those of `names`
wrong    raises
says     what the message advises; code between backquotes, which stands in the message without them
right    the program that was wrong, after the advice: it has the code of the message, and sets `got`
want     what `got` is, by other means
"""

from __future__ import annotations

import re
import tempfile
from types import SimpleNamespace
from typing import Any, NamedTuple

import oracle
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase, UnbatchedTensor, lazy_stack
from torch import Tensor

import maskpack as mp
from maskpack.errors import MaskpackError
from maskpack.store import RolloutLog
from maskpack.views import BatchMeta

PAD = 0


def rollout(rows: int = 4, prompt: int = 3, response: int = 4, seed: int = 0) -> TensorDict:
    """Prompts padded on the left, responses on the right, and what a trainer adds. Row 1 is as long as row 0."""
    rng = torch.Generator().manual_seed(seed)
    before, after = torch.tensor([2, 2, 3, 1])[:rows], torch.tensor([4, 4, 1, 2])[:rows]
    mask = torch.cat(
        [torch.arange(prompt) >= prompt - before[:, None], torch.arange(response) < after[:, None]], 1
    ).long()
    ids = torch.randint(1, 90, mask.shape, generator=rng) * mask
    of_response = mask[:, prompt:]
    fields = {
        "attention_mask": mask,
        "input_ids": ids,
        "prompts": ids[:, :prompt],
        "responses": ids[:, prompt:],
        "response_mask": of_response,
        "old_log_probs": 0.0 - torch.rand(of_response.shape, generator=rng) * of_response,
    }
    uids = NonTensorStack(*[NonTensorData(f"u{row}") for row in range(rows)])
    return TensorDict(fields, [rows]).set("uid", uids)


def outputs(batch: TensorDict) -> TensorDict:
    """What a worker returns: a field without a mask."""
    return TensorDict({"values": batch["old_log_probs"] * 2}, batch.batch_size)


def names() -> dict[str, Any]:
    """What the lines below may use: public names, and one batch in all its forms."""
    parts = (mp, mp.planning, mp.replay, mp.views)
    batch = rollout()
    packed = mp.compress(batch, pad_token_id=PAD)
    return {name: getattr(part, name) for part in parts for name in part.__all__} | {
        "mp": mp,
        "torch": torch,
        "oracle": oracle,
        "tempfile": tempfile,
        "SimpleNamespace": SimpleNamespace,
        "NonTensorData": NonTensorData,
        "NonTensorStack": NonTensorStack,
        "TensorDict": TensorDict,
        "UnbatchedTensor": UnbatchedTensor,
        "lazy_stack": lazy_stack,
        "RolloutLog": RolloutLog,
        "BatchMeta": BatchMeta,
        "PAD": PAD,
        "rollout": rollout,
        "outputs": outputs,
        "batch": batch,
        "packed": packed,
        "nested": mp.nest_batch_by_mask(batch, pad_token_id=PAD),
        "view": mp.views.BatchView.of(packed),
    }


class Case(NamedTuple):
    wrong: str
    says: str
    right: str
    want: str
    given: str = ""


STRIDED = "x = torch.nested.nested_tensor([torch.rand(2, 3), torch.rand(1, 3)], layout=torch.strided)"
GAPS = (
    "line = torch.rand(4, 5); x = torch.nested.narrow(line, 1, torch.tensor([0, 1, 2, 0]), torch.tensor([4, 4, 1, 2]))"
)
GAPS = GAPS[:-1] + ", layout=torch.jagged)"
REBUILT = "Rebuild it from its rows [j, *F]: `torch.nested.nested_tensor(list(x.unbind()), layout=torch.jagged)`."
FROM_ROWS = "x = torch.nested.nested_tensor(list(x.unbind()), layout=torch.jagged)"
CUT = "[line[0, 0:4], line[1, 1:5], line[2, 2:3], line[3, 0:2]]"

CASES: dict[str, Case] = {
    # ---------------------------------------------------------------- what a batch is
    "compress: a dict": Case(
        "compress(fields)",
        "Wrap it: `TensorDict(fields, batch_size=[rows])`.",
        "rows = 4; got = decompress(compress(TensorDict(fields, batch_size=[rows]), pad_token_id=PAD))",
        "batch.exclude('uid')",
        given="fields = dict(batch.exclude('uid').items())",
    ),
    "PackedInputs: a dict": Case(
        "PackedInputs.of(fields)",
        "Wrap it: `TensorDict(fields, batch_size=[rows])`.",
        "rows = 4; got = PackedInputs.of(TensorDict(fields, batch_size=[rows])).input_ids",
        "batch['input_ids'][batch['attention_mask'].bool()][None]",
        given="fields = dict(batch.exclude('uid').items())",
    ),
    "cat: dicts": Case(
        "mp.nesting.cat([fields, fields])",
        "Wrap dicts in TensorDicts.",
        "got = mp.nesting.cat([TensorDict(fields, [4])] * 2)",
        "torch.cat([batch.exclude('uid')] * 2)",
        given="fields = dict(batch.exclude('uid').items())",
    ),
    "take: no rows": Case(
        "mp.nesting.take(batch, [1])",
        "Give it `batch_size=[rows]`.",
        "rows = 2; batch = TensorDict(batch, batch_size=[rows]); got = mp.nesting.take(batch, [1])['x']",
        "torch.tensor([6])",
        given="batch = TensorDict({'x': torch.tensor([5, 6])}, [])",
    ),
    "PackedBatch.take: no rows": Case(
        "packed.take([1])",
        "Give the TensorDict `batch_size=[rows]` before packing.",
        "rows = 2; got = decompress(compress(TensorDict(batch, batch_size=[rows])).take([1]))['x']",
        "torch.tensor([6])",
        given="batch = TensorDict({'x': torch.tensor([5, 6])}, []); packed = compress(batch)",
    ),
    "parts with other rows": Case(
        "compress(batch)",
        "Give the TensorDict a batch_size, or split it.",
        "got = [decompress(compress(batch[name])).batch_size for name in 'st']",
        "[torch.Size([2]), torch.Size([3])]",
        given="batch = TensorDict({'s': TensorDict({}, [2]), 't': TensorDict({}, [3])}, [])",
    ),
    "a lazy stack": Case(
        "compress(stack)",
        "or put the stack into a TensorDict, which keeps its rows as objects.",
        "got = decompress(compress(TensorDict({'rows': stack}, [2])))['rows'][1]['a']",
        "torch.ones(3)",
        given="stack = lazy_stack([TensorDict({'a': torch.ones(n)}, []) for n in (2, 3)])",
    ),
    "an UnbatchedTensor": Case(
        "compress(TensorDict({'a': UnbatchedTensor(value)}, [2]))",
        "Keep it as `NonTensorData(value)`, which holds for all rows.",
        "got = decompress(compress(TensorDict({'a': NonTensorData(value)}, [2])))['a']",
        "value",
        given="value = torch.rand(3)",
    ),
    "the meta device": Case(
        "compress(batch.set('a', torch.ones(4, device='meta')), pad_token_id=PAD)",
        "Load them, or leave the field out.",
        "got = decompress(compress(batch.exclude('a'), pad_token_id=PAD))",
        "rollout()",
    ),
    # ---------------------------------------------------------------- batches of groups
    "compress: [B, G]": Case(
        "compress(groups, pad_token_id=PAD)",
        "Make a row of each line of the mask: `batch.reshape(-1)`.",
        "batch = groups; got = decompress(compress(batch.reshape(-1), pad_token_id=PAD))",
        "rollout()",
        given="groups = batch.reshape(2, 2)",
    ),
    "nest: masks [B, G, S] in a batch [B]": Case(
        "mp.nest_batch_by_mask(batch, pad_token_id=PAD)",
        "Make a row of each line of the mask: `batch.batch_size = [2, 2]`, then `batch.reshape(-1)`.",
        "batch.batch_size = [2, 2]\n"
        "got = unnest_batch_by_mask(nest_batch_by_mask(batch.reshape(-1), pad_token_id=PAD))",
        "rollout().exclude('uid')",
        given="batch = TensorDict(batch.exclude('uid').reshape(2, 2).to_dict(), [2])",
    ),
    "PackedInputs: [B, G]": Case(
        "PackedInputs.of(batch)",
        "Make a row of each line of the mask: `batch.reshape(-1)`.",
        "got = PackedInputs.of(batch.reshape(-1)).input_ids",
        "PackedInputs.of(rollout()).input_ids",
        given="batch = batch.reshape(2, 2)",
    ),
    "select_and_pad_to_response: [B, G]": Case(
        "mp.select_and_pad_to_response(batch, 'old_log_probs')",
        "Make a row of each line of the mask: `batch.reshape(-1)`.",
        "got = mp.select_and_pad_to_response(batch.reshape(-1), 'old_log_probs')['old_log_probs']",
        "rollout()['old_log_probs']",
        given="batch = batch.reshape(2, 2)",
    ),
    "RolloutLog: [B, G]": Case(
        "log.append(batch)",
        "Make a row of each line of the mask: `batch.reshape(-1)`.",
        "log.append(batch.reshape(-1)); got = decompress(log.take([3, 0])); log.close()",
        "decompress(packed.take([3, 0]))",
        given="batch = batch.reshape(2, 2); log = RolloutLog(tempfile.mkdtemp() + '/log', pad_token_id=PAD)",
    ),
    "lengths of a batch [B, G]": Case(
        "compress(batch, registry=registry)",
        "expected whole numbers (B,). Pass integers of this shape.",
        "got = decompress(compress(batch.reshape(-1), registry=registry)).reshape(1, 2)",
        "batch",
        given="registry = mp.MaskNestingRegistry({'x': MaskNestingSpec('rows')}, "
        "{'rows': mp.MaskAxis('lengths', 'lengths', head=('x',))}); "
        "batch = TensorDict({'lengths': torch.tensor([[1, 2]]), 'x': torch.tensor([[[5, 0], [6, 7]]])}, [1, 2])",
    ),
    "a plan and lengths [B, G]": Case(
        "plan_micro_batches(lengths, 4)",
        "Give one a row; if they are [B, G], `lengths.reshape(-1)`.",
        "got = sorted(sum(plan_micro_batches(lengths.reshape(-1), 4).micro_batches, []))",
        "[0, 1, 2, 3, 4, 5]",
        given="lengths = torch.ones(2, 3, dtype=torch.int64)",
    ),
    "a plan and a batch [B, G]": Case(
        "list(plan.apply(batch))",
        "if that has batch dims [B, G], to `batch.reshape(-1)`.",
        "got = plan.restore(list(plan.apply(batch.reshape(-1))))['x']",
        "torch.arange(6)",
        given="plan = plan_micro_batches([1] * 6, 4); batch = TensorDict({'x': torch.arange(6).view(2, 3)}, [2, 3])",
    ),
    # ---------------------------------------------------------------- nested tensors
    "compress: a strided nested tensor": Case(
        "compress(TensorDict({'a': x}, [2]))",
        REBUILT,
        FROM_ROWS + "; got = decompress(compress(TensorDict({'a': x}, [2])))['a'].values()",
        "torch.cat(x.unbind())",
        given=STRIDED,
    ),
    "take: a strided nested tensor": Case(
        "mp.nesting.take(TensorDict({'a': x}, [2]), [1])",
        REBUILT,
        FROM_ROWS + "; got = mp.nesting.take(TensorDict({'a': x}, [2]), [1])['a'].values()",
        "x.unbind()[1]",
        given=STRIDED,
    ),
    "compress: jagged with gaps": Case(
        "compress(TensorDict({'a': x}, [4]))",
        REBUILT,
        FROM_ROWS + "; got = decompress(compress(TensorDict({'a': x}, [4])))['a'].values()",
        f"torch.cat({CUT})",
        given=GAPS,
    ),
    "cat: jagged with gaps": Case(
        "mp.nesting.cat([TensorDict({'a': x}, [4])] * 2)",
        REBUILT,
        FROM_ROWS + "; got = mp.nesting.cat([TensorDict({'a': x}, [4])] * 2)['a'].values()",
        f"torch.cat({CUT} * 2)",
        given=GAPS,
    ),
    "plan.apply: jagged with gaps": Case(
        "list(plan_micro_batches([4, 4, 1, 2], 8).apply(x))",
        REBUILT,
        FROM_ROWS + "; plan = plan_micro_batches([4, 4, 1, 2], 8); got = plan.restore(list(plan.apply(x))).values()",
        f"torch.cat({CUT})",
        given=GAPS,
    ),
    "select_and_pad_to_response: jagged with gaps": Case(
        "mp.select_and_pad_to_response(nested.set('fresh', x), 'fresh')",
        REBUILT,
        FROM_ROWS
        + "; got = mp.select_and_pad_to_response(nested.set('fresh', x), 'fresh')['fresh'][batch['response_mask'] > 0]",
        f"torch.cat({CUT})",
        given=GAPS,
    ),
    "take: fewer values than offsets": Case(
        "mp.nesting.take(TensorDict({'a': x}, [2]), [1])",
        "Build it anew from its rows: `torch.nested.nested_tensor(rows, layout=torch.jagged)`.",
        "x = torch.nested.nested_tensor(rows, layout=torch.jagged)\n"
        "got = mp.nesting.take(TensorDict({'a': x}, [2]), [1])['a'].values()",
        "rows[1]",
        given="rows = [torch.rand(2), torch.rand(3)]\n"
        "x = torch.nested.nested_tensor_from_jagged(torch.cat(rows)[:4], torch.tensor([0, 2, 5]))",
    ),
    "compress: fewer values than offsets": Case(
        "compress(TensorDict({'a': x}, [2]))",
        "Build it anew from its rows: `torch.nested.nested_tensor(rows, layout=torch.jagged)`.",
        "x = torch.nested.nested_tensor(rows, layout=torch.jagged)\n"
        "got = decompress(compress(TensorDict({'a': x}, [2])))['a'].values()",
        "torch.cat(rows)",
        given="rows = [torch.rand(2), torch.rand(3)]\n"
        "x = torch.nested.nested_tensor_from_jagged(torch.cat(rows)[:4], torch.tensor([0, 2, 5]))",
    ),
    "take: a sparse tensor": Case(
        "mp.nesting.take(TensorDict({'a': x}, [3]), [1])",
        "Convert it with `to_dense()`, or leave it out.",
        "got = mp.nesting.take(TensorDict({'a': x.to_dense()}, [3]), [1])['a']",
        "torch.tensor([[0.0, 1.0, 0.0]])",
        given="x = torch.eye(3).to_sparse()",
    ),
    "compress: a sparse tensor": Case(
        "compress(batch.set('old_log_probs', x), pad_token_id=PAD, strict_mask_nesting=True)",
        "Convert it with `to_dense()`, or leave it out.",
        "batch['old_log_probs'] = x.to_dense()\n"
        "got = decompress(compress(batch, pad_token_id=PAD, strict_mask_nesting=True))",
        "rollout()",
        given="x = batch['old_log_probs'].to_sparse()",
    ),
    "from_mask: jagged": Case(
        "RowLayout.from_mask(mask)",
        "Give its lengths: `RowLayout.from_lengths([len(row) for row in mask.unbind()])`.",
        "got = RowLayout.from_lengths([len(row) for row in mask.unbind()]).lengths.tolist()",
        "[4, 4, 1, 2]",
        given="mask = nested['response_mask']",
    ),
    "from_mask: a strided nested tensor": Case(
        "RowLayout.from_mask(mask)",
        "Give its lengths: `RowLayout.from_lengths([len(row) for row in mask.unbind()])`.",
        "got = RowLayout.from_lengths([len(row) for row in mask.unbind()]).lengths.tolist()",
        "[2, 0, 1]",
        given="mask = torch.nested.nested_tensor([torch.ones(n) for n in (2, 0, 1)], layout=torch.strided)",
    ),
    "from_mask: a number": Case(
        "RowLayout.from_mask(mask)",
        "mask is (); expected a dense mask (B, width). Reshape the mask to one entry per row and position.",
        "got = RowLayout.from_mask(mask.reshape(1, 1)).num_tokens",
        "1",
        given="mask = torch.tensor(1)",
    ),
    # ---------------------------------------------------------------- nested batches
    "unnest: without layouts": Case(
        "mp.unnest_batch_by_mask(batch.select('responses'))",
        'Nest the batch first, or select the entry too: `batch.select("responses", "_maskpack")`.',
        'got = mp.unnest_batch_by_mask(batch.select("responses", "_maskpack"))',
        "rollout().select('responses')",
        given="batch = nested",
    ),
    "unnest: one row": Case(
        "mp.unnest_batch_by_mask(batch[1])",
        "Take one row with a list: maskpack.`nesting.take(batch, [i])`.",
        "i = 1; got = mp.unnest_batch_by_mask(mp.nesting.take(batch, [i]))",
        "oracle.take_rows(rollout(), [1])",
        given="batch = nested",
    ),
    "unnest: a new field": Case(
        "mp.unnest_batch_by_mask(batch)",
        "Nest the batch again with a registry that has the field, which gives it a layout: "
        "`unnest_batch_by_mask(nest_batch_by_mask(batch, registry))`;",
        "got = unnest_batch_by_mask(nest_batch_by_mask(batch, registry))['mine']",
        "rollout()['old_log_probs'] * 2",
        given="batch = nested.set('mine', nested['old_log_probs'] * 2)\n"
        "registry = mp.RL_FIELDS | {'mine': MaskNestingSpec('response')}",
    ),
    "unnest: an update by other rows": Case(
        "both = batch.clone(); both.update(other); mp.unnest_batch_by_mask(both)",
        "Restore both first, then update the padded batch: "
        "`unnest_batch_by_mask(batch).update(unnest_batch_by_mask(other))`.",
        "got = unnest_batch_by_mask(batch).update(unnest_batch_by_mask(other))",
        "rollout().update(fields)",
        given="batch = nested; names = ['attention_mask', 'old_log_probs', 'response_mask']\n"
        "fields = oracle.take_rows(rollout(), [3, 2, 1, 0]).select(*names); other = mp.nest_batch_by_mask(fields)",
    ),
    "cat: nested and padded": Case(
        "mp.nesting.cat([batch, nested])",
        "Nest or unnest all of them.",
        "got = mp.nesting.cat([batch, mp.unnest_batch_by_mask(nested)])",
        "oracle.take_rows(batch, [*range(4)] * 2)",
    ),
    "cat: nested with other widths": Case(
        "mp.nesting.cat([nested, other])",
        "or join them packed: `PackedBatch.cat([compress(batch), `...]).",
        "batch = nested; got = decompress(PackedBatch.cat([compress(batch), compress(other)]))['responses']",
        "torch.cat([torch.nn.functional.pad(rollout()['responses'], (0, 2)), wide['responses']])",
        given="wide = rollout(response=6); other = mp.nest_batch_by_mask(wide, pad_token_id=PAD)",
    ),
    "compress: nested, then complex": Case(
        "compress(nested.set('old_log_probs', nested['old_log_probs'].to(torch.complex64)))",
        "Restore it before the cast: `unnest_batch_by_mask`.",
        "again = mp.unnest_batch_by_mask(nested); again['old_log_probs'] = again['old_log_probs'].to(torch.complex64)\n"
        "got = decompress(compress(again, pad_token_id=PAD))['old_log_probs']",
        "batch['old_log_probs'].to(torch.complex64)",
        given="batch['old_log_probs'][2, 2] = -0.0; nested = mp.nest_batch_by_mask(batch, pad_token_id=PAD)",
    ),
    # ---------------------------------------------------------------- fields and their registry
    "no pad_token_id": Case(
        "compress(batch)",
        "Pass `pad_token_id=tokenizer.pad_token_id`.",
        "tokenizer = SimpleNamespace(pad_token_id=PAD)\n"
        "got = decompress(compress(batch, pad_token_id=tokenizer.pad_token_id))",
        "rollout()",
    ),
    "a field of another width": Case(
        "compress(batch.set('old_log_probs', wide), pad_token_id=PAD)",
        "Fix the producer, or give the field another mask in the registry.",
        "registry = mp.RL_FIELDS | {'old_log_probs': (None, 0)}\n"
        "got = decompress(compress(batch, registry=registry, pad_token_id=PAD))['old_log_probs']",
        "wide",
        given="wide = torch.rand(4, 5)",
    ),
    "strict mode: values under the mask": Case(
        "compress(batch, pad_token_id=PAD, strict_mask_nesting=True)",
        "or let it stay padded: with `MaskNestingSpec(None)`, or without strict mode.",
        "registry = mp.RL_FIELDS | {'old_log_probs': MaskNestingSpec(None)}\n"
        "got = decompress(compress(batch, registry=registry, pad_token_id=PAD, strict_mask_nesting=True))",
        "batch",
        given="batch['old_log_probs'][2, 3] = 5.0",
    ),
    "strict mode: a field of no registry": Case(
        "compress(batch, pad_token_id=PAD, strict_mask_nesting=True)",
        "Give each field a MaskNestingSpec in the registry; with `MaskNestingSpec(None)` a field",
        "registry = mp.RL_FIELDS | {'mine': MaskNestingSpec(None)}\n"
        "got = decompress(compress(batch, registry=registry, pad_token_id=PAD, strict_mask_nesting=True))",
        "batch",
        given="batch['mine'] = torch.rand(4, 7)",
    ),
    "a pad that the dtype does not hold": Case(
        "compress(batch, registry=mp.RL_FIELDS | {'mine': ('response', -100)}, pad_token_id=PAD)",
        "Give the field a pad that its dtype can hold.",
        "got = decompress(compress(batch, registry=mp.RL_FIELDS | {'mine': ('response', 0)}, pad_token_id=PAD))",
        "batch",
        given="batch['mine'] = batch['response_mask'].to(torch.uint8)",
    ),
    "a ragged_dim that is not there": Case(
        "own = mp.RL_FIELDS | {'mine': MaskNestingSpec('response', ragged_dim=3)}\n"
        "compress(batch, registry=own, pad_token_id=PAD)",
        "Give the dim of the width.",
        "own = mp.RL_FIELDS | {'mine': MaskNestingSpec('response', ragged_dim=2)}\n"
        "got = decompress(compress(batch, registry=own, pad_token_id=PAD, strict_mask_nesting=True))",
        "batch",
        given="batch['mine'] = batch['old_log_probs'][:, None].expand(4, 2, 4).clone()",
    ),
    "parts that do not make up the mask": Case(
        "compress(batch.set('prompts', batch['prompts'][:, 1:]), pad_token_id=PAD)",
        "Fix the producer, or give the axis other head and tail fields.",
        "own = mp.MaskNestingRegistry({**mp.RL_FIELDS, 'prompts': MaskNestingSpec(None)}, {**mp.RL_FIELDS.axes, "
        "'response': mp.MaskAxis('attention_mask', part='tail', tail=('responses',))})\n"
        "got = decompress(compress(batch, registry=own, pad_token_id=PAD))",
        "batch",
    ),
    "bools with other bytes": Case(
        "compress(batch.set('attention_mask', x), pad_token_id=PAD)",
        "write `x.view(torch.uint8) != 0`, or keep them as uint8.",
        "got = decompress(compress(batch.set('attention_mask', x.view(torch.uint8) != 0), pad_token_id=PAD))",
        "rollout().set('attention_mask', rollout()['attention_mask'].bool())",
        given="x = batch['attention_mask'].bool(); x.view(torch.uint8).mul_(2)",
    ),
    "no response axis": Case(
        "mp.select_and_pad_to_response(outputs(batch), 'values')",
        "else keep them in the batch, or nest before they are dropped.",
        "kept = batch.select('attention_mask', 'responses').update(outputs(batch))\n"
        "got = mp.select_and_pad_to_response(kept, 'values')['values']",
        "batch['old_log_probs'] * 2",
    ),
    "a response of another registry": Case(
        "mp.select_and_pad_to_response(batch, 'scores')",
        "Pass `registry=` for names of your own;",
        "own = mp.MaskNestingRegistry({'scores': ('response', 0)}, {'response': mp.MaskAxis('loss_mask')})\n"
        "got = mp.select_and_pad_to_response(batch, 'scores', registry=own)['scores']",
        "batch['scores']",
        given="batch = TensorDict({'loss_mask': batch['response_mask'], 'scores': batch['old_log_probs']}, [4])",
    ),
    "select_and_pad_to_response: too narrow": Case(
        "mp.select_and_pad_to_response(batch, 'old_log_probs', width=2)",
        "width is 2; the longest response ends at column 4. Pass at least 4.",
        "got = mp.select_and_pad_to_response(batch, 'old_log_probs', width=4)['old_log_probs']",
        "batch['old_log_probs']",
    ),
    "select_and_pad_to_response: a new field without a pad": Case(
        "mp.select_and_pad_to_response(nested, 'fresh', registry=own)",
        "Nest the batch again with `pad_token_id`, which gives new fields their pad;",
        "again = mp.nest_batch_by_mask(nested, own, pad_token_id=PAD)\n"
        "got = mp.select_and_pad_to_response(again, 'fresh', registry=own)['fresh']",
        "batch['responses'] * 2",
        given="nested['fresh'] = nested['input_ids'] * 2\n"
        "own = mp.RL_FIELDS | {'fresh': MaskNestingSpec('sequence', mp.PAD_TOKEN_ID)}",
    ),
    # ---------------------------------------------------------------- packed batches
    "compress: packed": Case(
        "compress(packed)",
        "Use it as it is, or decompress it first.",
        "got = decompress(compress(decompress(packed), pad_token_id=PAD))",
        "batch",
    ),
    "decompress: nested": Case(
        "decompress(nested)",
        "`unnest_batch_by_mask` restores a nested TensorDict",
        "got = mp.unnest_batch_by_mask(nested)",
        "batch",
    ),
    "decompress: a view": Case(
        "decompress(view)", "and `materialize` decodes a BatchView.", "got = view.materialize()", "batch"
    ),
    "decompress: more bytes": Case(
        "decompress(packed, 'input_ids', max_bytes=100)",
        "Decode fewer rows or fields, or pass `max_bytes=224`.",
        "got = decompress(packed, 'input_ids', max_bytes=224)['input_ids']",
        "batch['input_ids']",
    ),
    "decompress: the meta device": Case(
        "decompress(packed, device='meta')",
        'Pass `device="cpu"`.',
        'got = decompress(packed, device="cpu").cpu()',
        "batch.cpu()",
    ),
    "compress: like a view": Case(
        "compress(outputs(batch), like=view)",
        "for a BatchView, pass `view.layouts_alone()`.",
        "got = decompress(compress(outputs(batch), like=view.layouts_alone(), strict_mask_nesting=True))",
        "outputs(batch)",
    ),
    "compress: like rows in another order": Case(
        "compress(fields, like=packed)",
        "Take the rows of one in the order of the other",
        "order = [list(fields['uid']).index(uid) for uid in batch['uid']]\n"
        "got = decompress(compress(mp.nesting.take(fields, order), like=packed))",
        "batch.select('old_log_probs', 'uid')",
        given="fields = mp.nesting.take(batch.select('old_log_probs', 'uid'), [1, 0, 2, 3])",
    ),
    "one row of a packed batch": Case(
        "packed[1]",
        "Take one row as a slice: `[1:2]`.",
        "got = decompress(packed[1:2])",
        "oracle.take_rows(batch, [1])",
    ),
    "a field of a packed batch": Case(
        "packed[name]",
        "Name fields when you decode: `decompress(packed, name)`, or `view.materialize(name)`.",
        "got = [*decompress(packed, name).keys(), *view.materialize(name).keys()]",
        "['responses', 'responses']",
        given="name = 'responses'",
    ),
    "narrow: the width": Case(
        "packed.narrow('old_log_probs', 0, 2, dim=1)",
        'Rows are taken with take, and widths trimmed by decompress(`widths="trim"`).',
        'got = decompress(packed[2:], widths="trim")["old_log_probs"]',
        "batch['old_log_probs'][2:, :2]",
    ),
    "take_tokens: another layout": Case(
        "packed.take_tokens([[0, 1, 3]])",
        "Select these first, and take the tokens of the others by their own layout.",
        "got = decompress(packed.select('input_ids').take_tokens([[0, 1, 3]]))['input_ids'].values()",
        "batch['input_ids'][0, 2:4]",
    ),
    "cat: other fields": Case(
        "PackedBatch.cat([packed, packed.select('responses')])",
        "Pack the same fields, or decode and drop the others.",
        "got = decompress(PackedBatch.cat([packed.select('responses')] * 2))['responses']",
        "torch.cat([batch['responses']] * 2)",
    ),
    "narrow: a field that stayed padded": Case(
        "packed.narrow('routed_experts', 0, 1)",
        "Pass `dim=2` for the layers of [B, S, layers, k].",
        "got = decompress(packed.narrow('routed_experts', 0, 1, dim=2))['routed_experts']",
        "experts[:, :, :1]",
        given="experts = torch.arange(4 * 7 * 2 * 2).view(4, 7, 2, 2)\n"
        "packed = compress(batch.set('routed_experts', experts), pad_token_id=PAD)",
    ),
    "select: a tuple of fields": Case(
        "packed.select(('responses', 'uid'))",
        "A tuple names one field in a sub-TensorDict: pass several names one by one.",
        "got = decompress(packed.select('responses', 'uid'))",
        "batch.select('responses', 'uid')",
    ),
    "cat: a field that stays padded in another width": Case(
        "PackedBatch.cat([compress(batch, pad_token_id=PAD), compress(wide, pad_token_id=PAD)])",
        "Bring the batches to one prompt and response width, or fix the field.",
        "both = [compress(batch.set('input_ids', own), pad_token_id=PAD), compress(wide, pad_token_id=PAD)]\n"
        "got = decompress(PackedBatch.cat(both))['input_ids']",
        "torch.cat([torch.nn.functional.pad(own, (2, 0)), wide['input_ids']])",
        given="own, batch, wide = batch['input_ids'], batch.clone(), rollout(prompt=5); batch['input_ids'][0, 0] = 9",
    ),
    "cat: other dtypes": Case(
        "PackedBatch.cat([packed, compress(double, pad_token_id=PAD)])",
        "Cast before packing.",
        "double['old_log_probs'] = double['old_log_probs'].float()\n"
        "got = decompress(PackedBatch.cat([packed, compress(double, pad_token_id=PAD)]))['old_log_probs']",
        "torch.cat([batch['old_log_probs']] * 2)",
        given="double = rollout(); double['old_log_probs'] = double['old_log_probs'].double()",
    ),
    "cat: a padded batch": Case(
        "PackedBatch.cat([packed, batch])",
        "Compress what is not packed.",
        "got = decompress(PackedBatch.cat([packed, compress(batch, pad_token_id=PAD)]))",
        "oracle.take_rows(batch, [*range(4)] * 2)",
    ),
    "to_bytes: a set": Case(
        "packed.to_bytes()",
        "Leave it out, or pass `allow_pickle=True` here and where it is read.",
        "data = packed.to_bytes(allow_pickle=True)\n"
        "got = decompress(PackedBatch.from_bytes(data, allow_pickle=True))['tool'][1]",
        "{1}",
        given="sets = NonTensorStack(*[NonTensorData({row}) for row in range(4)])\n"
        "packed = compress(batch.set('tool', sets), pad_token_id=PAD)",
    ),
    "from_bytes: more bytes": Case(
        "PackedBatch.from_bytes(data, max_bytes=100)",
        "Pass a larger max_bytes, or None, if you trust who wrote it.",
        "got = decompress(PackedBatch.from_bytes(data, max_bytes=None))",
        "batch",
        given="data = packed.to_bytes()",
    ),
    # ---------------------------------------------------------------- views
    "BatchView.of: a TensorDict": Case(
        "BatchView.of(batch)",
        "Compress it first",
        "got = BatchView.of(compress(batch, pad_token_id=PAD)).materialize()",
        "batch",
    ),
    "with_fields: a TensorDict": Case(
        "view.with_fields(outputs(batch))",
        "Compress the fields, with `like=view.layouts_alone()` if they have no mask.",
        "got = view.with_fields(compress(outputs(batch), like=view.layouts_alone())).materialize()",
        "batch.clone().update(outputs(batch))",
    ),
    "with_fields: other lengths": Case(
        "view.with_fields(compress(fields))",
        "Compress the new fields with `like=`, or give their mask beside them.",
        "own = compress(fields.select('old_log_probs'), like=packed)\n"
        "got = view.with_fields(own).materialize('old_log_probs')['old_log_probs']",
        "batch['old_log_probs'] * 2",
        given="fields = TensorDict({'attention_mask': torch.ones(4, 7), 'old_log_probs': batch['old_log_probs'] * 2, "
        "'responses': torch.ones(4, 4, dtype=torch.int64)}, [4]).select('attention_mask', 'old_log_probs')\n"
        "fields['response_mask'] = torch.ones(4, 4)",
    ),
    "with_fields: rows in another order": Case(
        "view.with_fields(fields)",
        "Take the rows of one in the order of the other",
        "order = [fields.objects['uid',].data.index(uid) for uid in batch['uid']]\n"
        "got = view.with_fields(fields.take(order)).materialize()",
        "batch",
        given="fields = compress(oracle.take_rows(batch, [1, 0, 2, 3]), pad_token_id=PAD)",
    ),
    "with_fields: known rows in another order": Case(
        "view.with_fields(scores[[1, 0, 2, 3]])",
        "or add the fields first; `to_packed(get=ray.get)` returns fields that can be combined with any rows.",
        "ray = SimpleNamespace(get=None)\n"
        "other = scores[[1, 0, 2, 3]].to_packed(get=ray.get)\n"
        "got = view.with_fields(other).materialize('values')['values']",
        "batch['old_log_probs'][[1, 0, 2, 3]] * 2",
        given="scores = view.with_fields(compress(outputs(batch), like=packed)).select('values')",
    ),
    "with_fields: other batch dims": Case(
        "view.with_fields(compress(fields))",
        "Give the TensorDict the same batch dims before packing.",
        "fields.batch_size = [4]; got = view.with_fields(compress(fields)).materialize('d')['d']",
        "fields['d']",
        given="fields = TensorDict({'d': torch.rand(4, 3)}, [4, 3])",
    ),
    "BatchView.cat: an axis that is split for some fields only": Case(
        "BatchView.cat([fields(own, like=False) for own in (batch, wide)])",
        "Compress all its fields with `like=` the batch that has prompts and responses, or together with these.",
        "got = BatchView.cat([fields(own, like=True) for own in (batch, wide)]).materialize('x')['x']",
        "torch.cat([torch.nn.functional.pad(batch['attention_mask'], (2, 0)), wide['attention_mask']])",
        given="""
wide = rollout(prompt=5)
def fields(own, like):
    packed = compress(own, pad_token_id=PAD)
    known = own.select('attention_mask').set('x', own['attention_mask'])
    more = {'like': packed} if like else {}
    registry = mp.RL_FIELDS | {'x': ('sequence', 0)}
    return BatchView.of(packed).with_fields(compress(known, registry=registry, **more))
""",
    ),
    "materialize: rows elsewhere": Case(
        "away.materialize()",
        "Pass `get=ray.get`.",
        "ray = SimpleNamespace(get=lambda references: [packed for _ in references])\n"
        "got = away.materialize(get=ray.get)",
        "batch",
        given="away = BatchView.at('a reference', BatchMeta.of(packed))",
    ),
    "BatchView.cat: other fields": Case(
        "BatchView.cat([view.with_fields(scores), view])",
        "Add them with with_fields first.",
        "got = BatchView.cat([view.with_fields(scores), view.with_fields(scores)]).materialize('values')['values']",
        "torch.cat([batch['old_log_probs'] * 2] * 2)",
        given="scores = compress(outputs(batch), like=packed)",
    ),
    # ---------------------------------------------------------------- plans
    "plan: options as a dict": Case(
        "plan_micro_batches([1, 2], 3, options={'num_updates': 2})",
        "Pass `PlanOptions(`...).",
        "got = len(plan_micro_batches([1, 2], 3, options=PlanOptions(num_updates=2)).updates)",
        "2",
    ),
    "plan: no loss tokens": Case(
        "plan_micro_batches([3, 2], 8).loss_weights('token-mean')",
        "Make the plan with `loss_tokens`, the sum of each row's loss mask.",
        "got = plan_micro_batches([3, 2], 8, loss_tokens=[1, 1]).loss_weights('token-mean')[0].tolist()",
        "[0.5, 0.5]",
    ),
    "restore: packed tokens": Case(
        "plan.restore(outputs)",
        "for packed tensors, pass `lengths`.",
        "got = plan.restore(outputs, lengths=plan.lengths)",
        "tokens",
        given="tokens, plan = torch.arange(6.0), plan_micro_batches([1, 2, 3], 4)\n"
        "rows = tokens.split([1, 2, 3])\n"
        "outputs = [torch.cat([rows[at] for at in part]) for part in plan.micro_batches]",
    ),
    # ---------------------------------------------------------------- replay
    "PackedInputs: ids of another name": Case(
        "PackedInputs.of(batch)",
        'If they have another name, pass it: `ReplayOptions(input_ids="tokens")`.',
        'got = PackedInputs.of(batch, options=ReplayOptions(input_ids="tokens")).input_ids',
        "PackedInputs.of(rollout()).input_ids",
        given="batch = batch.rename_key_('input_ids', 'tokens')",
    ),
    "PackedInputs: no prompt": Case(
        "PackedInputs.of(batch)",
        'Drop these rows, or pass `ReplayOptions(no_prompt="skip")`.',
        'got = PackedInputs.of(batch, options=ReplayOptions(no_prompt="skip")).input_ids',
        "batch['input_ids'][batch['attention_mask'].bool()][None]",
        given="batch['attention_mask'][2, :3] = 0",
    ),
    "PackedInputs: a document without a prompt": Case(
        "PackedInputs.of(batch)",
        'Pass a mask that is 0 there, `ReplayOptions(scored=("loss_mask",))`, or ReplayOptions(no_prompt="skip").',
        "batch['loss_mask'] = batch['response_mask'].clone(); batch['loss_mask'][:, 2] = 0\n"
        'got = PackedInputs.of(batch, options=ReplayOptions(scored=("loss_mask",))).targets.tolist()',
        "[id for row in range(4) for at, id in enumerate(batch['responses'][row].tolist()) "
        "if at != 2 and batch['response_mask'][row, at]]",
        given="batch['position_ids'] = torch.tensor([[0, 0, 1, 2, 3, 0, 1]] * 4) * batch['attention_mask']",
    ),
    "PackedInputs: no mask of that name": Case(
        "PackedInputs.of(batch, options=ReplayOptions(scored=('loss_mask',)))",
        "Keep it in the batch, or leave it out of ReplayOptions(scored=).",
        "got = PackedInputs.of(batch, options=ReplayOptions()).targets.tolist()",
        "batch['responses'][batch['response_mask'].bool()].tolist()",
    ),
    "PackedInputs: positions that jump": Case(
        "PackedInputs.of(batch)",
        "or drop the field: positions then count the valid tokens of each row.",
        "got = PackedInputs.of(batch.exclude('position_ids')).position_ids[0].tolist()",
        "[at for n in batch['attention_mask'].sum(1).tolist() for at in range(n)]",
        given="batch['position_ids'] = torch.tensor([[0, 5, 1, 2, 3, 9, 1]] * 4)",
    ),
    "PackedInputs: documents of another length": Case(
        "PackedInputs.of(row)",
        "Fix the producer, or drop the field if the row is one document.",
        "got = PackedInputs.of(row.exclude('cu_seqlens')).cu_seqlens.tolist()",
        "[0, 6]",
        given="row = batch[:1].set('cu_seqlens', torch.tensor([[0, 2, 4, 9]]))",
    ),
    "PackedInputs: jagged positions of the response": Case(
        "PackedInputs.of(nested.set('position_ids', nested['responses']))",
        "Nest it under the sequence axis.",
        "batch['position_ids'] = torch.arange(7).expand(4, 7).clone()\n"
        "got = PackedInputs.of(mp.nest_batch_by_mask(batch, pad_token_id=PAD)).position_ids",
        "torch.arange(7).expand(4, 7)[batch['attention_mask'].bool()][None]",
    ),
    "compare: padded without a mask": Case(
        "compare(old, new)",
        "Pass `mask=response_mask`.",
        "response_mask = batch['response_mask']; got = compare(old, new, mask=response_mask).metrics()",
        "compare(nested['old_log_probs'], nested['old_log_probs'] * 1.5).metrics()",
        given="old, new = batch['old_log_probs'], batch['old_log_probs'] * 1.5",
    ),
    "compare: padded and jagged": Case(
        "compare(nested['old_log_probs'], batch['old_log_probs'] * 1.5, batch['response_mask'])",
        "Nest or pad them alike.",
        "nested['new'] = nested['old_log_probs'] * 1.5\n"
        "got = compare(nested['old_log_probs'], nested['new']).metrics()",
        "compare(batch['old_log_probs'], batch['old_log_probs'] * 1.5, batch['response_mask']).metrics()",
    ),
    "compare: a number for a limit": Case(
        "compare(old, old, limit=0.01)",
        "Pass `MismatchLimit(k3=0.01)`.",
        "got = compare(old, old, limit=MismatchLimit(k3=0.01)).metrics()",
        "compare(old, old).metrics()",
        given="old = nested['old_log_probs']",
    ),
    # ---------------------------------------------------------------- layouts
    "cu_seqlens without their 0": Case(
        "RowLayout.from_cu_seqlens([2, 5])",
        "Pass the cumulative row lengths with their leading 0.",
        "got = RowLayout.from_cu_seqlens([0, 2, 5]).lengths.tolist()",
        "[2, 3]",
    ),
    "lengths beyond the width": Case(
        "RowLayout.from_lengths([2, 9], width=4)",
        "Clip the lengths or give the true width.",
        "got = RowLayout.from_lengths([2, 9], width=9).width",
        "9",
    ),
    "a wrong num_tokens": Case(
        "RowLayout.from_mask(batch['attention_mask'], num_tokens=3)",
        "Give the true num_tokens, or leave it out",
        "got = RowLayout.from_mask(batch['attention_mask']).num_tokens",
        "int(batch['attention_mask'].sum())",
    ),
}


def same(one: Any, other: Any) -> None:
    if isinstance(one, TensorDictBase):
        oracle.assert_same_batch(one, other)
    elif isinstance(one, Tensor):
        oracle.assert_same_tensor(one, other)
    else:
        assert type(one) is type(other)
        assert one == other


@pytest.mark.filterwarnings("ignore::maskpack.errors.MaskpackWarning")
@pytest.mark.parametrize("name", CASES)
def test_the_remedy_of_an_error_is_a_program_that_runs(name: str) -> None:
    case, scope = CASES[name], names()
    exec(case.given, scope)
    with pytest.raises(MaskpackError) as caught:
        exec(case.wrong, scope)
    assert case.says.replace("`", "") in str(caught.value)
    for code in re.findall("`(.*?)`", case.says):
        assert code in case.right
    exec(case.right, scope)
    same(scope["got"], eval(case.want, scope))
