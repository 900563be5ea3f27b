"""The house: what importing maskpack brings in, which module may import which, and how large a file may grow."""

from __future__ import annotations

import ast
import inspect
import itertools
import subprocess
import sys
from pathlib import Path

import pytest

import maskpack as mp

HOUSE = Path(mp.__file__).parent
SOURCES = {".".join(path.relative_to(HOUSE).with_suffix("").parts): path for path in sorted(HOUSE.rglob("*.py"))}
HEAVY = {"ray", "transformers", "triton", "rich", "verl", "transfer_queue", "torchrl", "trl", "accelerate"}

FLOORS = [
    ["errors"],
    ["arguments"],
    ["bins", "costs"],
    ["balance", "budget", "loss_weights"],
    ["plan"],
    ["rank_plans"],
    ["tensors"],
    ["keys"],
    ["backends", "pool", "registry", "rows"],
    ["runs"],
    ["words", "tree", "options", "scan_kernels", "attention"],
    ["scan", "compact", "objects", "origins", "segments", "wire"],
    ["coverage", "encodings", "codec", "run_lines", "tasks"],
    ["layout", "sharing"],
    ["choice", "bools"],
    ["ops", "jagged", "axes"],
    ["schema", "sources"],
    ["checks"],
    ["verify"],
    ["survey"],
    ["nesting", "cover"],
    ["contents", "response"],
    ["joining", "manifest", "reading", "recipes"],
    ["pickles", "staging"],
    ["packed"],
    ["report", "strands"],
    ["views"],
    ["micro_batches", "agreement", "recorder", "replay"],
    ["division", "parcels", "placement"],
    ["serving"],
    ["calls"],
    ["dispatch"],
    ["adapters"],
    ["saved"],
    ["demo", "cli", "doctor", "__main__"],
]
"""Lowest first; a module imports from lower floors only."""
TOP = len(FLOORS) - 1
PLANNERS = {"arguments", "bins", "costs", "loss_weights", "balance", "budget", "plan", "rank_plans"}
"""Modules that work with numbers alone: they import no torch."""
KERNELS = {"scan_kernels", "ops._triton", "ops._decode_kernel", "ops._log_prob_kernels"}
"""The modules that import Triton; they are imported inside functions."""
FRAMEWORKS = {
    "transformers": {"transformers"},
    "verl": {"verl"},
    "verl_packed": {"verl"},
    "verl_dispatch": {"verl", "ray"},
    "transferqueue": {"transfer_queue"},
    "torchrl": {"torchrl"},
}
"""What each adapter may import beside the core."""
MAY_IMPORT_RAY = {"calls", "placement", "dispatch", "demo", "cli", "__main__"}


def room(module):
    """The name on the floor plan: `ops._torch` is part of `ops`, every `demo...` is part of `demo`."""
    name = module.split(".")[0]
    return "demo" if name.startswith("demo") else name


def floor(module):
    for number, rooms in enumerate(FLOORS):
        if room(module) in rooms:
            return number
    raise AssertionError(f"maskpack/{module}.py has no floor; give it one in FLOORS.")


def imports(source, module="module"):
    """Every module that `source` imports, wherever in the file; names inside maskpack begin with a dot."""
    package = [part for part in module.split(".")[:-1] if part != "__init__"]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield _local(alias.name)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join(["maskpack", *package[: len(package) - node.level + 1], *base.split(".")]).rstrip(".")
            if base == "maskpack":
                for alias in node.names:
                    known = any(name == alias.name or name.startswith(alias.name + ".") for name in SOURCES)
                    yield f".{alias.name}" if known else ".__init__"
            else:
                yield _local(base)


def _local(name):
    parts = name.split(".")
    return (f".{'.'.join(parts[1:])}" if parts[1:] else ".__init__") if parts[0] == "maskpack" else parts[0]


