"""Random programs with state: layers, written as text, that read something beside their
arguments and weights.

A program draws what the state is (`VALUES`: a number, a container, an array, a
generator, an object), where it lives (`PLACES`: an attribute, a part, a global, a
variable of an inner function, the model around), how it is read and written, and when
(`MOMENTS`: in the forward that reads it, in the model's, in that of another layer, by a
hook, between forward and backward, in backward). Every layer is a region. Plain
autograd needs none of the state again: a re-run must see what its forward saw, and
leave all as it was; or the layer runs once.
"""

import random
import sys
from collections import Counter
from types import ModuleType
from typing import Any

import numpy as np
import torch

import ssdtrain

PLANS: list[dict[str, Any]] = [
    {"plan": "keep-all", "recompute": "regions"},
    {"plan": "offload-all", "recompute": "regions"},
    {"plan": "auto", "memory_budget": 1700, "recompute": "regions"},
]
NUM_STEPS = 5
NUM_LAYERS = 3
Case = tuple[str, str, str]
"""What makes the state; how it is read; how it is written. `@` is the state; several
ways, one a line."""
VALUES: dict[str, Case] = {
    "number": ("1.0", "@", "@ = @ + 0.5\n@ *= 1.5"),
    "truth": ("True", "(1.0 if @ else 0.5)", "@ = not @"),
    "text": ("'ab'", "float(len(@))", "@ += 'c'"),
    "nothing": ("None", "(2.0 if @ is None else 1.0)", "@ = 1 if @ is None else None"),
    "list": (
        "[1.0, 2.0]",
        "@[0]\nsum(@)\nfloat(len(@))\n@[-1]",
        "@.append(0.5)\n@[0] += 0.5\n@.insert(0, 3.0)\n@.reverse()\n"
        "@[:] = [v * 1.5 for v in @]\n@ += [0.75]\nlist.append(@, 0.3)\n"
        "@ = [*@, 0.5]\nheapq.heappush(@, @[0] - 0.125)\nbisect.insort(@, @[0] - 0.5)",
    ),
    "nested": (
        "[[1.0], {'k': [2.0]}]",
        "@[0][0]\n@[1]['k'][0]",
        "@[0][0] += 0.5\n@[1]['k'][0] *= 2\n@[1]['k'] = [@[1]['k'][0] + 1]",
    ),
    "dict": (
        "{'k': 1.0}",
        "@['k']\nsum(@.values())\n@.get('k', 0.0)\n[*@.values()][0]",
        "@['k'] += 0.5\n@.update(k=@['k'] * 1.5)\n@[str(len(@))] = 0.5\n"
        "@ |= {'k': @['k'] + 1}\n@['k'] = @.pop('k') + 1",
    ),
    "set": ("{1, 2}", "float(sum(@))", "@.add(len(@) + 1)\n@ |= {len(@) + 1}"),
    "deque": (
        "deque([1.0, 2.0], maxlen=4)",
        "@[0]\nsum(@)",
        "@.append(@[-1] + 0.5)\n@.appendleft(@[0] + 0.5)\n@.rotate(1)",
    ),
    "ordered": (
        "OrderedDict(a=1.0, b=2.0)",
        "next(iter(@.values()))",
        "@.move_to_end(next(iter(@)))\n@['a'] += 1",
    ),
    "default": ("defaultdict(float)", "@['k'] + 1.0", "@['k'] += 0.5"),
    "counts": ("Counter(a=1)", "float(@['a'])", "@['a'] += 1\n@.update('a')"),
    "chain": ("ChainMap({}, {'k': 1.0})", "@['k']", "@['k'] = @['k'] + 1"),
    "users": ("UserList([1.0])", "@[0]", "@[0] += 1\n@.data.insert(0, 4.0)"),
    "array": (
        "np.ones(2)",
        "float(@[0])\nfloat(@.sum())\n@.mean().item()",
        "@[0] += 0.5\n@ += 0.5\nnp.add(@, 0.5, out=@)\n@.fill(float(@[0]) + 1)\n"
        "np.copyto(@, @ * 1.5)\nmemoryview(@)[0:1].__setitem__(0, float(@[0]) + 1)",
    ),
    "tensor": (
        "torch.ones(2)",
        "@[0]\n@.sum().item()\n@.mean()",
        "@.add_(0.5)\n@[0] += 0.5\ntorch.add(@, 0.5, out=@)\n@ = @ * 1.5\n"
        "torch._foreach_add_([@], 0.5)\nnn.init.constant_(@, 3.0)\n@.exponential_()",
    ),
    "numbers": ("array('d', [1.0, 2.0])", "@[0]", "@[0] += 0.5\n@.append(@[-1] + 1)"),
    "bytes": ("bytearray(b'ab')", "float(@[0] - 96)", "@[0] += 1\n@.insert(0, 99)"),
    "count": ("itertools.count(1)", "float(next(@))", "next(@)"),
    "cycle": ("itertools.cycle([1.0, 2.0, 3.0])", "next(@)", "next(@)"),
    "generator": ("(1.0 + n / 8 for n in range(4000))", "next(@)", "next(@)"),
    "random": ("random.Random(3)", "@.random()", "@.random()\n@.seed(5)"),
    "numpy": ("np.random.default_rng(3)", "@.random()", "@.random()"),
    "torch": (
        "torch.Generator().manual_seed(3)",
        "torch.rand((), generator=@)",
        "@.manual_seed(7)\ntorch.rand(1, generator=@)",
    ),
    "object": (
        "Thing()",
        "@.v\n@.double()\n@()\n@[0]\n@.more\nfloat(@)\n@ * 1.0",
        "@.v += 0.5\nsetattr(@, 'v', @.v * 1.5)\n@.bump()\n"
        "object.__setattr__(@, 'v', @.v + 1)\nvars(@).update(v=@.v + 1)\n@[0] = 2.5",
    ),
    "slots": ("Slots()", "@.v", "@.v += 0.5\n@.w.append(1); @.v += len(@.w)"),
    "data": ("Data()", "@.v\n@.w[0]", "@.v += 0.5\n@.w = [1.5]\n@ = replace(@, v=3.0)"),
    "frozen": ("Frozen([1.0])", "@.w[0]", "@.w[0] += 1"),
    "namespace": ("SimpleNamespace(v=1.0, w=[1.0])", "@.v\n@.w[0]", "@.w[0] += 1"),
    "class": ("type('C', (), dict(v=1.0))", "@.v\n@().v", "@.v += 0.5"),
    "function": (
        "make_function()",
        "@()\n@.v",
        "@.v += 0.5\n@.__defaults__ = (@.__defaults__[0] + 1,)\n@.bump()",
    ),
    "partial": ("functools.partial(get, Thing())", "@()", "@.args[0].v += 0.5"),
    "method": ("Thing().double", "@()", "@.__self__.v += 0.5"),
    "variable": ("ContextVar('c', default=1.0)", "@.get()", "@.set(@.get() + 0.5)"),
    "thread": ("make_local()", "@.v", "@.v += 0.5"),
    "module": (
        "nn.Linear(2, 2)",
        "@.in_features\n(@.training + 1.0)",
        "@.train(not @.training)\n@.in_features += 1",
    ),
    "cache": (
        "make_cache()",
        "@(1)\n@(2)",
        "@.state.v += 0.5; @.cache_clear()\n@.state.v += 0.5",
    ),
    "queue": ("make_queue()", "float(@.qsize())", "@.put(1)"),
    "reference": ("weakref.ref(KEPT)", "@().v", "@().v += 0.5"),
    "proxy": ("weakref.proxy(KEPT)", "@.v", "@.v += 0.5"),
    "tuple": ("([1.0], Thing())", "@[0][0]\n@[1].v", "@[0][0] += 1\n@[1].v += 1"),
    "view": ("MappingProxyType(BASE)", "@['k']", "BASE['k'] += 1"),
    "choice": ("Mode.A", "float(@.value)", "@ = Mode.B if @ is Mode.A else Mode.A"),
}
PLACES: dict[str, tuple[str, str, str]] = {
    "attribute": ("self.s = MAKE", "self.s", "LAYER.s"),
    "of all": ("self.s = shared", "self.s", "LAYER.s"),
    "part": ("self.c = Part(MAKE)", "self.c.s", "LAYER.c.s"),
    "object": ("self.o = Thing(); self.o.s = MAKE", "self.o.s", "LAYER.o.s"),
    "list": ("self.l = [MAKE]", "self.l[0]", "LAYER.l[0]"),
    "dictionary": ("self.m = {'q': MAKE}", "self.m['q']", "LAYER.m['q']"),
    "deep": (
        "self.o = Thing(); self.o.p = {'a': [Thing()]}; self.o.p['a'][0].s = MAKE",
        "self.o.p['a'][0].s",
        "LAYER.o.p['a'][0].s",
    ),
    "global": ("pass", "HELD['q']", "HELD['q']"),
    "class": ("pass", "type(self).S", "Layer.S"),
    "module": ("pass", "OTHER.s", "OTHER.s"),
    "configuration": ("self.cfg = cfg", "self.cfg.s", "MODEL.cfg.s"),
    "model": ("self.p = [model]", "self.p[0].s", "MODEL.s"),
    "weak model": ("self.p = weakref.ref(model)", "self.p().s", "MODEL.s"),
    "variables": ("self.s = MAKE", "vars(self)['s']", "LAYER.s"),
    "default": ("self.f = defaulting(SimpleNamespace(s=MAKE))", "d.s", "LAYER.f().s"),
    "closure": ("self.f = enclosing(SimpleNamespace(s=MAKE))", "d.s", "LAYER.f().s"),
    "property": ("self._d = SimpleNamespace(s=MAKE)", "self.d.s", "LAYER.d.s"),
    "argument": ("pass", "ctl.s", "MODEL.ctl.s"),
    "registry": (
        "self.k = len(ALL); ALL.append(SimpleNamespace(s=MAKE))",
        "ALL[self.k].s",
        "ALL[LAYER.k].s",
    ),
}
MOMENTS = (
    *("before", "after", "helper", "model", "next", "hook", "inner hook", "loss"),
    *("between", "backward", "behind", "never"),
)
USES = (
    *("y * v", "y + v", "F.dropout(y, 0.5) * v", "torch.where(y > 0, y * v, y)"),
    *("y * torch.as_tensor(v).float()", "(y * v if float(v) > 1.2 else y - v)"),
)
ORDERS = (
    "v = READ\ny = self.down(F.gelu(self.up(x)))",
    "y = self.up(x)\nv = READ\ny = self.down(torch.tanh(y))",
    "y = self.down(F.silu(self.up(x)))\nv = READ",
)
PROGRAM = """
import bisect, functools, heapq, itertools, queue, random, threading, weakref
from array import array
from collections import ChainMap, Counter, OrderedDict, UserList, defaultdict, deque
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from enum import Enum
from types import MappingProxyType, ModuleType, SimpleNamespace
import numpy as np, torch
from torch import nn
from torch.nn import functional as F

class Mode(Enum):
    A = 1
    B = 2

class Thing:
    def __init__(self): self.v = 1.0
    def double(self): return self.v * 2
    def __call__(self): return self.v
    def __getitem__(self, n): return self.v
    def __setitem__(self, n, v): self.v = v + self.v
    def __float__(self): return float(self.v)
    def __mul__(self, other): return self.v * other
    def bump(self): self.v += 0.25
    more = property(lambda self: self.v + 1)

class Slots:
    __slots__ = ("v", "w")
    def __init__(self): self.v, self.w = 1.0, []

@dataclass
class Data:
    v: float = 1.0
    w: list = field(default_factory=lambda: [1.0])

@dataclass(frozen=True)
class Frozen:
    w: list

KEPT, BASE, ALL, OTHER = Thing(), {"k": 1.0}, [], ModuleType("other")

class Part(nn.Module):
    def __init__(self, s):
        super().__init__()
        self.s = s

def get(thing): return thing.v

def make_function():
    thing = Thing()
    def function(d=1.0): return d + thing.v
    function.v, function.bump = 1.0, thing.bump
    return function

def make_local():
    local = threading.local()
    local.v = 1.0
    return local

def make_cache():
    thing = Thing()
    @functools.lru_cache
    def function(n): return thing.v * n
    function.state = thing
    return function

def make_queue():
    made = queue.Queue()
    made.put(1)
    return made

def defaulting(o):
    def function(d=o): return d
    return function

def enclosing(o):
    def function(): return o
    return function

HELD, OTHER.s = {"q": MAKE}, MAKE

class Layer(nn.Module):
    S = MAKE
    def __init__(self, model, cfg, shared):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        PUT
    d = property(lambda self: self._d)
    def note(self, ctl, d):
        IN_HELPER
    def forward(self, x, ctl=None):
        d = self.f() if hasattr(self, "f") else None
        IN_BEFORE
        FORWARD
        y = USE
        IN_AFTER
        self.note(ctl, d)
        return x + y

class Writer(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.m, self.up = [model], nn.Linear(8, 8)
    def forward(self, x, ctl=None):
        model = self.m[0]
        IN_NEXT
        return torch.tanh(self.up(x))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.cfg, self.ctl, self.s = Thing(), SimpleNamespace(s=MAKE), MAKE
        self.cfg.s, shared = MAKE, MAKE
        self.layers = nn.ModuleList(Layer(self, self.cfg, shared) for _ in range(3))
        self.layers.append(Writer(self))
        self.head = nn.Linear(8, 8)
    def forward(self, x):
        model = self
        for layer in self.layers:
            x = layer(CALL)
            IN_MODEL
        return self.head(x)

def prepare(model):
    def hook(*_):
        IN_HOOK
    def inner(*_):
        IN_INNER_HOOK
    if HOOK: model.layers[0].register_forward_hook(hook)
    if INNER_HOOK: model.layers[1].up.register_forward_pre_hook(inner)

def between(model, y):
    def grad(_):
        IN_BACKWARD
    IN_BETWEEN
    if BACKWARD: y.register_hook(grad)

def loss_of(model, y):
    IN_LOSS
    return y.square().mean()

def behind(model):
    IN_BEHIND
"""
UNKEPT = frozenset(("tensor", "module"))
"""Tensors that are written cannot be put back."""


