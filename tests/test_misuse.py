"""Misuse: what a newcomer hands over by mistake ends in an error of maskpack's own that says what to do, everywhere."""

from __future__ import annotations

import math
import pickle
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from samples import calls_of, freeze
from tensordict import TensorDict

import maskpack as mp
from maskpack import ops, testing
from maskpack.adapters.transformers.collator import PackedCollator
from maskpack.adapters.trl import packed as packed_trainer
from maskpack.dispatch import group as dispatch
from maskpack.ops.attention import packed_attention
from maskpack.views import BatchMeta

PARTS = (mp, mp.nesting, mp.planning, mp.replay, mp.views, testing)
EXPORTED = {name: getattr(part, name) for part in PARTS for name in part.__all__}
PUBLIC = EXPORTED | {
    "ops": ops,
    "TensorDict": TensorDict,
    "WorkerGroup": dispatch.WorkerGroup,
    "endpoint": dispatch.endpoint,
    "BatchMeta": BatchMeta,
    "PackedCollator": PackedCollator,
    "packed_trainer": packed_trainer,
    "packed_attention": packed_attention,
    "math": math,
    "np": np,
    "pickle": pickle,
    "SimpleNamespace": SimpleNamespace,
    "torch": torch,
    "__file__": __file__,
    "LENGTHS": mp.MaskNestingRegistry(
        {"x": mp.MaskNestingSpec("rows")}, {"rows": mp.MaskAxis("lengths", "lengths", head=("x",))}
    ),
    "FLAT": mp.MaskNestingRegistry({"x": mp.MaskNestingSpec("rows")}, {"rows": mp.MaskAxis("cu", "cu_seqlens")}),
}


def names():
    """What the lines below may use, beside the public names."""
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
    batch = TensorDict({"attention_mask": mask, "input_ids": mask * 5, "responses": mask[:, 2:] * 5}, batch_size=[2])
    packed = mp.compress(batch, pad_token_id=0)
    nested = mp.nest_batch_by_mask(batch, pad_token_id=0)
    layout = mp.RowLayout.from_mask(mask)
    plan = mp.planning.plan_micro_batches([3, 2], 3)
    hidden = torch.ones(5, 4)
    rows = torch.tensor([0, 3, 5], dtype=torch.int32)
    return PUBLIC | {
        "m": mask,
        "b": batch,
        "p": packed,
        "n": nested,
        "L": layout,
        "plan": plan,
        "view": mp.views.BatchView.of(packed),
        "batch_meta": BatchMeta.of(packed),
        "packed": ops.pack(batch["input_ids"], layout),
        "values": ops.pack(batch["input_ids"], layout),
        "meta": torch.zeros(2, 4, device="meta"),
        "jagged": nested["input_ids"],
        "strided": torch.nested.nested_tensor([torch.ones(2), torch.ones(1)]),
        "sparse": mask.to_sparse(),
        "data": packed.to_bytes(),
        "inputs": mp.replay.PackedInputs.of(batch),
        "hidden": hidden,
        "head": torch.ones(7, 4),
        "ids": torch.arange(5),
        "q": torch.ones(5, 2, 8),
        "bounds": rows,
        "rank_plans": mp.planning.plan_ranks([3, 2], 2, 9),
        "collate": PackedCollator(),
        "sample": {"input_ids": [1, 2, 3]},
        "spec": mp.MaskNestingSpec("sequence"),
        "model": SimpleNamespace(
            hidden=lambda inputs: torch.ones(inputs.input_ids.shape[1], 4),
            dense_hidden=print,
            self_check=lambda *_: None,
            head=torch.ones(7, 4),
        ),
        "group": dispatch.WorkerGroup([None], pad_token_id=0),
    }