def forbidden(module, source):
    """The imports of a module that the house does not allow."""
    wrong = []
    for name in imports(source, module):
        if name.startswith("."):
            other = name[1:]
            if module.startswith("__init__"):
                if other != "__init__" and (floor(other) == TOP or room(other) in MAY_IMPORT_RAY):
                    wrong.append(name)
            elif other == "__init__":
                if floor(module) < TOP:
                    wrong.append("maskpack")
            elif room(other) != room(module) and floor(other) >= floor(module) and floor(module) < TOP:
                wrong.append(name)
        elif not may_import(module, name):
            wrong.append(name)
    return wrong


def may_import(module, package):
    if package in {"torch", "tensordict"}:
        return module not in PLANNERS
    if package == "triton":
        return module in KERNELS
    if room(module) == "adapters":
        return package not in HEAVY or package in FRAMEWORKS.get(module.split(".")[1], ())
    return package not in HEAVY or room(module) in MAY_IMPORT_RAY


def loaded(statement):
    """The modules of a fresh interpreter after `statement`."""
    code = f"{statement}\nimport sys\nprint(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    return set(done.stdout.splitlines()[-1].split())


FACTORIES = {
    *("arange", "as_tensor", "asarray", "empty", "empty_permuted", "empty_strided", "eye", "full", "linspace"),
    *("logspace", "nested_tensor", "ones", "rand", "randint", "randn", "randperm", "range", "scalar_tensor"),
    *("sparse_coo_tensor", "sparse_csr_tensor", "tensor", "tril_indices", "triu_indices", "zeros"),
}
"""The functions of torch that make a tensor on its default device."""


def without_device(source):
    """The lines that call one of FACTORIES and do not say where the tensor lies."""
    for node in ast.walk(ast.parse(source)):
        called = node.func if isinstance(node, ast.Call) else None
        if not isinstance(called, ast.Attribute) or called.attr not in FACTORIES:
            continue
        if ast.unparse(called.value).split(".")[0] == "torch" and "device" not in {word.arg for word in node.keywords}:
            yield node.lineno


# -------------------------------------------------------------------- what an import brings in


def test_importing_maskpack_is_light():
    modules = loaded("import maskpack")
    assert {"maskpack", "torch", "tensordict", "numpy"} <= modules
    assert modules & HEAVY <= loaded("import torch, tensordict, numpy") & {"triton"}
    assert modules & {f"maskpack.{module}" for module in KERNELS} == set()


def test_a_heavy_import_would_be_seen():
    assert "ray" in loaded("import maskpack.dispatch")


# -------------------------------------------------------------------- arrows


@pytest.mark.parametrize("module", SOURCES)
def test_imports_go_down(module):
    assert forbidden(module, SOURCES[module].read_text()) == []


@pytest.mark.parametrize(
    ("module", "source", "wrong"),
    [
        ("layout", "from maskpack.nesting import nest_batch_by_mask", [".nesting"]),
        ("layout", "from maskpack import survey", [".survey"]),
        ("layout", "import maskpack.packed", [".packed"]),
        ("layout", "from .packed import compress", [".packed"]),
        ("layout", "from . import packed, errors", [".packed"]),
        ("ops._torch", "from ..nesting import unnest", [".nesting"]),
        ("ops._torch", "from . import _torch", []),
        ("ops.__init__", "from maskpack.survey import survey", [".survey"]),
        ("packed", "from maskpack.dispatch import endpoint", [".dispatch"]),
        ("nesting", "from maskpack import RL_FIELDS", ["maskpack"]),
        ("nesting", "import maskpack", ["maskpack"]),
        ("nesting", "def late():\n    from maskpack import packed", [".packed"]),
        ("nesting", "if TYPE_CHECKING:\n    from maskpack.packed import PackedBatch", [".packed"]),
        ("packed", "import ray", ["ray"]),
        ("adapters.transformers", "import transformers\nfrom maskpack.replay import PackedInputs", []),
        ("adapters.transformers", "import ray", ["ray"]),
        ("replay", "from maskpack.adapters.transformers import replayable", [".adapters.transformers"]),
        ("plan", "import torch\nimport numpy", ["torch"]),
        ("costs", "def late():\n    from tensordict import TensorDict", ["tensordict"]),
        ("packed", "def late():\n    from ray.util import x", ["ray"]),
        ("ops._torch", "import triton.language as tl", ["triton"]),
        ("ops._triton", "import triton.language as tl", []),
        ("ops._triton", "import ray", ["ray"]),
        ("__init__", "from maskpack.dispatch import WorkerGroup", [".dispatch"]),
        ("__init__", "from maskpack import cli", [".cli"] if "cli" in SOURCES else []),
        ("packed", "from maskpack.nesting import unnest\nimport torch", []),
        ("dispatch", "import ray\nfrom maskpack.packed import compress", []),
        ("demo_table", "import rich, ray\nimport maskpack\nfrom maskpack.demo import x", []),
    ],
)
def test_a_forbidden_arrow_would_be_seen(module, source, wrong):
    assert forbidden(module, source) == wrong