def drawn(seed: int) -> tuple[dict[str, str], random.Random]:
    """What a program has."""
    draw = random.Random(seed)
    kinds = {"value": list(VALUES), "place": list(PLACES), "moment": list(MOMENTS)}
    has = {name: draw.choice(each) for name, each in kinds.items()}
    if has["value"] == "module" and has["place"] == "variables":
        has["place"] = "attribute"  # a module keeps its modules elsewhere
    return has, draw


def program(seed: int) -> str:
    """The text of one."""
    has, draw = drawn(seed)
    make, reads, writes = VALUES[has["value"]]
    put, own, others = PLACES[has["place"]]
    read, write = draw.choice(reads.split("\n")), draw.choice(writes.split("\n"))
    layer = f"model.layers[{draw.randrange(NUM_LAYERS)}]"
    others = others.replace("LAYER", layer).replace("MODEL", "model")
    forward, use = draw.choice(ORDERS), draw.choice(USES)
    moment = has["moment"]
    inside = moment in ("before", "after", "helper")
    written = write.replace("@", own if inside else others)
    filled = PROGRAM.replace("FORWARD", forward.replace("\n", "\n        "))
    filled = filled.replace("READ", read.replace("@", own)).replace("USE", use)
    for each in MOMENTS[:-1]:
        name = each.upper().replace(" ", "_")
        done = written if each == moment else "pass"
        filled = filled.replace(f" IN_{name}\n", f" {done}\n")
        filled = filled.replace(f"if {name}:", f"if {moment == each}:")
    given = "x, self.ctl" if has["place"] == "argument" else "x"
    return filled.replace("CALL", given).replace("PUT", put).replace("MAKE", make)