MISUSES = """
# ---- nothing
…(None) <- compress ; from_engine ; nest_batch_by_mask ; decompress ; unnest_batch_by_mask ;
    select_and_pad_to_response ; p.take ; p.split ; PackedBatch.cat ; PackedBatch.from_bytes ; BatchView.of ;
    BatchView.cat ; view.take ; view.with_fields ; BatchMeta.of ; RowLayout.from_mask ; RowLayout.from_lengths ;
    RowLayout.from_cu_seqlens ; RowLayout.cat ; L.take ; MaskAxis ; MaskNestingRegistry ;
    MaskNestingRegistry.from_dict ; rank_plans.for_rows ; plan.apply ; plan.restore ; prefix_tree ; inputs.shard ;
    PackedInputs.of ; report ; assert_covered ; check ; packed_trainer ; WorkerGroup ; group.put ; group.pack
# ---- compress, and the arguments that it shares with nesting
compress(b, pad_token_id=0, …) <- strict_mask_nesting="yes" ; verify="always" ; like=m ; like=b ; codec="gzip" ;
    codec=["zstd"]
compress(…, registry=LENGTHS) <- TensorDict({"x": m, "lengths": torch.tensor([9, 1])}, [2]) ;
    TensorDict({"x": m, "lengths": m}, [2]) ; TensorDict({"x": m, "lengths": torch.tensor([1, 2, 3])}, [])
compress(…, pad_token_id=0) <- TensorDict({"attention_mask": m[:, 0], "input_ids": m}, [2]) ;
    TensorDict({"attention_mask": m, "prompts": m[:, :1], "responses": m[:, :1]}, [2]) ;
    TensorDict({"attention_mask": m, "responses": torch.zeros(2, 9)}, [2])
compress(b, …) <- registry=None ; registry={"input_ids": "sequence"} ; pad_token_id="0"
compress(…) <- p ; b ; TensorDict({"x": meta}, [2]) ;
    TensorDict({"_maskpack": TensorDict({"spans": m}, [2])}, [2]) ; TensorDict({"x": strided}, [2]) ;
    TensorDict({"x": sparse}, [2]) ;
    TensorDict({"x": torch.quantize_per_tensor(torch.ones(2, 3), 0.1, 0, torch.qint8)}, [2]) ;
    b.clone().set("v", m), registry=RL_FIELDS | {"v": MaskNestingSpec("sequence", 0, -7)}, pad_token_id=0 ;
    b.clone().set("v", m), registry=RL_FIELDS | {"v": MaskNestingSpec("sequence", 0.5)}, pad_token_id=0 ;
    TensorDict({"x": torch.zeros(5), "cu": torch.tensor([1, 5])}, []), registry=FLAT ;
    TensorDict({"x": torch.zeros(5), "cu": torch.tensor([0, 7, 5])}, []), registry=FLAT
from_engine(…, prompts=[[1]]) <- [{"output_ids": "ab"}] ; [{"output_ids": [[1], [2]]}] ;
    [{"output_ids": [1], "meta_info": {"output_token_logprobs": [1.0]}}] ;
    [{"output_ids": [1], "meta_info": {"output_token_logprobs": 1}}] ;
    [{"output_ids": [1], "meta_info": {"routed_experts": [[1], [2, 3]]}}] ; [SimpleNamespace(outputs=3)] ;
    [SimpleNamespace(outputs=[3])]
from_engine([{"output_ids": [1]}], …) <- prompts=3 ; prompts=[3] ; prompts=[[1]], response_width=0 ;
    prompts=[[1]], prompt_width=-1 ; prompts=[[1]], experts_shape=3
from_engine([{"meta_info": 3}])
nest_batch_by_mask(b, …) <- "RL_FIELDS" ; pad_token_id=None ; pad_token_id=0, strict_mask_nesting="no" ;
    pad_token_id=0, verify=1
nest_batch_by_mask(…) <- TensorDict({"x": meta}, [2]) ; TensorDict({"_maskpack": m}, [2])
take(…, [0]) <- p ; TensorDict({}, []) ; TensorDict({"x": strided}, [2]) ; TensorDict({"x": sparse}, [2])
take(b, …) <- 0 ; [2] ; "first"
take(n, [True])
cat(…) <- b ; [] ; [b, p] ; [b, n] ; [b, b.float()] ; [n, TensorDict({}, [])]
# ---- decompress, unnest and the response axis
decompress(p, …) <- ["responses"] ; None ; ("responses", "input_ids") ; format="jagged" ; widths="short" ;
    device="cuda:99" ; format="nested", device="meta"
unnest_batch_by_mask(n, …) <- "nope" ; ["responses"] ; None
unnest_batch_by_mask(…) <- b ; TensorDict({"_maskpack": m}, [2])
select_and_pad_to_response(n, …) <- "nope" ; ["responses"] ; None ; registry=None
select_and_pad_to_response(…) <- b.select("attention_mask") ; TensorDict({"_maskpack": m}, [2])
extract_response(b, …) <- None ; meta ; strided ; sparse ; m, registry=3
extract_response(…) <- None, m ; b.select("responses"), m
# ---- PackedBatch
p[…] <- 0 ; 5 ; -3 ; True ; torch.tensor(1) ; "responses" ; ("responses",) ; [0, 1], [0] ; torch.tensor([True]) ;
    [1 << 70] ; [-3] ; slice("a", "b")
p.narrow(…, 0, 1) <- "nope" ; ["responses"] ; 3 ; "responses"
p.narrow("responses", 0, 1, dim="layers")
p.select()
p.select(…) <- "nope" ; ["responses"] ; 3
p.select("responses").take_tokens(None)
p.take_tokens(…) <- [[0, 0, 1]], "nope" ; [[0, 0, 1]]
p.split(…) <- 0 ; [2, -1, 1] ; [[1], [1, 0]] ; [1 << 70]
p.chunk(…) <- 0 ; True
p.lengths("nope")
compress(TensorDict({"x": torch.ones(2)}, [2])).lengths("sequence")
p.pin_memory()
p.to_bytes(…) <- allow_pickle="no" ; checksum="crc32"
compress(TensorDict({"x": torch.ones(2, 1)}, [])).take([0])
compress(TensorDict({"x": torch.ones(2, 1)}, [])).split(1)
compress(b.clone().set_non_tensor("o", object()), pad_token_id=0).to_bytes()
PackedBatch.cat(…) <- p ; [p, compress(b.select("attention_mask"))] ; [p, compress(b.float(), pad_token_id=0)]
PackedBatch.from_bytes(…) <- b"" ; data[:-1] ; data, allow_pickle="no" ; np.zeros((4, 4))[::2, ::2] ;
    pickle.dumps(p)
PackedBatch.load(…) <- 3 ; __file__ ; __file__, allow_pickle=1
p.save(…) <- 3 ; "/tmp", allow_pickle="no"
# ---- views
BatchView.at(p, None)
BatchView.at("elsewhere", batch_meta).materialize()
BatchView.at("elsewhere", batch_meta).materialize(…) <- get=lambda refs: None ; get=lambda refs: [b] ;
    get=lambda refs: [p[:1]]
BatchView.cat(…) <- view ; [view, BatchView.of(compress(b.select("attention_mask")))]
view[…] <- -1 ; "responses" ; 1.5 ; [7]
view.select()
view.select(…) <- "nope" ; ["responses"] ; 3
view.split(…) <- 0 ; "1" ; [5]
view.chunk(0)
view.lengths("nope")
view.with_fields(p[:1])
view.materialize(…) <- "nope" ; ["responses"] ; 3 ; format="jagged" ; device="nowhere"
view.to_packed(…) <- "nope" ; ["responses"]
BatchView.of(compress(TensorDict({"x": torch.ones(2)}, [2]))).lengths("sequence")
batch_meta.take([0.5])
# ---- RowLayout
RowLayout.from_mask(…) <- strided ; meta ; sparse ; m, num_tokens=4 ; m, num_tokens="5"
RowLayout.from_lengths(…) <- [-1] ; [[1], [1, 2]] ; [], -1 ; [1 << 62, 1 << 62] ; [1], device="nowhere"
RowLayout.from_cu_seqlens(…) <- torch.tensor([]) ; torch.tensor([1, 3]) ; torch.tensor([[0, 3]]) ;
    torch.tensor([0, 3]), 2 ; torch.tensor([0, 3]), "3" ; meta[0].long()
RowLayout.from_spans([0], [1], …) <- [1], "3" ; [1], 3, anchor=9 ; [1], 3, device="nowhere" ;
    [1, 2**63 - 1, 2**63 - 1, 2], 4
RowLayout.from_spans(…) <- [0], [1, 1], [1], 3 ; [0, 1], [1, 1], [2], 3 ; [0, 0], [1, 1], [3, -1], 3 ;
    ["a"], [1], [1], 3 ; [2**63 - 1], [5], [1], 4 ; [1 << 31], [1], [1], (1 << 31) + 1, device="meta"
RowLayout.from_lengths([1 << 30, 1 << 30]).cu_seqlens
RowLayout.from_lengths([1 << 30, 1 << 30]).to("meta")
RowLayout.cat(L)
L.take([9])
L.narrow(…) <- -1, 2 ; 2, 1 ; 0, 9
L.to("nowhere")
L.to_mask("bool")
# ---- ops
ops.pack(…, L) <- None ; jagged ; meta
ops.pack(…) <- b["input_ids"], m[0, 0] ; b["input_ids"], m[:1] ; m, L, backend="cuda" ; m, L, backend="triton"
ops.unpack(values, L, …) <- "0" ; 0.5 ; torch.zeros(3) ; torch.zeros(2, device="meta") ; [0, 0] ; backend="x"
ops.unpack(…) <- values[:1], m ; None, L
ops.packed_log_probs(hidden, head, ids, …) <- temperature=0 ; keep=-1 ; keep=True ; entropy="yes" ;
    backend="cuda" ; group="world" ; logits=30.0 ; logits=ops.Logits(softcap=0) ; logits=ops.Logits(scale=None) ;
    logits=ops.Logits(lora_scale=-1.0) ; logits=ops.Logits(bias=1.0) ; logits=ops.Logits(bias=hidden) ;
    logits=ops.Logits(lora_a=hidden) ; logits=ops.Logits(lora_a=hidden, lora_b=hidden) ;
    logits=ops.Logits(lora_b=head) ; logits=ops.Logits(bias=torch.zeros(len(head), device="meta")) ;
    logits=ops.Logits(bias=torch.zeros(len(head)).to_sparse()) ;
    logits=ops.Logits(bias=torch.zeros(len(head), dtype=torch.int64)) ;
    logits=ops.Logits(scale=1e38, softcap=1e-38)
ops.packed_log_probs(hidden, …) <- head, ids.float() ; head, ids + 100 ; head, ids - 1 ; head.double(), ids ;
    head.T, ids ; head[:0], ids ; head, ids.to("meta")
ops.packed_log_probs(…, head, ids) <- None ; hidden[None] ; hidden.to("meta") ; hidden.to_sparse()
ops.packed_log_probs(…) <- hidden.int(), head.int(), ids ; hidden.double(), head.double(), ids, backend="triton"
packed_attention(q, q, q, bounds, 3, scale=1.0, …) <- window=0 ; window="2" ; softcap=0 ; softcap="5" ;
    backend="sdpa" ; backend="flash" ; group=2
packed_attention(q, q, q, …, 3, scale=1.0) <- [0, 3, 5] ; bounds.long() ; bounds[:0] ; bounds[None] ;
    bounds.to("meta") ; torch.tensor([0, 3, 3, 5], dtype=torch.int32) ; torch.tensor([0, 3, 4], dtype=torch.int32)
packed_attention(q, q, q, bounds, …) <- 2, scale=1.0 ; "3", scale=1.0 ; 3, scale="1"
packed_attention(q, …) <- q[:, :1].expand(5, 3, 8), q, bounds, 3, scale=1.0 ; q[:4], q[:4], bounds, 3, scale=1.0 ;
    q[:, :0], q[:, :0], bounds, 3, scale=1.0 ; q, q.bfloat16(), bounds, 3, scale=1.0
packed_attention(…) <- None, q, q, bounds, 3, scale=1.0 ; q[:, 0], q, q, bounds, 3, scale=1.0
# ---- registry
MaskNestingSpec("m", …) <- [*range(9)]
MaskNestingSpec("m", 0, …) <- 0 ; 1, "rle" ; 1, ("fast",) ; 1, ("concat:a",)
MaskNestingSpec(…) <- 3 ; "m", "0"
MaskAxis("m", …) <- form="Mask" ; part="middle" ; part="head" ; part="head", head="prompts" ;
    part="tail", tail="responses" ; part="head", head=3 ; part="head", head=(3,) ; padded="both" ; shift=True ;
    shift=0.5 ; part="prefix", shift=-1
MaskNestingRegistry({}, …) <- {"sequence": MaskAxis("m", shift=-1)} ;
    {"response": (MaskAxis("m", shift=-1), MaskAxis("m"))} ; {"a": None} ; {"a": ()} ; {3: MaskAxis("m")}
MaskNestingRegistry(…) <- {"x": "sequence"} ; {3: spec}
RL_FIELDS | {3: spec}
{"x": 3} | RL_FIELDS
MaskNestingRegistry.from_dict(…) <- {"field": {}} ; {"fields": None} ; {"fields": {"x": None}} ;
    {"fields": {"x": {}}} ; {"fields": {"x": {"mask": 3}}} ; {"fields": {"x": {"mask": []}}} ;
    {"fields": {"x": {"mask": "m", "pad": "0"}}} ; {"fields": {"x": {"mask": "m", "pad": None}}} ;
    {"fields": {"x": {"mask": "m", "pad": [0, "x"]}}} ; {"fields": {"x": {"mask": "m", "ragged_dim": "1"}}} ;
    {"fields": {"x": {"mask": "m", "hints": "rle"}}} ; {"fields": {"x": {"mask": "m", "hints": [3]}}} ;
    {"fields": {"x": {"mask": "m", "padding": 0}}} ; {"fields": {3: {"mask": "m"}}} ; {"axes": []} ;
    {"axes": {"a": None}} ; {"axes": {"a": {}}} ; {"axes": {"a": {"source": 3}}} ;
    {"axes": {"a": {"source": "m", "form": "x"}}} ;
    {"axes": {"a": {"source": "m", "head": "prompts", "part": "head"}}} ;
    {"axes": {"a": {"source": "m", "head": [3], "part": "head"}}} ; {"axes": {3: {"source": "m"}}}
MaskNestingRegistry({"a/b": spec}).to_dict()
# ---- plans
plan_micro_batches([1, 2], 10, …) <- options=PlanOptions(cost=lambda n: None) ;
    options=PlanOptions(cost=lambda n: [1]) ; options=PlanOptions(cost=lambda n: -n) ;
    options=PlanOptions(cost=lambda n: n / None) ; options=PlanOptions(work=lambda n: 1 // 0) ; groups=3 ;
    groups=[1] ; loss_tokens=[1] ; loss_tokens=[-1, 1] ; loss_tokens="ab" ; loss_tokens=[math.nan, 1]
plan_micro_batches([3, 2], …, options=PlanOptions(cost=np.ones_like)) <- 0 ; True ; math.nan
plan_micro_batches(…, 10) <- None ; [-1] ; [[1], [1, 2]] ; [True]
plan_micro_batches(…) <- [3, 2], 10, options=3 ; [1, 2], 0
plan_ranks([1, 2], …) <- 0, 10 ; 2, "10" ; 2, 10, groups=[1] ; 2, 10, loss_tokens=[1]
plan_ranks(…) <- [3, 2], 2, 10, options={"num_updates": 2} ; None, 2, 10
PlanOptions(…) <- cost="flops" ; num_updates=0 ; work=3
BatchView.of(p).to_packed(get="ray.get")
BatchView.at(p, batch_meta).materialize(get=3)
balance_rows([1, 2], …) <- 2, cost=lambda n: {}["a"] ; 0 ; 2, cost="padded" ; 2, groups=[1]
balance_rows(…) <- None, 2 ; [1.5], 2
rank_plans.for_rows(…) <- {0: [9]} ; {0: np.array([-1])}
plan.with_count(…) <- 0 ; -1 ; [3, 3]
plan.apply(…) <- strided ; TensorDict({}, []) ; b, 7 ; b, -1
plan.restore([torch.zeros(3), torch.zeros(2)], …) <- lengths=[3] ; lengths="ab" ; lengths=[3.0, 2.0]
plan.restore(…) <- [] ; m ; [m[:1], m[:1, :2]] ; [None, None] ; [b[:1], b[:1].exclude("responses")] ;
    [b[:1], p[:1]] ; [[1], [2, 3]] ; [m[:1], meta[:1]] ; [torch.tensor(1), torch.tensor(2)] ;
    [torch.zeros(3), torch.zeros(3)], lengths=[3, 2] ; [[1], [2]], lengths=[3, 2] ; b
plan.loss_weights(…) <- "mean" ; "token-mean" ; "token-mean", gradients="max"
plan_micro_batches([1, 2], 10, loss_tokens=[1, 1]).loss_weights(…) <- "token-mean", 5 ; "token-mean", "0"
agree_on_count(plan)
# ---- replay
prefix_tree(…) <- b, options=ReplayOptions(input_ids="absent") ; b, options="x"
ReplayOptions(…) <- min_shared=0 ; share_prefixes="yes" ; routed_experts=1 ; keep=1.5 ; input_ids=3 ;
    registry=None ; multiple_of=0 ; no_prompt="drop"
PrefixTree.from_ids([1, 2], …) <- [0, 1] ; [0, 2], [0] ; None ; [0, 2], min_shared=1.5 ; [0, 2**63 - 1, -2, 2] ;
    [0, 2, 1, 2]
PrefixTree.from_ids([0.5, 2], [0, 2])
PrefixTree.from_groups([3, 2], …) <- ["a"], [1, 1] ; "ab", [1, 1] ; [{}, {}], [1, 1] ; ["a", "a"], [3, 3] ;
    ["a", "a"], [-1, 1]
PrefixTree.from_groups([-3, 4], ["a", "a"], [0, 4])
PrefixTree.from_groups([3, 2], ["a", "a"], [1, 1]).take([2])
plan_micro_batches(…) <- [3], 9, tree=PrefixTree.from_groups([3], ["a"], [1]), options=PlanOptions(cost="padded") ;
    [3, 2], 9, tree=PrefixTree.from_groups([3, 3], ["a", "a"], [1, 1]) ; [3, 2], 9, tree=[1, 2]
response_log_probs(model, b, …) <- options=None ; plan=3 ; plan=plan_micro_batches([1], 9)
PackedInputs.of(…) <- b, options=3 ; b.exclude("input_ids") ; b.exclude("attention_mask") ;
    p.take([0]), device="nowhere" ; b.clone().set("input_ids", m.bool()) ;
    b.clone().set("input_ids", m[..., None]) ; b.clone().set("position_ids", m[:, :2]) ;
    b.clone().set("position_ids", m.float()) ; b.clone().set("pixel_values", m)
MicroBatchMeter("cuda:77")
response_values(…) <- None, b, print ; model, b, None ; model, b, print, plan=3
response_outputs(model, b, …) <- log_probs=False ; log_probs=None ; entropy="yes" ; heads=print ;
    heads={"value": None}
response_outputs(model, None)
compare(m.float(), …) <- m.float() ; m.float()[:1], m ; m.float(), m, clip="0.2" ; m.float(), m, clip=2 ;
    m.float(), m, limit=0.1 ; m.float() + 1, m, limit=MismatchLimit(k3=0.1)
compare(…) <- m, m, m ; None, m.float(), m
MismatchLimit(…) <- outside=1.5 ; k3="0.1" ; k3=0.1, action="stop"
MismatchLimit()
# ---- report
report(b)
# ---- testing
assert_exact(…) <- view, view ; meta, meta ; sparse, sparse ; strided, strided ;
    {"k": [meta]}, {"k": [meta.clone()]}
assert_covered(…) <- b ; b, None ; b, pad_token_id="0"
check(…) <- b, None ; b, pad_token_id="0" ; b, eos_token_id="0"
# ---- collator
packed_trainer(print)
PackedCollator(…) <- multiple_of=0 ; seq_idx="no" ; extras=None ; extras=("input_ids",)
collate(…) <- [None] ; [{}] ; [{"input_ids": None}] ; [{"input_ids": [0.5]}] ; [{"input_ids": [[1]]}] ;
    [{"input_ids": [1, 2], "attention_mask": [1, 0]}] ; [{"input_ids": [1, 2], "seq_lengths": [1]}] ;
    [{"input_ids": [1, 2], "seq_lengths": [3, -1]}] ; [{"input_ids": [1, 2], "position_ids": [0, 1]}] ;
    [sample, {"input_ids": [1], "labels": [1]}] ; {"input_ids": [[1, 2]]}
collate.micro_batches([sample], …) <- 0 ; 8, options=0 ; 8, loss_tokens=[1]
collate.micro_batches(None, 8)
# ---- fields of another memory, and numbers beyond memory
select_and_pad_to_response(…) <- b.clone().set("x", strided), "x" ; b.clone().set_non_tensor("o", 3), "o"
extract_response(…) <- n, torch.zeros(2, 5) ; n, n["responses"]
nest_batch_by_mask(…, pad_token_id=0) <- b.clone().set("prompts", m[:, :1]) ; n.clone().set("x", strided) ; n[0]
nest_batch_by_mask(…) <- TensorDict({"x": m, "m": m}, [2]), {"x": MaskNestingSpec("m", ragged_dim=2)} ;
    TensorDict({"x": m[:, 1:], "m": m}, [2]), {"x": MaskNestingSpec("m")} ;
    TensorDict({"x": m, "m": m[:, :, None]}, [2]), {"x": MaskNestingSpec("m")} ;
    TensorDict({"x": m.byte(), "m": m}, [2]), {"x": MaskNestingSpec("m", -100)}
cat([b, b.select("responses")])
unnest_batch_by_mask(…) <- n.clone().set("x", strided) ; n.clone().set("responses", strided) ; n[0] ;
    n.apply(lambda x: x + 1)
compress(…) <- b.unsqueeze(0), pad_token_id=0 ; b.exclude("attention_mask"), pad_token_id=0, like=p[:1] ;
    TensorDict({"x": m, "m": sparse}, [2]), registry={"x": MaskNestingSpec("m")} ;
    TensorDict({"x": m, "m": m}, [2]), registry={"x": MaskNestingSpec("m", 10**400)} ;
    TensorDict({"x": m.float(), "m": m}, [2]), registry={"x": MaskNestingSpec("m", 1j)}
compress(TensorDict({"x": torch.zeros(2, *[1] * 40)}, [2])).to_bytes()
compress(TensorDict({"x\\ud800": torch.zeros(2)}, [2])).to_bytes()
compress(b.clone().set_non_tensor("o", lambda: 3), pad_token_id=0).to_bytes(allow_pickle=True)
p.save("")
PackedBatch.load("\\0")
list(plan.apply(n.clone().set("x", strided)))
list(plan.apply(TensorDict({"x": sparse}, [2])))
plan.restore(…) <- [b[:1], b[:1].float()] ; [p[:1], compress(b[1:].float(), pad_token_id=0)]
plan.with_count(10**30)
PlanOptions(num_updates=10**30)
plan_micro_batches(np.array([2**63], np.uint64), 10)
plan_ranks([1, 2], 10**30, 10)
p.chunk(10**30)
RowLayout.from_lengths([], 10**30)
ReplayOptions(multiple_of=10**30)
PackedCollator(multiple_of=10**30)
collate([{"input_ids": torch.tensor([1, 2]).to_sparse()}])
"""
DISPATCH = """
WorkerGroup([None], …) <- dp_ranks="0" ; dp_ranks=[0.0] ; dp_ranks=[] ; collect=True ; registry=None ;
    pad_token_id="0" ; strict_mask_nesting="no" ; verify="x" ; codec="gzip"
WorkerGroup([None] * 3, …) <- dp_ranks=[0, 2, 2] ; collect=[True, True, False] ; collect=[True] ;
    dp_ranks=[0, 0, 1], collect=[True, True, True]
WorkerGroup([])
WorkerGroup.launch(dict, …) <- 2, factor=3.0 ; 2, worker_kwargs=3 ; 0 ; 2, peers=0
WorkerGroup.launch(3, 2)
group.call("update", …) <- None ; b, format="jagged" ; b, timeout=-1 ; b, grace=None ; p, rank_plans ;
    p, balance=[[0]] ; p, balance=[["a"]] ; p, balance=[[0, 5]] ; p, balance=[[[0], [0, 1]]] ; p, plan=3 ;
    p, plan=rank_plans ; p, p[:1] ; TensorDict({"x": meta}, [2])
group.call(None, b)
group.submit("update", b, format=3)
group.put(…) <- p, onto=p ; p, balance=3
group.plan(…, 10) <- b ; None ; compress(TensorDict({"x": torch.ones(2)}, [2]))
group.plan(p, …) <- "10" ; 10, lengths="ab" ; 10, lengths=[3, 2], options="flops"
group.pack(p)
endpoint(…) <- 3 ; format="jagged" ; device=3.5 ; fields="values" ; fields=3 ; fields=[3] ; micro_batches="yes"
"""
LINES = calls_of(MISUSES + DISPATCH)
GIVEN = names()
HELD = {name: freeze(GIVEN[name]) for name in ("b", "n", "m", "values")}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("line", LINES)
def test_misuse_is_a_named_error(line):
    with pytest.raises(mp.MaskpackError) as caught:
        eval(line, dict(GIVEN))
    text = str(caught.value)
    assert re.match(r"[A-Za-z_.]+(\('.*'\))?: .", text), text
    assert text.endswith("."), text
    assert len(text) < 600, text
    assert " object at 0x" not in text, text
    assert str(pickle.loads(pickle.dumps(caught.value))) == text
    assert {name: freeze(GIVEN[name]) for name in HELD} == HELD