def test_a_module_without_a_floor_would_be_seen():
    with pytest.raises(AssertionError, match=r"maskpack/utils\.py has no floor"):
        forbidden("utils", "from maskpack import errors")
    assert "utils" not in SOURCES


def test_every_room_is_on_one_floor():
    rooms = [name for rooms in FLOORS for name in rooms]
    assert len(rooms) == len(set(rooms))
    missing = {name for name in rooms if name not in map(room, SOURCES)}
    assert missing == set()


# -------------------------------------------------------------------- where tensors lie


@pytest.mark.parametrize("module", [module for module in SOURCES if room(module) != "demo"])
def test_every_new_tensor_is_told_where_it_lies(module):
    """Whoever sets a default device does not set it for maskpack. The demo is a program by itself."""
    assert list(without_device(SOURCES[module].read_text())) == []


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("torch.zeros(3)", [1]),
        ("torch.zeros(3, dtype=torch.int64)", [1]),
        ("x = [\n    torch.tensor(1),\n    torch.full((), 0, device=x.device),\n]", [2]),
        ("torch.nested.nested_tensor(rows, layout=torch.jagged)", [1]),
        ('torch.empty(0, device="cpu")', []),
        ("torch.zeros_like(x); x.new_empty(3); torch.from_numpy(x); np.zeros(3); tl.zeros([4], tl.int32)", []),
    ],
)
def test_a_tensor_on_the_default_device_would_be_seen(source, lines):
    assert list(without_device(source)) == lines


# -------------------------------------------------------------------- files and names


@pytest.mark.parametrize("module", SOURCES)
def test_every_module_says_what_it_owns(module):
    assert ast.get_docstring(ast.parse(SOURCES[module].read_text()))


def test_types_are_shipped():
    assert (HOUSE / "py.typed").is_file()


def constants():
    """Names that a module assigns, each with the string that stands below it."""
    found = {}
    for path in SOURCES.values():
        body = ast.parse(path.read_text()).body
        for node, below in itertools.pairwise(body):
            if isinstance(node, ast.Assign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                found |= {name.id: below.value.value for name in node.targets if isinstance(name, ast.Name)}
    return found


def documentation(name, value):
    if inspect.isclass(value) or inspect.isroutine(value) or inspect.ismodule(value):
        written = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
        made_by_dataclass = (written or "").startswith(f"{name}(")
        return "" if made_by_dataclass else written
    return constants().get(name)


@pytest.mark.parametrize("name", mp.__all__)
def test_every_public_name_is_there_and_documented(name):
    assert documentation(name, getattr(mp, name))


def test_missing_documentation_would_be_seen():
    import dataclasses

    @dataclasses.dataclass
    class Bare:
        x: int

    assert not documentation("Bare", Bare)
    assert not documentation("bare", lambda: None)
    assert not documentation("SEVEN", 7)


def test_public_names_are_listed_once():
    assert len(mp.__all__) == len(set(mp.__all__))
    assert {"compress", "decompress", "nest_batch_by_mask", "unnest", "PackedBatch", "RL_FIELDS"} <= set(mp.__all__)