def may_raise(seed: int) -> bool:
    """Whether ssdtrain may raise alone in this program."""
    return drawn(seed)[0]["value"] in UNKEPT


def train(seed: int, plan: dict[str, Any] | None, features: Counter[str]) -> list[Any]:
    """Losses and gradients of every step as bytes; a string where a step raised."""
    has, draw = drawn(seed)
    features.update(f"{kind} {each}" for kind, each in has.items())
    home = ModuleType("stateful_program")
    sys.modules[home.__name__] = home
    for each in (torch.manual_seed, random.seed, np.random.seed):
        each(0)
    try:
        exec(compile(program(seed), "<stateful>", "exec"), vars(home))
        model = home.Model()
        home.prepare(model)
        first = draw.choice([0, 2])
        if plan is None:
            return _steps(home, model, first)
        with ssdtrain.offload(model, target="host", min_bytes=0, **plan) as session:
            found = _steps(home, model, first)
            features["planned"] += session.plan is not None
            features["reruns"] += any(
                each.recipes.get("region") for each in session.steps
            )
            features["refused"] += bool(session.regions_refused)
            return found
    finally:
        del sys.modules[home.__name__]


def _steps(home: Any, model: Any, first: int) -> list[Any]:
    found: list[Any] = []
    for number in range(NUM_STEPS):
        torch.manual_seed(number)
        y, writes = model(torch.randn(4, 8)), number >= first
        try:
            if writes:
                home.between(model, y)
            loss = home.loss_of(model, y) if writes else y.square().mean()
            loss.backward()
        except RuntimeError as error:
            found.append(f"raised {'inplace' in str(error)}")
            break
        given: list[Any] = [loss.detach(), *(p.grad for p in model.parameters())]
        found.append([None if t is None else t.numpy().tobytes() for t in given])
        model.zero_grad()
        with torch.no_grad():
            for layer in model.layers:
                layer.up.weight.mul_(0.99)
        if writes:
            home.behind(model)
    return found