WORKS = """
compress(b, …) <- pad_token_id=np.int64(0) ; registry=dict(RL_FIELDS), pad_token_id=0
decompress(p, …) <- *["responses", "input_ids"] ; ("responses",) ; device=torch.device("cpu")
p[…] <- 0:1 ; -1: ; 0, 1 ; np.array([0, -1]) ; torch.tensor([True, False]) ; :100
p.split(…) <- np.int64(1) ; 10**30
p.chunk(np.int32(5))
PackedBatch.cat(…) <- (p, p) ; iter([p, p])
BatchView.at("elsewhere", batch_meta).materialize(get=lambda refs: (p for _ in refs))
RowLayout.from_lengths(np.array([1, 2], np.uint8), np.int64(3))
RowLayout.from_cu_seqlens(…) <- [0, 3, 5] ; np.array([0, 3, 5])
ops.pack((m, m), L)
ops.unpack(…) <- values, L, np.int64(3) ; values.float(), L, np.float32(0.5)
ops.packed_log_probs(hidden, head, ids, …) <- temperature=np.float32(1), keep=np.int64(8) ; group=None
MaskNestingSpec("m", …) <- np.float32(0.5) ; [np.int64(0), EDGE]
MaskAxis("m", part="head", head=["prompts"])
plan_micro_batches(torch.tensor([3, 2]), np.int64(3), options=PlanOptions(num_updates=np.int32(2)))
plan_micro_batches([3, 2], 10**400)
PackedInputs.of(b, options=ReplayOptions(multiple_of=np.int64(4)))
collate.micro_batches([sample], np.int64(8))
PackedCollator(extras=["w"])
"""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("line", calls_of(WORKS))
def test_what_looks_like_misuse_and_works(line):
    eval(line, dict(GIVEN))


def test_every_public_function_is_misused():
    called = {
        name
        for name, value in EXPORTED.items()
        if callable(value) and not (isinstance(value, type) and issubclass(value, Exception))
    }
    called -= {
        "Finding",
        "MaskpackWarning",
        "MicroBatchPlan",
        "Mismatch",
        "RankPlans",
        "ReplayModel",
        "ResponseOutputs",
    }  # results, or no function
    assert {name for name in called if not any(re.search(rf"\b{name}\b", line) for line in LINES)} == set()
    assert len(set(LINES)) == len(LINES)
